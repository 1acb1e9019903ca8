//! Merged weights against those of the adapters' own libraries.

use std::{fs, path::PathBuf};

use serde_json::Value;
use shardpack_containers::container;
use shardpack_quantize::Dtype;

use super::*;
use crate::{Source, SourceError};

mod experts;
mod tied;

/// Products may be summed in another order: the fixtures' own tolerance.
const RELATIVE: f32 = 1e-5;
/// The same for values near zero.
const ABSOLUTE: f32 = 1e-6;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/sources").join(name)
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn merged(base: &str, adapters: &[&str]) -> Result<Source, SourceError> {
    let mut source = Source::open(&data(base)).unwrap();
    let folders: Vec<PathBuf> = adapters.iter().map(|name| data(&format!("lora/{name}"))).collect();
    source.merge_adapters(&folders)?;
    Ok(source)
}

fn floats(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.size_bytes()];
    widen(dtype, bytes, &mut values);
    values
}

/// Every tensor of the merged model is what the fixture's library computed.
fn check(base: &str, adapter: &str) {
    let source = merged(base, &[adapter]).unwrap();
    let folder = data(&format!("lora/{adapter}"));
    let expected = json(folder.join("merged.json"));
    let file = fs::read(folder.join("merged.safetensors")).unwrap();
    let stored = container::parse(&file).unwrap();
    let tensors = expected["tensors"].as_object().unwrap();
    assert_eq!(tensors.len(), source.tensors().count(), "{adapter}");
    let mut changed = 0;
    for info in source.tensors() {
        let name = &info.name;
        let shape: Vec<u64> = serde_json::from_value(tensors[name]["shape"].clone()).unwrap();
        assert_eq!(info.shape, shape, "{adapter}: {name}");
        let bytes = source.read_tensor(name).unwrap().unwrap();
        let Some(stored) = stored.iter().find(|stored| stored.name == *name) else {
            assert!(source.merge(name).unwrap().is_none(), "{adapter}: {name} was changed");
            continue;
        };
        changed += 1;
        let found = floats(info.dtype, &bytes);
        let bytes = &file[stored.offset as usize..(stored.offset + stored.size) as usize];
        let expected = floats(stored.dtype, bytes);
        assert_eq!(found.len(), expected.len(), "{adapter}: {name}");
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let allowed = RELATIVE * expected.abs() + ABSOLUTE;
            let difference = (found - expected).abs();
            assert!(difference <= allowed, "{adapter}: {name}[{index}]: {found} {expected}");
        }
    }
    assert_eq!(changed, stored.len(), "{adapter}: every merged tensor was compared");
}

#[test]
fn merged_weights_are_those_of_peft() {
    for adapter in
        ["lora_plain", "lora_rs_patterns", "lora_dora", "lora_new_tokens", "lora_embedding"]
    {
        check("bf16_sharded", adapter);
    }
}

#[test]
fn fused_experts_are_merged_one_by_one() {
    check("bf16_moe", "lora_moe_experts");
}

#[test]
fn merged_weights_are_those_of_mlx_lm() {
    for adapter in ["mlx_lora", "mlx_dora"] {
        check("bf16_sharded", adapter);
    }
}

#[test]
fn blocks_of_rows_do_not_show() {
    for (base, adapter) in [
        ("bf16_sharded", "lora_dora"),
        ("bf16_sharded", "lora_new_tokens"),
        ("bf16_sharded", "lora_embedding"),
        ("bf16_moe", "lora_moe_experts"),
    ] {
        let source = merged(base, &[adapter]).unwrap();
        for info in source.tensors() {
            let Some(merge) = source.merge(&info.name).unwrap() else { continue };
            let whole = source.read_tensor(&info.name).unwrap().unwrap();
            let (mut joined, mut block) = (Vec::new(), Vec::new());
            let mut row = 0;
            while row < info.shape[0] {
                let end = (row + 7).min(info.shape[0]);
                source.merged_rows(&merge, row..end, &mut block).unwrap();
                joined.extend_from_slice(&block);
                row = end;
            }
            assert!(joined == whole, "{adapter}: {}", info.name);
        }
    }
}

#[test]
fn two_adapters_are_merged_one_after_the_other() {
    let name = "model.layers.1.self_attn.q_proj.weight";
    let value = |adapters: &[&str]| {
        let source = merged("bf16_sharded", adapters).unwrap();
        let dtype = source.tensors().find(|info| info.name == name).unwrap().dtype;
        floats(dtype, &source.read_tensor(name).unwrap().unwrap())
    };
    let (base, first) = (value(&[]), value(&["lora_plain"]));
    let (second, both) = (value(&["mlx_lora"]), value(&["lora_plain", "mlx_lora"]));
    for index in 0..base.len() {
        let expected = f64::from(first[index]) + f64::from(second[index]) - f64::from(base[index]);
        let difference = (f64::from(both[index]) - expected).abs();
        assert!(difference <= f64::from(RELATIVE * both[index].abs() + ABSOLUTE), "{index}");
    }
}

#[test]
fn what_is_no_lora_or_not_of_this_model_is_refused_by_name() {
    for (base, adapter) in [("bf16_sharded", "refused_ia3"), ("bf16_sharded", "refused_unmatched")]
    {
        let error = merged(base, &[adapter]).err().unwrap();
        assert!(error.is_wrong());
        let message = error.to_string().to_lowercase();
        let expected = json(data(&format!("lora/{adapter}/expected_error.json")));
        for word in expected["must_mention"].as_array().unwrap() {
            let word = word.as_str().unwrap().to_lowercase();
            assert!(message.contains(&word), "{adapter}: {message}");
        }
    }
    // Of another model: refused, whatever it is.
    let message = merged("bf16_sharded", &["lora_moe_experts"]).err().unwrap().to_string();
    assert!(message.contains("model.layers.1.mlp.experts"), "{message}");
}
