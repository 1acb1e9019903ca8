//! Temporary files and folders that name the process that made them, so that what a killed process left is
//! removed by the next one.

use std::{fs, path::Path, process};

use rustix::process::{Pid, test_kill_process};
use tempfile::Builder;

/// What the name of a temporary file or folder begins with: its kind, and this process.
pub(crate) fn prefix(kind: &str) -> String {
    format!("{kind}{}-", process::id())
}

/// A folder below the system's for temporary files, which other accounts cannot read; gone when it is
/// dropped.
pub(crate) fn folder(kind: &str) -> std::io::Result<tempfile::TempDir> {
    let prefix = prefix(kind);
    let mut builder = Builder::new();
    builder.prefix(&prefix);
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    builder.tempdir()
}

/// Removes what processes that have ended left of a kind in a folder. What cannot be removed, as another
/// account's, stays.
pub(crate) fn sweep(folder: &Path, kind: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(kind));
        let maker =
            rest.and_then(|rest| rest.split_once('-')).and_then(|(pid, _)| pid.parse().ok());
        let Some(maker) = maker.and_then(Pid::from_raw) else { continue };
        // A process of another account cannot be asked, and lives.
        if test_kill_process(maker) != Err(rustix::io::Errno::SRCH) {
            continue;
        }
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let path = entry.path();
        let _ = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_ended_processes_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let mut ended = process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let names = [
            format!("kind-{}-left", ended.id()),
            format!("kind-{}-mine", process::id()),
            format!("other-{}-left", ended.id()),
            "kind-someone".to_owned(),
        ];
        fs::create_dir(folder.path().join(&names[0])).unwrap();
        fs::write(folder.path().join(&names[0]).join("document"), "x").unwrap();
        for name in &names[1..] {
            fs::write(folder.path().join(name), "x").unwrap();
        }
        sweep(folder.path(), "kind-");
        let left = names.iter().filter(|name| folder.path().join(name).exists());
        assert_eq!(left.collect::<Vec<_>>(), names[1..].iter().collect::<Vec<_>>());
    }

    #[test]
    fn folders_are_this_account_s_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = folder("shardpack-test-").unwrap();
        let mode = fs::metadata(folder.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}
