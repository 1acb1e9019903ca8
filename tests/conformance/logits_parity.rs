//! Logits of the program against transformers, and the same greedy tokens on any number of ranks.

use std::{fs, path::Path};

use safetensors::SafeTensors;
use tempfile::tempdir;

use crate::harness::{MODELS, convert, data, fail, path, succeed};

/// A float32 engine stays this close to transformers' logits (the fixtures' own statement; 1e-4
/// is typical).
const TOLERANCE: f32 = 5e-4;

fn logits(set: &Path, tokens: &[i32]) -> Vec<f32> {
    let folder = tempdir().unwrap();
    let (ids, out) = (folder.path().join("ids.json"), folder.path().join("logits.safetensors"));
    fs::write(&ids, format!("{tokens:?}")).unwrap();
    // Rounding activations to 8 bits makes a step of what is the last bit of a sum, and so may
    // decide a near-tie otherwise on another number of ranks: shardings are compared without it.
    succeed(&["logits", path(set), "--tokens", path(&ids), "-o", path(&out), "--exact"]);
    let file = fs::read(&out).unwrap();
    floats(&file, "logits")
}

fn floats(file: &[u8], name: &str) -> Vec<f32> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let bytes = tensors.tensor(name).unwrap();
    bytes.data().chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

fn tokens(file: &[u8], name: &str) -> Vec<i32> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let bytes = tensors.tensor(name).unwrap();
    bytes.data().chunks_exact(4).map(|four| i32::from_le_bytes(four.try_into().unwrap())).collect()
}

fn argmax(row: &[f32]) -> i32 {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a))).unwrap() as i32
}

/// Greedy continuation of `prompt`, checked in one pass: the logits after each token of the
/// continuation must have the next one as their largest.
fn greedy_from(logits: &[f32], vocab: usize, prompt: usize) -> Vec<i32> {
    logits.chunks_exact(vocab).skip(prompt - 1).map(argmax).collect()
}

#[test]
fn logits_at_16_bits_match_transformers_on_any_number_of_ranks() {
    let folder = tempdir().unwrap();
    for model in ["llama", "llama-tied", "qwen3"] {
        let expected = fs::read(data("models").join(model).join("expected.safetensors")).unwrap();
        for nodes in ["1", "2", "3"] {
            let set = convert(
                &format!("models/{model}"),
                &folder.path().join(model).join(nodes),
                &["--bits", "16", "--nodes", nodes],
            );
            let mut worst = 0.0_f32;
            for sequence in ["a", "b"] {
                let ours = logits(&set, &tokens(&expected, &format!("tokens_{sequence}")));
                let theirs = floats(&expected, &format!("logits_{sequence}"));
                assert_eq!(ours.len(), theirs.len());
                worst =
                    ours.iter().zip(&theirs).fold(worst, |worst, (a, b)| worst.max((a - b).abs()));
            }
            assert!(worst < TOLERANCE, "{model} on {nodes} ranks differs by {worst}");
            let (prompt, greedy) = (tokens(&expected, "tokens_a"), tokens(&expected, "greedy"));
            let all = [prompt.as_slice(), &greedy[..greedy.len() - 1]].concat();
            let vocab = 512;
            assert_eq!(
                greedy_from(&logits(&set, &all), vocab, prompt.len()),
                greedy,
                "{model} on {nodes} ranks"
            );
        }
    }
}

#[test]
fn greedy_tokens_are_the_same_on_any_number_of_ranks() {
    const STEPS: usize = 12;
    let folder = tempdir().unwrap();
    for model in MODELS {
        for bits in ["4", "6", "8", "16"] {
            let mut first: Option<Vec<i32>> = None;
            for nodes in ["1", "2", "3", "4"] {
                let output =
                    folder.path().join(format!("{}-{bits}-{nodes}", model.replace('/', "-")));
                let set = convert(model, &output, &["--bits", bits, "--nodes", nodes]);
                let mut sequence = vec![5, 17, 200, 33, 8];
                let prompt = sequence.len();
                if let Some(expected) = &first {
                    // One pass over the one-rank continuation shows every step's choice.
                    let all = [sequence.as_slice(), &expected[..STEPS - 1]].concat();
                    let values = logits(&set, &all);
                    assert_eq!(
                        greedy_from(&values, values.len() / all.len(), prompt),
                        *expected,
                        "{model}, {bits} bits, {nodes} ranks"
                    );
                } else {
                    for _ in 0..STEPS {
                        let values = logits(&set, &sequence);
                        let row = &values[values.len() - values.len() / sequence.len()..];
                        sequence.push(argmax(row));
                    }
                    first = Some(sequence[prompt..].to_vec());
                }
            }
        }
    }
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let folder = tempdir().unwrap();
    let set = convert("models/llama", &folder.path().join("set"), &[]);
    let out = folder.path().join("out");
    let check = |text: &str, word: &str| {
        let ids = folder.path().join("ids.json");
        fs::write(&ids, text).unwrap();
        let error = fail(1, &["logits", path(&set), "--tokens", path(&ids), "-o", path(&out)]);
        assert!(error.contains(word), "{error}");
    };
    check("[1, 512]", "512");
    check("[]", "no tokens");
    check("{}", "JSON list");
    assert!(!out.exists());
}
