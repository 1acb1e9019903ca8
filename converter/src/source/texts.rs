//! The text files of a source as packages have them: what other programs put together when they load
//! a model stands in one place, and what no reader could use is left out, with a note.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use shardpack_containers::tokenizer::{Converted, TOKENIZER_FILE, added};
use shardpack_formats::{
    chat::{self, special_tokens, turn_end::after_answer},
    python_json,
};

use crate::checkpoint::{BYTE_ORDER_MARK, TEMPLATE_ENDING, TEMPLATE_FOLDER};

const CONFIG: &str = "tokenizer_config.json";
const GENERATION: &str = "generation_config.json";

type Texts = BTreeMap<String, Vec<u8>>;

/// Takes marks off that are no part of a text.
pub(super) fn strip_marks(texts: &mut Texts, notes: &mut Vec<String>) {
    for (name, bytes) in texts {
        if bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
            notes.push(format!("{name} begins with a byte order mark, which is left out"));
        }
    }
}

fn object(texts: &Texts, name: &str) -> Option<Map<String, Value>> {
    match python_json::parse(texts.get(name)?) {
        Ok(Value::Object(object)) => Some(object),
        _ => None,
    }
}

/// Named templates that stand in files of their own become the list that `tokenizer_config.json`
/// may have, which every reader knows.
pub(super) fn fold_templates(texts: &mut Texts, notes: &mut Vec<String>) {
    let own = |name: &str| {
        Some(name.strip_prefix(TEMPLATE_FOLDER)?.strip_suffix(TEMPLATE_ENDING)?.to_owned())
    };
    let named: Vec<(String, String)> =
        texts.keys().filter_map(|name| Some((own(name)?, name.clone()))).collect();
    if named.is_empty() {
        return;
    }
    let config = if texts.contains_key(CONFIG) { object(texts, CONFIG) } else { Some(Map::new()) };
    let default = chat::lookup(texts).ok().flatten();
    let mut found: Vec<(String, String)> = Vec::new();
    for (name, file) in named {
        let text = texts.remove(&file).unwrap_or_default();
        found.push((name, String::from_utf8_lossy(&text).into_owned()));
    }
    let Some(mut config) = config else { return };
    let template = |name: &str| found.iter().find(|(found, _)| found == name);
    let default = default.map(|templates| templates.default);
    let default =
        default.or_else(|| Some(template("default").or_else(|| template("tool_use"))?.1.clone()));
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    let Some(default) = default else {
        notes.push(format!("{TEMPLATE_FOLDER} has {}, but there is no default", names.join(", ")));
        return;
    };
    let mut list = vec![json!({ "name": "default", "template": default })];
    let others = found.iter().filter(|(name, _)| name != "default");
    list.extend(others.map(|(name, text)| json!({ "name": name, "template": text })));
    notes.push(format!(
        "chat templates of {TEMPLATE_FOLDER} ({}) go into {CONFIG}",
        names.join(", ")
    ));
    config.insert("chat_template".to_owned(), list.into());
    texts.remove(chat::TEMPLATE_FILE);
    texts.remove(chat::LEGACY_FILE);
    texts.insert(CONFIG.to_owned(), Value::Object(config).to_string().into_bytes());
}

/// Adds the tokens that the other files name to the tokenizer.
pub(super) fn add_tokens(
    texts: &mut Texts,
    converted: &mut Option<Result<Converted, String>>,
    rows: Option<u64>,
    notes: &mut Vec<String>,
) {
    let config = object(texts, CONFIG).map(Value::Object).unwrap_or_default();
    let file = object(texts, "added_tokens.json").map(Value::Object);
    let document = match converted {
        Some(Ok(converted)) => Some(&mut converted.json),
        _ => texts.get_mut(TOKENIZER_FILE),
    };
    let Some(document) = document else { return };
    let Some(completed) = added::complete(document, &config, file.as_ref(), rows) else { return };
    let listed = |tokens: &[(String, u64)]| {
        let shown: Vec<String> =
            tokens.iter().take(8).map(|(text, id)| format!("{text:?} ({id})")).collect();
        let more = tokens.len().saturating_sub(shown.len());
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        shown.join(", ") + &more
    };
    if let Some(json) = completed.json {
        *document = json;
        let tokens = listed(&completed.added);
        notes.push(format!(
            "tokens that stand outside of {TOKENIZER_FILE} are added to it: {tokens}"
        ));
    }
    if !completed.without_row.is_empty() {
        let tokens = listed(&completed.without_row);
        notes.push(format!("tokens that the model has no embedding for are left out: {tokens}"));
    }
}

/// What ends an answer: ids within the vocabulary, and the token that the chat template ends turns
/// with.
pub(super) fn complete_ends(
    texts: &mut Texts,
    converted: Option<&Converted>,
    config: &Value,
    rows: Option<u64>,
    notes: &mut Vec<String>,
) {
    if let Some(bytes) = texts.get(GENERATION) {
        let problem = match python_json::parse(bytes) {
            Ok(Value::Object(_)) => None,
            Ok(_) => Some("it is no JSON object".to_owned()),
            Err(error) => Some(format!("it is not JSON: {error}")),
        };
        if let Some(problem) = problem {
            notes.push(format!("{GENERATION} is left out: {problem}"));
            texts.remove(GENERATION);
        }
    }
    let generation = object(texts, GENERATION);
    let of_generation = generation.as_ref().and_then(|object| object.get("eos_token_id"));
    let of_generation = of_generation.map_or(Vec::new(), ids);
    let of_config = [ids(&config["eos_token_id"]), ids(&config["text_config"]["eos_token_id"])];
    let beyond = |id: &u64| rows.is_some_and(|rows| *id >= rows);
    for (file, ids) in [(GENERATION, &of_generation), ("config.json", &of_config.concat())] {
        let wrong: BTreeSet<String> =
            ids.iter().filter(|id| beyond(id)).map(u64::to_string).collect();
        if !wrong.is_empty() {
            let wrong: Vec<String> = wrong.into_iter().collect();
            notes.push(format!(
                "eos_token_id {} of {file} is outside the model's vocabulary of {} tokens and ends no answer",
                wrong.join(", "),
                rows.unwrap_or(0),
            ));
        }
    }
    let mut ends: Vec<u64> =
        if of_generation.is_empty() { of_config.concat() } else { of_generation.clone() };
    ends.retain(|id| !beyond(id));
    let all = [&ends[..], &of_config.concat()].concat();
    let end = turn_end(texts, converted, &all);
    if let Some((text, id)) = &end {
        notes.push(format!(
            "the chat template ends a turn with {text:?} (token {id}), which no eos_token_id names: it is added to {GENERATION}"
        ));
        ends.push(*id);
    }
    if end.is_some() || of_generation.iter().any(beyond) {
        let mut object = generation.unwrap_or_default();
        object.insert("eos_token_id".to_owned(), ends.into());
        texts.insert(GENERATION.to_owned(), Value::Object(object).to_string().into_bytes());
    }
}

/// One id or a list of them.
fn ids(value: &Value) -> Vec<u64> {
    match value {
        Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
        value => value.as_u64().into_iter().collect(),
    }
}

/// The token after an assistant's answer, unless one that ends answers stands there.
fn turn_end(texts: &Texts, converted: Option<&Converted>, ends: &[u64]) -> Option<(String, u64)> {
    let templates = chat::lookup(texts).ok().flatten()?;
    let config = object(texts, CONFIG).map(Value::Object).unwrap_or_default();
    let specials = special_tokens(&config);
    let document = converted.map(|converted| &converted.json).or_else(|| texts.get(TOKENIZER_FILE));
    let tokens = added::added_ids(document?);
    let eos = specials.get("eos_token").and_then(|eos| tokens.get(eos));
    let ends_answers = |id: u64| ends.contains(&id) || eos == Some(&id);
    let found: Vec<Vec<(String, u64)>> =
        after_answer(&templates, &specials).iter().map(|text| tokens_of(text, &tokens)).collect();
    if found.iter().flatten().any(|(_, id)| ends_answers(*id)) {
        return None;
    }
    found.into_iter().find_map(|tokens| tokens.into_iter().next())
}

/// The added tokens of a text in their order; of those that begin together the longest. Spaces and
/// line breaks are tokens of some vocabularies and no ends.
fn tokens_of(text: &str, tokens: &BTreeMap<String, u64>) -> Vec<(String, u64)> {
    let is_mark = |token: &str| token.chars().any(|c| !c.is_whitespace() && c != '\u{2581}');
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let here =
            tokens.iter().filter(|(token, _)| is_mark(token) && rest.starts_with(token.as_str()));
        match here.max_by_key(|(token, _)| token.len()) {
            Some((token, id)) => {
                found.push((token.clone(), *id));
                rest = &rest[token.len()..];
            }
            None => rest = &rest[first.len_utf8()..],
        }
    }
    found
}
