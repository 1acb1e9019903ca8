//! This program as a command, for ranks and servers in processes of their own.

use std::{
    env, fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

/// The running program on Linux, whatever has become of its file.
const RUNNING: &str = "/proc/self/exe";

/// What to start for another process of the very program that runs: its file, or on Linux, where that
/// was replaced or removed meanwhile (an upgrade under a running node), the program that is in memory.
pub(crate) fn path() -> anyhow::Result<PathBuf> {
    let own = env::current_exe().context("cannot find this program's own file")?;
    let running = Path::new(RUNNING);
    Ok(if is_other(&own, running) { running.to_owned() } else { own })
}

/// Whether `path` is not the file that is `running`.
fn is_other(path: &Path, running: &Path) -> bool {
    let Ok(running) = fs::metadata(running) else { return false };
    fs::metadata(path).map_or(true, |own| (own.dev(), own.ino()) != (running.dev(), running.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_replaced_is_not_the_running_one() {
        let folder = tempfile::tempdir().unwrap();
        let (running, program) = (folder.path().join("running"), folder.path().join("program"));
        fs::write(&program, "old").unwrap();
        fs::hard_link(&program, &running).unwrap();
        assert!(!is_other(&program, &running));
        fs::remove_file(&program).unwrap();
        assert!(is_other(&program, &running));
        fs::write(&program, "new").unwrap();
        assert!(is_other(&program, &running));
        assert!(!is_other(&program, &folder.path().join("no procfs")));
    }
}
