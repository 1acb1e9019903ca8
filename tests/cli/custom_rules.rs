//! Architectures of the user's own: drafted by `plan`, finished by a person, converted with
//! `--rules`; and what is made of such packages.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use shardpack_converter::Source;
use shardpack_formats::{RulePack, normalise::draft};
use tempfile::tempdir;

use crate::harness::{copy_folder, data, fail, files, path, run, succeed, text};

/// A copy of a reference model under a name that no rules know.
fn rename(model: &str, to: &Path) {
    copy_folder(&data("models").join(model), to);
    let file = to.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["model_type"] = "driftwood".into();
    config["architectures"] = json!(["DriftwoodForCausalLM"]);
    fs::write(file, config.to_string()).unwrap();
}

/// What a person does last: the draft without its points.
fn decide(draft: &str) -> String {
    let (before, rest) = draft.split_once("\ntodo = [").unwrap();
    let (_, after) = rest.split_once("\n]\n").unwrap();
    format!("{before}\n{after}")
}

/// Every stored tensor of a set with its bytes' digest.
fn weights(set: &Path) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for rank in 0.. {
        let Ok(manifest) = fs::read(set.join(format!("node-{rank}/manifest.json"))) else {
            return all;
        };
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        for tensor in manifest["tensors"].as_array().unwrap() {
            let name = format!("{rank} {}", tensor["name"]);
            all.insert(name, json!([tensor["dtype"], tensor["shape"], tensor["blake3"]]));
        }
    }
    all
}

#[test]
fn a_completed_rule_scaffold_converts_to_the_weights_of_the_known_architecture() {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (model, rules) = (at("model"), at("own.toml"));
    rename("olmo2", &model);
    let refused = run(&["plan", path(&model)]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.contains("unknown architecture: model_type is \"driftwood\""), "{said}");
    assert!(said.contains("--scaffold-rules rules.toml"), "{said}");
    let refused = run(&["plan", path(&model), "--scaffold-rules", path(&rules)]);
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stderr);
    assert!(said.contains("own.toml has scaffolded rules based on olmo2 (olmo2)"), "{said}");
    // The option's old name is still accepted.
    let again = text(&run(&["plan", path(&model), "--draft", path(&rules)]).stderr);
    assert!(again.contains("no rules were scaffolded") && again.contains("own.toml"), "{again}");

    // Nobody has decided anything yet.
    let open = fail(1, &["plan", path(&model), "--rules", path(&rules)]);
    let draft = fs::read_to_string(&rules).unwrap();
    let line = 1 + draft.lines().position(|line| line.starts_with("todo = [")).unwrap();
    assert!(open.contains(&format!("own.toml: line {line}: todo: 1 points")), "{open}");
    fs::write(&rules, decide(&draft)).unwrap();
    succeed(&["plan", path(&model), "--rules", path(&rules)]);

    // The same weights, and packages that need no rules of this program.
    let convert = |source: &Path, to: &str, rest: &[&str]| {
        let to = at(to);
        let all = [&["convert", path(source), "-o", path(&to)], rest].concat();
        succeed(&all);
        to
    };
    let own = ["--rules", path(&rules), "--nodes"];
    let known = convert(&data("models/olmo2"), "known", &["--nodes", "2"]);
    let two = convert(&model, "two", &[&own[..], &["2"]].concat());
    assert_eq!(weights(&two), weights(&known));
    let three = convert(&model, "three", &[&own[..], &["3"]].concat());
    let carried = fs::read_to_string(two.join("node-1/rules.toml")).unwrap();
    assert!(!carried.contains("extends") && carried.contains("[families.driftwood]"), "{carried}");
    let resharded = at("resharded");
    succeed(&["reshard", path(&two), "-o", path(&resharded), "--nodes", "3"]);
    assert!(files(&resharded) == files(&three));
    succeed(&["verify", path(&resharded)]);

    let ids = at("ids.json");
    fs::write(&ids, "[5, 300, 7, 81]").unwrap();
    let logits = |set: &Path, name: &str| {
        let out = at(name);
        succeed(&["logits", path(set), "--tokens", path(&ids), "-o", path(&out), "--exact"]);
        fs::read(out).unwrap()
    };
    assert!(logits(&two, "own-logits") == logits(&known, "known-logits"));

    let floats = at("floats");
    succeed(&["export", path(&two), "-o", path(&floats), "--hf"]);
    let rules = floats.join("rules.toml");
    convert(&floats, "again", &["--rules", path(&rules), "--bits", "16"]);
}

#[test]
fn errors_in_rules_name_file_line_and_key() {
    let folder = tempdir().unwrap();
    let (model, rules) = (folder.path().join("model"), folder.path().join("own.toml"));
    rename("llama", &model);
    let own = "schema = 1\nid = 'own'\nextends = 'dense-gqa'\n\n[families.driftwood]\n\
               architectures = ['DriftwoodForCausalLM']\nused = ['mlp_bias', 'pretraining_tp']\n\n\
               [families.driftwood.let]\nffn_biases = 'mlp_bias ?? false'\n";
    fs::write(&rules, own).unwrap();
    succeed(&["plan", path(&model), "--rules", path(&rules)]);
    let check = |from: &str, to: &str, expected: &str| {
        fs::write(&rules, own.replace(from, to)).unwrap();
        let output = folder.path().join("set");
        let args = ["convert", path(&model), "-o", path(&output), "--rules", path(&rules)];
        let error = fail(1, &args);
        assert!(error.contains(&format!("own.toml: {expected}")), "{error}");
        assert!(!output.exists());
    };
    check("mlp_bias ?? false", "mlp_bais ?? false", "line 10: let.ffn_biases");
    check("[families", "[family", "line 5: ");
    check("used = ", "used == ", "line 7: ");
    check("'own'", "'mla'", "line 2: id: \"mla\" is the name of a compiled-in pack");
    fs::remove_file(&rules).unwrap();
    let args = ["plan", path(&model), "--rules", path(&rules)];
    assert!(fail(2, &args).contains("own.toml"));
}

#[test]
fn an_unknown_architecture_is_scaffolded_on_the_nearest_known_rules() {
    let folder = tempdir().unwrap();
    let model = folder.path().join("model");
    rename("olmo2", &model);
    let source = Source::open(&model).unwrap();
    let mut packs = RulePack::builtin();
    packs.retain(|pack| !["olmo2", "olmo3"].contains(&pack.id()));
    let drafted = draft(&source.config, &source.source_tensors(), &packs).unwrap();
    assert_eq!(drafted.nearest, "post-norm (exaone4)", "{}", drafted.text);
    for norm in ["q_norm", "k_norm"] {
        let point = format!("tensor model.layers.{{L}}.self_attn.{norm}.weight has shape [");
        assert!(drafted.text.contains(&point), "{}", drafted.text);
    }
    // What a person makes of it: the norms are over all heads at once, and cut with them.
    let own = decide(&drafted.text);
    let (own, _) = own.split_once("\n[[tensors]]").unwrap();
    let own = own.replace("qk_norm = \"'head'\"", "qk_norm = \"'full'\"");
    let norm = |name: &str, axis: &str| {
        format!(
            "\n[[tensors]]\nname = 'model.layers.{{L}}.self_attn.{name}.weight'\n\
             shape = ['{axis}_size']\ncut = 'vector({axis})'\nrequired = true\n"
        )
    };
    let own = own + &norm("q_norm", "q") + &norm("k_norm", "kv");
    let rules = folder.path().join("own.toml");
    fs::write(&rules, own).unwrap();
    let set = |source: &Path, name: &str, rest: &[&str]| {
        let to = folder.path().join(name);
        succeed(&[&["convert", path(source), "-o", path(&to), "--nodes", "2"], rest].concat());
        weights(&to)
    };
    let found = set(&model, "own", &["--rules", path(&rules)]);
    assert_eq!(found, set(&data("models/olmo2"), "known", &[]));
}

#[test]
fn the_families_page_lists_every_architecture() {
    let page = include_str!("../../docs/families.md");
    let has = |row: &dyn Fn(&str) -> bool| page.lines().any(row);
    let mut known = 0;
    for pack in RulePack::builtin() {
        for model_type in pack.model_types() {
            known += 1;
            let name = format!("`{model_type}`");
            let is_named = |line: &str| {
                line.split('|')
                    .nth(1)
                    .is_some_and(|cell| cell.split(", ").any(|own| own.trim() == name))
            };
            assert!(has(&is_named), "docs/families.md has no row for {name}");
        }
    }
    assert!(known > 80, "{known}");
    let refused = include_str!("../../formats/rules/refused.toml");
    let refused = refused.split_once("[refused]\n").unwrap().1;
    for line in refused.lines() {
        let (model_type, reason) = line.split_once(" = ").unwrap();
        let row = format!("| `{model_type}` | {} |", reason.trim_matches('"'));
        assert!(page.contains(&row), "docs/families.md does not say: {row}");
    }
}
