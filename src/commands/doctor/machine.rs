//! What hardware and software this machine has; nothing is computed.

use std::{
    fs,
    io::Read as _,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::json;
use shardpack_mlx::{
    Device, Library,
    runtime::{self, CheckError},
};
use shardpack_sensors::Sensors;

use super::{
    apple::system::{self, MacosVersion},
    links,
    report::{Finding, Report},
};
use crate::{commands::threads, engines, progress::size};

/// Timeout for a program that prints information.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest output of one; a Mac's list of Thunderbolt devices has some kilobytes.
const MAX_OUTPUT_BYTES: u64 = 4 << 20;
/// Interval between two readings of energy counters.
const SENSORS_INTERVAL: Duration = Duration::from_millis(200);

/// Runs all checks. Returns whether MLX can be used.
pub(super) fn look(report: &mut Report) -> bool {
    let (os, arch) = (operating_system(), std::env::consts::ARCH);
    let cores = threads::count(None);
    let memory = memory_bytes();
    let shown = memory.map_or_else(|| "unknown memory".to_owned(), size);
    report.pass(
        "machine",
        format!("{os}, {arch}, {cores} cores, {shown}"),
        json!({ "os": os, "arch": arch, "cores": cores, "memory_bytes": memory }),
    );
    sensors(report);
    links::look(report);
    mlx(report)
}

/// The operating system's name and version.
fn operating_system() -> String {
    if cfg!(target_os = "macos") {
        let version = ask("sw_vers", &["-productVersion"]).unwrap_or_default();
        return format!("macOS {}", version.trim());
    }
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or(std::env::consts::OS, |name| name.trim_matches('"')).to_owned()
}

/// Bytes of this machine's memory.
pub(in crate::commands) fn memory_bytes() -> Option<u64> {
    if cfg!(target_os = "macos") {
        return ask("sysctl", &["-n", "hw.memsize"]).ok()?.trim().parse().ok();
    }
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    kib.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Power and temperature, as far as they are readable without root.
fn sensors(report: &mut Report) {
    const NAME: &str = "sensors";
    let mut sensors = Sensors::open();
    // The counters count energy: power needs two readings.
    sensors.read();
    thread::sleep(SENSORS_INTERVAL);
    let found = sensors.read();
    let shown = [(found.power_watts, "W"), (found.temperature_celsius, "°C")];
    let shown: Vec<String> = shown
        .into_iter()
        .filter_map(|(value, unit)| value.map(|value| format!("{value:.1} {unit}")))
        .collect();
    if shown.is_empty() {
        report.skip(NAME, "neither power nor temperature is readable without root on this machine");
        return;
    }
    let facts = json!({
        "power_watts": found.power_watts,
        "temperature_celsius": found.temperature_celsius,
    });
    report.pass(NAME, shown.join(", "), facts);
}

/// MLX's runtime; whether it can be used.
fn mlx(report: &mut Report) -> bool {
    const NAME: &str = "MLX runtime";
    macos(report);
    wired_limit(report);
    let folder = match engines::mlx_folder(None) {
        Ok(folder) => folder,
        Err(error) => {
            report.skip(NAME, format!("{error:#}"));
            return false;
        }
    };
    match runtime::check(&folder) {
        Err(error @ (CheckError::Absent(_) | CheckError::Platform)) => {
            report.skip(NAME, error.to_string());
            return false;
        }
        Err(error) => {
            report.add_result(NAME, Err(error.into()));
            return false;
        }
        Ok(checked) => {
            let (version, files) = (checked.record.mlx, checked.record.files.len());
            let detail = format!("{version}, {files} files as installed in {}", folder.display());
            report.pass(NAME, detail, json!({ "version": version, "folder": folder }));
        }
    }
    let opened = device(&folder);
    let is_usable = opened.is_ok();
    report.add_result("MLX device", opened);
    is_usable
}

/// MLX's device and its memory limit.
fn device(folder: &Path) -> anyhow::Result<Finding> {
    let library = Library::open(folder, None)?;
    let working_set = library.device_figure("max_recommended_working_set_size");
    let layers: Vec<&str> =
        ["ring", "jaccl"].into_iter().filter(|name| library.has_distributed(name)).collect();
    let (name, limit) = match library.device() {
        Device::Cpu => ("the processor", String::new()),
        Device::Gpu => {
            let bytes = working_set.context("Metal does not report the GPU's working-set limit")?;
            ("the GPU", format!(", which may use {}", size(bytes as u64)))
        }
    };
    let wired = if cfg!(target_os = "macos") {
        ask("sysctl", &["-n", "iogpu.wired_limit_mb"]).ok().map(|it| it.trim().to_owned())
    } else {
        None
    };
    let detail = format!("computes on {name}{limit}; its own collectives: {}", layers.join(", "));
    let figures = json!({
        "device": name, "working_set_bytes": working_set, "collectives": layers,
        "iogpu_wired_limit_mb": wired,
    });
    Ok(Finding::new(detail, figures))
}

/// Whether this macOS has what the installed build of MLX calls.
fn macos(report: &mut Report) {
    const NAME: &str = "macOS and MLX's build";
    let Some(version) =
        ask("sw_vers", &["-productVersion"]).ok().as_deref().and_then(MacosVersion::parse)
    else {
        return report.skip(NAME, "no macOS here");
    };
    let MacosVersion(major, minor) = version;
    let found =
        Finding::new(format!("macOS {major}.{minor}"), json!({ "major": major, "minor": minor }));
    let MacosVersion(least_major, least_minor) = system::JACCL_MACOS;
    let found = found.expected(format!("{least_major}.{least_minor} or later for JACCL"));
    let is_old = version < system::JACCL_MACOS;
    let advice =
        "the built-in collectives work; for JACCL update macOS and install the engine again";
    report.find(NAME, Finding { advice: if is_old { advice } else { "" }.to_owned(), ..found });
}

/// What the GPU may wire.
fn wired_limit(report: &mut Report) {
    const NAME: &str = "wired limit";
    let number = |name: &str| ask("sysctl", &["-n", name]).ok()?.trim().parse::<u64>().ok();
    let (Some(limit), Some(memory)) =
        (number("iogpu.wired_limit_mb").filter(|_| cfg!(target_os = "macos")), memory_bytes())
    else {
        return report.skip(NAME, "only macOS on Apple silicon has one");
    };
    let figures = json!({ "iogpu_wired_limit_mb": limit, "memory_bytes": memory });
    let all = size(memory);
    let found = match limit {
        0 => Finding::new(format!("macOS's default: about three quarters of {all}"), figures),
        limit => Finding::new(format!("{} of {all}", size(limit << 20)), figures),
    };
    let reserve = (memory >> 20).saturating_sub(8 << 10);
    let is_too_high = limit > reserve;
    let found =
        found.expected(format!("0 (the default) to {reserve} MiB: 8 GiB stay the system's"));
    let advice = format!("sudo sysctl iogpu.wired_limit_mb={reserve}");
    report.find(NAME, found.slow_if(is_too_high, &advice));
}

/// Runs a program and returns its output.
pub(in crate::commands) fn ask(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = Command::new(program);
    command.args(arguments);
    output(command, PROGRAM_TIMEOUT)
}

/// The same with a timeout.
pub(super) fn output(mut command: Command, timeout: Duration) -> anyhow::Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().with_context(|| format!("`{program}` cannot be run"))?;
    let output = child.stdout.take().context("its output is a pipe")?;
    // More than a pipe holds is read while it runs.
    let reading = thread::spawn(move || {
        let mut text = Vec::new();
        output.take(MAX_OUTPUT_BYTES).read_to_end(&mut text).map(|_| text)
    });
    let deadline = Instant::now() + timeout;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            bail!("`{program}` did not end in time");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let text = reading.join().map_err(|_| anyhow::anyhow!("`{program}` cannot be read"))??;
    let status = child.wait()?;
    anyhow::ensure!(status.success(), "`{program}` failed ({status})");
    Ok(String::from_utf8_lossy(&text).into_owned())
}
