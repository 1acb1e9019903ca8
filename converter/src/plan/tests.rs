//! Plans of the models that people run, from lists of their tensors: every tensor has its place,
//! and the sizes are those that follow from the models' dimensions.

mod published;

use std::{collections::BTreeMap, fs, path::PathBuf};

use serde_json::Value;
use shardpack_formats::SourceTensor;

use super::*;

/// Sizes may differ this much (in percent) from those of everything in one format: norms and
/// routers stay in 16 bits.
const TOLERATED_PERCENT: f64 = 1.0;

/// The largest part may be this much (in percent) above the mean.
const TOLERATED_IMBALANCE_PERCENT: u64 = 15;

/// The tensors of a published model.
struct Shapes {
    name: String,
    config: Value,
    tensors: Vec<SourceTensor>,
    /// At 4, 6 and 8 bits.
    gigabytes: [f64; 3],
}

/// Every name that a pattern stands for: `{0-3}` for numbers, `{q|k}` for words.
fn expand(pattern: &str) -> Vec<String> {
    let Some((before, rest)) = pattern.split_once('{') else { return vec![pattern.to_owned()] };
    let (choice, after) = rest.split_once('}').unwrap();
    let choices: Vec<String> = match choice.split_once('-') {
        Some((first, last)) => {
            let number = |text: &str| text.parse::<u32>().unwrap();
            (number(first)..=number(last)).map(|number| number.to_string()).collect()
        }
        None => choice.split('|').map(str::to_owned).collect(),
    };
    let rest = expand(after);
    let one = |choice: &String| {
        rest.iter().map(|rest| format!("{before}{choice}{rest}")).collect::<Vec<_>>()
    };
    choices.iter().flat_map(one).collect()
}

fn parse(name: String, text: &str) -> Shapes {
    let mut shapes = Shapes { name, config: Value::Null, tensors: Vec::new(), gigabytes: [0.0; 3] };
    for line in text.lines() {
        if let Some(numbers) = line.strip_prefix("# gigabytes at 4, 6 and 8 bits: ") {
            let numbers: Vec<f64> =
                numbers.split(' ').map(|number| number.parse().unwrap()).collect();
            shapes.gigabytes = numbers.try_into().unwrap();
        } else if let Some(config) = line.strip_prefix("config ") {
            shapes.config = serde_json::from_str(config).unwrap();
        } else if !line.starts_with('#') {
            let words: Vec<&str> = line.split(' ').collect();
            let dtype = Dtype::from_name(words[1]).unwrap();
            let shape: Vec<u64> = words[2..].iter().map(|size| size.parse().unwrap()).collect();
            let tensor = |name| SourceTensor { name, dtype, shape: shape.clone() };
            shapes.tensors.extend(expand(words[0]).into_iter().map(tensor));
        }
    }
    shapes
}

fn all() -> Vec<Shapes> {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/shapes"));
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        parse(name, &fs::read_to_string(path).unwrap())
    };
    paths.iter().map(read).collect()
}

fn plan(shapes: &Shapes, normalised: &Normalised, bits: u32, nodes: u32) -> Plan {
    let options = ConvertOptions { bits, ..ConvertOptions::new(PathBuf::new(), nodes) };
    let choice = Choice::new(&options).unwrap();
    let dtypes: BTreeMap<&str, Dtype> =
        shapes.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.dtype)).collect();
    let native = |name: &str| dtypes.get(name).copied();
    let dtype = formats::main_dtype(&normalised.tensors, native);
    let quantization = formats::choose(normalised, &choice, None, dtype, None)
        .unwrap_or_else(|error| panic!("{}: {error}", shapes.name));
    Plan::of(normalised.clone(), quantization, options, choice.rounding, Vec::new())
}

#[test]
fn published_models_are_covered_to_the_last_tensor() {
    let models = all();
    assert!(models.len() >= 10, "the ten models of the issue, and more");
    for shapes in models {
        let normalised = resolve(&shapes.config, &shapes.tensors, &RulePack::builtin())
            .unwrap_or_else(|error| panic!("{}: {error}", shapes.name));
        let taken: usize = normalised.ignored.len()
            + normalised
                .tensors
                .iter()
                .flat_map(|tensor| &tensor.sources)
                .collect::<std::collections::BTreeSet<_>>()
                .len();
        assert_eq!(taken, shapes.tensors.len(), "{}", shapes.name);
        for (bits, gigabytes) in [4, 6, 8].into_iter().zip(shapes.gigabytes) {
            let one = plan(&shapes, &normalised, bits, 1);
            let total = one.weight_bytes_per_rank()[0];
            let percent = (total as f64 / 1e9 / gigabytes - 1.0).abs() * 100.0;
            // The table has one digit behind the point.
            let rounding = 0.05 / gigabytes * 100.0;
            assert!(
                percent < TOLERATED_PERCENT + rounding,
                "{} at {bits} bits: {total} bytes, expected {gigabytes} GB",
                shapes.name
            );
            for nodes in [2, 3, 4, 8] {
                let plan = plan(&shapes, &normalised, bits, nodes);
                let held = plan.weight_bytes_per_rank();
                let (sum, most) = (held.iter().sum::<u64>(), held.iter().max().unwrap());
                assert!(sum >= total, "{} on {nodes}: everything is somewhere", shapes.name);
                assert!(
                    most * u64::from(nodes) * 100 <= sum * (100 + TOLERATED_IMBALANCE_PERCENT),
                    "{} at {bits} bits on {nodes} nodes: {held:?}",
                    shapes.name
                );
            }
        }
    }
}

#[test]
fn experts_are_cut_inside_unless_that_is_uneven() {
    let shapes = all().into_iter().find(|shapes| shapes.name == "qwen3-235b-a22b").unwrap();
    let normalised = resolve(&shapes.config, &shapes.tensors, &RulePack::builtin()).unwrap();
    let is_whole =
        |bits, nodes| plan(&shapes, &normalised, bits, nodes).layout.axes.contains_key("experts");
    // 1536 inner columns are 24 groups: at most 4 % more than an even split on up to eight nodes.
    assert!([2, 3, 4, 5, 6, 8].into_iter().all(|nodes| !is_whole(4, nodes)));
    // Seven nodes: 3 or 4 of 24 groups, a sixth more.
    assert!(is_whole(4, 7));
}
