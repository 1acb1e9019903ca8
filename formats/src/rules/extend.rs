//! Packs that build on others: the tables of two rule files become one.
//!
//! Lists of keys, prefixes, patterns and requirements are joined; tables are joined key by key,
//! the extending pack's value in place of the other one's, but for `spec.block`, which is replaced. A tensor of a name that the other pack
//! has changes the fields that it states; a new one stands behind the tensor that it names with
//! `after`, else at the end. `without` takes tensors away. Families are the extending pack's own.
//! `parts` names what several packs add to others: each is put over the other pack before the
//! extending one.

use toml::{Table, Value};

use super::{RuleError, builtin_text, part_text};

/// Most packs that build on each other.
const MAX_DEPTH: usize = 4;

/// Lists that are joined, by the table that they stand in.
const JOINED: &[(&str, &[&str])] =
    &[("", &["strip", "ignore", "require"]), ("config", &["used", "ignored"])];

/// Tables that are taken as they are: what they leave out is not there.
const REPLACED: &[&str] = &["spec.block"];

/// The file with all that it extends.
pub(super) fn extended(mut file: Table, depth: usize) -> Result<Table, RuleError> {
    let Some(base) = file.remove("extends") else { return Ok(file) };
    let invalid =
        |place: &str, problem: String| RuleError::Invalid { place: place.to_owned(), problem };
    if depth == MAX_DEPTH {
        let problem = format!("packs build on each other more than {MAX_DEPTH} times");
        return Err(invalid("extends", problem));
    }
    let name = base.as_str().unwrap_or_default();
    let Some(text) = builtin_text(name) else {
        return Err(invalid(
            "extends",
            format!("{} is not the name of a compiled-in pack", shown(&base)),
        ));
    };
    let mut base = extended(toml::from_str(text)?, depth + 1)?;
    base.remove("families");
    let parts = file.remove("parts");
    let without = file.remove("without");
    let tensors = file.remove("tensors");
    let mut all = match base.remove("tensors") {
        Some(Value::Array(tensors)) => tensors,
        _ => Vec::new(),
    };
    for name in parts.iter().flat_map(|names| names.as_array().into_iter().flatten()) {
        let text = name.as_str().and_then(part_text);
        let unknown = || invalid("parts", format!("{} is not a compiled-in part", shown(name)));
        let mut part: Table = toml::from_str(text.ok_or_else(unknown)?)?;
        if let Some(Value::Array(tensors)) = part.remove("tensors") {
            for tensor in tensors {
                add(&mut all, tensor).map_err(|problem| invalid("tensors", problem))?;
            }
        }
        join("", &mut base, part);
    }
    for name in without.iter().flat_map(|names| names.as_array().into_iter().flatten()) {
        let Some(at) = position(&all, name) else {
            return Err(invalid(
                "without",
                format!("{} is not a tensor of the other pack", shown(name)),
            ));
        };
        all.remove(at);
    }
    if let Some(Value::Array(tensors)) = tensors {
        for tensor in tensors {
            add(&mut all, tensor).map_err(|problem| invalid("tensors", problem))?;
        }
    }
    // What the other pack passes over may mean something here.
    let used = file.get("config").and_then(|config| config.get("used")).cloned();
    let ignored = base.get_mut("config").and_then(|config| config.get_mut("ignored"));
    if let (Some(Value::Array(used)), Some(Value::Array(ignored))) = (used, ignored) {
        ignored.retain(|key| !used.contains(key));
    }
    join("", &mut base, file);
    base.insert("tensors".to_owned(), Value::Array(all));
    Ok(base)
}

/// A value for a message.
fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| format!("this {}", value.type_str()), |text| format!("{text:?}"))
}

fn position(tensors: &[Value], name: &Value) -> Option<usize> {
    tensors.iter().position(|tensor| tensor.get("name") == Some(name))
}

/// Changes a tensor, or adds it.
fn add(all: &mut Vec<Value>, mut tensor: Value) -> Result<(), String> {
    let Value::Table(own) = &mut tensor else { return Err("a tensor is a table".to_owned()) };
    if let Some(old) = own.remove("cut") {
        own.entry("shard").or_insert(old);
    }
    let after = own.remove("after");
    let name = own.get("name").cloned().unwrap_or(Value::Boolean(false));
    if let Some(at) = position(all, &name) {
        if after.is_some() {
            return Err(format!("{} has its place already", shown(&name)));
        }
        if let Value::Table(there) = &mut all[at] {
            there.extend(own.clone());
        }
        return Ok(());
    }
    let at = match &after {
        None => all.len(),
        Some(after) => {
            let found = position(all, after);
            let problem =
                || format!("{} comes after {}, which is not a tensor", shown(&name), shown(after));
            found.ok_or_else(problem)? + 1
        }
    };
    all.insert(at, tensor);
    Ok(())
}

/// Puts the contents of `file` over those of `base`, which stands at `place`.
fn join(place: &str, base: &mut Table, file: Table) {
    for (key, value) in file {
        let joined = JOINED.iter().any(|(table, keys)| *table == place && keys.contains(&&*key));
        match (base.get_mut(&key), value) {
            (Some(Value::Table(there)), Value::Table(own)) => {
                let inner = if place.is_empty() { key } else { format!("{place}.{key}") };
                if REPLACED.contains(&inner.as_str()) {
                    *there = own;
                } else {
                    join(&inner, there, own);
                }
            }
            (Some(Value::Array(there)), Value::Array(own)) if joined => there.extend(own),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extend(file: &str) -> Result<Table, RuleError> {
        extended(toml::from_str(file).unwrap(), 0)
    }

    #[test]
    fn lists_are_joined_and_values_replaced() {
        let base: Table = extend("extends = 'decoder'").unwrap();
        let own = extend(
            "extends = 'decoder'\nid = 'own'\n[config]\nused = ['new_key']\n[let]\ntied = 'true'\n",
        )
        .unwrap();
        assert_eq!(own["id"].as_str(), Some("own"));
        let used = |table: &Table| table["config"]["used"].as_array().unwrap().clone();
        assert_eq!(used(&own).len(), used(&base).len() + 1);
        assert_eq!(used(&own).last().unwrap().as_str(), Some("new_key"));
        assert_eq!(own["let"]["tied"].as_str(), Some("true"));
        assert_eq!(own["let"]["q_size"], base["let"]["q_size"]);
        assert_eq!(own["spec"], base["spec"]);
        assert!(own.get("families").is_none() && own.get("extends").is_none());
    }

    #[test]
    fn tensors_are_changed_added_and_taken_away() {
        let own = extend(
            "extends = 'decoder'\nwithout = ['model.layers.{L}.mlp.gate_proj.bias']\n\
             [[tensors]]\nname = 'model.norm.weight'\nrequired = 'tied'\n\
             [[tensors]]\nname = 'model.norm.bias'\nafter = 'model.norm.weight'\n\
             [[tensors]]\nname = 'last'\n",
        )
        .unwrap();
        let tensors = own["tensors"].as_array().unwrap();
        let at = |name: &str| position(tensors, &Value::String(name.to_owned()));
        assert_eq!(at("model.layers.{L}.mlp.gate_proj.bias"), None);
        let norm = at("model.norm.weight").unwrap();
        assert_eq!(tensors[norm]["required"].as_str(), Some("tied"));
        assert_eq!(tensors[norm]["shard"].as_str(), Some("replicate"));
        assert_eq!(at("model.norm.bias"), Some(norm + 1));
        assert_eq!(at("last"), Some(tensors.len() - 1));
    }

    #[test]
    fn the_older_key_of_the_sharding_rule_replaces_that_of_the_other_pack() {
        let own = extend(
            "extends = 'decoder'\n[[tensors]]\nname = 'model.norm.weight'\ncut = 'vector(q)'\n",
        )
        .unwrap();
        let tensors = own["tensors"].as_array().unwrap();
        let norm = &tensors[position(tensors, &"model.norm.weight".into()).unwrap()];
        assert_eq!(norm["shard"].as_str(), Some("vector(q)"));
        assert!(norm.get("cut").is_none());
    }

    #[test]
    fn parts_stand_between_the_other_pack_and_the_extending_one() {
        let own = extend(
            "extends = 'moe-gqa'\nparts = ['mamba']\n[let]\nlin_groups = '2'\n\
             [[tensors]]\nname = 'model.layers.{L}.linear_attn.D'\nrequired = 'tied'\n",
        )
        .unwrap();
        assert_eq!(own["let"]["lin_groups"].as_str(), Some("2"));
        assert_eq!(own["let"]["mamba"].as_str(), Some("'mamba'"));
        assert_eq!(own["spec"]["layer"]["delta"].as_str(), Some("is_mamba"));
        assert!(own["spec"]["layer"].get("moe").is_some() && own.get("parts").is_none());
        let tensors = own["tensors"].as_array().unwrap();
        let at = |name: &str| position(tensors, &Value::String(name.to_owned())).unwrap();
        let norm = at("model.layers.{L}.input_layernorm.weight");
        assert_eq!(at("model.layers.{L}.linear_attn.in_proj_q.weight"), norm + 1);
        let skip = &tensors[at("model.layers.{L}.linear_attn.D")];
        assert_eq!(skip["required"].as_str(), Some("tied"));
        assert_eq!(skip["shard"].as_str(), Some("vector(lin_v)"));
    }

    #[test]
    fn slips_are_named() {
        let check = |file: &str, expected: &str| {
            let error = extend(file).expect_err(file).to_string();
            assert!(error.contains(expected), "{error}");
        };
        check("extends = 'nobody'", "\"nobody\" is not the name of a compiled-in pack");
        check("extends = 1", "this integer is not the name of a compiled-in pack");
        check("extends = 'decoder'\nwithout = ['x']", "\"x\" is not a tensor of the other pack");
        check("extends = 'decoder'\nparts = ['x']", "\"x\" is not a compiled-in part");
        check("extends = 'decoder'\nparts = [1]", "this integer is not a compiled-in part");
        check(
            "extends = 'decoder'\n[[tensors]]\nname = 'a'\nafter = 'b'",
            "\"a\" comes after \"b\", which is not a tensor",
        );
    }
}
