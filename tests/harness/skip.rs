//! Skipped tests: each prints one line with its reason, and fails where nobody announced it. Shared
//! by path with the tests of other crates; knows nothing of what is tested.

use std::{
    env,
    ffi::OsStr,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

/// Capabilities, separated by commas or spaces, that a run may lack; every other one is required.
/// Unset, all tests may be skipped. `.ci/run` sets it from `.ci/skips`; `tests/skip.sh` is the
/// same for shell scripts.
const ANNOUNCED: &str = "SHARDPACK_SKIPS";

/// Says why a test is skipped that needs a capability of the machine. To be followed by `return`.
///
/// # Panics
/// If `SHARDPACK_SKIPS` is set and does not name the capability.
#[track_caller]
pub(crate) fn skip(capability: &str, reason: &str) {
    // Not `eprintln!`, whose output is shown of failed tests only.
    let _ = writeln!(io::stderr(), "skipped: {reason} [{capability}]");
    let announced = env::var_os(ANNOUNCED);
    let Some(announced) = announced.as_deref().map(OsStr::to_string_lossy) else { return };
    let mut names = announced.split([',', ' ']);
    assert!(
        names.any(|name| name == capability),
        "skipped: {reason}, and ${ANNOUNCED} ({announced:?}) does not announce {capability:?}"
    );
}

/// The installed MLX runtime in `$SHARDPACK_ENGINES`; without one the test is skipped.
#[track_caller]
pub(crate) fn mlx_runtime(folder: &str) -> Option<PathBuf> {
    let found = env::var_os("SHARDPACK_ENGINES")
        .map(|engines| Path::new(&engines).join(folder))
        .filter(|folder| folder.is_dir());
    if found.is_none() {
        skip("mlx", "no MLX runtime in $SHARDPACK_ENGINES; tests/mlx.sh installs one");
    }
    found
}
