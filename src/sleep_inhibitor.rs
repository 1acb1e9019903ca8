//! Keeps a Mac awake while one of its ranks answers: a desk machine that nobody touches would fall
//! asleep in the middle of an answer, and nothing wakes it over Thunderbolt.

use std::process::{Child, Command, Stdio};

/// Held while the machine must not sleep.
pub(crate) struct KeepAwake(Option<Child>);

impl KeepAwake {
    /// Until it is dropped or this process ends, however it ends. Where there is nothing to be
    /// asked, or it cannot be started, the machine's own settings stand.
    pub(crate) fn start() -> Self {
        Self(guard(std::env::consts::OS, std::process::id()).and_then(spawn))
    }
}

impl Drop for KeepAwake {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            // It has nothing to finish, and may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What keeps a machine awake until `process` ends.
fn guard(system: &str, process: u32) -> Option<Command> {
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
    fn a_mac_is_asked_to_stay_awake_as_long_as_the_process() {
        let command = guard("macos", 42).expect("macOS has a program for it");
        let arguments: Vec<_> = command.get_args().collect();
        assert_eq!(command.get_program(), "/usr/bin/caffeinate");
        assert_eq!(arguments, ["-ims", "-w", "42"]);
        assert!(guard("linux", 42).is_none(), "servers do not sleep by themselves");
    }

    #[test]
    fn the_guard_ends_with_its_owner() {
        let mut command = Command::new("sleep");
        command.arg("600");
        let child = spawn(command).expect("sleep is everywhere");
        let process = child.id().to_string();
        drop(KeepAwake(Some(child)));
        let alive = Command::new("kill").args(["-0", &process]).stderr(Stdio::null()).status();
        assert!(!alive.expect("kill is everywhere").success(), "{process} still runs");
    }
}
