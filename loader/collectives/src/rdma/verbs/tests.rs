//! The layouts against the header of the machine, where it has one.

use std::{fmt::Write as _, fs, path::Path, process::Command};

use super::*;
use crate::skip::skip;

#[test]
fn layouts_are_those_of_the_header() {
    assert_eq!(LAYOUT.len(), 68);
    let mut source = "#include <stddef.h>\n#include <infiniband/verbs.h>\n".to_owned();
    for (expression, value) in LAYOUT {
        writeln!(source, "_Static_assert(({expression}) == ({value}), \"{expression}\");").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("layout.c");
    fs::write(&file, source).unwrap();
    let compile = |file: &Path| {
        let mut cc = Command::new("cc");
        cc.arg("-c").arg(file).arg("-o").arg(folder.path().join("layout.o")).output()
    };
    let probe = folder.path().join("probe.c");
    fs::write(&probe, "#include <infiniband/verbs.h>\n").unwrap();
    if !compile(&probe).is_ok_and(|output| output.status.success()) {
        return skip("verbs-header", "no cc that finds infiniband/verbs.h (libibverbs-dev)");
    }
    let output = compile(&file).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
