//! Quantization of activations to 8 bits: how far logits are off, and that `--exact` does without.

use std::{fs, path::Path};

use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::tempdir;

use crate::{
    harness::{convert, data, fail, path, succeed},
    reference_models::all_models,
};

/// Tokens of the comparison.
const TOKENS: &str = "[5, 17, 200, 33, 8, 411, 90, 2, 77, 301, 12, 64]";

/// Largest difference between `--exact` and plain f32 weights of the same values.
const EXACT_TOLERANCE: f32 = 1e-3;

/// Error of the middle row's logits with 8-bit activations, root mean square relative to that
/// row's: half a step of a 127th of a group's largest activation in every product, over the few
/// layers of these models, whose random weights make errors larger from layer to layer. It does not
/// depend on the weights' bits. Single rows are further off where another expert is routed to.
const ROUNDING_TOLERANCE: f64 = 0.06;

/// Logits of a set for tokens, written as JSON, as `shardpack logits` computes them.
pub(crate) fn logits(set: &Path, tokens: &str, options: &[&str]) -> Vec<f32> {
    let folder = tempdir().unwrap();
    let (ids, out) = (folder.path().join("ids.json"), folder.path().join("logits.safetensors"));
    fs::write(&ids, tokens).unwrap();
    let args = ["logits", path(set), "--tokens", path(&ids), "-o", path(&out)];
    succeed(&[&args, options].concat());
    let file = fs::read(&out).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor("logits").unwrap().data().to_vec();
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

/// Logits of the weights that a set stands for, with f32 activations and weights.
fn plain_logits(set: &Path, folder: &Path, tokens: &str) -> Vec<f32> {
    let (floats, plain) = (folder.join("floats"), folder.join("plain"));
    succeed(&["export", path(set), "-o", path(&floats), "--hf", "--dtype", "f32"]);
    let options = ["--bits", "16", "--dtype", "f32"];
    succeed(&[&["convert", path(&floats), "-o", path(&plain)], &options[..]].concat());
    logits(&plain, tokens, &[])
}

/// The second sequence of a reference model, as JSON.
fn sequence(model: &Path) -> String {
    let file = fs::read(model.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor("tokens_b").unwrap().data();
    let token = |four: &[u8; 4]| i32::from_le_bytes(*four);
    format!("{:?}", bytes.as_chunks::<4>().0.iter().map(token).collect::<Vec<_>>())
}

/// How far each row is from the expected one, root mean square relative to the expected row's.
fn row_errors(expected: &[f32], found: &[f32], rows: usize) -> Vec<f64> {
    let square = |values: &mut dyn Iterator<Item = f32>| -> f64 {
        values.map(|value| f64::from(value).powi(2)).sum()
    };
    let width = expected.len() / rows;
    let pairs = expected.chunks_exact(width).zip(found.chunks_exact(width));
    let error = |(expected, found): (&[f32], &[f32])| {
        let error = square(&mut expected.iter().zip(found).map(|(a, b)| a - b));
        (error / square(&mut expected.iter().copied())).sqrt()
    };
    pairs.map(error).collect()
}

/// Compares a reference model's logits at some bits: exact ones with those of plain f32 weights of
/// the same values, fast ones with exact ones.
fn check(model: &str, bits: &str) {
    let source = data("models").join(model);
    let tokens = sequence(&source);
    let folder = tempdir().unwrap();
    let set = folder.path().join("set");
    let set = convert(&format!("models/{model}"), &set, &["--bits", bits, "--nodes", "1"]);
    let expected = plain_logits(&set, folder.path(), &tokens);
    let exact = logits(&set, &tokens, &["--exact"]);
    assert_eq!(expected.len(), exact.len());
    let worst = expected.iter().zip(&exact).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < EXACT_TOLERANCE, "{model}, {bits} bits: exact logits differ by {worst}");
    // Another choice of keys is another model.
    let config: Value =
        serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    if !config["index_topk"].is_null() {
        return;
    }
    let fast = logits(&set, &tokens, &[]);
    let mut errors = row_errors(&exact, &fast, tokens.split(',').count());
    errors.sort_by(f64::total_cmp);
    // Where rows choose experts and blocks of keys, another expert of an early row reaches many later
    // ones: a quarter of them tells what rounding does.
    let share = if config["index_topk_blocks"].is_null() { 2 } else { 4 };
    let middle = errors[errors.len() / share];
    assert!(middle < ROUNDING_TOLERANCE, "{model}, {bits} bits: off by {middle} of the logits");
    // What the layers say may be small beside the residual stream, as in Granite; the head rounds to 16 bits.
    assert!(middle > 2e-5, "{model}, {bits} bits: off by {middle}: activations were not rounded");
}

#[test]
fn exact_logits_match_dequantized_weights_and_8_bit_activations_stay_near() {
    // Kernels know bits, models do not: each family with one of the three, some with all.
    for (model, bits) in all_models().iter().zip(["4", "6", "8"].iter().cycle()) {
        check(model, bits);
    }
    for model in ["llama", "mixtral", "qwen3_5"] {
        for bits in ["4", "6", "8"] {
            check(model, bits);
        }
    }
}

#[test]
fn simd_and_portable_kernels_compute_the_same_bits() {
    let folder = tempdir().unwrap();
    for bits in ["4", "6", "8"] {
        let set = convert("models/llama", &folder.path().join(bits), &["--bits", bits]);
        let best = logits(&set, TOKENS, &[]);
        let portable = logits(&set, TOKENS, &["--platform", "portable", "--threads", "1"]);
        let same = best
            .iter()
            .map(|value| value.to_bits())
            .eq(portable.iter().map(|value| value.to_bits()));
        assert!(same, "{bits} bits: platforms differ");
    }
}

#[test]
fn unknown_platforms_are_refused_by_name() {
    let folder = tempdir().unwrap();
    let set = convert("models/llama", &folder.path().join("set"), &[]);
    let (ids, out) = (folder.path().join("ids.json"), folder.path().join("out"));
    fs::write(&ids, TOKENS).unwrap();
    let args = ["logits", path(&set), "--tokens", path(&ids), "-o", path(&out)];
    let error = fail(2, &[&args[..], &["--platform", "mmx"]].concat());
    assert!(error.contains("mmx") && error.contains("portable"), "{error}");
}
