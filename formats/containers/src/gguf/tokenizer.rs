//! The tokenizer that a GGUF file has in its keys, as a `tokenizer.json`.
//!
//! Byte-level BPE is built for the splits of words that are known to be the same in llama.cpp and
//! in the tokenizer that the model was trained with, and pieces of sentencepiece (`pieces`).
//! Anything else is refused by name: a tokenizer that is nearly right makes a model that is quietly
//! worse.
//!
//! Source: `convert_hf_to_gguf.py` (`get_vocab_base_pre`) and `llama-vocab.cpp` of llama.cpp, and
//! the published `tokenizer.json` of the models that they name.

mod pieces;

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::{GgufError, Header, Value};
use crate::tokenizer::sentencepiece::Algorithm;

/// Most tokens: the largest published vocabulary has 262,144.
const MAX_TOKENS: usize = 1 << 22;

/// Ids that llama.cpp takes where no key names them, by the tokenizer's kind.
const DEFAULT_IDS: &[(&str, &str, i64)] = &[
    ("llama", "bos_token_id", 1),
    ("llama", "eos_token_id", 2),
    ("llama", "unknown_token_id", 0),
    ("t5", "eos_token_id", 1),
    ("t5", "unknown_token_id", 2),
    ("t5", "padding_token_id", 0),
];

/// What the types of tokens are numbered.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// What to do about a tokenizer that is not built.
const BESIDE: &str = "put the model's tokenizer.json beside the file";

/// How words are told apart before they are cut into tokens.
struct Words {
    /// llama.cpp's name for it.
    name: &'static str,
    /// Digits stand alone.
    digits: bool,
    /// The expression that splits; absent for that of GPT-2, which is built into byte level.
    expression: Option<&'static str>,
    /// Whether text is brought into Unicode's composed form first.
    composed: bool,
    /// Whether a word that is a token needs no merges.
    skips_merges: bool,
}

/// Other names of llama.cpp for the same words.
const ALIASES: &[(&str, &str)] = &[("llama3", "llama-bpe"), ("llama-v3", "llama-bpe")];

/// Where llama.cpp puts the first token before every text when no key says whether to.
const FIRST_IS_PUT: &[&str] = &["llama-bpe"];

const WORDS: &[Words] = &[
    Words { name: "gpt-2", digits: false, expression: None, composed: false, skips_merges: false },
    Words { name: "smollm", digits: true, expression: None, composed: false, skips_merges: false },
    Words { name: "refact", digits: true, expression: None, composed: false, skips_merges: false },
    Words {
        name: "starcoder",
        digits: true,
        expression: None,
        composed: false,
        skips_merges: false,
    },
    Words {
        name: "llama-bpe",
        digits: false,
        expression: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        composed: false,
        skips_merges: true,
    },
    Words {
        name: "qwen2",
        digits: false,
        expression: Some(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        composed: true,
        skips_merges: false,
    },
];

/// Keys of the tokenizer.
struct Keys<'a>(&'a BTreeMap<String, Value>);

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(&name(key))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key)?.text()
    }

    /// A list of texts that has to be there.
    fn texts(&self, key: &str) -> Result<&'a [String], GgufError> {
        match self.get(key) {
            Some(Value::Texts(texts)) => Ok(texts),
            Some(other) => {
                Err(GgufError::key(name(key), format!("is {}, expected texts", other.words())))
            }
            None => Err(GgufError::key(name(key), format!("is missing; {BESIDE}"))),
        }
    }

    /// The id in a key; without the key that which llama.cpp takes for pieces of sentencepiece, if it
    /// is of a token that is no text.
    fn id(&self, key: &str) -> Option<i64> {
        if let Some(stated) = self.get(key) {
            return stated.integer();
        }
        let defaults = DEFAULT_IDS.iter().filter(|(model, ..)| self.text("model") == Some(model));
        let id = defaults.clone().find(|(_, name, _)| *name == key).map(|(.., id)| *id)?;
        let Some(Value::Numbers(kinds)) = self.get("token_type") else { return None };
        let kind = kinds.integer(usize::try_from(id).ok()?)?;
        matches!(kind, UNKNOWN | CONTROL).then_some(id)
    }

    /// The token of an id in a key.
    fn token(&self, key: &str) -> Option<&'a str> {
        let Some(Value::Texts(tokens)) = self.get("tokens") else { return None };
        let id = usize::try_from(self.id(key)?).ok()?;
        tokens.get(id).map(String::as_str)
    }
}

/// The id of a named token, such as `eos_token_id`.
pub(super) fn special_id(keys: &BTreeMap<String, Value>, key: &str) -> Option<i64> {
    Keys(keys).id(key)
}

fn name(key: &str) -> String {
    format!("tokenizer.ggml.{key}")
}

/// Whether the file has a tokenizer at all.
#[must_use]
pub fn is_there(header: &Header) -> bool {
    Keys(&header.keys).text("model").is_some_and(|model| model != "no_vocab")
}

/// Writes `tokenizer.json`.
pub fn tokenizer(header: &Header) -> Result<Json, GgufError> {
    let keys = Keys(&header.keys);
    let kind = keys.text("model").unwrap_or("none");
    match kind {
        "gpt2" => byte_level_bpe(&keys),
        "llama" => pieces::tokenizer(&keys, Algorithm::Bpe),
        "t5" => pieces::tokenizer(&keys, Algorithm::Unigram),
        _ => Err(GgufError::Unread(format!(
            "its tokenizer is of the kind {kind:?}, of which no tokenizer.json is built; {BESIDE}"
        ))),
    }
}

fn byte_level_bpe(keys: &Keys) -> Result<Json, GgufError> {
    let pre = keys.text("pre").unwrap_or("default");
    let pre = ALIASES.iter().find(|(alias, _)| *alias == pre).map_or(pre, |(_, name)| *name);
    let words = WORDS.iter().find(|words| words.name == pre).ok_or_else(|| {
        let known: Vec<&str> = WORDS.iter().map(|words| words.name).collect();
        GgufError::Unread(format!(
            "its tokenizer splits words as {pre:?}, of which no tokenizer.json is built (it is of {}); {BESIDE}",
            known.join(", ")
        ))
    })?;
    let tokens = keys.texts("tokens")?;
    let kinds = kinds(keys, tokens.len())?;
    let mut vocab = Map::new();
    let mut added = Vec::new();
    for (id, (token, kind)) in tokens.iter().zip(&kinds).enumerate() {
        // Places that the model has and the tokenizer has not.
        if *kind == UNUSED {
            continue;
        }
        if vocab.insert(token.clone(), id.into()).is_some() {
            return Err(GgufError::key(name("tokens"), format!("has {token:?} twice")));
        }
        if matches!(*kind, CONTROL | USER_DEFINED) {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": *kind == CONTROL,
            }));
        }
    }
    let merges = merges(keys, &vocab)?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": words.composed.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": pre_tokenizer(words),
        "post_processor": post_processor(keys, FIRST_IS_PUT.contains(&pre))?,
        "decoder": byte_level(true, true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": words.skips_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }))
}

/// The type of every token.
fn kinds(keys: &Keys, tokens: usize) -> Result<Vec<i64>, GgufError> {
    if tokens == 0 || tokens > MAX_TOKENS {
        let problem = format!("has {tokens} tokens, expected 1 to {MAX_TOKENS}");
        return Err(GgufError::key(name("tokens"), problem));
    }
    match keys.get("token_type") {
        Some(Value::Numbers(numbers)) if numbers.len() == tokens => {
            Ok((0..tokens).map(|index| numbers.integer(index).unwrap_or(0)).collect())
        }
        _ => {
            let problem = format!("is not there for each of {tokens} tokens; {BESIDE}");
            Err(GgufError::key(name("token_type"), problem))
        }
    }
}

/// Pairs of tokens; in the file they are one text with a space between, which no byte-level token
/// contains.
fn merges(keys: &Keys, vocab: &Map<String, Json>) -> Result<Vec<[String; 2]>, GgufError> {
    let wrong = |merge: &str, what: &str| {
        let problem = format!("has {merge:?}, which {what}");
        GgufError::key(name("merges"), problem)
    };
    let pair = |merge: &String| {
        let (left, right) =
            merge.split_once(' ').ok_or_else(|| wrong(merge, "is no pair of tokens"))?;
        let known = |token: &str| vocab.contains_key(token);
        if !known(left) || !known(right) || !known(&format!("{left}{right}")) {
            return Err(wrong(merge, "is of no tokens"));
        }
        Ok([left.to_owned(), right.to_owned()])
    };
    keys.texts("merges")?.iter().map(pair).collect()
}

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Json {
    json!({
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true,
        "use_regex": use_regex,
    })
}

fn pre_tokenizer(words: &Words) -> Json {
    let first = match words.expression {
        Some(expression) => json!({
            "type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated",
            "invert": false,
        }),
        None if words.digits => json!({"type": "Digits", "individual_digits": true}),
        None => return byte_level(false, true),
    };
    let rest = byte_level(false, words.expression.is_none());
    json!({"type": "Sequence", "pretokenizers": [first, rest]})
}

/// The token before every text, where the model expects one: as the key says, else as `absent` says.
fn post_processor(keys: &Keys, absent: bool) -> Result<Json, GgufError> {
    let stated = |key: &str| keys.get(key).and_then(Value::truth);
    let wanted = |key: &str| stated(key).unwrap_or(false);
    for (key, what) in [("add_eos_token", "after"), ("add_sep_token", "between")] {
        if wanted(key) {
            let problem = format!("is true: a token {what} every text; {BESIDE}");
            return Err(GgufError::key(name(key), problem));
        }
    }
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let second = json!({"Sequence": {"id": "B", "type_id": 1}});
    let id = keys.id("bos_token_id");
    let token = keys.token("bos_token_id");
    // What no key asks for is not put where no token is named.
    let is_put = stated("add_bos_token").unwrap_or(absent && token.is_some());
    let (single, pair, specials) = if is_put {
        let (Some(id), Some(token)) = (id, token) else {
            return Err(GgufError::key(name("bos_token_id"), "is no token, but is to be added"));
        };
        let first = |kind: u32| json!({"SpecialToken": {"id": token, "type_id": kind}});
        let specials = json!({ token: {"id": token, "ids": [id], "tokens": [token]} });
        (json!([first(0), text]), json!([first(0), text, first(1), second]), specials)
    } else {
        (json!([text]), json!([text, second]), json!({}))
    };
    Ok(json!({
        "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials,
    }))
}

/// Writes `tokenizer_config.json`: the named tokens and the chat template.
#[must_use]
pub fn tokenizer_config(header: &Header) -> Json {
    let keys = Keys(&header.keys);
    let mut config = Map::new();
    for (key, ours) in [
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
    ] {
        if let Some(token) = keys.token(key) {
            config.insert(ours.to_owned(), token.into());
        }
    }
    if let Some(template) = header.keys.get("tokenizer.chat_template").and_then(Value::text) {
        config.insert("chat_template".to_owned(), template.into());
    }
    Json::Object(config)
}
