//! The RDMA devices of a machine.

use std::sync::Arc;

use super::{
    device::{Device, DeviceError, RawDevice as _},
    port::{Port, PortReport},
    real,
};

/// The RDMA devices of this machine, opened. Kept while a process serves: links borrow registered
/// memory of them.
#[derive(Clone)]
pub struct Devices(pub(super) Arc<[Arc<Device>]>);

impl Devices {
    /// Opens every device.
    pub fn open() -> Result<Self, DeviceError> {
        Self::open_those(|_| true)
    }

    /// Opens the devices of these names.
    pub fn open_only(names: &[&str]) -> Result<Self, DeviceError> {
        Self::open_those(|name| names.contains(&name))
    }

    fn open_those(wanted: impl Fn(&str) -> bool) -> Result<Self, DeviceError> {
        let mut devices = real::open(wanted)?;
        devices.sort_by(|a, b| a.name().cmp(b.name()));
        Ok(Self(devices.into_iter().map(|device| Device::new(Box::new(device))).collect()))
    }

    /// The devices' names; none where the machine has no device, or RDMA is not enabled.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|device| device.name().to_owned()).collect()
    }

    /// What each device's port says of itself.
    #[must_use]
    pub fn ports(&self) -> Vec<PortReport> {
        let report = |device: &Arc<Device>| match device.port() {
            Ok(port) => PortReport::of(device.name(), &port),
            Err(error) => PortReport {
                remedy: Some(format!("its port cannot be asked: {error}")),
                ..PortReport::of(device.name(), &Port::unknown())
            },
        };
        self.0.iter().map(report).collect()
    }
}
