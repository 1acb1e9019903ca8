//! Prevents a Mac from sleeping while one of its ranks runs: an idle desktop would fall asleep in
//! the middle of an answer, and nothing wakes it over Thunderbolt.

use std::process::{Child, Command, Stdio};

/// Keeps the machine awake until it is dropped.
pub(crate) struct SleepInhibitor(Option<Child>);

impl SleepInhibitor {
    /// Starts it. It also ends with this process, however that ends. On other systems, or if it
    /// cannot be started, it does nothing.
    pub(crate) fn start() -> Self {
        Self(inhibitor(std::env::consts::OS, std::process::id()).and_then(spawn))
    }
}

impl Drop for SleepInhibitor {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The program that keeps a machine awake until `process` ends.
fn inhibitor(system: &str, process: u32) -> Option<Command> {
    // caffeinate(8): no idle sleep, no sleep of disks, no sleep of the system on mains power, and
    // an end when the process ends.
    (system == "macos").then(|| {
        let mut command = Command::new("/usr/bin/caffeinate");
        command.args(["-ims", "-w"]).arg(process.to_string());
        command
    })
}

fn spawn(mut command: Command) -> Option<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_is_kept_awake_until_the_process_ends() {
        let command = inhibitor("macos", 42).expect("macOS has a program for it");
        let arguments: Vec<_> = command.get_args().collect();
        assert_eq!(command.get_program(), "/usr/bin/caffeinate");
        assert_eq!(arguments, ["-ims", "-w", "42"]);
        assert!(inhibitor("linux", 42).is_none(), "servers do not sleep by themselves");
    }

    #[test]
    fn the_inhibitor_ends_with_its_owner() {
        let mut command = Command::new("sleep");
        command.arg("600");
        let child = spawn(command).expect("sleep is everywhere");
        let process = child.id().to_string();
        drop(SleepInhibitor(Some(child)));
        let alive = Command::new("kill").args(["-0", &process]).stderr(Stdio::null()).status();
        assert!(!alive.expect("kill is everywhere").success(), "{process} still runs");
    }
}
