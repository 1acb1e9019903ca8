//! Every published configuration of the table is planned, or refused with its reason. Its tensors
//! are those that the rules expect of it: what is tested are its keys, its values and its sizes.

use std::fmt::Write as _;

use serde_json::{Map, json};
use shardpack_containers::stored::{Documents, StoredConfig};
use shardpack_formats::normalise::expected_tensors;

use super::*;

/// `{"$cycle": […], "$len": n}` and `{"$runs": [[value, n], …]}` are lists; the table is smaller so.
fn spelled_out(value: &Value) -> Value {
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    match value {
        Value::Object(map) => {
            if let Some(cycle) = map.get("$cycle") {
                let cycle = cycle.as_array().unwrap();
                return cycle.iter().cycle().take(number(&map["$len"])).cloned().collect();
            }
            if let Some(runs) = map.get("$runs") {
                let run = |run: &Value| vec![run[0].clone(); number(&run[1])];
                return runs.as_array().unwrap().iter().flat_map(run).collect();
            }
            let pair = |(key, value): (&String, &Value)| (key.clone(), spelled_out(value));
            Value::Object(map.iter().map(pair).collect::<Map<_, _>>())
        }
        Value::Array(items) => items.iter().map(spelled_out).collect(),
        other => other.clone(),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text
}

/// What becomes of a configuration, in a line.
fn outcome(name: &str, config: Value) -> String {
    let documents = Documents { config: Some(&config), ..Documents::default() };
    let stored = match StoredConfig::parse(documents) {
        Err(error) => return format!("refused: {}", chain(&error)),
        Ok(stored) => stored.map_or("floats", |stored| stored.name()),
    };
    let packs = RulePack::builtin();
    let tensors = match expected_tensors(&config, &packs) {
        Err(error) => return format!("refused: {}", chain(&error)),
        Ok(tensors) => tensors,
    };
    let normalised = match resolve(&config, &tensors, &packs) {
        Err(error) => return format!("refused: {}", chain(&error)),
        Ok(normalised) => normalised,
    };
    // What a package says of itself is the same model.
    let packaged = shardpack_formats::config_for_package(&config, &normalised, None);
    let again = expected_tensors(&packaged, &packs)
        .and_then(|tensors| resolve(&packaged, &tensors, &packs));
    let again = again.unwrap_or_else(|error| panic!("{name}: {}", chain(&error)));
    assert_eq!(again.spec, normalised.spec, "{name}");
    let shapes = Shapes { name: name.to_owned(), config, tensors, gigabytes: [0.0; 3] };
    let mut words = format!(
        "planned: {} ({}), {stored}, {} tensors, context {}, at 4 bits in MB:",
        normalised.spec.model_type,
        normalised.spec.rules,
        normalised.tensors.len(),
        normalised.spec.max_positions
    );
    for nodes in [1, 2, 3, 4, 8] {
        let held = plan(&shapes, &normalised, 4, nodes).weight_bytes_per_rank();
        let _ = write!(words, " {}", held.iter().max().unwrap() / 1_000_000);
    }
    words
}

#[test]
fn every_published_configuration_is_planned_or_refused_with_its_reason() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/published.json"));
    let table: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let table = table.as_object().unwrap();
    assert!(table.len() >= 82);
    let mut lines = String::new();
    for (name, config) in table {
        let _ = writeln!(lines, "{name}: {}", outcome(name, spelled_out(config)));
    }
    insta::assert_snapshot!(lines);
}

#[test]
fn lists_of_the_table_are_spelled_out() {
    let list = json!({"a": {"$cycle": [1, 2], "$len": 3}, "b": {"$runs": [["x", 2], ["y", 1]]}});
    assert_eq!(spelled_out(&list), json!({"a": [1, 2, 1], "b": ["x", "x", "y"]}));
}

/// Of every reference model, the form that its rules call published is the one that it has.
#[test]
fn published_forms_are_those_of_the_reference_models() {
    let models = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/models"));
    let mut families = 0;
    for folder in fs::read_dir(models).unwrap().map(|entry| entry.unwrap().path()) {
        if !folder.is_dir() {
            continue;
        }
        families += 1;
        let source = crate::source::Source::open(&folder).unwrap();
        let packs = RulePack::builtin();
        let normalised = resolve(&source.config, &source.source_tensors(), &packs).unwrap();
        for tensor in &normalised.tensors {
            let own = || vec![tensor.name.clone()];
            let published = tensor.published.as_ref().map_or_else(own, |form| form.names.clone());
            let stored = |name: &String| name.replacen("model.language_model.", "model.", 1);
            let stored: Vec<String> = tensor.sources.iter().map(stored).collect();
            assert_eq!(published, stored, "{}", folder.display());
            if let Some(published) = &tensor.published {
                assert_eq!(published.view, tensor.view, "{}: {}", folder.display(), tensor.name);
            }
        }
    }
    assert!(families >= 64);
}
