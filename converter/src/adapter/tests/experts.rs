//! Adapters of experts on the layouts in which models store them, and of other versions of PEFT.

use std::{collections::BTreeMap, path::Path};

use shardpack_containers::container::TensorInfo;

use super::*;

/// Tensors by name: shape and values.
type Tensors = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

fn read(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let value = |info: TensorInfo| {
        let bytes = &file[info.offset as usize..(info.offset + info.size) as usize];
        (info.name, (info.shape, floats(info.dtype, bytes)))
    };
    container::parse(&file).unwrap().into_iter().map(value).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let info = |(name, (shape, values)): (&String, &(Vec<u64>, Vec<f32>))| TensorInfo {
        name: name.clone(),
        dtype: Dtype::F32,
        shape: shape.clone(),
        offset: 0,
        size: values.len() as u64 * 4,
    };
    let infos: Vec<TensorInfo> = tensors.iter().map(info).collect();
    let mut bytes = container::header_for("pt", &infos);
    for (_, values) in tensors.values() {
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    fs::write(path, bytes).unwrap();
}

fn turned((shape, values): &(Vec<u64>, Vec<f32>)) -> (Vec<u64>, Vec<f32>) {
    let [rows, columns] = [shape[0] as usize, shape[1] as usize];
    let turned = (0..columns).flat_map(|column| (0..rows).map(move |row| (row, column)));
    let turned = turned.map(|(row, column)| values[row * columns + column]);
    (vec![shape[1], shape[0]], turned.collect())
}

/// How a model stores its experts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// `mlp.experts.0.gate_proj`.
    Apart,
    /// `block_sparse_moe.experts.0.w1`.
    Mixtral,
    /// `mlp.experts.gate_up_proj`, `[experts, out, in]`.
    Fused,
    /// The same, `[experts, in, out]` and with biases, as gpt-oss has them.
    Turned,
    /// `mlp.switch_mlp.gate_proj`.
    Mlx,
}

/// The matrices of one expert in the order of a form's tensors.
fn expert(tensors: &Tensors, place: &str, parts: &[&str], form: Form) -> (Vec<u64>, Vec<f32>) {
    let mut joined = (vec![0, 0], Vec::new());
    for part in parts {
        let (shape, values) = &tensors[&format!("{place}.{part}.weight")];
        joined.0 = vec![joined.0[0] + shape[0], shape[1]];
        joined.1.extend(values);
    }
    if form == Form::Turned { turned(&joined) } else { joined }
}

/// Tensors with experts one by one in another form.
fn in_form(tensors: &Tensors, form: Form) -> Tensors {
    let mut out = Tensors::new();
    for (name, tensor) in tensors {
        let Some((layer, rest)) = name.split_once(".mlp.experts.") else {
            out.insert(name.clone(), tensor.clone());
            continue;
        };
        if form == Form::Mixtral {
            let rest = rest.replace("gate_proj", "w1").replace("up_proj", "w3");
            let rest = rest.replace("down_proj", "w2");
            out.insert(format!("{layer}.block_sparse_moe.experts.{rest}"), tensor.clone());
            continue;
        }
        if form == Form::Apart {
            out.insert(name.clone(), tensor.clone());
            continue;
        }
        let places: &[(&str, &[&str])] = if form == Form::Mlx {
            &[
                ("switch_mlp.gate_proj.weight", &["gate_proj"]),
                ("switch_mlp.up_proj.weight", &["up_proj"]),
                ("switch_mlp.down_proj.weight", &["down_proj"]),
            ]
        } else {
            &[
                ("experts.gate_up_proj", &["gate_proj", "up_proj"]),
                ("experts.down_proj", &["down_proj"]),
            ]
        };
        for (place, parts) in places {
            let mut stack = (vec![0, 0, 0], Vec::new());
            for index in 0.. {
                let at = format!("{layer}.mlp.experts.{index}");
                if !tensors.contains_key(&format!("{at}.down_proj.weight")) {
                    break;
                }
                let (shape, values) = expert(tensors, &at, parts, form);
                stack.0 = vec![index + 1, shape[0], shape[1]];
                stack.1.extend(values);
            }
            if form == Form::Turned {
                // Such modules tell PEFT so; the biases tell them.
                let bias =
                    (vec![stack.0[0], stack.0[2]], vec![0.0; (stack.0[0] * stack.0[2]) as usize]);
                out.insert(format!("{layer}.mlp.{place}_bias"), bias);
            }
            out.insert(format!("{layer}.mlp.{place}"), stack);
        }
    }
    out
}

fn open(tensors: &Tensors, out: &Path) -> Source {
    fs::copy(data("bf16_moe/config.json"), out.join("config.json")).unwrap();
    write(&out.join("model.safetensors"), tensors);
    Source::open(out).unwrap()
}

/// Every tensor of a source, widened.
fn values(source: &Source) -> Tensors {
    let value = |info: &TensorInfo| {
        let bytes = source.read_tensor(&info.name).unwrap().unwrap();
        (info.name.clone(), (info.shape.clone(), floats(info.dtype, &bytes)))
    };
    source.tensors().map(value).collect()
}

/// An adapter changes a model in this form as it changes one with experts one by one.
fn check_form(adapter: &Path, form: Form) {
    let base = read(&data("bf16_moe/model.safetensors"));
    let merge = |form| {
        let folder = tempfile::tempdir().unwrap();
        let mut source = open(&in_form(&base, form), folder.path());
        source.merge_adapters(&[adapter.to_owned()]).unwrap();
        values(&source)
    };
    let expected = in_form(&merge(Form::Apart), form);
    let found = merge(form);
    assert!(expected != in_form(&base, form), "the adapter changes something");
    assert_eq!(found.len(), expected.len(), "{form:?}");
    for (name, (shape, expected)) in &expected {
        let (found_shape, found) = &found[name];
        assert_eq!(found_shape, shape, "{form:?}: {name}");
        for (found, expected) in found.iter().zip(expected) {
            let allowed = RELATIVE * expected.abs() + ABSOLUTE;
            assert!((found - expected).abs() <= allowed, "{form:?}: {name}: {found} {expected}");
        }
    }
}

#[test]
fn experts_are_merged_in_every_form_in_which_models_store_them() {
    for form in [Form::Mixtral, Form::Fused, Form::Turned] {
        check_form(&data("lora/lora_moe_experts"), form);
    }
}

#[test]
fn experts_of_mlx_adapters_are_merged_into_copies_of_mlx_lm_too() {
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"fine_tune_type":"lora","lora_parameters":{"rank":2,"scale":3.0}}"#;
    fs::write(folder.path().join("adapter_config.json"), config).unwrap();
    let some = |count: usize| (0..count).map(|at| (at as f32 * 0.37).sin() * 0.1).collect();
    let mut tensors = Tensors::new();
    for (projection, [rows, width]) in [("gate_proj", [128, 256]), ("down_proj", [256, 128])] {
        let place = format!("model.layers.1.mlp.switch_mlp.{projection}");
        tensors.insert(format!("{place}.lora_a"), (vec![4, 2, width], some(8 * width as usize)));
        tensors.insert(format!("{place}.lora_b"), (vec![4, rows, 2], some(8 * rows as usize)));
    }
    write(&folder.path().join("adapters.safetensors"), &tensors);
    for form in [Form::Mixtral, Form::Mlx] {
        check_form(folder.path(), form);
    }
}

#[test]
fn mlx_adapters_fit_a_text_model_and_the_wrapper_around_it() {
    let folder = tempfile::tempdir().unwrap();
    let from = data("lora/mlx_lora");
    let config = from.join("adapter_config.json");
    fs::copy(config, folder.path().join("adapter_config.json")).unwrap();
    let tensors = read(&from.join("adapters.safetensors")).into_iter();
    let tensors = tensors.map(|(name, tensor)| (format!("language_model.{name}"), tensor));
    write(&folder.path().join("adapters.safetensors"), &tensors.collect());
    let mut source = Source::open(&data("bf16_sharded")).unwrap();
    source.merge_adapters(&[folder.path().to_owned()]).unwrap();
    assert!(values(&source) == values(&merged("bf16_sharded", &["mlx_lora"]).unwrap()));
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
