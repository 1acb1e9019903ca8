//! The reference models of `tests/data/models`: converted, opened, changed, compared with the logits
//! that transformers computes, and joined again from the packages of several ranks.

use std::{collections::BTreeMap, fs, path::Path};

use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::Value;
use shardpack_converter::{ConvertOptions, Plan, Source, convert, plan::ExpertSharding};
use shardpack_engine::{
    engine::{logits, memory_group},
    loading::{OpenOptions, Package},
};
use shardpack_engine_api::TokenId;
use tempfile::tempdir;

use crate::harness::data;

/// A float32 engine stays this close to transformers' logits (the fixtures' own statement).
const TOLERANCE: f32 = 5e-4;

const EXPERT_SHARDINGS: [ExpertSharding; 2] = [ExpertSharding::Inside, ExpertSharding::Whole];

/// The folders of all reference models.
pub(crate) fn all_models() -> Vec<String> {
    let entries = fs::read_dir(data("models")).unwrap().map(Result::unwrap);
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut models: Vec<_> =
        folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    models.sort();
    models
}

/// Converts a reference model into `output`.
pub(crate) fn write(model: &Path, output: &Path, bits: u32, nodes: u32, experts: ExpertSharding) {
    let source = Source::open(model).unwrap();
    let options = ConvertOptions {
        bits,
        experts,
        rounding: "mlx-cpu".to_owned(),
        ..ConvertOptions::new(output.to_owned(), nodes)
    };
    let plan =
        Plan::new(&source, options).unwrap_or_else(|error| panic!("{}: {error}", model.display()));
    convert(&source, &plan, &|_| ()).unwrap();
}

/// The packages of a set, as our own kernels read them.
pub(crate) fn open(set: &Path, nodes: u32) -> Vec<Package> {
    open_with(set, nodes, OpenOptions::fast(1))
}

/// The packages of a set in one way.
pub(crate) fn open_with(set: &Path, nodes: u32, options: OpenOptions) -> Vec<Package> {
    let open = |rank| {
        let folder = set.join(format!("node-{rank}"));
        Package::open(&folder, &options, &|_| ()).unwrap()
    };
    (0..nodes).map(open).collect()
}

/// A copy of a reference model with some other keys in its configuration, and without some tensors.
pub(crate) fn changed(model: &str, out: &Path, keys: &Value, without: &str) {
    let from = data("models").join(model);
    fs::create_dir_all(out).unwrap();
    let mut config: Value =
        serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(out.join("config.json"), config.to_string()).unwrap();
    let file = fs::read(from.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let kept = tensors.tensors().into_iter().filter(|(name, _)| !name.contains(without));
    let kept: Vec<(String, TensorView<'_>)> = kept.collect();
    fs::write(out.join("model.safetensors"), safetensors::serialize(kept, None).unwrap()).unwrap();
}

/// Tokens of a reference model's golden logits.
pub(crate) fn expected(model: &str, name: &str) -> Vec<TokenId> {
    let file = fs::read(data("models").join(model).join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor(name).unwrap().data().to_vec();
    let token = |four: &[u8]| TokenId(u32::from_le_bytes(four.try_into().unwrap()));
    bytes.chunks_exact(4).map(token).collect()
}

fn compute(packages: &[Package], tokens: &[i32]) -> Vec<f32> {
    let tokens: Vec<TokenId> = tokens.iter().map(|token| TokenId(*token as u32)).collect();
    let groups = memory_group(packages.len() as u32).unwrap();
    logits(packages, &groups, &tokens, 1).unwrap()
}

fn numbers<T>(file: &[u8], name: &str, from: fn([u8; 4]) -> T) -> Vec<T> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let view = tensors.tensor(name).unwrap();
    view.data().as_chunks::<4>().0.iter().map(|four| from(*four)).collect()
}

fn argmax(row: &[f32]) -> i32 {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a))).unwrap() as i32
}

pub(crate) fn check_against_transformers(model: &str, nodes: u32, experts: ExpertSharding) {
    let folder = tempdir().unwrap();
    let source = data("models").join(model);
    let set = folder.path().join("set");
    write(&source, &set, 16, nodes, experts);
    let packages = open(&set, nodes);
    let expected = fs::read(source.join("expected.safetensors")).unwrap();
    let ints = |name: &str| numbers(&expected, name, i32::from_le_bytes);
    for sequence in ["a", "b"] {
        let ours = compute(&packages, &ints(&format!("tokens_{sequence}")));
        let theirs = numbers(&expected, &format!("logits_{sequence}"), f32::from_le_bytes);
        assert_eq!(ours.len(), theirs.len());
        let worst = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < TOLERANCE, "{model}, {nodes} nodes, {experts:?}, {sequence}: {worst}");
    }
    let (prompt, greedy) = (ints("tokens_a"), ints("greedy"));
    let all = [prompt.as_slice(), &greedy[..greedy.len() - 1]].concat();
    let values = compute(&packages, &all);
    let rows = values.chunks_exact(values.len() / all.len());
    let chosen: Vec<i32> = rows.skip(prompt.len() - 1).map(argmax).collect();
    assert_eq!(chosen, greedy, "{model}, {nodes} nodes, {experts:?}");
}

/// Families on so many nodes and fewer, the experts of those that have some sharded both ways.
pub(crate) fn check_families(families: &[(&str, bool)], most_nodes: u32) {
    for (model, has_experts) in families {
        for nodes in 1..=most_nodes {
            let shardings = if *has_experts && nodes > 1 { 2 } else { 1 };
            for experts in EXPERT_SHARDINGS.into_iter().take(shardings) {
                check_against_transformers(model, nodes, experts);
            }
        }
    }
}

/// The sets of families for two to four nodes. Whole experts once: that sharding is another
/// dimension of the same tensors. Each family at 16 bits and at one other width, in turn: how many bits
/// a group's elements take is nothing that families know, and [`check_joined`] is run with all of them
/// for dense and hybrid families.
pub(crate) fn check_families_joined(families: &[(&str, bool)]) {
    for ((model, has_experts), quantized) in families.iter().zip([4, 6, 8].iter().cycle()) {
        let sets = [2, 3, 4].map(|nodes| (nodes, ExpertSharding::Inside)).into_iter();
        let whole = has_experts.then_some((3, ExpertSharding::Whole));
        check_joined(model, &[*quantized, 16], &sets.chain(whole).collect::<Vec<_>>());
    }
}

/// Bits of a weight that packages are written with.
pub(crate) const ALL_BITS: [u32; 4] = [4, 6, 8, 16];

/// That a model's sets at some bits, put together, are its package for one node.
pub(crate) fn check_joined(model: &str, bits: &[u32], sets: &[(u32, ExpertSharding)]) {
    let folder = tempdir().unwrap();
    let source = data("models").join(model);
    for &bits in bits {
        let one = folder.path().join("one");
        write(&source, &one, bits, 1, ExpertSharding::Inside);
        let expected = join(&one, 1);
        fs::remove_dir_all(one).unwrap();
        for (nodes, experts) in sets {
            let set = folder.path().join("set");
            write(&source, &set, bits, *nodes, *experts);
            let same = join(&set, *nodes) == expected;
            assert!(same, "{model}, {bits} bits, {nodes} nodes, {experts:?}");
            fs::remove_dir_all(set).unwrap();
        }
    }
}

/// A stored tensor: element type, shape, bytes.
type Tensor = (String, Vec<u64>, Vec<u8>);

/// Puts the packages of a set together by what their manifests say of each tensor's shard.
pub(crate) fn join(set: &Path, nodes: u32) -> BTreeMap<String, Tensor> {
    let mut joined: BTreeMap<String, Tensor> = BTreeMap::new();
    for rank in 0..nodes {
        let package = set.join(format!("node-{rank}"));
        let manifest: Value =
            serde_json::from_slice(&fs::read(package.join("manifest.json")).unwrap()).unwrap();
        for entry in manifest["tensors"].as_array().unwrap() {
            let number = |value: &Value| value.as_u64().unwrap();
            let file = fs::read(package.join(entry["file"].as_str().unwrap())).unwrap();
            let size = number(&entry["size"]) as usize;
            let bytes = &file[number(&entry["offset"]) as usize..][..size];
            let shape: Vec<u64> = entry["shape"].as_array().unwrap().iter().map(number).collect();
            let name = entry["name"].as_str().unwrap().to_owned();
            let dtype = entry["dtype"].as_str().unwrap().to_owned();
            if shape.is_empty() {
                // A number by itself, which every rank holds.
                let place = joined.entry(name).or_insert((dtype, shape, bytes.to_vec()));
                assert_eq!(place.2, bytes, "every rank holds the same number");
                continue;
            }
            let range = &entry["shard"]["range"];
            let (dim, start, full) = if range.is_object() {
                (number(&range["dim"]) as usize, number(&range["start"]), number(&range["full"]))
            } else {
                (0, 0, shape[0])
            };
            let mut whole = shape.clone();
            whole[dim] = full;
            let total = size / shape[dim] as usize * full as usize;
            let place = joined.entry(name).or_insert((dtype, whole.clone(), vec![0; total]));
            assert_eq!(place.1, whole, "every rank tells the same full shape");
            let inner = size / shape[..=dim].iter().product::<u64>() as usize;
            for (index, piece) in bytes.chunks_exact(inner * shape[dim] as usize).enumerate() {
                let at = (index * full as usize + start as usize) * inner;
                place.2[at..at + piece.len()].copy_from_slice(piece);
            }
        }
    }
    joined
}
