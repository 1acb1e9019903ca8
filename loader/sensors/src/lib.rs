//! Sensors that need no root: the machine's power and temperature, and the memory of this process.
//!
//! Reading order: `smc` (the controller of Macs, as bytes), then the two systems: `linux` (files
//! of the kernel) and `macos` (calls into `IOKit`; the one home of unsafe code here).

mod linux;
#[cfg(target_os = "macos")]
mod macos;
mod smc;

#[cfg(not(target_os = "macos"))]
use linux::Machine;
#[cfg(target_os = "macos")]
use macos::Machine;

/// One reading; a sensor that the machine lacks is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Memory of this process in bytes: its footprint on macOS, its resident pages on Linux.
    pub memory_bytes: Option<u64>,
    /// Watts: of the whole Mac; on Linux of the platform or the processors, averaged since the
    /// previous reading.
    pub power_watts: Option<f64>,
    /// The hottest sensor of the processor, and of the GPU on Macs, in degrees Celsius.
    pub temperature_celsius: Option<f64>,
}

/// Sensors found when it was opened.
pub struct Sensors(Machine);

impl Sensors {
    /// Looks for sensors. A machine without any is none the worse.
    #[must_use]
    pub fn open() -> Self {
        Self(Machine::open())
    }

    /// Reads them all; takes well under a millisecond on Linux, some on a Mac.
    pub fn read(&mut self) -> Reading {
        self.0.read()
    }
}

/// Bytes that the system has fetched from disks for this process, its caches left out; none where it
/// does not count them.
#[must_use]
pub fn disk_read_bytes() -> Option<u64> {
    #[cfg(target_os = "macos")]
    return macos::disk_read_bytes();
    #[cfg(not(target_os = "macos"))]
    linux::disk_read_bytes()
}

/// Degrees that a working processor may have; others are of broken or absent sensors.
fn plausible(celsius: f64) -> bool {
    (1.0..150.0).contains(&celsius)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_read_again_and_again() {
        let mut sensors = Sensors::open();
        for _ in 0..3 {
            let found = sensors.read();
            assert!(found.memory_bytes.is_none_or(|bytes| bytes > 1 << 18), "{found:?}");
            assert!(found.power_watts.is_none_or(|watts| watts >= 0.0), "{found:?}");
            assert!(found.temperature_celsius.is_none_or(plausible), "{found:?}");
        }
        assert!(!cfg!(target_os = "linux") || sensors.read().memory_bytes.is_some());
    }
}
