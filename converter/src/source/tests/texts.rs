//! Text files that other programs put together when they load a model.

use super::*;

/// The small trained model with some files changed; null removes one.
fn changed(changes: &[(&str, Option<Vec<u8>>)]) -> Source {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/kjv-4m");
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    for (name, content) in changes {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match content {
            Some(content) => fs::write(path, content).unwrap(),
            None => fs::remove_file(path).unwrap(),
        }
    }
    Source::open(folder.path()).unwrap()
}

fn json_of(source: &Source, name: &str) -> Value {
    serde_json::from_slice(&source.text[name]).unwrap()
}

fn check_note(source: &Source, words: &[&str]) {
    let all = |note: &&String| words.iter().all(|word| note.contains(word));
    assert!(source.notes.iter().any(|note| all(&note)), "{words:?} in {:?}", source.notes);
}

fn bytes(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

const GENERATION: &str = "generation_config.json";
const CONFIG: &str = "tokenizer_config.json";

#[test]
fn a_model_whose_files_are_right_is_left_alone() {
    let source = changed(&[]);
    assert!(source.notes.is_empty() && source.originals.is_empty(), "{:?}", source.notes);
}

#[test]
fn an_eos_id_outside_the_vocabulary_is_named_and_left_out() {
    for (ids, kept) in [
        (json!([2, 0, 99_999]), json!([2, 0])),
        (json!(2048), json!([2])),
        (json!([70_000, 80_000]), json!([2])),
    ] {
        let source = changed(&[(GENERATION, Some(bytes(&json!({ "eos_token_id": ids }))))]);
        let found = json_of(&source, GENERATION)["eos_token_id"].clone();
        let found: BTreeSet<u64> = serde_json::from_value(found).unwrap();
        let kept: BTreeSet<u64> = serde_json::from_value(kept).unwrap();
        assert!(found.is_subset(&kept), "{found:?}");
        check_note(&source, &["eos_token_id", GENERATION, "vocabulary of 2048"]);
        assert!(source.originals.contains_key(GENERATION));
    }
}

#[test]
fn a_generation_config_that_is_not_json_is_named_and_left_out() {
    for content in ["", "{", "[]", "{\"eos_token_id\": 2"] {
        let source = changed(&[(GENERATION, Some(content.into()))]);
        check_note(&source, &[GENERATION, "is left out"]);
        assert!(!source.text.contains_key(GENERATION));
    }
}

#[test]
fn a_generation_config_without_ends_is_left_alone() {
    for content in ["{}", r#"{"temperature": 0.5}"#, r#"{"eos_token_id": null}"#] {
        let source = changed(&[(GENERATION, Some(content.into()))]);
        assert_eq!(source.text[GENERATION], content.as_bytes());
        assert!(source.notes.is_empty(), "the config has them: {:?}", source.notes);
    }
}

#[test]
fn byte_order_marks_are_no_part_of_a_text() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/kjv-4m");
    for name in ["tokenizer.json", CONFIG, GENERATION, "chat_template.jinja", "config.json"] {
        let own = fs::read(model.join(name)).unwrap();
        let marked = [b"\xef\xbb\xbf".as_slice(), &own].concat();
        let source = changed(&[(name, Some(marked.clone()))]);
        if name != "config.json" {
            assert_eq!(source.text[name], own, "{name}");
            assert_eq!(source.originals[name], marked, "the manifest states what was read");
            check_note(&source, &[name, "byte order mark"]);
        }
    }
}

#[test]
fn templates_with_names_of_their_own_files_are_used() {
    let file = |name: &str| format!("additional_chat_templates/{name}.jinja");
    let template = |text: &str| Some(text.as_bytes().to_vec());
    let (tools, rag) = (file("tool_use"), file("rag"));
    let files = [(tools.as_str(), template("TOOLS{{ messages }}")), (&rag, template("RAG"))];
    let source = changed(&files);
    let templates = chat::lookup(&source.text).unwrap().unwrap();
    assert_eq!(templates.tools.as_deref(), Some("TOOLS{{ messages }}"));
    assert!(templates.default.contains("<|im_start|>"), "{}", templates.default);
    check_note(&source, &["additional_chat_templates", "rag, tool_use"]);
    let list = json_of(&source, CONFIG)["chat_template"].clone();
    assert_eq!(list.as_array().unwrap().len(), 3, "{list}");
    assert!(!source.text.keys().any(|name| name.contains('/') || name == chat::TEMPLATE_FILE));
    // Without one that has no name.
    let alone = changed(&[files.as_slice(), &[("chat_template.jinja", None)]].concat());
    let templates = chat::lookup(&alone.text).unwrap().unwrap();
    assert_eq!(templates.default, "TOOLS{{ messages }}");
    // In place of it.
    let named = file("default");
    let default = [(named.as_str(), template("D")), ("chat_template.jinja", None)];
    let source = changed(&default);
    assert_eq!(chat::lookup(&source.text).unwrap().unwrap().default, "D");
}

#[test]
fn tokens_outside_of_the_tokenizer_are_added_where_the_model_has_rows() {
    let config = |rows: u64| {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/kjv-4m");
        let mut config: Value =
            serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
        config["vocab_size"] = rows.into();
        ("config.json", Some(bytes(&config)))
    };
    let decoder = json!({ "eos_token": "<|im_end|>", "added_tokens_decoder": {
        "2048": { "content": "<new_tok>", "special": true, "normalized": false },
    } });
    let source = changed(&[config(2112), (CONFIG, Some(bytes(&decoder)))]);
    let ids = tokenizer::added::added_ids(&source.text["tokenizer.json"]);
    assert_eq!(ids["<new_tok>"], 2048);
    check_note(&source, &["tokenizer.json", "<new_tok>", "2048"]);
    let legacy = ("added_tokens.json", Some(bytes(&json!({ "<new_tok>": 2048 }))));
    let source = changed(&[config(2112), legacy.clone()]);
    let ids = tokenizer::added::added_ids(&source.text["tokenizer.json"]);
    assert_eq!(ids["<new_tok>"], 2048);
    let source = changed(&[config(2048), legacy]);
    check_note(&source, &["no embedding", "<new_tok>"]);
}

#[test]
fn the_token_that_ends_a_turn_ends_an_answer() {
    // ChatML over a vocabulary whose configuration names the document's end alone.
    let without = json!({ "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>" });
    let config = {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/kjv-4m");
        let mut config: Value =
            serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
        config["eos_token_id"] = 0.into();
        Some(bytes(&config))
    };
    let files = [(CONFIG, Some(bytes(&without))), ("config.json", config)];
    let ends = |source: &Source| json_of(source, GENERATION)["eos_token_id"].clone();
    let generation = (GENERATION, Some(bytes(&json!({ "eos_token_id": 0, "top_k": 4 }))));
    let source = changed(&[files.as_slice(), &[generation]].concat());
    assert_eq!(ends(&source), json!([0, 2]));
    assert_eq!(json_of(&source, GENERATION)["top_k"], 4);
    check_note(&source, &["<|im_end|>", "token 2", GENERATION]);
    // There is no such file.
    let source = changed(&[files.as_slice(), &[(GENERATION, None)]].concat());
    assert_eq!(ends(&source), json!([0, 2]));
    assert!(source.derived.contains(GENERATION));
    // A template whose turns end otherwise, in the middle of the line or before the next turn.
    for (template, expected) in [
        ("{% for m in messages %}{{ m.content }} <|endoftext|>{% endfor %}", Value::Null),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Value::Null),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", json!([0, 1])),
    ] {
        let template = ("chat_template.jinja", Some(template.as_bytes().to_vec()));
        let source = changed(&[files.as_slice(), &[template, (GENERATION, None)]].concat());
        let found = source.text.get(GENERATION).map_or(Value::Null, |_| ends(&source));
        assert_eq!(found, expected);
    }
}
