//! Requests of the shapes that agents send, through every chat template at hand: none is refused,
//! nothing of what was said is lost but by the template itself, and the snapshots show what the model sees.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use serde_json::Value;
use shardpack_chat::model::ChatModel;

use super::{Dialect, ParsedRequest};

const KJV: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/kjv-4m");

/// Folders of chat templates: of every tool-call format, published ones, those of models without
/// one, and such as refuse what the published ones of their families refuse.
const TEMPLATES: [&str; 4] = [
    concat!(env!("CARGO_MANIFEST_DIR"), "/../chat/src/tools/parser/templates"),
    concat!(env!("CARGO_MANIFEST_DIR"), "/../chat/src/template/golden"),
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../formats/templates"),
    concat!(env!("CARGO_MANIFEST_DIR"), "/src/dialect/tests/agents/templates"),
];

/// Fewer would mean that a folder has moved.
const TEMPLATES_MIN: usize = 38;

/// Templates whose whole prompts are shown, each with the request to show.
const SHOWN: [(&str, &str); 6] = [
    ("mistral_strict", "codex-resumed"),
    ("gemma2", "claude-code-resumed"),
    ("gemma3", "opencode-calls"),
    ("llama31", "opencode-cut-call"),
    ("llama2", "codex-calls"),
    ("qwen35", "aider-first"),
];

/// What templates leave out by themselves, as their models were trained: what is said beside a call,
/// and in `mistral` the system message where a result is the last.
const LEFT_OUT: [(&str, &[&str]); 6] = [
    ("llama3", &["SAID one"]),
    ("llama31", &["SAID one"]),
    ("llama_json", &["SAID one"]),
    ("mistral", &["SAID one", "INSTRUCTIONS", "DEVELOPER", "SYSTEM of", "SYSTEM two"]),
    ("mistral_json", &["SAID one"]),
    ("mistral_strict", &["SAID one"]),
];

struct Recorded {
    name: String,
    request: ParsedRequest,
    /// What the prompt must hold.
    shown: Vec<String>,
}

fn recorded() -> Vec<Recorded> {
    let list: Vec<Value> = serde_json::from_str(include_str!("agents/requests.json")).unwrap();
    let one = |value: &Value| {
        let name = value["name"].as_str().unwrap().to_owned();
        let dialect = match value["path"].as_str().unwrap() {
            "chat" => Dialect::Chat,
            "responses" => Dialect::Responses,
            "messages" => Dialect::Messages,
            other => panic!("{other}"),
        };
        let request = dialect.parse(value["body"].to_string().as_bytes());
        let request = request.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let shown = value["shown"].as_array().unwrap().iter();
        let shown = shown.map(|text| text.as_str().unwrap().to_owned()).collect();
        Recorded { name, request, shown }
    };
    list.iter().map(one).collect()
}

/// The small model under every template, by the template's name.
fn models() -> BTreeMap<String, ChatModel> {
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"]
    {
        fs::copy(Path::new(KJV).join(file), folder.path().join(file)).unwrap();
    }
    let mut models = BTreeMap::new();
    for templates in TEMPLATES {
        for entry in fs::read_dir(templates).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "jinja") {
                continue;
            }
            fs::copy(&path, folder.path().join("chat_template.jinja")).unwrap();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            // No conversation: a list of what the language can do.
            if name == "features" {
                continue;
            }
            let model = ChatModel::open(folder.path());
            models.insert(name.clone(), model.unwrap_or_else(|error| panic!("{name}: {error:?}")));
        }
    }
    models
}

#[test]
fn no_template_refuses_what_agents_send() {
    let (recorded, models) = (recorded(), models());
    assert!(models.len() >= TEMPLATES_MIN, "{:?}", models.keys());
    let mut table = String::new();
    let mut faults = String::new();
    let mut prompts: BTreeMap<(&str, &str), String> = BTreeMap::new();
    for (template, model) in &models {
        let mut by_change: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for Recorded { name, request, shown } in &recorded {
            let rendered = match model.render(&request.request) {
                Ok(rendered) => rendered,
                Err(error) => {
                    let _ = writeln!(faults, "{template}, {name}: {error}");
                    continue;
                }
            };
            let own = LEFT_OUT.iter().find(|(own, _)| own == template);
            let own = own.map_or(&[][..], |(_, words)| *words);
            let is_lost = |words: &&String| {
                !rendered.text.contains(words.as_str()) && !own.contains(&words.as_str())
            };
            for words in shown.iter().filter(is_lost) {
                let _ = writeln!(faults, "{template}, {name}: {words:?} is lost");
            }
            if let Some(&own) = SHOWN.iter().find(|own| **own == (template.as_str(), name.as_str()))
            {
                prompts.insert(own, rendered.text);
            }
            by_change.entry(rendered.adjustments.join(", ")).or_default().push(name);
        }
        let _ = writeln!(table, "{template}");
        for (changes, names) in by_change {
            let changes = if changes.is_empty() { "as it came".to_owned() } else { changes };
            let _ = writeln!(table, "  {changes}: {}", names.join(" "));
        }
    }
    assert!(faults.is_empty(), "{faults}");
    assert_eq!(prompts.len(), SHOWN.len());
    insta::assert_snapshot!("changes", table);
    for ((template, name), text) in prompts {
        insta::assert_snapshot!(format!("{template}_{name}"), text);
    }
}
