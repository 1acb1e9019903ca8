//! What rounding activations to 8 bits costs, and that `--exact` does not round them.

use std::{fs, path::Path};

use safetensors::SafeTensors;
use tempfile::tempdir;

use crate::harness::{convert, fail, path, succeed};

/// Tokens of the comparison.
const TOKENS: &str = "[5, 17, 200, 33, 8, 411, 90, 2, 77, 301, 12, 64]";

/// Largest difference between `--exact` and plain f32 weights of the same values.
const EXACT_TOLERANCE: f32 = 1e-3;

/// Error of the logits with 8-bit activations, root mean square relative to the logits': half a
/// step of a 127th of a group's largest activation in every product, over the few layers of these
/// models. It does not depend on the weights' bits.
const ROUNDING_TOLERANCE: f64 = 0.03;

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

#[test]
fn exact_logits_are_those_of_the_plain_weights_and_fast_ones_are_near() {
    let folder = tempdir().unwrap();
    for bits in ["4", "6", "8"] {
        let at = |name: &str| folder.path().join(format!("{name}-{bits}"));
        let set = convert("models/llama", &at("set"), &["--bits", bits]);
        let floats = at("floats");
        succeed(&["export", path(&set), "-o", path(&floats), "--hf", "--dtype", "f32"]);
        let plain = at("plain");
        let options = ["--bits", "16", "--dtype", "f32"];
        succeed(&[&["convert", path(&floats), "-o", path(&plain)], &options[..]].concat());

        let expected = logits(&plain, TOKENS, &[]);
        let exact = logits(&set, TOKENS, &["--exact"]);
        let differences = expected.iter().zip(&exact).map(|(a, b)| (a - b).abs());
        let worst = differences.fold(0.0, f32::max);
        assert!(worst < EXACT_TOLERANCE, "{bits} bits: exact logits differ by {worst}");

        let fast = logits(&set, TOKENS, &[]);
        let square = |values: &mut dyn Iterator<Item = f32>| -> f64 {
            values.map(|value| f64::from(value).powi(2)).sum()
        };
        let error = square(&mut exact.iter().zip(&fast).map(|(a, b)| a - b));
        let relative = (error / square(&mut exact.iter().copied())).sqrt();
        assert!(relative < ROUNDING_TOLERANCE, "{bits} bits: off by {relative} of the logits");
        assert!(relative > 1e-5, "{bits} bits: activations were not rounded");
        let portable = logits(&set, TOKENS, &["--platform", "portable", "--threads", "1"]);
        assert!(
            fast.iter().zip(&portable).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{bits} bits: platforms differ"
        );
    }
}

#[test]
fn instructions_that_there_are_not_are_refused_by_name() {
    let folder = tempdir().unwrap();
    let set = convert("models/llama", &folder.path().join("set"), &[]);
    let (ids, out) = (folder.path().join("ids.json"), folder.path().join("out"));
    fs::write(&ids, TOKENS).unwrap();
    let args = ["logits", path(&set), "--tokens", path(&ids), "-o", path(&out)];
    let error = fail(2, &[&args[..], &["--platform", "mmx"]].concat());
    assert!(error.contains("mmx") && error.contains("portable"), "{error}");
}
