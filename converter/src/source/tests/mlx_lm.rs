//! Copies as mlx-lm writes them: what it changes in values is taken back as they are read.

use shardpack_containers::container::header_for;
use tempfile::tempdir;

use super::*;

/// Sums and products of the copy are rounded once to f32 on the way there and once back.
const RELATIVE: f32 = 1e-6;

/// A tensor's name in the copy, and its values there.
type Change = fn(&str, &[u64], Vec<f32>) -> (String, Vec<f32>);

/// Writes the copy of a reference model in f32, with convolutions turned.
fn copy(model: &str, format: &str, change: Change, out: &Path) -> Source {
    let original = fixture(&format!("../models/{model}"));
    let source = Source::open(&original).unwrap();
    fs::copy(original.join("config.json"), out.join("config.json")).unwrap();
    let (mut infos, mut data) = (Vec::new(), Vec::new());
    for tensor in source.logical_tensors() {
        let values = values(&source, tensor, 64);
        let (name, values) = change(&tensor.name, &tensor.shape, values);
        let mut shape = tensor.shape.clone();
        if let [_, first @ 1, last] = &mut shape[..] {
            std::mem::swap(first, last);
        }
        let size = values.len() as u64 * 4;
        infos.push(TensorInfo {
            name,
            dtype: shardpack_quantize::Dtype::F32,
            shape,
            offset: 0,
            size,
        });
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    let file = [header_for(format, &infos), data].concat();
    fs::write(out.join("model.safetensors"), file).unwrap();
    source
}

fn check(model: &str, change: Change) {
    let folder = tempdir().unwrap();
    let original = copy(model, "mlx", change, folder.path());
    let source = Source::open(folder.path()).unwrap();
    for tensor in original.logical_tensors() {
        let name = change(&tensor.name, &tensor.shape, vec![0.0; 1 << 20]).0;
        let found = values(&source, source.logical(&name).unwrap(), 3);
        let expected = values(&original, tensor, 64);
        assert_eq!(found.len(), expected.len(), "{model}: {name}");
        for (found, expected) in found.iter().zip(&expected) {
            let allowed = RELATIVE * (1.0 + expected.abs());
            assert!((found - expected).abs() <= allowed, "{model}: {name}: {found} {expected}");
        }
    }
}

fn plus_one(name: &str, values: Vec<f32>, is_shifted: bool) -> (String, Vec<f32>) {
    let offset = if is_shifted { 1.0 } else { 0.0 };
    (name.to_owned(), values.into_iter().map(|value| value + offset).collect())
}

fn qwen(name: &str, _: &[u64], values: Vec<f32>) -> (String, Vec<f32>) {
    let endings = ["input_layernorm", "post_attention_layernorm", "model.norm", "q_norm", "k_norm"];
    let module = name.trim_end_matches(".weight");
    plus_one(name, values, endings.iter().any(|ending| module.ends_with(ending)))
}

fn step(name: &str, _: &[u64], values: Vec<f32>) -> (String, Vec<f32>) {
    let mut new = name.to_owned();
    for (from, to) in [
        (".moe.gate_proj.", ".mlp.switch_mlp.gate_proj."),
        (".moe.up_proj.", ".mlp.switch_mlp.up_proj."),
        (".moe.down_proj.", ".mlp.switch_mlp.down_proj."),
        (".moe.gate.", ".mlp.gate.gate."),
        (".moe.router_bias", ".mlp.gate.router_bias"),
        (".share_expert.", ".mlp.share_expert."),
    ] {
        new = new.replace(from, to);
    }
    plus_one(&new, values, name.contains("norm"))
}

fn falcon(name: &str, shape: &[u64], mut values: Vec<f32>) -> (String, Vec<f32>) {
    let module = name.trim_end_matches(".weight").rsplit('.').next().unwrap();
    let factor = match module {
        "embed_tokens" => 5.6,
        "lm_head" => 0.5,
        "q_proj" | "k_proj" => 0.75,
        "o_proj" => 0.94,
        "out_proj" => 0.24,
        "gate_proj" => 0.88,
        "down_proj" => 0.29,
        _ => 1.0,
    };
    // Of the one input projection: gates, values, keys, queries and steps.
    let runs: [(usize, f32); 5] = [(64, 0.35), (64, 0.25), (32, 0.18), (32, 0.5), (4, 0.6)];
    let mut runs = runs.iter().flat_map(|(rows, factor)| vec![1.25 * factor; *rows]);
    for row in values.chunks_exact_mut(shape.last().map_or(1, |width| *width as usize)) {
        let factor = if module == "in_proj" { runs.next().unwrap_or(1.0) } else { factor };
        for value in row {
            *value *= factor;
        }
    }
    (name.to_owned(), values)
}

#[test]
fn what_mlx_lm_adds_or_multiplies_is_taken_back() {
    check("qwen3_next", qwen);
    check("qwen3_5", qwen);
    check("step3p5", step);
    check("falcon_h1", falcon);
}

#[test]
fn a_copy_that_nobody_has_signed_is_refused_where_only_names_tell() {
    let folder = tempdir().unwrap();
    copy("step3p5", "pt", step, folder.path());
    let error = Source::open(folder.path()).err().unwrap();
    let error: &dyn std::error::Error = &error;
    let message = error.source().unwrap().to_string();
    assert!(message.contains("convert the publisher's own checkpoint"), "{message}");
}
