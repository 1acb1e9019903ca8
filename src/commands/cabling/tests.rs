//! Matrices of Macs in the form that their tools print, and of Linux machines as sysfs has them.

use std::{collections::BTreeMap, fs, net::Ipv4Addr};

use serde_json::json;

use super::{
    causes,
    facts::{Facts, Outputs},
    matrix::Cabling,
    measured, parse, wire,
};
use crate::commands::doctor::apple::sample;

/// A port of a Mac in a test: number, interface, Gb/s, own domain, domain at the other end.
#[derive(Clone, Copy)]
struct Port {
    number: u32,
    interface: &'static str,
    speed: u32,
    domain: &'static str,
    peer: Option<&'static str>,
    address: Option<[u8; 4]>,
    is_active: bool,
}

/// A port with a cable to `peer`.
fn port(number: u32, domain: &'static str, peer: &'static str) -> Port {
    let interface = ["en0", "en3", "en4", "en5"][number as usize];
    let (speed, peer) = (80, Some(peer));
    Port { number, interface, speed, domain, peer, address: None, is_active: true }
}

fn with_address(port: Port, address: [u8; 4]) -> Port {
    Port { address: Some(address), ..port }
}

/// What the tools of a Mac with these ports print; all is as it should be.
fn outputs(ports: &[Port]) -> Outputs {
    let bus = |port: &Port| {
        let is_connected = port.peer.is_some();
        let status =
            if is_connected { "receptacle_connected" } else { "receptacle_no_devices_connected" };
        let items: Vec<_> = port
            .peer
            .iter()
            .map(|peer| json!({ "device_name_key": "Mac16,11", "domain_uuid_key": peer }))
            .collect();
        json!({
            "_items": items,
            "domain_uuid_key": port.domain,
            "receptacle_1_tag": {
                "current_speed_key": format!("{} Gb/s", port.speed),
                "receptacle_id_key": port.number.to_string(),
                "receptacle_status_key": status,
            },
        })
    };
    let buses: Vec<_> = ports.iter().map(bus).collect();
    let hardware = |port: &Port| {
        format!("Hardware Port: Thunderbolt {}\nDevice: {}\n\n", port.number, port.interface)
    };
    let address = |port: &Port| {
        let address = port.address.map_or_else(String::new, |it| {
            format!("\tinet {} netmask 0xfffffffc broadcast 10.42.0.3\n", Ipv4Addr::from(it))
        });
        let flags = "flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500";
        format!("{}: {flags}\n\tether 36:00:00:00:00:00\n{address}", port.interface)
    };
    let device = |port: &Port| {
        let state = if port.is_active { "PORT_ACTIVE (4)" } else { "PORT_DOWN (1)" };
        let gid = port.address.filter(|_| port.is_active).map_or_else(String::new, |it| {
            format!("\t\t\tGID[  1]:\t\t::ffff:{}\n", Ipv4Addr::from(it))
        });
        format!("hca_id:\trdma_{}\n\t\tport:\t1\n\t\t\tstate:\t\t\t{state}\n{gid}", port.interface)
    };
    Outputs {
        thunderbolt: json!({ "SPThunderboltDataType": buses }).to_string(),
        hardware_ports: ports.iter().map(hardware).collect(),
        ifconfig: ports.iter().map(address).collect(),
        rdma: Some("enabled\n".to_owned()),
        devices: ports.iter().map(device).collect(),
        model: "Mac16,11\n".to_owned(),
        build: "25C56\n".to_owned(),
        sleep: " standby 0\n sleep                0 (sleep prevented by coreaudiod)\n".to_owned(),
        firewall: "Firewall is disabled. (State = 0)\n".to_owned(),
    }
}

fn cabling(macs: &[Outputs]) -> Cabling {
    let names = ["studio-1", "studio-2", "studio-3", "studio-4"];
    let facts = macs.iter().map(Facts::of_outputs);
    Cabling::of(names.into_iter().map(str::to_owned).zip(facts).collect())
}

/// Two Macs, one cable, addresses set.
fn good_pair() -> [Vec<Port>; 2] {
    [
        vec![with_address(port(2, "A", "B"), [10, 42, 0, 1])],
        vec![with_address(port(1, "B", "A"), [10, 42, 0, 2])],
    ]
}

fn of(ports: &[Vec<Port>]) -> Cabling {
    cabling(&ports.iter().map(|ports| outputs(ports)).collect::<Vec<_>>())
}

/// The problems and remedies, one line each.
fn lines(cabling: &Cabling) -> Vec<String> {
    causes::of(cabling).into_iter().map(|it| format!("{} => {}", it.problem, it.remedy)).collect()
}

#[track_caller]
fn check(cabling: &Cabling, problem: &str, remedy: &str) {
    let found = lines(cabling);
    let is_it = |line: &&String| line.contains(problem) && line.contains(remedy);
    assert!(
        found.iter().any(|line| is_it(&line)),
        "{problem:?} and {remedy:?} are not in {found:#?}"
    );
}

#[test]
fn two_macs_that_are_well_have_a_cable_and_no_cause() {
    let cabling = of(&good_pair());
    assert_eq!(lines(&cabling), [""; 0]);
    insta::assert_snapshot!(cabling.shown(&[]));
}

#[test]
fn each_machine_s_fault_is_named_with_what_mends_it() {
    let change = |change: &dyn Fn(&mut Outputs)| {
        let mut macs: Vec<Outputs> = good_pair().iter().map(|ports| outputs(ports)).collect();
        change(&mut macs[0]);
        cabling(&macs)
    };
    check(&change(&|it| it.rdma = Some("disabled".into())), "RDMA is off", "rdma_ctl enable");
    check(&change(&|it| it.rdma = None), "no rdma_ctl", "26.2");
    check(&change(&|it| it.devices.clear()), "there is no device", "restart");
    let bridge = "bridge0: flags=8863<UP> mtu 1500\n\tmember: en4 flags=3<LEARNING,DISCOVER>\n";
    let bridged = change(&|it| it.ifconfig += bridge);
    check(&bridged, "bridge0 owns", "sudo ifconfig bridge0 deletem en4");
    check(&change(&|it| it.sleep = " sleep   10\n".into()), "it sleeps", "sudo pmset -a sleep 0");
    let firewall = "Firewall is enabled. (State = 1)\n";
    check(&change(&|it| it.firewall = firewall.into()), "firewall is on", "--unblockapp");
    check(&change(&|it| it.build = "25B78".into()), "builds of macOS differ", "same one");
    let studio = change(&|it| {
        it.model = "Mac16,9".into();
        for text in [&mut it.hardware_ports, &mut it.ifconfig, &mut it.devices] {
            *text = text.replace("en4", "en2");
        }
    });
    check(&studio, "next to Ethernet", "another port");
}

#[test]
fn each_cable_s_fault_is_named_with_what_mends_it() {
    let change = |change: &dyn Fn(&mut [Vec<Port>; 2])| {
        let mut ports = good_pair();
        change(&mut ports);
        of(&ports)
    };
    let slow = change(&|it| it.iter_mut().for_each(|ports| ports[0].speed = 40));
    check(&slow, "runs at 40 Gb/s", "Thunderbolt 5 cable");
    let old = change(&|it| it[1][0].speed = 40);
    check(&old, "runs at 40 Gb/s", "Thunderbolt 5 ports");
    let down = change(&|it| it[1][0].is_active = false);
    check(&down, "the port of rdma_en3 is down", "at the other end too (studio-1)");
    let bare = change(&|it| it[0][0].address = None);
    check(&bare, "en4 has no IPv4 address", "sudo ifconfig en4 inet 10.42.0.");
    let late: Vec<Outputs> = good_pair()
        .iter()
        .map(|ports| {
            let outputs = outputs(ports);
            Outputs { devices: outputs.devices.replace("::ffff:10.42.0.1", "fe80::1"), ..outputs }
        })
        .collect();
    let late = cabling(&late);
    check(&late, "no GID for it yet", "sudo ifconfig en4 inet 10.42.0.1 netmask 255.255.255.252");
    // Two cables in one network; crossed ones.
    let two = of(&[
        vec![
            with_address(port(1, "A1", "B2"), [10, 0, 0, 1]),
            with_address(port(2, "A2", "B1"), [10, 0, 0, 2]),
        ],
        vec![
            with_address(port(1, "B1", "A2"), [10, 0, 0, 1]),
            with_address(port(2, "B2", "A1"), [10, 0, 0, 2]),
        ],
    ]);
    check(&two, "en3 and en4 are in one network", "cluster wire");
    check(&two, "cables are crossed: en3–en4, en4–en3", "only JACCL");
}

#[test]
fn a_ring_of_four_says_which_pairs_have_no_cable() {
    let ring = of(&[
        vec![port(1, "A1", "B1"), port(2, "A2", "D2")],
        vec![port(1, "B1", "A1"), port(2, "B2", "C1")],
        vec![port(1, "C1", "B2"), port(2, "C2", "D1")],
        vec![port(1, "D1", "C2"), port(2, "D2", "A2")],
    ]);
    assert_eq!(ring.cables.len(), 4);
    check(&ring, "no cable between studio-1 and studio-3", "along the chain of neighbours");
    check(&ring, "no cable between studio-2 and studio-4", "along the chain of neighbours");
    let star = of(&[
        vec![port(1, "A1", "B1"), port(2, "A2", "C1")],
        vec![port(1, "B1", "A1")],
        vec![port(1, "C1", "A2")],
    ]);
    check(&star, "no cable between studio-2 and studio-3", "over the network");
    insta::assert_snapshot!(ring.shown(&causes::of(&ring)));
}

#[test]
fn wiring_gives_every_cable_a_network_of_its_own_and_keeps_what_is_right() {
    let mut ports = [
        vec![with_address(port(1, "A1", "B1"), [192, 168, 7, 1]), port(2, "A2", "C1")],
        vec![with_address(port(1, "B1", "A1"), [192, 168, 7, 2]), port(2, "B2", "C2")],
        // An address of the range that is proposed, elsewhere.
        vec![
            port(1, "C1", "A2"),
            port(2, "C2", "B2"),
            Port { peer: None, ..with_address(port(3, "C3", "-"), [10, 42, 0, 9]) },
        ],
    ];
    let cabling = of(&ports);
    let plan = wire::plan(&cabling);
    assert_eq!(plan[0].kept, ["en3 192.168.7.1/30"]);
    assert_eq!(plan[0].commands[0], "sudo ifconfig en4 inet 10.42.0.1 netmask 255.255.255.252");
    assert_eq!(plan[1].commands[0], "sudo ifconfig en4 inet 10.42.0.5 netmask 255.255.255.252");
    assert_eq!(plan[2].commands[0], "sudo ifconfig en3 inet 10.42.0.2 netmask 255.255.255.252");
    assert_eq!(plan[2].commands[2], "sudo ifconfig en4 inet 10.42.0.6 netmask 255.255.255.252");
    insta::assert_snapshot!(wire::shown(&cabling, &plan));
    // Once that is done there is nothing left to do.
    ports[0][1].address = Some([10, 42, 0, 1]);
    ports[2][0].address = Some([10, 42, 0, 2]);
    ports[1][1].address = Some([10, 42, 0, 5]);
    ports[2][1].address = Some([10, 42, 0, 6]);
    let done = of(&ports);
    assert!(
        wire::plan(&done).iter().all(|plan| plan.commands.is_empty()),
        "{:?}",
        wire::plan(&done)
    );
    // The next cable does not take the network of the idle port.
    ports[2][0].address = None;
    ports[0][1].address = None;
    ports[1][1].address = Some([10, 42, 0, 1]);
    ports[2][1].address = Some([10, 42, 0, 2]);
    let next = wire::plan(&of(&ports));
    assert!(next[0].commands[0].contains("10.42.0.5"), "{next:?}");
}

#[test]
fn linux_machines_are_joined_by_their_networks() {
    let sys = tempfile::tempdir().unwrap();
    let machine = |name: &str, device: &str, address: &str| {
        let root = sys.path().join(name);
        let port = root.join("class/infiniband").join(device).join("ports/1");
        fs::create_dir_all(port.join("gids")).unwrap();
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        fs::write(port.join("rate"), "100 Gb/sec (4X EDR)\n").unwrap();
        fs::write(port.join("gids/0"), "fe80:0000:0000:0000:0202:c9ff:fe00:0001\n").unwrap();
        let ip: Ipv4Addr = address.parse().unwrap();
        let [a, b, c, d] = ip.octets();
        let gid = format!("0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}\n");
        fs::write(port.join("gids/1"), gid).unwrap();
        let json =
            json!([{ "ifname": "eth1", "addr_info": [{ "local": address, "prefixlen": 30 }] }]);
        Facts::of_sysfs(&root, &parse::ip(&json.to_string()))
    };
    let nodes = vec![
        ("a".to_owned(), machine("a", "mlx5_0", "10.9.0.1")),
        ("b".to_owned(), machine("b", "rxe0", "10.9.0.2")),
        ("c".to_owned(), machine("c", "rxe0", "10.9.0.6")),
    ];
    let cabling = Cabling::of(nodes);
    assert_eq!(cabling.cables.len(), 1);
    assert_eq!(cabling.cables[0].ports[0].usable(), Some(Ipv4Addr::new(10, 9, 0, 1)));
    let shown = cabling.shown(&causes::of(&cabling));
    assert!(shown.contains("eth1 (mlx5_0)") && shown.contains("100"), "{shown}");
    assert!(shown.contains("no cable between a and c"), "{shown}");
    assert!(Facts::of_sysfs(&sys.path().join("none"), &BTreeMap::new()).ports.is_empty());
}

#[test]
fn outputs_that_were_published_are_read() {
    let outputs = Outputs {
        thunderbolt: sample("thunderbolt-rdma-off.json"),
        hardware_ports: sample("hardware-ports.txt"),
        rdma: Some("disabled\n".to_owned()),
        devices: sample("ibv_devinfo-gids.txt"),
        ..Outputs::default()
    };
    let facts = Facts::of_outputs(&outputs);
    assert_eq!(facts.ports.len(), 3);
    let cable = facts.ports.iter().find(|port| port.peer_domain.is_some()).unwrap();
    assert_eq!((cable.interface.as_str(), cable.speed), ("en6", Some(80)));
    assert_eq!(cable.domain.as_deref(), Some("00000004-0000-4000-8000-000000000004"));
    assert_eq!(cable.peer_domain.as_deref(), Some("00000003-0000-4000-8000-000000000003"));
    let (addresses, bridged) = parse::ifconfig(&sample("ifconfig-bridge.txt"));
    assert_eq!(bridged, ["en1", "en2", "en3"]);
    assert_eq!(addresses["lo0"], [(Ipv4Addr::LOCALHOST, 8)]);
    assert_eq!(addresses["bridge0"], [(Ipv4Addr::new(169, 254, 60, 12), 16)]);
    assert_eq!(addresses["en0"], [(Ipv4Addr::new(192, 168, 1, 3), 24)]);
    assert_eq!(parse::sleeps(&sample("pmset.txt")), Some(true));
    assert_eq!(parse::firewall("Firewall is enabled. (State = 1)"), Some(true));
    assert_eq!(parse::firewall("Firewall is disabled. (State = 0)"), Some(false));
}

#[test]
fn what_a_server_measured_stands_below_the_matrix() {
    let mut cabling = of(&good_pair());
    let stats = json!({
        "nodes": [{ "name": "node studio-2" }, { "name": "node studio-1" }],
        "links": [{
            "ranks": [0, 1], "transport": "rdma", "latency_us": 9.46, "bytes_per_second": 5_368_709_120.0,
        }],
    });
    cabling.measured = measured::of_stats(&stats, &cabling.nodes).unwrap();
    let shown = cabling.shown(&[]);
    assert!(shown.contains("studio-2 – studio-1  rdma  9.5 µs   5.00 GiB/s"), "{shown}");
    let elsewhere = json!({ "nodes": [{ "name": "x" }, { "name": "y" }], "links": stats["links"] });
    let error = measured::of_stats(&elsewhere, &cabling.nodes).unwrap_err().to_string();
    assert!(error.contains("serves no two"), "{error}");
    measured::of_stats(&json!({}), &cabling.nodes).unwrap_err();
}

mod anything {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_of_anyone_is_read_without_a_panic(text in "(?s).{0,400}") {
            let told = |text: &str| text.to_owned();
            let facts = Facts::of_outputs(&Outputs {
                thunderbolt: told(&text),
                hardware_ports: told(&text),
                ifconfig: told(&text),
                rdma: Some(told(&text)),
                devices: told(&text),
                model: told(&text),
                build: told(&text),
                sleep: told(&text),
                firewall: told(&text),
            });
            prop_assert!(facts.ports.is_empty());
            let _ = (parse::ip(&text), parse::gid(&text), parse::rate(&text));
        }

        #[test]
        fn interfaces_of_anyone_are_read(name in "[a-z]{1,8}[0-9]", address: [u8; 4], mask: u32) {
            let ip = Ipv4Addr::from(address);
            let text = format!("{name}: flags=8863<UP> mtu 1500\n\tinet {ip} netmask {mask:#x} broadcast {ip}\n");
            let (addresses, _) = parse::ifconfig(&text);
            prop_assert_eq!(&addresses[&name], &[(ip, mask.leading_ones() as u8)]);
            let _ = wire::network(addresses[&name][0]);
        }
    }
}
