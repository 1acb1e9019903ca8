//! The machine of a node: memory, load, power, temperature. Sensors are read now and then on a thread of
//! their own, since counters of energy give power between two readings.

use std::{
    fs,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use shardpack_sensors::{Reading, Sensors};

use crate::commands::{doctor, threads};

/// Between two readings of the sensors.
const SENSORS_INTERVAL: Duration = Duration::from_secs(5);

/// The first reading follows soon, so that a node that was just started tells its power too.
const FIRST_INTERVAL: Duration = Duration::from_millis(250);

/// A machine, as far as it can be read without root.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MachineFacts {
    pub cores: usize,
    /// Processes that want to run, on average over 1, 5 and 15 minutes.
    pub load: Option<[f64; 3]>,
    pub memory_total_bytes: Option<u64>,
    /// What programs could still take without swapping.
    pub memory_available_bytes: Option<u64>,
    /// Of the node's own process.
    pub node_memory_bytes: Option<u64>,
    pub power_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
}

/// Reads the machine.
pub(super) struct Watch(Arc<Mutex<Reading>>);

impl Watch {
    /// Starts to read the sensors.
    pub(super) fn start() -> std::io::Result<Self> {
        let latest = Arc::new(Mutex::new(Reading::default()));
        let shared = Arc::downgrade(&latest);
        let read = move || {
            let mut sensors = Sensors::open();
            let mut pause = FIRST_INTERVAL;
            sensors.read();
            loop {
                thread::sleep(pause);
                pause = SENSORS_INTERVAL;
                let Some(latest) = shared.upgrade() else { return };
                *latest.lock().unwrap_or_else(PoisonError::into_inner) = sensors.read();
            }
        };
        thread::Builder::new().name("sensors".to_owned()).spawn(read)?;
        Ok(Self(latest))
    }

    /// The machine now.
    pub(super) fn read(&self) -> MachineFacts {
        let reading = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [memory_total_bytes, memory_available_bytes] = memory();
        MachineFacts {
            cores: threads::count(None),
            load: load(),
            memory_total_bytes,
            memory_available_bytes,
            node_memory_bytes: reading.memory_bytes,
            power_watts: reading.power_watts,
            temperature_celsius: reading.temperature_celsius,
        }
    }
}

/// Load averages.
fn load() -> Option<[f64; 3]> {
    let text = if cfg!(target_os = "macos") {
        doctor::ask("sysctl", &["-n", "vm.loadavg"]).ok()?
    } else {
        fs::read_to_string("/proc/loadavg").ok()?
    };
    parse_load(&text)
}

/// Of `/proc/loadavg` (`0.52 0.58 0.59 1/467 12345`) or of macOS (`{ 1.52 1.58 1.59 }`).
fn parse_load(text: &str) -> Option<[f64; 3]> {
    let mut numbers = text.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
    Some([numbers.next()?, numbers.next()?, numbers.next()?])
}

/// Total and available memory in bytes.
fn memory() -> [Option<u64>; 2] {
    if cfg!(target_os = "macos") {
        let total = doctor::ask("sysctl", &["-n", "hw.memsize"]).ok();
        let pages = doctor::ask("vm_stat", &[]).ok();
        return [
            total.and_then(|text| text.trim().parse().ok()),
            pages.and_then(|text| parse_vm_stat(&text)),
        ];
    }
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    ["MemTotal:", "MemAvailable:"].map(|key| kibibytes(&text, key))
}

/// The value of a line `KEY: 123 kB`, in bytes.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What macOS could give to programs: pages that are free, inactive, speculative or purgeable.
fn parse_vm_stat(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("page size of ")?;
    let page: u64 = rest.split_whitespace().next()?.parse().ok()?;
    let pages = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches('.').parse::<u64>().ok()
    };
    let free = pages("Pages free:")?;
    let others = ["Pages inactive:", "Pages speculative:", "Pages purgeable:"];
    let others = others.iter().filter_map(|name| pages(name)).sum::<u64>();
    free.checked_add(others)?.checked_mul(page)
}

/// Resident memory of a process of this machine.
pub(super) fn memory_of(process: u32) -> Option<u64> {
    if cfg!(target_os = "linux") {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        return kibibytes(&status, "VmRSS:");
    }
    let text = doctor::ask("ps", &["-o", "rss=", "-p", &process.to_string()]).ok()?;
    text.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_and_memory_are_read_as_both_systems_write_them() {
        let expected = Some([0.52, 0.58, 1.5]);
        assert_eq!(parse_load("0.52 0.58 1.5 1/467 12345\n"), expected);
        assert_eq!(parse_load("{ 0.52 0.58 1.5 }\n"), expected);
        assert_eq!(parse_load(""), None);
        let text = "MemTotal:       16384 kB\nMemAvailable:    4096 kB\n";
        assert_eq!(kibibytes(text, "MemAvailable:"), Some(4 << 20));
        assert_eq!(kibibytes(text, "SwapTotal:"), None);
        let text = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n\
                    Pages free:                               10.\n\
                    Pages active:                           9999.\n\
                    Pages inactive:                           20.\n\
                    Pages speculative:                         2.\n";
        assert_eq!(parse_vm_stat(text), Some(32 * 16384));
        assert_eq!(parse_vm_stat("Pages free: 10."), None);
    }

    #[test]
    fn this_process_has_memory() {
        assert!(memory_of(std::process::id()).is_none_or(|bytes| bytes > 1 << 18));
    }
}
