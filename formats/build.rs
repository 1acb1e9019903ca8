//! Compiles in every rule pack of `rules/`, so that adding one is adding its file.
//!
//! Writes `packs.rs`, an array of file names and texts in the order of the names. It knows nothing
//! of what the files say.

use std::{env, fs, path::Path};

/// What stands in the same folder and is no model's pack: `src/rules.rs` names these itself.
const OTHERS: [&str; 2] = ["decoder.toml", "refused.toml"];

fn main() {
    let package = env::var("CARGO_MANIFEST_DIR").expect("Cargo sets it");
    let folder = Path::new(&package).join("rules");
    let entries = fs::read_dir(&folder).expect("the package has rules");
    let names = entries.map(|entry| entry.expect("it can be listed").file_name());
    let mut names: Vec<String> =
        names.map(|name| name.into_string().expect("names are ASCII")).collect();
    let is_toml = |name: &String| Path::new(name).extension().is_some_and(|it| it == "toml");
    names.retain(|name| is_toml(name) && !OTHERS.contains(&name.as_str()));
    names.sort();
    let pack = |name: &String| {
        let path =
            folder.join(name).into_os_string().into_string().expect("Cargo's paths are UTF-8");
        format!("    ({name:?}, include_str!({path:?})),\n")
    };
    let packs = names.iter().map(pack).collect::<Vec<_>>().concat();
    let out = env::var("OUT_DIR").expect("Cargo sets it");
    fs::write(Path::new(&out).join("packs.rs"), format!("&[\n{packs}]\n"))
        .expect("Cargo's folder can be written");
    println!("cargo::rerun-if-changed=rules");
    println!("cargo::rerun-if-changed=build.rs");
}
