//! Checkpoints as other tools write them again: each family's fixture is turned into their layout, and
//! must give the very weights of the fixture.

use std::{collections::BTreeMap, fs, path::Path};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use shardpack_converter::plan::ExpertSharding;
use tempfile::tempdir;

use crate::{
    harness::data,
    reference_models::{all_models, join, write},
};

/// Tensors by name: type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn read(model: &str) -> Tensors {
    let owned = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    let mut all = Tensors::new();
    for entry in fs::read_dir(data("models").join(model)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let file = fs::read(&path).unwrap();
            let tensors = SafeTensors::deserialize(&file).unwrap();
            all.extend(tensors.tensors().into_iter().map(|(name, view)| (name, owned(view))));
        }
    }
    all
}

fn save(model: &str, tensors: &Tensors, format: &str, out: &Path) {
    fs::create_dir_all(out).unwrap();
    fs::copy(data("models").join(model).join("config.json"), out.join("config.json")).unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let metadata = [("format".to_owned(), format.to_owned())].into();
    let views: Vec<_> = views.collect();
    fs::write(
        out.join("model.safetensors"),
        safetensors::serialize(views, Some(metadata)).unwrap(),
    )
    .unwrap();
}

/// The changed checkpoint gives the tensors that the fixture gives, bit for bit.
fn check_same(model: &str, tensors: &Tensors, format: &str) {
    let folder = tempdir().unwrap();
    let changed = folder.path().join("changed");
    save(model, tensors, format, &changed);
    let (ours, theirs) = (folder.path().join("a"), folder.path().join("b"));
    write(&data("models").join(model), &ours, 16, 1, ExpertSharding::Inside);
    write(&changed, &theirs, 16, 1, ExpertSharding::Inside);
    let (ours, theirs) = (join(&ours, 1), join(&theirs, 1));
    assert_eq!(ours.len(), theirs.len(), "{model}");
    for (name, tensor) in &ours {
        assert!(theirs.get(name) == Some(tensor), "{model}: {name} is another one");
    }
}

/// Replaces the matrices of experts one by one by one tensor with gates and ups, and one of downs.
fn fused(tensors: &Tensors, block: Option<&str>) -> Tensors {
    let mut fused = tensors.clone();
    let mut stacks: BTreeMap<(String, &str), Vec<(usize, String)>> = BTreeMap::new();
    for name in tensors.keys() {
        let Some((prefix, rest)) = name.split_once(".experts.") else { continue };
        let Some((expert, projection)) = rest.split_once('.') else { continue };
        let Ok(expert) = expert.parse() else { continue };
        let kind = match projection {
            "gate_proj.weight" | "w1.weight" => "gate",
            "up_proj.weight" | "w3.weight" => "up",
            "down_proj.weight" | "w2.weight" => "down",
            _ => continue,
        };
        stacks.entry((prefix.to_owned(), kind)).or_default().push((expert, name.clone()));
    }
    for names in stacks.values_mut() {
        names.sort_unstable();
    }
    let prefixes: Vec<String> =
        stacks.keys().filter(|key| key.1 == "gate").map(|key| key.0.clone()).collect();
    for prefix in prefixes {
        let place = |name: &str| {
            let layer = prefix.rsplit_once('.').unwrap().0;
            let place = block.map_or_else(|| prefix.clone(), |block| format!("{layer}.{block}"));
            format!("{place}.experts.{name}")
        };
        let stack = |kinds: &[&str]| {
            let count = stacks[&(prefix.clone(), kinds[0])].len();
            let mut bytes = Vec::new();
            let (mut dtype, mut shape) = (Dtype::BF16, Vec::new());
            for expert in 0..count {
                for kind in kinds {
                    let tensor = &tensors[&stacks[&(prefix.clone(), *kind)][expert].1];
                    bytes.extend(&tensor.2);
                    (dtype, shape) =
                        (tensor.0, vec![count, tensor.1[0] * kinds.len(), tensor.1[1]]);
                }
            }
            (dtype, shape, bytes)
        };
        fused.insert(place("gate_up_proj"), stack(&["gate", "up"]));
        fused.insert(place("down_proj"), stack(&["down"]));
        for kind in ["gate", "up", "down"] {
            for (_, name) in &stacks[&(prefix.clone(), kind)] {
                fused.remove(name);
            }
        }
    }
    fused
}

/// Replaces fused `[experts, 2 · out, in]` and `[experts, out, in]` by matrices one by one.
fn apart(tensors: &Tensors) -> Tensors {
    let mut apart = Tensors::new();
    for (name, tensor) in tensors {
        let (dtype, shape, bytes) = tensor;
        let parts: &[&str] = match name.rsplit('.').next().unwrap() {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            "down_proj" => &["down_proj"],
            _ => &[],
        };
        if parts.is_empty() || shape.len() != 3 {
            apart.insert(name.clone(), tensor.clone());
            continue;
        }
        let place = name.rsplit_once('.').unwrap().0;
        let matrices = shape[0] * parts.len();
        let matrix = bytes.len() / matrices;
        for (index, bytes) in bytes.chunks_exact(matrix).enumerate() {
            let (expert, part) = (index / parts.len(), parts[index % parts.len()]);
            let shape = vec![shape[1] / parts.len(), shape[2]];
            apart
                .insert(format!("{place}.{expert}.{part}.weight"), (*dtype, shape, bytes.to_vec()));
        }
    }
    apart
}

/// Every family whose experts are stored one by one takes them fused, where they are and under the
/// name that transformers 5 gives the block.
#[test]
fn experts_that_another_tool_has_fused_give_the_same_packages() {
    let mut families = 0;
    for model in all_models() {
        let tensors = read(&model);
        for block in [None, Some("mlp")] {
            let changed = fused(&tensors, block);
            if changed.len() != tensors.len() {
                check_same(&model, &changed, "pt");
                families += 1;
            }
        }
    }
    assert!(families > 40, "only {families}");
}

/// Fused experts `[in, out]` as matrices `[out, in]` one by one, which linear layers are.
#[test]
fn fused_experts_stored_the_other_way_round_give_the_same_packages_when_split() {
    let model = "llama4_text";
    let tensors = read(model);
    let mut turned = tensors.clone();
    for (name, (_, shape, bytes)) in &mut turned {
        if !name.contains(".experts.") {
            continue;
        }
        let [experts, rows, columns] = [shape[0], shape[1], shape[2]];
        let size = bytes.len() / (experts * rows * columns);
        let stored = std::mem::take(bytes);
        for expert in 0..experts {
            for column in 0..columns {
                for row in 0..rows {
                    let at = ((expert * rows + row) * columns + column) * size;
                    bytes.extend(&stored[at..at + size]);
                }
            }
        }
        shape.swap(1, 2);
    }
    let split = apart(&turned);
    assert!(split.len() > tensors.len());
    check_same(model, &split, "pt");
}

#[test]
fn fused_experts_that_another_tool_has_split_give_the_same_packages() {
    let turned = ["llama4_text", "gpt_oss"];
    let mut families = 0;
    for model in all_models() {
        let tensors = read(&model);
        let changed = apart(&tensors);
        if changed.len() != tensors.len() && !turned.contains(&model.as_str()) {
            check_same(&model, &changed, "pt");
            families += 1;
        }
    }
    assert!(families >= 4, "only {families}");
}

/// mlx-lm's convolutions are `[channels, kernel, 1]`; where it changes values, only they tell.
#[test]
fn convolutions_as_mlx_lm_turns_them_give_the_same_packages() {
    let mut families = 0;
    for model in all_models() {
        let config: Value = serde_json::from_slice(
            &fs::read(data("models").join(&model).join("config.json")).unwrap(),
        )
        .unwrap();
        let kind = config["model_type"].as_str().unwrap_or_default();
        let mut tensors = read(&model);
        let mut turned = 0;
        for (name, (_, shape, _)) in &mut tensors {
            if name.contains("conv") && shape.len() == 3 && shape[1] == 1 {
                shape.swap(1, 2);
                turned += 1;
            }
        }
        let changes_values = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "falcon_h1"];
        if turned > 0 && !changes_values.iter().any(|name| kind.starts_with(name)) {
            check_same(&model, &tensors, "mlx");
            families += 1;
        }
    }
    assert!(families >= 6, "only {families}");
}

/// What mlx-lm does to names and shapes alone: experts stacked under `switch_mlp`, convolutions
/// `[channels, kernel, 1]`, the names that its modules have.
fn as_mlx_lm_names_them(tensors: &Tensors) -> Tensors {
    let mut copy = Tensors::new();
    let mut stacks: BTreeMap<String, Vec<(usize, String)>> = BTreeMap::new();
    for (name, tensor) in tensors {
        let projection = |name: &str| match name {
            "w1.weight" => "gate_proj.weight".to_owned(),
            "w3.weight" => "up_proj.weight".to_owned(),
            "w2.weight" => "down_proj.weight".to_owned(),
            other => other.to_owned(),
        };
        let expert = name.split_once(".experts.").and_then(|(block, rest)| {
            let (expert, leaf) = rest.split_once('.')?;
            Some((format!("{block}.switch_mlp.{}", projection(leaf)), expert.parse().ok()?))
        });
        if let Some((stack, expert)) = expert {
            stacks.entry(stack).or_default().push((expert, name.clone()));
            continue;
        }
        let mut name = name.clone();
        for conv in ["q_conv1d", "k_conv1d", "v_conv1d"] {
            name = name.replace(conv, &conv.replace("conv1d", "conv.conv"));
        }
        let mut tensor = tensor.clone();
        if name.contains("conv") && tensor.1.len() == 3 && tensor.1[1] == 1 {
            tensor.1.swap(1, 2);
        }
        copy.insert(name, tensor);
    }
    for (name, mut experts) in stacks {
        experts.sort_unstable();
        let (dtype, shape, _) = &tensors[&experts[0].1];
        let bytes = experts.iter().flat_map(|(_, name)| tensors[name].2.clone()).collect();
        let shape = [&[experts.len()], &shape[..]].concat();
        copy.insert(name, (*dtype, shape, bytes));
    }
    copy
}

/// The families whose values mlx-lm changes too are compared where sources are read.
const CHANGED_VALUES: [&str; 4] = ["qwen3_next", "qwen3_5", "falcon_h1", "step3p5"];

#[test]
fn names_and_stacks_of_mlx_lm_give_the_same_packages() {
    let mut families = 0;
    for model in all_models() {
        let tensors = read(&model);
        let copy = as_mlx_lm_names_them(&tensors);
        if copy != tensors && !CHANGED_VALUES.iter().any(|name| model.starts_with(name)) {
            check_same(&model, &copy, "mlx");
            families += 1;
        }
    }
    assert!(families > 25, "only {families}");
}

/// Text models within a wrapper: `model.language_model.` as publishers have it, and
/// `language_model.model.` as mlx-lm and older transformers do.
#[test]
fn prefixes_of_wrappers_give_the_same_packages() {
    let model = "qwen3_5_vl";
    let renamed = |from: &str, to: &str| -> Tensors {
        let tensors = read(model).into_iter();
        tensors.map(|(name, tensor)| (name.replacen(from, to, 1), tensor)).collect()
    };
    let changed = renamed("model.language_model.", "language_model.model.");
    assert!(changed != read(model), "{model}");
    check_same(model, &changed, "pt");
}

/// transformers' own modules of Ling 3.0: one convolution over queries, keys and values, and the
/// decay in a module of its own.
#[test]
fn ling_as_transformers_names_its_modules_gives_the_same_packages() {
    let mut renamed = Tensors::new();
    let mut convolutions: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for (name, tensor) in read("bailing_hybrid") {
        let Some((layer, rest)) = name.split_once(".attention.") else {
            renamed
                .insert(name.replace(".gate.expert_bias", ".gate.e_score_correction_bias"), tensor);
            continue;
        };
        let own = match rest {
            // They come in the order of their names: keys, queries, values.
            _ if rest.ends_with("_conv1d.weight") => {
                convolutions
                    .entry(format!("{layer}.self_attn.conv1d.weight"))
                    .or_default()
                    .push(tensor);
                continue;
            }
            "dense.weight" => "o_proj.weight".to_owned(),
            "A_log" | "dt_bias" | "f_proj.weight" => format!("forget_gate.{rest}"),
            _ => rest.to_owned(),
        };
        renamed.insert(format!("{layer}.self_attn.{own}"), tensor);
    }
    assert!(!convolutions.is_empty());
    for (name, parts) in convolutions {
        let [keys, queries, values] = &parts[..] else { panic!("{name}") };
        let bytes = [&queries.2[..], &keys.2, &values.2].concat();
        renamed.insert(name, (keys.0, vec![3 * keys.1[0], 1, keys.1[2]], bytes));
    }
    check_same("bailing_hybrid", &renamed, "pt");
}

/// transformers stacks the groups of DeepSeek V4's output matrix row-wise under its own name.
#[test]
fn output_matrices_of_groups_are_told_from_stacked_rows_by_their_shape() {
    let mut renamed = Tensors::new();
    for (name, tensor) in read("deepseek_v4") {
        let own = name.strip_suffix(".attn.wo_a.weight");
        let own = own.map(|layer| format!("model.{layer}.self_attn.o_a_proj.weight"));
        renamed.insert(own.unwrap_or(name), tensor);
    }
    assert!(renamed != read("deepseek_v4"));
    check_same("deepseek_v4", &renamed, "pt");
}
