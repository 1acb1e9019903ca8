//! KL divergence of quantized models from the 16-bit one.
#![allow(clippy::format_collect, clippy::print_stdout, reason = "a test that shows its figures")]

use std::{fs, path::Path};

use serde_json::Value;
use tempfile::tempdir;

use crate::harness::{convert, data, fail, path, succeed};

/// Verses that the model never saw, each as the answer to its reference.
fn held_out() -> String {
    let file = fs::read(data("kjv-4m/heldout.json")).unwrap();
    let verses: Vec<Value> = serde_json::from_slice(&file).unwrap();
    assert_eq!(verses.len(), 154);
    verses
        .iter()
        .map(|verse| {
            let (reference, text) =
                (verse["reference"].as_str().unwrap(), verse["text"].as_str().unwrap());
            format!(
                "<|im_start|>user\n{reference}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
            )
        })
        .collect()
}

fn evaluate(set: &Path, text: &Path, against: &Path) -> Value {
    let output = succeed(&[
        "eval",
        path(set),
        "--text",
        path(text),
        "--against",
        path(against),
        "--context",
        "128",
        "--json",
    ]);
    let figures: Value = serde_json::from_str(&output).unwrap();
    figures["sets"][0].clone()
}

/// The search for scales has to be worth its time where it counts: in what the model says.
#[test]
fn refined_rounding_has_a_lower_kl_divergence_than_mlx_rounding() {
    let folder = tempdir().unwrap();
    let text = folder.path().join("heldout.txt");
    fs::write(&text, held_out()).unwrap();
    let exact = convert("kjv-4m", &folder.path().join("16"), &["--bits", "16"]);
    for bits in ["4", "6"] {
        let [ours, mlx] = ["refined", "mlx-cpu"].map(|rounding| {
            let output = folder.path().join(format!("{bits}-{rounding}"));
            let set = convert("kjv-4m", &output, &["--bits", bits, "--rounding", rounding]);
            evaluate(&set, &text, &exact)
        });
        let mean = |found: &Value| found["against"]["kl_mean"]["value"].as_f64().unwrap();
        let (refined, plain) = (mean(&ours), mean(&mlx));
        println!("{bits} bits: {ours}\n{mlx}");
        assert!(refined < plain, "{bits} bits: {refined} is not below {plain}");
        // Far from nothing, far from everything.
        assert!(refined > 1e-6 && plain < 0.5, "{bits} bits: {refined} {plain}");
        assert_eq!(ours["against"]["perplexity"], mlx["against"]["perplexity"]);
        assert!(ours["tokens"].as_u64().unwrap() > 2000);
    }
    let perplexity = succeed(&["eval", path(&exact), "--text", path(&text), "--context", "64"]);
    assert!(perplexity.contains("perplexity"), "{perplexity}");
    let error = fail(1, &["eval", path(&exact), "--text", path(&text), "--context", "100000"]);
    assert!(error.contains("context of 100000"), "{error}");
}
