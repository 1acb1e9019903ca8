//! Sets of the small model that many tests begin with. Each is converted once; a test gets a copy, which it may change.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{LazyLock, OnceLock},
};

use crate::harness::{convert, copy_folder};

/// The sets of this process, and what removes them after it.
struct Sets {
    folder: PathBuf,
    /// Nothing in this process runs last. A shell that reads what never comes goes on when it has ended, however it
    /// did.
    _remover: Child,
}

static SETS: LazyLock<Sets> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap().keep();
    let mut remover = Command::new("sh");
    remover.args(["-c", "trap '' HUP INT TERM; read -r _; rm -rf \"$0\""]).arg(&folder);
    let remover = remover.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    Sets { folder, _remover: remover.unwrap() }
});

/// `kjv-4m` converted for one node with no options, in `output`.
pub(crate) fn kjv(output: &Path) -> PathBuf {
    static CONVERTED: OnceLock<PathBuf> = OnceLock::new();
    copy(CONVERTED.get_or_init(|| convert("kjv-4m", &SETS.folder.join("one"), &[])), output)
}

/// The same for two nodes.
pub(crate) fn kjv_for_two(output: &Path) -> PathBuf {
    static CONVERTED: OnceLock<PathBuf> = OnceLock::new();
    let two = ["--nodes", "2"];
    copy(CONVERTED.get_or_init(|| convert("kjv-4m", &SETS.folder.join("two"), &two)), output)
}

fn copy(set: &Path, output: &Path) -> PathBuf {
    copy_folder(set, output);
    // Not among the files that sets are compared by.
    fs::copy(set.join("run.json"), output.join("run.json")).unwrap();
    output.to_owned()
}
