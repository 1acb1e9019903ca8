//! Added tokens that stand beside a `tokenizer.json`: in `added_tokens_decoder` or among the named
//! tokens of `tokenizer_config.json`, or in `added_tokens.json`. transformers adds them when it
//! loads, after those that are there; ids follow by order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The configuration's keys that name one token.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The configuration's keys that list tokens.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// A tokenizer with all of its added tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completed {
    /// `tokenizer.json`; absent when it is right as it stands.
    pub json: Option<Vec<u8>>,
    /// What was added: text and id.
    pub added: Vec<(String, u64)>,
    /// What the model has no embedding for, so that it was not added.
    pub without_row: Vec<(String, u64)>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of the format")]
struct Token {
    id: u64,
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

/// As much of the document as tells whether it is whole.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    added_tokens: Vec<Token>,
}

/// Adds to a `tokenizer.json` what its configuration and `added_tokens.json` name. `rows` are the
/// tokens that the model has embeddings for. Nothing for a document that is not understood: whoever
/// loads it says so.
#[must_use]
pub fn complete(
    document: &[u8],
    config: &Value,
    added_tokens: Option<&Value>,
    rows: Option<u64>,
) -> Option<Completed> {
    let head: Head = serde_json::from_slice(document).ok()?;
    let has = |content: &str| head.added_tokens.iter().any(|token| token.content == content);
    let wanted = wanted(config, added_tokens);
    let missing: Vec<Token> = wanted.into_iter().filter(|token| !has(&token.content)).collect();
    let mut completed = Completed { json: None, added: Vec::new(), without_row: Vec::new() };
    if missing.is_empty() {
        return Some(completed);
    }
    let mut document: Value = serde_json::from_slice(document).ok()?;
    let vocabulary = &document["model"]["vocab"];
    let of_model = |content: &str| match vocabulary {
        Value::Object(ids) => ids.get(content).and_then(Value::as_u64),
        Value::Array(pieces) => pieces
            .iter()
            .position(|piece| piece[0].as_str() == Some(content))
            .map(|index| index as u64),
        _ => None,
    };
    let size = match vocabulary {
        Value::Object(ids) => ids.len() as u64,
        Value::Array(pieces) => pieces.len() as u64,
        _ => return None,
    };
    let mut tokens = head.added_tokens;
    for token in missing {
        let after = tokens.iter().map(|token| token.id + 1).max().unwrap_or(0);
        let id = of_model(&token.content).unwrap_or_else(|| size.max(after));
        if rows.is_some_and(|rows| id >= rows) {
            completed.without_row.push((token.content, id));
            continue;
        }
        completed.added.push((token.content.clone(), id));
        tokens.push(Token { id, ..token });
    }
    if !completed.added.is_empty() {
        tokens.sort_by_key(|token| token.id);
        document["added_tokens"] = serde_json::to_value(tokens).ok()?;
        completed.json = Some(document.to_string().into_bytes());
    }
    Some(completed)
}

/// What is to be there, in transformers' order; ids are given by whoever adds them.
fn wanted(config: &Value, added_tokens: Option<&Value>) -> Vec<Token> {
    let named = NAMES.iter().map(|name| &config[*name]);
    let lists = LISTS.iter().filter_map(|name| config[*name].as_array()).flatten();
    let specials: Vec<Token> = named
        .chain(lists)
        .filter_map(token)
        .map(|token| Token { special: true, ..token })
        .collect();
    let is_special = |content: &str| specials.iter().any(|special| special.content == content);
    let by_id = |entries: BTreeMap<u64, Token>| {
        let mark =
            |token: Token| Token { special: token.special || is_special(&token.content), ..token };
        entries.into_values().map(mark).collect::<Vec<Token>>()
    };
    let mut wanted = match (config["added_tokens_decoder"].as_object(), added_tokens) {
        (Some(decoder), _) => {
            let entry = |(id, value): (&String, &Value)| Some((id.parse().ok()?, token(value)?));
            by_id(decoder.iter().filter_map(entry).collect())
        }
        (None, Some(Value::Object(ids))) => {
            let entry = |(content, id): (&String, &Value)| {
                let plain = Token { special: false, ..token(&Value::from(content.as_str()))? };
                Some((id.as_u64()?, plain))
            };
            by_id(ids.iter().filter_map(entry).collect())
        }
        _ => Vec::new(),
    };
    for special in specials {
        if !wanted.iter().any(|token| token.content == special.content) {
            wanted.push(special);
        }
    }
    wanted
}

/// A token by its text, which makes it special, or with its properties.
fn token(value: &Value) -> Option<Token> {
    let flag = |name: &str| value[name].as_bool();
    let (content, special) = match value {
        Value::String(content) => (content.as_str(), true),
        value => (value["content"].as_str()?, flag("special").unwrap_or(false)),
    };
    (!content.is_empty()).then(|| Token {
        id: 0,
        content: content.to_owned(),
        single_word: flag("single_word").unwrap_or(false),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        normalized: flag("normalized").unwrap_or(!special),
        special,
    })
}

/// The ids of the added tokens of a `tokenizer.json` by their text.
#[must_use]
pub fn added_ids(document: &[u8]) -> BTreeMap<String, u64> {
    let head: Option<Head> = serde_json::from_slice(document).ok();
    let tokens = head.into_iter().flat_map(|head| head.added_tokens);
    tokens.map(|token| (token.content, token.id)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document() -> Vec<u8> {
        json!({
            "added_tokens": [{
                "id": 3, "content": "<a>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            }],
            "model": { "vocab": { "x": 0, "y": 1, "<u>": 2, "<a>": 3 } },
        })
        .to_string()
        .into_bytes()
    }

    fn check(config: &Value, added: Option<&Value>, expected: &[(&str, u64)], without: &[&str]) {
        let completed = complete(&document(), config, added, Some(6)).unwrap();
        let found: Vec<(&str, u64)> =
            completed.added.iter().map(|(content, id)| (content.as_str(), *id)).collect();
        assert_eq!(found, expected, "{config}");
        let left: Vec<&str> = completed.without_row.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(left, without, "{config}");
        assert_eq!(completed.json.is_some(), !expected.is_empty());
        if let Some(json) = completed.json {
            let ids = added_ids(&json);
            assert!(expected.iter().all(|(content, id)| ids[*content] == *id) && ids["<a>"] == 3);
        }
    }

    #[test]
    fn tokens_of_other_files_get_the_ids_that_transformers_gives_them() {
        check(&json!({}), None, &[], &[]);
        check(&json!({ "eos_token": "<a>", "pad_token": null }), None, &[], &[]);
        let decoder = json!({ "added_tokens_decoder": {
            "5": { "content": "<c>", "special": false }, "4": { "content": "<b>", "special": true },
            "3": { "content": "<a>", "special": true },
        } });
        check(&decoder, None, &[("<b>", 4), ("<c>", 5)], &[]);
        // A token of the vocabulary keeps its place.
        check(&json!({ "unk_token": { "content": "<u>" } }), None, &[("<u>", 2)], &[]);
        let file = json!({ "<c>": 5, "<b>": 4 });
        check(&json!({ "eos_token": "<b>" }), Some(&file), &[("<b>", 4), ("<c>", 5)], &[]);
        // The configuration's list is asked first.
        check(&decoder, Some(&json!({ "<z>": 9 })), &[("<b>", 4), ("<c>", 5)], &[]);
        let many = json!({ "additional_special_tokens": ["<b>", "<c>", "<d>"] });
        check(&many, None, &[("<b>", 4), ("<c>", 5)], &["<d>"]);
        assert_eq!(complete(b"{", &json!({}), None, None), None);
    }
}
