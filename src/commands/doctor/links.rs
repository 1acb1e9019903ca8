//! The links to other Macs: Thunderbolt ports, what is connected to them, and their RDMA devices.

use std::{collections::BTreeMap, fs};

use serde_json::json;

use super::{
    apple::{
        rdma::{self, Device, Switch},
        thunderbolt::{self, Port},
    },
    machine::ask,
    report::{Finding, Report},
};

/// Runs both checks.
pub(super) fn look(report: &mut Report) {
    let has_thunderbolt_5 = thunderbolt(report);
    rdma(has_thunderbolt_5, report);
}

/// The ports. Returns whether one can do Thunderbolt 5, if that is known.
fn thunderbolt(report: &mut Report) -> Option<bool> {
    const NAME: &str = "Thunderbolt";
    if !cfg!(target_os = "macos") {
        report.skip(NAME, "looked at on macOS only");
        return None;
    }
    let found = ask("system_profiler", &["-json", "SPThunderboltDataType"])
        .and_then(|json| thunderbolt::ports(&json));
    let ports = match found {
        Ok(ports) => ports,
        Err(error) => {
            report.skip(NAME, format!("{error:#}"));
            return None;
        }
    };
    let interfaces = ask("networksetup", &["-listallhardwareports"]).unwrap_or_default();
    report.find(NAME, of_ports(&ports, &thunderbolt::interfaces(&interfaces)));
    Some(ports.iter().any(is_thunderbolt_5))
}

fn is_thunderbolt_5(port: &Port) -> bool {
    port.speed >= Some(thunderbolt::THUNDERBOLT_5)
}

/// What the ports say. A cable that is slower than its port is one to replace.
fn of_ports(ports: &[Port], interfaces: &BTreeMap<String, String>) -> Finding {
    let shown: Vec<String> = ports.iter().map(|port| port.shown(interfaces)).collect();
    let figures = json!({ "ports": shown });
    let found = Finding::new(shown.join("; "), figures);
    let has_fast = ports.iter().any(is_thunderbolt_5);
    let slow: Vec<&str> = ports
        .iter()
        .filter(|port| port.peer.as_ref().is_some_and(|peer| peer.is_mac))
        .filter(|port| has_fast && !is_thunderbolt_5(port))
        .map(|port| port.receptacle.as_str())
        .collect();
    let advice = format!(
        "the cable at port {} is no Thunderbolt 5 cable, or the other Mac has an older port",
        slow.join(", ")
    );
    found.expected("80 Gb/s to each Mac, for RDMA").slow_if(!slow.is_empty(), &advice)
}

/// The RDMA devices, and whether JACCL could use them.
fn rdma(has_thunderbolt_5: Option<bool>, report: &mut Report) {
    const NAME: &str = "RDMA devices";
    if !cfg!(target_os = "macos") {
        let entries = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        if names.is_empty() {
            report.skip(NAME, "none");
        } else {
            report.pass(NAME, names.join(", "), json!({ "devices": names }));
        }
        return;
    }
    let switch = ask("rdma_ctl", &["status"]).map(|text| Switch::parse(&text));
    let names = ask("ibv_devices", &[]).map(|text| rdma::names(&text)).unwrap_or_default();
    let described =
        ask("ibv_devinfo", &["-v"]).map(|text| rdma::devices(&text)).unwrap_or_default();
    match verdict(switch.ok(), &names, &described, has_thunderbolt_5) {
        Ok(found) => report.find(NAME, found),
        Err(why) => report.skip(NAME, why),
    }
}

/// What was found; an error is why there is nothing to find.
fn verdict(
    switch: Option<Switch>,
    names: &[String],
    described: &[Device],
    has_thunderbolt_5: Option<bool>,
) -> Result<Finding, String> {
    let why = match switch {
        _ if has_thunderbolt_5 == Some(false) => {
            Some("this Mac has no Thunderbolt 5 port, and RDMA needs one".to_owned())
        }
        None => Some("this macOS has no rdma_ctl: RDMA needs macOS 26.2".to_owned()),
        Some(Switch::Disabled) => Some(
            "RDMA is off: start in Recovery (hold the power button), open Terminal there, and run \
             `rdma_ctl enable`"
                .to_owned(),
        ),
        Some(Switch::Unknown(text)) => Some(format!("rdma_ctl says {text:?}")),
        Some(Switch::Enabled) if names.is_empty() => {
            Some("RDMA is on and there is no device: Thunderbolt 4 has none".to_owned())
        }
        Some(Switch::Enabled) => None,
    };
    if let Some(why) = why {
        return Err(why);
    }
    let mut shown = Vec::new();
    let mut advice = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let device = described.iter().find(|device| device.name == *name);
        let Some(device) = device else {
            shown.push(format!("{name}: not described by ibv_devinfo"));
            continue;
        };
        if !device.is_active() {
            shown.push(format!("{name}: {}", device.state));
        } else if let Some(gid) = device.usable_gid() {
            shown.push(format!("{name}: active, GID {gid}"));
        } else {
            shown.push(format!("{name}: active, without a GID that JACCL takes"));
            advice.push(device.remedy(index + 1));
        }
    }
    if !described.iter().any(Device::is_active) {
        advice.push("connect a cable, and enable RDMA on the Mac at its other end too".to_owned());
    }
    let found = Finding::new(shown.join("; "), json!({ "devices": names }));
    let found = found.expected("PORT_ACTIVE and an IPv4 address on each port with a cable");
    Ok(Finding { advice: advice.join("; "), ..found })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(name: &str) -> String {
        crate::commands::doctor::apple::sample(name)
    }

    #[test]
    fn a_port_without_a_usable_gid_says_which_line_gives_it_one() {
        let described = rdma::devices(&sample("ibv_devinfo-gids.txt"));
        let names: Vec<String> = described.iter().map(|it| it.name.clone()).collect();
        let found = verdict(Some(Switch::Enabled), &names, &described, Some(true)).unwrap();
        assert!(found.detail.contains("rdma_en4: active, GID ::ffff:169.254.10.1"), "{found:?}");
        assert!(found.detail.contains("rdma_en5: PORT_DOWN"), "{found:?}");
        assert_eq!(found.advice.matches("ifconfig").count(), 1, "{found:?}");
        assert!(found.advice.starts_with("sudo ifconfig en3 inet"), "{found:?}");
    }

    #[test]
    fn each_reason_for_having_no_device_is_told_apart() {
        let check = |switch, thunderbolt_5, expected: &str| {
            let why = verdict(switch, &[], &[], thunderbolt_5).unwrap_err();
            assert!(why.contains(expected), "{why}");
        };
        check(Some(Switch::Disabled), Some(true), "Recovery");
        check(Some(Switch::Enabled), Some(false), "no Thunderbolt 5 port");
        check(Some(Switch::Enabled), None, "Thunderbolt 4 has none");
        check(None, Some(true), "macOS 26.2");
        let down = rdma::devices(&sample("ibv_devinfo-down.txt"));
        let names = rdma::names(&sample("ibv_devices.txt"));
        let found = verdict(Some(Switch::Enabled), &names, &down, Some(true)).unwrap();
        assert!(found.advice.contains("at its other end"), "{found:?}");
    }

    #[test]
    fn a_slow_cable_between_two_fast_ports_is_named() {
        let interfaces = thunderbolt::interfaces(&sample("hardware-ports.txt"));
        let mut ports = thunderbolt::ports(&sample("thunderbolt-rdma-off.json")).unwrap();
        assert!(!of_ports(&ports, &interfaces).is_slow);
        ports[1].speed = Some(40);
        let found = of_ports(&ports, &interfaces);
        assert!(found.is_slow && found.advice.contains("at port 2"), "{found:?}");
        let idle = thunderbolt::ports(&sample("thunderbolt-idle-m4.json")).unwrap();
        assert!(!of_ports(&idle, &interfaces).is_slow);
    }
}
