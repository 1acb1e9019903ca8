//! What `convert` writes: the same bytes every time, and the same tensors for any number of nodes.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::harness::{MODELS, convert, copy_folder, data, fail, files, path, run, succeed, text};

/// A stored tensor: dtype, shape, bytes.
type Tensor = (String, Vec<u64>, Vec<u8>);

fn manifest(package: &Path) -> Value {
    serde_json::from_slice(&fs::read(package.join("manifest.json")).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

/// Puts the packages of a set together again, by what their manifests say of each tensor's shard.
fn join(set: &Path, nodes: usize) -> BTreeMap<String, Tensor> {
    let mut joined: BTreeMap<String, (Tensor, Vec<bool>)> = BTreeMap::new();
    for rank in 0..nodes {
        let package = set.join(format!("node-{rank}"));
        for entry in manifest(&package)["tensors"].as_array().unwrap() {
            let file = fs::read(package.join(entry["file"].as_str().unwrap())).unwrap();
            let (offset, size) =
                (entry["offset"].as_u64().unwrap(), entry["size"].as_u64().unwrap());
            let bytes = &file[offset as usize..][..size as usize];
            let name = entry["name"].as_str().unwrap().to_owned();
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            let shape = numbers(&entry["shape"]);
            let range = &entry["shard"]["range"];
            let (dim, start, full) = match range.as_object() {
                Some(_) => (
                    range["dim"].as_u64().unwrap() as usize,
                    range["start"].as_u64().unwrap(),
                    range["full"].as_u64().unwrap(),
                ),
                None => (0, 0, shape[0]),
            };
            let mut whole = shape.clone();
            whole[dim] = full;
            let total = (size / shape[dim] * full) as usize;
            let ((_, found, out), filled) = joined
                .entry(name.clone())
                .or_insert_with(|| ((dtype, whole.clone(), vec![0; total]), vec![false; total]));
            assert_eq!(*found, whole, "{name}: every rank tells the same full shape");
            let inner = size as usize / shape[..=dim].iter().product::<u64>() as usize;
            let width = inner * shape[dim] as usize;
            for (outer, piece) in bytes.chunks_exact(width).enumerate() {
                let at = outer * inner * full as usize + start as usize * inner;
                for (index, byte) in piece.iter().enumerate() {
                    // Heads that two ranks share are stored twice and must agree.
                    assert!(
                        !filled[at + index] || out[at + index] == *byte,
                        "{name}: copies differ"
                    );
                    out[at + index] = *byte;
                    filled[at + index] = true;
                }
            }
        }
    }
    let whole = |(name, (tensor, filled)): (String, (Tensor, Vec<bool>))| {
        assert!(filled.iter().all(|filled| *filled), "{name}: some bytes are in no package");
        (name, tensor)
    };
    joined.into_iter().map(whole).collect()
}

fn check_join(model: &str, bits: &str) {
    let folder = tempdir().unwrap();
    let set = |nodes: &str| {
        convert(model, &folder.path().join(nodes), &["--bits", bits, "--nodes", nodes])
    };
    let one = join(&set("1"), 1);
    let ids = |set: &Path| manifest(&set.join("node-0"))["ids"].clone();
    let first = ids(&folder.path().join("1"));
    for nodes in ["2", "3", "4"] {
        let set = set(nodes);
        let count = nodes.parse().unwrap();
        assert!(
            join(&set, count) == one,
            "{model} at {bits} bits over {nodes} nodes differs from one node"
        );
        let ids = ids(&set);
        assert_eq!(
            (&ids["weights"], &ids["model"]),
            (&first["weights"], &first["model"]),
            "ids do not depend on nodes"
        );
        assert_ne!(ids["layout"], first["layout"]);
        let shared: Vec<_> =
            (0..count).map(|rank| shared_files(&set.join(format!("node-{rank}")))).collect();
        assert!(
            shared.windows(2).all(|pair| pair[0] == pair[1]),
            "shared files are the same in every package"
        );
    }
}

fn shared_files(package: &Path) -> BTreeMap<String, Vec<u8>> {
    files(package).into_iter().filter(|(name, _)| name.starts_with("model-shared-")).collect()
}

#[test]
fn joined_packages_equal_the_one_node_package() {
    for model in MODELS {
        for bits in ["4", "6", "8", "16"] {
            check_join(model, bits);
        }
    }
}

#[test]
fn eight_nodes_and_other_group_sizes_join_too() {
    let folder = tempdir().unwrap();
    for group in ["32", "128"] {
        let set = |nodes: &str| {
            convert(
                "kjv-4m",
                &folder.path().join(group).join(nodes),
                &["--group-size", group, "--nodes", nodes],
            )
        };
        assert!(join(&set("8"), 8) == join(&set("1"), 1), "groups of {group}");
    }
}

#[test]
fn float_groups_join_and_say_what_they_are() {
    let folder = tempdir().unwrap();
    for (format, bits, group) in [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)] {
        let set = |nodes: &str| {
            let output = folder.path().join(format).join(nodes);
            convert("kjv-4m", &output, &["--format", format, "--nodes", nodes])
        };
        let one = set("1");
        assert!(join(&set("3"), 3) == join(&one, 1), "{format}");
        let package = one.join("node-0");
        let manifest = manifest(&package);
        assert_eq!(manifest["requires"], json!([format]));
        assert_eq!(manifest["quantization"]["float"], format);
        let config: Value =
            serde_json::from_slice(&fs::read(package.join("config.json")).unwrap()).unwrap();
        let expected = json!({ "bits": bits, "group_size": group, "mode": format });
        assert_eq!(config["quantization"], expected);
        let shown = succeed(&["inspect", path(&one)]);
        assert!(shown.contains(&format!("{format}, other weights BF16")), "{shown}");
        succeed(&["verify", path(&one)]);
        let again = folder.path().join(format).join("again");
        succeed(&[
            "reshard",
            path(&folder.path().join(format).join("3")),
            "-o",
            path(&again),
            "--nodes",
            "1",
        ]);
        assert_eq!(files(&again.join("node-0")), files(&package), "{format}");
    }
}

#[test]
fn float_groups_refuse_what_they_have_not() {
    let folder = tempdir().unwrap();
    let output = folder.path().join("set");
    let check = |args: &[&str], words: &str| {
        let source = data("kjv-4m");
        let all = ["convert", path(&source), "-o", path(&output), "--format", "mxfp4"];
        let error = fail(2, &[&all, args].concat());
        assert!(error.contains(words), "{args:?}: {error}");
        assert!(!output.exists());
    };
    check(&["--bits", "8"], "mxfp4 with --bits 8 is not possible");
    check(&["--rounding", "refined"], "mxfp4 with --rounding refined is not possible");
    check(&["--calibrate"], "mxfp4 with --calibrate is not possible");
    check(&["--bpw", "4.5"], "mxfp4 with --bpw 4.5 is not possible");
    check(&["--imatrix", "none"], "mxfp4 with --imatrix is not possible");
    check(&["--override", "*=mxfp5"], "mxfp5");
}

#[test]
fn six_heads_of_half_a_group_are_sharded_four_and_two() {
    let folder = tempdir().unwrap();
    let set = convert("models/llama", &folder.path().join("set"), &["--nodes", "2"]);
    let axes = &manifest(&set.join("node-1"))["layout"]["axes"];
    assert_eq!(axes["q"]["ranges"], serde_json::json!([[0, 4], [4, 6]]));
    assert_eq!(axes["kv"]["ranges"], serde_json::json!([[0, 2], [1, 2]]));
}

#[test]
fn the_same_conversion_gives_the_same_bytes() {
    let folder = tempdir().unwrap();
    let moved = folder.path().join("another name");
    copy_folder(&data("kjv-4m"), &moved);
    let options = ["--nodes", "3", "--bits", "6"];
    let first = convert("kjv-4m", &folder.path().join("first"), &options);
    let expected = files(&first);
    for threads in ["1", "2", "5"] {
        let output = folder.path().join(threads);
        let mut args = vec!["convert", path(&moved), "-o", path(&output), "--threads", threads];
        args.extend(options);
        succeed(&args);
        assert!(files(&output) == expected, "{threads} threads");
    }
}

#[test]
fn sharded_sources_and_other_float_types_convert() {
    let folder = tempdir().unwrap();
    let whole = convert("models/llama", &folder.path().join("whole"), &["--bits", "16"]);
    let expected = join(&whole, 1);
    for (dtype, shards) in [("BF16", 3), ("F32", 2), ("F32", 1)] {
        let source = folder.path().join(format!("{dtype}-{shards}"));
        reshard(&data("models/llama"), &source, dtype, shards);
        let output = folder.path().join(format!("out-{dtype}-{shards}"));
        succeed(&["convert", path(&source), "-o", path(&output), "--bits", "16"]);
        assert!(join(&output, 1) == expected, "{dtype} in {shards} files");
    }
}

/// Writes a BF16 model again in `shards` files with an index, as `dtype`.
fn reshard(from: &Path, to: &Path, dtype: &str, shards: usize) {
    fs::create_dir_all(to).unwrap();
    fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
    let file = fs::read(from.join("model.safetensors")).unwrap();
    let model = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut parts: Vec<Vec<(String, safetensors::tensor::TensorView)>> = vec![Vec::new(); shards];
    let wide: Vec<(String, Vec<usize>, Vec<u8>)> = model
        .iter()
        .map(|(name, tensor)| {
            let widen = |pair: &[u8]| {
                if dtype == "F32" { vec![0, 0, pair[0], pair[1]] } else { pair.to_vec() }
            };
            (
                name.to_owned(),
                tensor.shape().to_vec(),
                tensor.data().chunks_exact(2).flat_map(widen).collect(),
            )
        })
        .collect();
    let kind = if dtype == "F32" { safetensors::Dtype::F32 } else { safetensors::Dtype::BF16 };
    let mut map = BTreeMap::new();
    let name = |shard: usize| {
        if shards == 1 {
            "model.safetensors".to_owned()
        } else {
            format!("model-{shard}.safetensors")
        }
    };
    for (index, (tensor, shape, bytes)) in wide.iter().enumerate() {
        let view = safetensors::tensor::TensorView::new(kind, shape.clone(), bytes).unwrap();
        parts[index % shards].push((tensor.clone(), view));
        map.insert(tensor.clone(), name(index % shards));
    }
    for (shard, part) in parts.into_iter().enumerate() {
        fs::write(to.join(name(shard)), safetensors::serialize(part, None).unwrap()).unwrap();
    }
    if shards > 1 {
        let index = serde_json::json!({ "metadata": {}, "weight_map": map });
        fs::write(to.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}

#[test]
fn output_for_machines_is_json_and_an_existing_output_is_kept() {
    let folder = tempdir().unwrap();
    let output = folder.path().join("set");
    let source = data("kjv-4m");
    let args = ["convert", path(&source), "-o", path(&output), "--json", "--name", "kjv"];
    let json: Value = serde_json::from_str(&succeed(&args)).unwrap();
    assert_eq!(json["packages"][0]["directory"], "node-0");
    let before = files(&output);
    let again = run(&args);
    assert_eq!(again.status.code(), Some(2));
    let json: Value = serde_json::from_str(&text(&again.stdout)).unwrap();
    assert_eq!(json["ok"], false);
    assert!(json["error"].as_str().unwrap().contains("exists already"), "{json}");
    assert!(files(&output) == before);
    let inspected: Value =
        serde_json::from_str(&succeed(&["inspect", path(&output), "--json"])).unwrap();
    assert_eq!(inspected["packages"][0]["name"], "kjv");
}

#[test]
fn unknown_config_keys_are_left_out_when_asked_and_recorded() {
    let folder = tempdir().unwrap();
    let model = folder.path().join("model");
    copy_folder(&data("models/llama"), &model);
    let file = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["my_head_scale"] = 2.5.into();
    fs::write(&file, config.to_string()).unwrap();
    let convert = |name: &str, key: Option<&str>| {
        let output = folder.path().join(name);
        let args = ["convert", path(&model), "-o", path(&output), "--bits", "8"].map(str::to_owned);
        let key = key.map(|key| format!("--ignore-config-key={key}"));
        (args.into_iter().chain(key).collect::<Vec<String>>(), output)
    };
    let refused = |key: Option<&str>, words: &[&str]| {
        let (args, output) = convert("refused", key);
        let error = fail(1, &args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert!(!output.exists());
    };
    refused(None, &["my_head_scale = 2.5"]);
    let (args, _) = convert("refused", None);
    let refusal = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(text(&refusal.stderr).contains("hint: a key that does not change what the model"));
    refused(Some("my_head_skale"), &["my_head_skale", "no key of that name"]);
    refused(Some("rope_theta"), &["rope_theta", "the rules of this architecture read it"]);
    let (args, output) = convert("set", Some("my_head_scale"));
    succeed(&args.iter().map(String::as_str).collect::<Vec<_>>());
    let package = output.join("node-0");
    let manifest = manifest(&package);
    assert_eq!(manifest["source"]["ignored_config_keys"], json!(["my_head_scale"]));
    let report = fs::read_to_string(output.join("report.json")).unwrap();
    assert!(report.contains("--ignore-config-key: my_head_scale = 2.5"), "{report}");
    // Nothing that reads the package asks again.
    let written = fs::read_to_string(package.join("config.json")).unwrap();
    assert!(!written.contains("my_head_scale"), "{written}");
}
