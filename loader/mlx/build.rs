//! Makes one file of the C layer's parts, and takes the layer for Apple silicon into the program, where `SHARDPACK_MLX_LAYER` names one that
//! `dist/native_layer.sh` has built from this very source. Without it nothing is embedded, and
//! `engine install mlx` compiles the layer.

use std::{env, fs, path::Path};

/// Fields of a dynamic library's header, and where they are: magic, processor, kind of file.
const MACHO: [(usize, [u8; 4]); 3] =
    [(0, [0xcf, 0xfa, 0xed, 0xfe]), (4, [0x0c, 0, 0, 1]), (12, [6, 0, 0, 0])];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=SHARDPACK_MLX_LAYER");
    let out = env::var_os("OUT_DIR").expect("cargo sets it");
    let out = Path::new(&out);
    let layer = assembled().unwrap_or_else(|problem| panic!("{problem}"));
    fs::write(out.join("layer.cpp"), layer).expect("the build folder can be written");
    // The layer is of no use to a program for another system.
    let target = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    let is_mac =
        target("CARGO_CFG_TARGET_OS", "macos") && target("CARGO_CFG_TARGET_ARCH", "aarch64");
    let layer = env::var_os("SHARDPACK_MLX_LAYER").filter(|path| is_mac && !path.is_empty());
    let source = match layer {
        None => "None".to_owned(),
        Some(path) => {
            let path = Path::new(&path);
            let bytes = read_layer(path).unwrap_or_else(|problem| {
                panic!("SHARDPACK_MLX_LAYER: {}: {problem}", path.display())
            });
            fs::write(out.join("layer.dylib"), bytes).expect("the build folder can be written");
            "Some(include_bytes!(concat!(env!(\"OUT_DIR\"), \"/layer.dylib\")))".to_owned()
        }
    };
    fs::write(out.join("layer.rs"), source).expect("the build folder can be written");
}

/// The layer's bytes, if it is one for Apple silicon, built from the source beside this file.
fn read_layer(path: &Path) -> Result<Vec<u8>, String> {
    let record = format!("{}.source", path.display());
    for path in [&*path.to_string_lossy(), &record, "src/table.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    if MACHO.iter().any(|(at, field)| bytes.get(*at..at + 4) != Some(&field[..])) {
        return Err("not a dynamic library for arm64 macOS (Mach-O); dist/native_layer.sh builds \
                    one"
        .to_owned());
    }
    let found = fs::read(&record).map_err(|error| format!("{record}: {error}"))?;
    if found != source_of_layer()? {
        return Err(
            "built from another source than this program's; run dist/native_layer.sh again"
                .to_owned(),
        );
    }
    Ok(bytes)
}

/// The number of the set of functions and the source, as `dist/native_layer.sh` keeps them.
fn source_of_layer() -> Result<Vec<u8>, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let table = read("src/table.rs")?;
    let abi = table.split_once("const ABI: i32 = ").and_then(|(_, rest)| rest.split_once(';'));
    let (abi, _) = abi.ok_or("src/table.rs: no ABI")?;
    Ok(format!("// ABI {abi}\n{}", assembled()?).into_bytes())
}

/// The parts that `native/parts.txt` names as one file; `name = path` is a text of that name.
fn assembled() -> Result<String, String> {
    let read = |path: &str| {
        println!("cargo::rerun-if-changed={path}");
        fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
    };
    let mut all = String::new();
    for line in read("native/parts.txt")?.lines() {
        match line.split_once(" = ") {
            None => all += &read(&format!("native/{line}"))?,
            Some((name, path)) => {
                let text = read(&format!("native/{path}"))?;
                all.extend([
                    "\nstatic const char ",
                    name,
                    "[] = R\"metal(\n",
                    &text,
                    ")metal\";\n",
                ]);
            }
        }
    }
    Ok(all)
}
