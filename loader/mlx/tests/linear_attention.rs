//! The kernels of linear attention for Metal, run on this machine's processor: their text is C++
//! too. `native/linear_attention/emulate.cpp` compares them with the plain loops.

#![expect(clippy::print_stdout, reason = "a test that is skipped says so")]

use std::{env, path::Path, process::Command};

#[test]
fn kernels_for_metal_compute_what_the_plain_loops_do() {
    let cxx = env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if Command::new(&cxx).arg("--version").output().is_err() {
        assert!(env::var("SHARDPACK_ENGINES").is_err(), "an engine without a C++ compiler");
        println!("skipped: no C++ compiler");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("emulate");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("native/linear_attention/emulate.cpp");
    let compiler = Command::new(&cxx)
        .args(["-std=c++20", "-O1", "-pthread", "-w"])
        .arg(source)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
    let run = Command::new(&program).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
}
