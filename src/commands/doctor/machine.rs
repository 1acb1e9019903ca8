//! What hardware and software this machine has; nothing is computed.

use std::{
    fs,
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

use super::report::{Finding, Report};
use crate::{commands::threads, engines, progress::size};

/// Timeout for a program that prints information.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(10);
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
    rdma(report);
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

fn memory_bytes() -> Option<u64> {
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

/// RDMA devices, as the system lists them.
fn rdma(report: &mut Report) {
    const NAME: &str = "RDMA devices";
    let devices = if cfg!(target_os = "macos") {
        ask("ibv_devices", &[]).map(|text| {
            let names = text.lines().filter_map(|line| line.split_whitespace().next());
            names.filter(|name| name.starts_with("rdma_")).map(str::to_owned).collect::<Vec<_>>()
        })
    } else {
        let entries = fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
        Ok(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
    };
    match devices {
        Ok(mut devices) if !devices.is_empty() => {
            devices.sort();
            report.pass(NAME, devices.join(", "), json!({ "devices": devices }));
        }
        Ok(_) => report.skip(
            NAME,
            "none (on a Mac: Thunderbolt 5, macOS 26.2, and `rdma_ctl enable` in Recovery)",
        ),
        Err(error) => report.skip(NAME, format!("cannot be listed: {error:#}")),
    }
}

/// MLX's runtime; whether it can be used.
fn mlx(report: &mut Report) -> bool {
    const NAME: &str = "MLX runtime";
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
    Ok(Finding { detail, figures })
}

/// Runs a program and returns its output.
fn ask(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("`{program}` cannot be run"))?;
    let deadline = Instant::now() + PROGRAM_TIMEOUT;
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            bail!("`{program}` did not end in time");
        }
        thread::sleep(Duration::from_millis(10));
    }
    // It has ended, and its output fits into the pipe.
    let output = child.wait_with_output()?;
    anyhow::ensure!(output.status.success(), "`{program}` failed ({})", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
