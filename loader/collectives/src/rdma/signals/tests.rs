//! A process of its own gets the signals.

use std::{
    env,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::process::ExitStatusExt as _,
    process::{Command, Stdio},
    sync::Arc,
};

use super::{
    super::{
        buffer::Buffer,
        device::{Completion, Device, DeviceError, Path, RawDevice, RawQueuePair, RawRegion, Work},
        port::Port,
        rules::{self, QueueShape},
    },
    *,
};

/// A device whose queue pairs say when they are destroyed.
struct Loud;

impl RawDevice for Loud {
    fn name(&self) -> &'static str {
        "loud"
    }

    fn port(&self) -> Result<Port, DeviceError> {
        Err(DeviceError::Library("no port".to_owned()))
    }

    fn register(&self, _: &Arc<Buffer>) -> Result<Box<dyn RawRegion>, DeviceError> {
        Ok(Box::new(Self))
    }

    fn queue_pair(&self, _: QueueShape) -> Result<(Box<dyn RawQueuePair>, usize), DeviceError> {
        Ok((Box::new(LoudQueue), rules::MAX_QUEUE_FRAMES))
    }
}

impl RawRegion for Loud {
    fn key(&self) -> u32 {
        0
    }
}

struct LoudQueue;

impl Drop for LoudQueue {
    fn drop(&mut self) {
        writeln!(io::stderr(), "destroyed").unwrap();
    }
}

impl RawQueuePair for LoudQueue {
    fn number(&self) -> u32 {
        1
    }

    fn ready_to_receive(&mut self, _: &Path) -> Result<(), DeviceError> {
        Ok(())
    }

    fn ready_to_send(&mut self, _: &Path) -> Result<(), DeviceError> {
        Ok(())
    }

    fn post_recv(&mut self, _: Work<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn post_send(&mut self, _: Work<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn poll(&mut self, _: &mut [Completion]) -> Result<usize, DeviceError> {
        Ok(0)
    }
}

#[test]
#[ignore = "the process that the next test ends"]
fn process_with_two_queue_pairs() {
    let device = Device::new(Box::new(Loud));
    let shape = QueueShape { slot_bytes: rules::FRAME_BYTES, slots: 1, sges: 1 };
    let queue_pair = || device.queue_pair(shape, device.lend(1).unwrap()).unwrap();
    let _queues = [queue_pair(), queue_pair()];
    release_on_signals().unwrap();
    release_on_signals().unwrap();
    writeln!(io::stderr(), "ready").unwrap();
    // Longer than its parent takes; the parent ends it.
    thread::sleep(Duration::from_hours(1));
}

#[test]
fn a_signal_destroys_queue_pairs_and_then_ends_the_process() {
    for (name, number) in [("TERM", SIGTERM), ("INT", SIGINT), ("HUP", SIGHUP)] {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture"])
            .arg("rdma::signals::tests::process_with_two_queue_pairs")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line == "ready"));
        let kill = Command::new("kill").args(["-s", name, &process.id().to_string()]).status();
        assert!(kill.unwrap().success());
        assert_eq!(lines.collect::<Vec<_>>(), ["destroyed", "destroyed"]);
        assert_eq!(process.wait().unwrap().signal(), Some(number));
    }
}
