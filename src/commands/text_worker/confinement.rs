//! What a sandbox may do: compute, with a little memory, and answer. On Linux the process installs a
//! filter of system calls; on macOS it is started under the system's sandbox; elsewhere limits of
//! resources are all there is.

use std::{io, path::Path, process::Command};

use rustix::process::{Resource, Rlimit, setrlimit};

/// Open files: standard input, output and error.
const FILES: u64 = 3;

/// No core dumps, no files to write, no further descriptors.
pub(super) fn limit_resources() -> io::Result<()> {
    let limit = |most| Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::Core, limit(0))?;
    setrlimit(Resource::Fsize, limit(0))?;
    Ok(setrlimit(Resource::Nofile, limit(FILES))?)
}

/// The sandbox's command.
#[cfg(not(target_os = "macos"))]
pub(super) fn confined(program: &Path) -> Command {
    Command::new(program)
}

/// What the system's sandbox lets a process do on macOS: nothing that leaves it.
#[cfg(target_os = "macos")]
const PROFILE: &str = "(version 1)(allow default)(deny network*)(deny file-write*)\
    (deny process-fork)(deny mach-register)(deny signal (target others))";

/// The sandbox's command, within the system's sandbox where there is one.
#[cfg(target_os = "macos")]
pub(super) fn confined(program: &Path) -> Command {
    let sandbox = Path::new("/usr/bin/sandbox-exec");
    if !sandbox.exists() {
        return Command::new(program);
    }
    let mut command = Command::new(sandbox);
    command.args(["-p", PROFILE]).arg(program);
    command
}

/// Lets every thread of this process compute and answer, and nothing else, for ever: another system
/// call ends it.
#[cfg(target_os = "linux")]
pub(super) fn confine() -> anyhow::Result<()> {
    use anyhow::Context as _;

    let arch = std::env::consts::ARCH.try_into().context("no filter for this processor")?;
    let filter = FILTER.replace(OPENAT, &format!("{OPEN}{OPENAT}"));
    let filters = seccompiler::compile_from_json(filter.as_bytes(), arch).context("the filter")?;
    // Of two filters the stricter answer counts; the last one lets no other be added.
    for name in ["files", "sandbox"] {
        let filter = filters.get(name).with_context(|| format!("no filter {name}"))?;
        seccompiler::apply_filter_all_threads(filter)
            .context("seccomp: expected a Linux kernel with CONFIG_SECCOMP_FILTER")?;
    }
    Ok(())
}

/// System calls by name, so that they are those of every processor. `tgkill` and `tkill` are with
/// SIGABRT alone, by which the standard library ends a process whose stack or memory is used up.
#[cfg(target_os = "linux")]
const FILTER: &str = include_str!("filter.json");

/// How the filters name the call that opens a file.
#[cfg(target_os = "linux")]
const OPENAT: &str = r#"{ "syscall": "openat","#;

/// The older call for the same, which musl's library makes where a processor has it.
#[cfg(target_os = "linux")]
const OPEN: &str = if cfg!(target_arch = "x86_64") { r#"{ "syscall": "open" }, "# } else { "" };

/// Its limits, and what confines it from outside, are all.
#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "the same everywhere")]
pub(super) const fn confine() -> anyhow::Result<()> {
    Ok(())
}
