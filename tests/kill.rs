//! Processes killed at named points, and run again.

use tempfile::tempdir;

use crate::harness::{convert, data, files, kill, path, paused, succeed};

#[test]
fn a_killed_conversion_leaves_no_result_and_runs_again() {
    let folder = tempdir().unwrap();
    let expected = files(&convert("kjv-4m", &folder.path().join("undisturbed"), &["--nodes", "2"]));
    let source = data("kjv-4m");
    for point in ["convert:planned", "convert:tensor:0", "convert:tensor:20", "convert:publishing"]
    {
        let output = folder.path().join(point.replace(':', "-"));
        let args = ["convert", path(&source), "-o", path(&output), "--nodes", "2"];
        kill(paused(point, &args));
        assert!(!output.exists(), "{point}: half a result has the final name");
        succeed(&args);
        succeed(&["verify", path(&output)]);
        assert!(files(&output) == expected, "{point}");
    }
}
