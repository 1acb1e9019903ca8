//! Merged weights against those of the adapters' own libraries.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use shardpack_formats::{
    Dtype,
    container::{self, TensorInfo},
};

use super::*;
use crate::{Source, SourceError};

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

/// The adapter of fused experts as PEFT before 0.19 stores it: what was B's is A's.
fn before_019(out: &Path, version: Option<&str>) {
    let from = data("lora/lora_moe_experts");
    let mut config = json(from.join("adapter_config.json"));
    config["peft_version"] = version.map_or(Value::Null, Into::into);
    fs::write(out.join("adapter_config.json"), config.to_string()).unwrap();
    let file = fs::read(from.join("adapter_model.safetensors")).unwrap();
    let mut tensors = container::parse(&file).unwrap();
    let read = |info: &TensorInfo| {
        floats(info.dtype, &file[info.offset as usize..(info.offset + info.size) as usize])
    };
    let by_name: BTreeMap<String, TensorInfo> =
        tensors.iter().map(|info| (info.name.clone(), info.clone())).collect();
    let rank = 2;
    let mut data = Vec::new();
    for info in &mut tensors {
        if !info.name.contains(".experts.") {
            data.extend(read(info));
            continue;
        }
        // A is [experts · rank, inputs], expert by expert; B is [outputs, rank · experts].
        let is_a = info.name.contains("lora_A");
        let [from, to] = if is_a { ["lora_A", "lora_B"] } else { ["lora_B", "lora_A"] };
        let other = &by_name[&info.name.replace(from, to)];
        let values = read(other);
        let [rows, columns] = [other.shape[0] as usize, other.shape[1] as usize];
        let pairs = if is_a { columns } else { rows };
        let experts = pairs / rank;
        let expert_first = |e: usize, k: usize| e * rank + k;
        let rank_first = |e: usize, k: usize| k * experts + e;
        let mut turned = vec![0.0; values.len()];
        for e in 0..experts {
            for k in 0..rank {
                for at in 0..rows.max(columns).min(values.len() / pairs) {
                    if is_a {
                        turned[expert_first(e, k) * rows + at] =
                            values[at * pairs + rank_first(e, k)];
                    } else {
                        turned[at * pairs + rank_first(e, k)] =
                            values[expert_first(e, k) * columns + at];
                    }
                }
            }
        }
        info.shape = vec![other.shape[1], other.shape[0]];
        info.size = other.size;
        data.extend(turned);
    }
    let mut bytes = container::header_for("pt", &tensors);
    bytes.extend(data.iter().flat_map(|value: &f32| value.to_le_bytes()));
    fs::write(out.join("adapter_model.safetensors"), bytes).unwrap();
}

#[test]
fn experts_of_older_versions_of_peft_have_their_factors_the_other_way_round() {
    let folder = tempfile::tempdir().unwrap();
    let experts = data("lora/lora_moe_experts");
    let merge = |adapter: &Path| {
        let mut source = Source::open(&data("bf16_moe")).unwrap();
        source.merge_adapters(&[adapter.to_owned()]).map(|()| source)
    };
    let expected = merge(&experts).unwrap();
    for version in ["0.18.1", "0.17.0"] {
        before_019(folder.path(), Some(version));
        let found = merge(folder.path()).unwrap();
        for info in expected.tensors() {
            let same =
                expected.read_tensor(&info.name).unwrap() == found.read_tensor(&info.name).unwrap();
            assert!(same, "{version}: {}", info.name);
        }
    }
    // Gates and ups of this model are square together: only the version tells.
    before_019(folder.path(), None);
    let message = merge(folder.path()).err().unwrap().to_string();
    assert!(message.contains("has no peft_version"), "{message}");
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
