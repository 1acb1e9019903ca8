//! A configuration as its rules know it, from one that transformers 5 has saved again: keys that it
//! has moved or renamed go back to where publishers have them. What does not agree with itself is
//! left as it is, and refused as an unknown key.

use serde_json::{Map, Value};

use super::family::knows_key;
use crate::rules::{Family, RulePack};

const PARTIAL: &str = "partial_rotary_factor";
const PARTIALS: &str = "partial_rotary_factors";
const ROPE: &str = "rope_parameters";
const PER_LAYER: &str = "per_layer_config";
const KINDS: &str = "mlp_layer_types";
const FIRST_SPARSE: &str = "first_k_dense_replace";

/// Puts moved keys back, by the rules of the configuration's family.
pub(super) fn put_back(config: &mut Map<String, Value>, packs: &[RulePack]) {
    let name = config.get("model_type").and_then(Value::as_str).map(str::to_owned);
    let found = name.and_then(|name| {
        packs.iter().find_map(|pack| Some((pack, pack.file.families.get(&name)?)))
    });
    let Some((pack, family)) = found else { return };
    for (new, old) in &family.renamed {
        if !config.contains_key(old)
            && let Some(value) = config.remove(new)
        {
            config.insert(old.clone(), value);
        }
    }
    if knows_key(pack, family, PARTIALS) {
        lists_of_layers(config);
    }
    if knows_key(pack, family, PARTIAL) {
        partial_rotary(config, family);
    }
    if !knows_key(pack, family, KINDS) && knows_key(pack, family, FIRST_SPARSE) {
        dense_layers(config);
    }
    per_layer(config, family);
}

/// The share of a head that turns, out of the object that describes the position embedding.
fn partial_rotary(config: &mut Map<String, Value>, family: &Family) {
    if family.rope.iter().any(|key| key == PARTIAL) {
        return;
    }
    let Some(Value::Object(rope)) = config.get_mut(ROPE) else { return };
    let mut objects: Vec<&mut Map<String, Value>> = Vec::new();
    if rope.values().any(Value::is_object) {
        objects.extend(rope.values_mut().filter_map(Value::as_object_mut));
    } else {
        objects.push(rope);
    }
    // There it is a part of the kind itself.
    objects.retain(|object| object.get("rope_type") != Some(&"proportional".into()));
    let first = objects.iter().find_map(|object| object.get(PARTIAL)).cloned();
    let Some(share) = first else { return };
    if objects.iter().any(|object| object.get(PARTIAL) != Some(&share)) {
        return;
    }
    let moved: Vec<_> = objects.into_iter().map(|object| object.remove(PARTIAL)).collect();
    match config.get(PARTIAL).filter(|stated| !stated.is_null()) {
        None => _ = config.insert(PARTIAL.to_owned(), share),
        Some(stated) if stated.as_f64() == share.as_f64() => {}
        // Two answers: back to where both are seen.
        Some(_) => {
            if let Some(Value::Object(rope)) = config.get_mut(ROPE) {
                rope.extend(moved.into_iter().flatten().map(|value| (PARTIAL.to_owned(), value)));
            }
        }
    }
}

/// Position embeddings of each kind of layer as lists with a value for each layer, and the one scaling
/// beside them; the layers with experts as a text of their numbers.
fn lists_of_layers(config: &mut Map<String, Value>) {
    const SPARSE: &str = "moe_layers_enum";
    let list = |config: &Map<String, Value>, key: &str| config.get(key)?.as_array().cloned();
    if let (None, Some(kinds)) = (config.get(SPARSE), list(config, KINDS)) {
        let sparse = kinds.iter().enumerate().filter(|(_, kind)| **kind == "sparse");
        let sparse: Vec<String> = sparse.map(|(layer, _)| layer.to_string()).collect();
        config.remove(KINDS);
        config.insert(SPARSE.to_owned(), sparse.join(",").into());
    }
    let Some(Value::Object(sections)) = config.get(ROPE) else { return };
    let Some(kinds) = list(config, "layer_types") else { return };
    let section = |kind: &Value| sections.get(kind.as_str()?)?.as_object();
    let of_layers = |key: &str| -> Option<Vec<Value>> {
        kinds.iter().map(|kind| section(kind)?.get(key).cloned()).collect()
    };
    let (Some(thetas), Some(shares)) = (of_layers("rope_theta"), of_layers(PARTIAL)) else {
        return;
    };
    let scaled =
        |section: &&Map<String, Value>| section.get("rope_type") != Some(&"default".into());
    let mut scalings =
        sections.iter().filter_map(|(kind, section)| Some((kind, section.as_object()?)));
    let scaling = scalings.find(|(_, section)| scaled(section));
    if scalings.any(|(_, section)| scaled(&section)) || config.contains_key("rope_theta") {
        return;
    }
    let (kind, scaling) = scaling.map(|(kind, section)| (kind.clone(), section.clone())).unzip();
    config.insert("yarn_only_types".to_owned(), kind.into_iter().collect());
    config.insert(
        "rope_scaling".to_owned(),
        scaling.map_or(Value::Null, |mut scaling| {
            scaling.remove("rope_theta");
            scaling.remove(PARTIAL);
            scaling.into()
        }),
    );
    config.insert("rope_theta".to_owned(), thetas.into());
    config.insert(PARTIALS.to_owned(), shares.into());
    config.remove(ROPE);
}

/// How many layers at the beginning are dense, from a list of all.
fn dense_layers(config: &mut Map<String, Value>) {
    let Some(kinds) = config.get(KINDS).and_then(Value::as_array) else { return };
    let dense = kinds.iter().take_while(|kind| *kind == "dense").count();
    let stated = config.get(FIRST_SPARSE).filter(|stated| !stated.is_null());
    let agrees = stated.is_none_or(|stated| stated.as_u64() == Some(dense as u64));
    if agrees && kinds[dense..].iter().all(|kind| kind == "sparse") {
        config.remove(KINDS);
        config.insert(FIRST_SPARSE.to_owned(), dense.into());
    }
}

/// Sizes of single layers, where all layers of one kind have the same: keys of their own.
fn per_layer(config: &mut Map<String, Value>, family: &Family) {
    let (Some(rules), Some(kinds)) = (&family.per_layer, config.get("layer_types")) else { return };
    let Some(layers) = config.get(PER_LAYER).and_then(Value::as_object) else { return };
    let kinds = kinds.as_array().map_or(&[][..], Vec::as_slice);
    let of_kind = kinds.iter().enumerate().filter(|(_, kind)| **kind == *rules.kind);
    let of_kind: Vec<String> = of_kind.map(|(layer, _)| layer.to_string()).collect();
    let first = of_kind.first().and_then(|layer| layers.get(layer)).and_then(Value::as_object);
    let Some(sizes) = first.cloned() else { return };
    let alike = of_kind.len() == layers.len()
        && of_kind.iter().all(|layer| layers.get(layer).and_then(Value::as_object) == Some(&sizes));
    let places: Option<Vec<(String, Value)>> = sizes
        .iter()
        .map(|(key, value)| Some((rules.keys.get(key)?.clone(), value.clone())))
        .collect();
    let Some(places) = places.filter(|_| alike) else { return };
    let fits = |(key, value): &(String, Value)| {
        config.get(key).is_none_or(|stated| stated.is_null() || stated == value)
    };
    if places.iter().all(fits) {
        config.remove(PER_LAYER);
        for (key, value) in places {
            match key.split_once('.') {
                None => _ = config.insert(key, value),
                Some((object, key)) => {
                    let object = config.entry(object).or_insert_with(|| Map::new().into());
                    if let Some(object) = object.as_object_mut() {
                        object.insert(key.to_owned(), value);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(model_type: &str, saved: &Value, expected: &Value) {
        let with_type = |value: &Value| {
            let mut map = value.as_object().unwrap().clone();
            map.insert("model_type".to_owned(), model_type.into());
            map
        };
        let mut config = with_type(saved);
        put_back(&mut config, &RulePack::builtin());
        assert_eq!(config, with_type(expected), "{model_type}");
    }

    #[test]
    fn keys_that_were_moved_go_back() {
        check(
            "glm4_moe",
            &json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
            &json!({"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.5}),
        );
        check(
            "internlm3",
            &json!({"attention_bias": true, "mlp_bias": false}),
            &json!({"qkv_bias": true, "bias": false}),
        );
        check(
            "deepseek_v3",
            &json!({"mlp_layer_types": ["dense", "sparse", "sparse"]}),
            &json!({"first_k_dense_replace": 1}),
        );
        let kinds = ["sliding_attention", "full_attention"];
        check(
            "gemma4_text",
            &json!({"layer_types": kinds, "per_layer_config": {"1": {"head_dim": 32}}}),
            &json!({"layer_types": kinds, "global_head_dim": 32}),
        );
    }

    #[test]
    fn what_contradicts_itself_stays_to_be_refused() {
        let same = |model_type: &str, value: Value| check(model_type, &value, &value);
        let rope = json!({"partial_rotary_factor": 0.5});
        same("glm4_moe", json!({"rope_parameters": rope, "partial_rotary_factor": 0.25}));
        same("deepseek_v3", json!({"mlp_layer_types": ["sparse", "dense"]}));
        let kinds = ["sliding_attention", "full_attention", "full_attention"];
        let one = json!({"1": {"head_dim": 32}});
        same("gemma4_text", json!({"layer_types": kinds, "per_layer_config": one}));
    }
}
