//! Names the build: a hash of all sources that are compiled into the program. Ranks of different
//! builds may differ in bits although both are of one version.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Folders and files that the program is compiled from.
const SOURCES: [&str; 10] = [
    "src",
    "formats",
    "http",
    "manifests",
    "identity",
    "converter",
    "transfer",
    "loader",
    "Cargo.toml",
    "Cargo.lock",
];

fn main() {
    let mut files = Vec::new();
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
        collect(Path::new(source), &mut files).expect("the sources can be read");
    }
    files.sort();
    // FNV-1a, 64 bits: it tells builds apart, and protects nothing.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        let name = file.to_string_lossy().into_owned().into_bytes();
        let content = fs::read(&file).expect("the sources can be read");
        for byte in name.into_iter().chain([0]).chain(content).chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=BUILD_HASH={hash:016x}");
}

/// The files below `path` that compiling reads.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let is_compiled = path.is_dir() && path.file_name().is_some_and(|name| name != "tests")
            || path.extension().is_some_and(|it| it == "rs" || it == "cpp" || it == "h");
        if is_compiled {
            collect(&path, files)?;
        }
    }
    Ok(())
}
