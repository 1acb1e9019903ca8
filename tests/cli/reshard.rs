//! `reshard` gives what `convert` would have given; `export` what other programs read.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tempfile::{TempDir, tempdir};

use crate::harness::{
    convert, copy_folder, data, fail, files, kill, path, paused, run, succeed, text,
};

/// The last has tensors without axes.
const MODELS: &[&str] =
    &["kjv-4m", "models/llama", "models/llama-tied", "models/qwen3", "models/apertus"];

const OWN: &str = "model-00001-of-00001.safetensors";

fn reshard(from: &[&Path], to: &Path, nodes: &str) -> PathBuf {
    let mut args = vec!["reshard"];
    args.extend(from.iter().map(|folder| path(folder)));
    args.extend(["-o", path(to), "--nodes", nodes]);
    succeed(&args);
    to.to_owned()
}

/// Converts for one, two and three nodes; 2 → 3 → 1 → 2 must give each of them byte for byte.
#[track_caller]
pub(crate) fn check_chain(model: &str, options: &[&str]) {
    let folder = tempdir().unwrap();
    let converted = |nodes: &str| {
        let mut all = vec!["--nodes", nodes];
        all.extend(options);
        convert(model, &folder.path().join(format!("converted-{nodes}")), &all)
    };
    let mut last = converted("2");
    for nodes in ["3", "1", "2"] {
        let next = reshard(&[&last], &folder.path().join(format!("resharded-{nodes}")), nodes);
        let expected = match nodes {
            "2" => folder.path().join("converted-2"),
            other => converted(other),
        };
        assert!(files(&next) == files(&expected), "{model} {options:?} for {nodes} nodes");
        last = next;
    }
    succeed(&["verify", path(&last)]);
}

#[test]
fn resharding_gives_the_bytes_of_a_conversion() {
    for model in MODELS {
        for bits in ["4", "6", "8", "16"] {
            check_chain(model, &["--bits", bits, "--rounding", "mlx-cpu"]);
        }
    }
}

#[test]
fn names_float_types_groups_and_recipes_survive() {
    check_chain("models/llama", &["--name", "other", "--dtype", "f16", "--group-size", "32"]);
    check_chain("models/qwen3", &["--bits", "16", "--dtype", "f32"]);
    check_chain("kjv-4m", &["--recipe", "sensitive", "--override", "*.o_proj=16"]);
}

#[test]
fn nodes_of_unequal_memory_are_sharded_as_by_convert() {
    let folder = tempdir().unwrap();
    let options = ["--nodes", "a=512m:100m,b=512m:27m", "--context", "64"];
    let expected = convert("kjv-4m", &folder.path().join("converted"), &options);
    let two = convert("kjv-4m", &folder.path().join("two"), &["--nodes", "2"]);
    let found = folder.path().join("resharded");
    let mut args = vec!["reshard", path(&two), "-o", path(&found)];
    args.extend(options);
    succeed(&args);
    assert!(files(&found) == files(&expected));
    assert!(files(&found) != files(&two), "the limits decide something");
}

/// A set of three and the folder that holds it.
fn scene() -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "3"]);
    (folder, set)
}

#[test]
fn packages_alone_are_enough_in_any_order_and_under_any_name() {
    let (folder, set) = scene();
    let mut expected = files(&convert("kjv-4m", &folder.path().join("two"), &["--nodes", "2"]));
    // Only the set knows what the conversion did to the weights.
    expected.retain(|name, _| !name.starts_with("report."));
    let back = folder.path().join("back");
    for (rank, name) in ["z", "a", "m"].iter().enumerate() {
        copy_folder(&set.join(format!("node-{rank}")), &back.join(name));
    }
    let one = reshard(&[&back], &folder.path().join("from-folder"), "2");
    assert!(files(&one) == expected);
    let [a, m, z] = ["a", "m", "z"].map(|name| back.join(name));
    let two = reshard(&[&a, &m, &z], &folder.path().join("from-packages"), "2");
    assert!(files(&two) == expected);
}

/// Damages a set of three; `reshard` of it must fail with these words and leave nothing.
#[track_caller]
fn check_refused(damage: impl Fn(&Path), words: &[&str]) {
    let (folder, set) = scene();
    damage(&set);
    let out = folder.path().join("out");
    let said = fail(1, &["reshard", path(&set), "-o", path(&out), "--nodes", "2"]);
    for word in words {
        assert!(said.contains(word), "expected {word:?} in: {said}");
    }
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing but the set is left: {left:?}");
}

fn flip(file: &Path, from_end: usize) {
    let mut bytes = fs::read(file).unwrap();
    let at = bytes.len() - from_end;
    bytes[at] ^= 1;
    // Shared files are one file under several names.
    fs::remove_file(file).unwrap();
    fs::write(file, bytes).unwrap();
}

#[test]
fn damaged_and_incomplete_sets_are_refused_with_file_and_tensor() {
    check_refused(
        |set| flip(&set.join("node-1").join(OWN), 10),
        &["node-1", OWN, "lm_head.biases"],
    );
    let shared = "model-shared-00001-of-00001.safetensors";
    check_refused(
        |set| flip(&set.join("node-0").join(shared), 10),
        &["node-0", shared, "model.norm"],
    );
    check_refused(|set| flip(&set.join("node-0/config.json"), 10), &["config.json", "changed"]);
    check_refused(|set| flip(&set.join("node-2/manifest.json"), 30), &["node-2"]);
    check_refused(
        |set| fs::remove_file(set.join("node-1").join(OWN)).unwrap(),
        &["node-1", OWN, "missing"],
    );
    check_refused(
        |set| {
            let file = set.join("node-2").join(OWN);
            let bytes = fs::read(&file).unwrap();
            fs::write(file, &bytes[..bytes.len() - 1]).unwrap();
        },
        &["node-2", OWN, "bytes, expected"],
    );
    check_refused(|set| fs::remove_dir_all(set.join("node-1")).unwrap(), &["node-1", "missing"]);
    check_refused(
        |set| {
            fs::remove_file(set.join("set.json")).unwrap();
            fs::remove_dir_all(set.join("node-1")).unwrap();
        },
        &["packages are missing", "of rank 1"],
    );
}

#[test]
fn packages_that_do_not_belong_together_are_refused() {
    let (folder, set) = scene();
    let other = convert("kjv-4m", &folder.path().join("other"), &["--nodes", "3", "--bits", "6"]);
    let out = folder.path().join("out");
    let check = |packages: [&Path; 3], words: &[&str]| {
        let [a, b, c] = packages.map(path);
        let said = fail(1, &["reshard", a, b, c, "-o", path(&out), "--nodes", "2"]);
        for word in words {
            assert!(said.contains(word), "expected {word:?} in: {said}");
        }
    };
    let [a, b, c] = ["node-0", "node-1", "node-2"].map(|name| set.join(name));
    check([&a, &other.join("node-1"), &c], &["other/node-1", "does not belong", "weights id"]);
    check([&a, &b, &b], &["both hold rank 1"]);
    let nothing = folder.path().join("nothing");
    fs::create_dir(&nothing).unwrap();
    let args = ["reshard", path(&nothing), "-o", path(&out), "--nodes", "2"];
    assert!(fail(2, &args).contains("neither a package set"));
    let args = ["reshard", path(&set), "-o", path(&out), "--nodes", "9"];
    assert!(fail(2, &args).contains("--nodes 9 is not possible"));
    let args = ["reshard", path(&set), "-o", path(&set), "--nodes", "2"];
    assert!(fail(2, &args).contains("exists already"));
}

#[test]
fn what_a_killed_run_leaves_does_not_come_into_the_next_result() {
    let (folder, set) = scene();
    let out = folder.path().join("out");
    let four = ["reshard", path(&set), "-o", path(&out), "--nodes", "4"];
    kill(paused("reshard:publishing", &four));
    assert!(!out.exists() && folder.path().join(".out.partial/node-3").exists());
    reshard(&[&set], &out, "2");
    let expected = convert("kjv-4m", &folder.path().join("two"), &["--nodes", "2"]);
    assert!(files(&out) == files(&expected));
}

/// Name, type, shape and bytes of every tensor of a folder's weight files (and of no other: the
/// test models bring their logits along).
pub(crate) fn weights(folder: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for (name, bytes) in files(folder) {
        if !name.starts_with("model") || !name.ends_with(".safetensors") {
            continue;
        }
        for (name, tensor) in safetensors::SafeTensors::deserialize(&bytes).unwrap().iter() {
            let dtype = tensor.dtype().to_string();
            let value = (dtype, tensor.shape().to_vec(), tensor.data().to_vec());
            assert!(found.insert(name.to_owned(), value).is_none(), "{name} twice");
        }
    }
    found
}

pub(crate) fn json(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

#[test]
fn an_exported_16_bit_set_holds_the_sources_own_bits() {
    for model in MODELS {
        let folder = tempdir().unwrap();
        let options = ["--bits", "16", "--nodes", "3"];
        let set = convert(model, &folder.path().join("set"), &options);
        let out = folder.path().join("hf");
        succeed(&["export", path(&set), "--hf", "-o", path(&out)]);
        let (found, expected) = (weights(&out), weights(&data(model)));
        assert!(found.keys().eq(expected.keys()), "{model}: the same names");
        assert!(found == expected, "{model}: the same types, shapes and bytes");
        let config = json(&out.join("config.json"));
        assert!(config["quantization"].is_null() && config["model_type"].is_string(), "{config}");
        // It is a source like any other, and the same one.
        let again = folder.path().join("again");
        succeed(&["convert", path(&out), "-o", path(&again), "--bits", "16", "--nodes", "3"]);
        assert!(weights(&again.join("node-1")) == weights(&set.join("node-1")), "{model}");
    }
}

#[test]
fn an_exported_quantized_set_is_dequantized_and_rounded_once() {
    let folder = tempdir().unwrap();
    let one = convert("models/llama", &folder.path().join("one"), &["--bits", "4"]);
    let three = reshard(&[&one], &folder.path().join("three"), "3");
    let out = folder.path().join("hf");
    succeed(&["export", path(&three), "--hf", "-o", path(&out), "--dtype", "f32"]);
    let (floats, stored) = (weights(&out), weights(&one.join("node-0")));
    let name = "model.layers.1.mlp.down_proj";
    let (dtype, shape, bytes) = &floats[&format!("{name}.weight")];
    let (_, packed_shape, packed) = &stored[&format!("{name}.weight")];
    assert_eq!((dtype.as_str(), shape[1]), ("F32", packed_shape[1] * 8));
    let line = |part: &str, group: usize| {
        let bytes = &stored[&format!("{name}.{part}")].2[group * 2..][..2];
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    };
    for (index, value) in bytes.chunks_exact(4).enumerate() {
        let q = packed[index / 2] >> (index % 2 * 4) & 15;
        let expected = line("scales", index / 64) * f32::from(q) + line("biases", index / 64);
        assert_eq!(value, expected.to_le_bytes(), "element {index}");
    }
    assert_eq!(json(&out.join("config.json"))["torch_dtype"], "float32");
    assert_eq!(floats["model.norm.weight"].0, "F32");
    // By default in the set's own type.
    let narrow = folder.path().join("bf16");
    succeed(&["export", path(&three), "--hf", "-o", path(&narrow)]);
    assert_eq!(weights(&narrow)[&format!("{name}.weight")].0, "BF16");
}

#[test]
fn an_export_for_mlx_is_the_one_node_package() {
    let (folder, set) = scene();
    let one = convert("kjv-4m", &folder.path().join("one"), &[]);
    let out = folder.path().join("mlx");
    let said = succeed(&["export", path(&set), "--mlx", "-o", path(&out), "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&said).unwrap()["ok"], true);
    assert!(files(&out) == files(&one.join("node-0")));
    assert!(succeed(&["verify", path(&out)]).contains("verified: 1 packages"));
    // A form must be chosen, and only one.
    let none = run(&["export", path(&set), "-o", path(&out)]);
    assert!(none.status.code() == Some(2) && text(&none.stderr).contains("--mlx"));
    let damaged = set.join("node-1").join(OWN);
    flip(&damaged, 10);
    let hf = folder.path().join("hf");
    let args = ["export", path(&set), "--hf", "-o", path(&hf)];
    assert!(fail(1, &args).contains("lm_head.biases"));
}

/// A package set that format 1 wrote, and the documents of the same set in format 2.
#[test]
fn a_set_of_format_1_is_refused_and_rewritten_with_its_weights_untouched() {
    let (old, golden) = (data("packages/format-1"), data("packages/format-2"));
    let folder = tempdir().unwrap();
    let verified = run(&["verify", path(&old)]);
    assert_eq!(verified.status.code(), Some(1));
    for said in [text(&verified.stderr), fail(1, &["inspect", path(&old)])] {
        assert!(said.contains("package format 1, this program reads 2"), "{said}");
        assert!(said.contains("shardpack reshard SET -o NEW --nodes N"), "{said}");
    }
    let new = reshard(&[&old], &folder.path().join("new"), "1");
    succeed(&["verify", path(&new)]);
    let (old, new) = (files(&old), files(&new));
    for (name, bytes) in files(&golden) {
        assert!(new[&name] == bytes, "{name}");
    }
    for (name, bytes) in old.iter().filter(|(name, _)| name.starts_with("node-0/")) {
        assert_eq!(new[name] == *bytes, !name.ends_with("manifest.json"), "{name}");
    }
    // A conversion of the source by this program gives the same.
    let options = ["--bits", "4", "--nodes", "1"];
    let converted = convert("models/granitemoe", &folder.path().join("converted"), &options);
    let documents = |name: &String| name.starts_with("node-0/") || name == "set.json";
    for (name, bytes) in files(&converted).iter().filter(|(name, _)| documents(name)) {
        assert!(new[name] == *bytes, "{name}");
    }
}
