//! Linux: files below /sys and /proc. Power comes from the counters of energy that the kernel
//! shows as `powercap` (readable by all only where an administrator allows it), temperatures from
//! `hwmon`, or from thermal zones on boards without it.

#![cfg_attr(
    target_os = "macos",
    expect(dead_code, reason = "checked on every system, used on one")
)]

use std::{
    fs,
    path::{Path, PathBuf},
    str::FromStr,
    time::Instant,
};

use crate::{Reading, plausible};

/// Chips that `hwmon` names and that sit in processors.
const CHIPS: [&str; 6] = ["coretemp", "k10temp", "zenpower", "cpu_thermal", "scpi_sensors", "soc"];

/// `read_bytes` of this process: what was fetched from block devices.
pub(crate) fn disk_read_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.trim().parse().ok()
}

/// The sensors of a Linux machine.
pub(crate) struct Machine {
    root: PathBuf,
    temperatures: Vec<PathBuf>,
    counters: Vec<Counter>,
}

/// A reading of an energy counter.
struct EnergySample {
    /// Microjoules.
    energy: u64,
    at: Instant,
}

/// A counter of energy.
struct Counter {
    folder: PathBuf,
    /// Microjoules after which it begins again.
    range: u64,
    last: Option<EnergySample>,
}

impl Machine {
    pub(crate) fn open() -> Self {
        Self::below(Path::new("/"))
    }

    fn below(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
            temperatures: temperatures(root),
            counters: counters(root),
        }
    }

    pub(crate) fn read(&mut self) -> Reading {
        self.read_at(Instant::now())
    }

    fn read_at(&mut self, now: Instant) -> Reading {
        let degrees = self.temperatures.iter().filter_map(|file| number::<f64>(file));
        let degrees = degrees.map(|thousandths| thousandths / 1000.0).filter(|at| plausible(*at));
        let watts: Vec<f64> =
            self.counters.iter_mut().filter_map(|counter| counter.watts(now)).collect();
        Reading {
            memory_bytes: resident(&self.root),
            power_watts: (!watts.is_empty()).then(|| watts.iter().sum()),
            temperature_celsius: degrees.reduce(f64::max),
        }
    }
}

impl Counter {
    /// The average since the last time.
    fn watts(&mut self, now: Instant) -> Option<f64> {
        let energy: u64 = number(&self.folder.join("energy_uj"))?;
        let EnergySample { energy: before, at } =
            self.last.replace(EnergySample { energy, at: now })?;
        let spent = match energy.checked_sub(before) {
            Some(spent) => spent,
            None => (self.range.checked_sub(before)?).checked_add(energy)?,
        };
        let seconds = now.checked_duration_since(at)?.as_secs_f64();
        (seconds > 0.0).then(|| spent as f64 / 1e6 / seconds)
    }
}

/// What a short file says.
fn text(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

fn number<T: FromStr>(file: &Path) -> Option<T> {
    text(file)?.parse().ok()
}

/// The folders in a folder, in the order of their names.
fn folders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn temperatures(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for chip in folders(&root.join("sys/class/hwmon")) {
        let name = text(&chip.join("name")).unwrap_or_default();
        if CHIPS.contains(&name.as_str()) {
            found.extend(folders(&chip).into_iter().filter(|file| {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("temp") && name.ends_with("_input")
            }));
        }
    }
    if found.is_empty() {
        for zone in folders(&root.join("sys/class/thermal")) {
            let kind = text(&zone.join("type")).unwrap_or_default();
            if kind == "x86_pkg_temp" || kind.starts_with("cpu") || kind.starts_with("soc") {
                found.push(zone.join("temp"));
            }
        }
    }
    found
}

/// The whole platform's counter if there is one, else one for each processor.
fn counters(root: &Path) -> Vec<Counter> {
    let named = |is_wanted: fn(&str) -> bool| -> Vec<PathBuf> {
        let folders = folders(&root.join("sys/class/powercap")).into_iter();
        folders.filter(|it| text(&it.join("name")).is_some_and(|name| is_wanted(&name))).collect()
    };
    let platform = named(|name| name == "psys");
    let packages = || named(|name| name.starts_with("package-"));
    let found = if platform.is_empty() { packages() } else { platform };
    let counter = |folder: PathBuf| {
        let range = number(&folder.join("max_energy_range_uj")).unwrap_or(0);
        Counter { folder, range, last: None }
    };
    found.into_iter().map(counter).collect()
}

/// Memory of this process that is not swapped out.
fn resident(root: &Path) -> Option<u64> {
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let file = root.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    #[test]
    fn the_hottest_sensor_of_the_processor_counts() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        write(root, "sys/class/hwmon/hwmon0/name", "nvme\n");
        write(root, "sys/class/hwmon/hwmon0/temp1_input", "99000\n");
        write(root, "sys/class/hwmon/hwmon1/name", "k10temp\n");
        write(root, "sys/class/hwmon/hwmon1/temp1_input", "41500\n");
        write(root, "sys/class/hwmon/hwmon1/temp3_input", "62250\n");
        write(root, "sys/class/hwmon/hwmon1/temp4_input", "-128000\n");
        write(root, "sys/class/hwmon/hwmon1/temp3_crit", "95000\n");
        write(root, "sys/class/thermal/thermal_zone0/type", "x86_pkg_temp\n");
        write(root, "sys/class/thermal/thermal_zone0/temp", "77000\n");
        assert_eq!(Machine::below(root).read().temperature_celsius, Some(62.25));
        fs::remove_dir_all(root.join("sys/class/hwmon")).unwrap();
        assert_eq!(Machine::below(root).read().temperature_celsius, Some(77.0));
    }

    #[test]
    fn power_is_energy_over_time_and_counters_begin_again() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for (index, name, energy) in [(0, "package-0", 1_000_000), (1, "package-1", 7)] {
            let counter = format!("sys/class/powercap/intel-rapl:{index}");
            write(root, &format!("{counter}/name"), name);
            write(root, &format!("{counter}/energy_uj"), &energy.to_string());
            write(root, &format!("{counter}/max_energy_range_uj"), "2000000");
        }
        write(root, "sys/class/powercap/intel-rapl:0:0/name", "core");
        write(root, "sys/class/powercap/intel-rapl:0:0/energy_uj", "5");
        let mut machine = Machine::below(root);
        let start = Instant::now();
        assert_eq!(machine.read_at(start).power_watts, None, "nothing to compare with");
        write(root, "sys/class/powercap/intel-rapl:0/energy_uj", "500000");
        write(root, "sys/class/powercap/intel-rapl:1/energy_uj", "1000007");
        let later = machine.read_at(start + Duration::from_millis(500));
        assert_eq!(later.power_watts, Some(3.0 + 2.0));
        write(root, "sys/class/powercap/intel-rapl:2/name", "psys");
        assert_eq!(
            Machine::below(root).counters.len(),
            1,
            "the platform counts the processors too"
        );
    }

    #[test]
    fn memory_is_read_in_kibibytes() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Machine::below(folder.path()).read(), Reading::default());
        write(folder.path(), "proc/self/status", "Name:\ta\nVmRSS:\t    2048 kB\nVmData: 1 kB\n");
        assert_eq!(Machine::below(folder.path()).read().memory_bytes, Some(2 << 20));
    }
}
