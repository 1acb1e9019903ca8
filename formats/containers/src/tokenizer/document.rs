//! Parts of `tokenizer.json`.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::{TokenizerError, damaged};

/// What sentencepiece writes for a space.
pub(super) const SPACE: &str = "\u{2581}";

/// A token that is found in a text before anything else is done to it.
pub(super) struct Added {
    pub(super) id: u32,
    pub(super) content: String,
    pub(super) is_special: bool,
}

/// The document of a tokenizer.
pub(super) struct Document {
    pub(super) added: Vec<Added>,
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) post_processor: Value,
    pub(super) decoder: Value,
    pub(super) model: Value,
}

impl Document {
    pub(super) fn into_json(self) -> Value {
        let added = self.added.iter().map(|token| {
            json!({
                "id": token.id,
                "content": token.content,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": token.is_special,
            })
        });
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self.post_processor,
            "decoder": self.decoder,
            "model": self.model,
        })
    }
}

/// The characters that stand for bytes in byte-level vocabularies (GPT-2's table).
pub(super) fn byte_characters() -> [char; 256] {
    let mut table = ['\0'; 256];
    let mut next = 256_u32;
    for byte in 0..=255_u8 {
        let is_itself = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        table[usize::from(byte)] = if is_itself {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).expect("far below the surrogates")
        };
    }
    table
}

/// Splits by a pattern, then bytes as characters.
pub(super) fn byte_level_split(pattern: &str) -> Value {
    json!({ "type": "Sequence", "pretokenizers": [
        { "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false },
        { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
    ] })
}

/// Characters back to bytes.
pub(super) fn byte_level_decoder() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false })
}

/// The model of byte tokens in the order of their ranks, whose ids begin at `first`; `before` are
/// the names of the ids below that.
///
/// tiktoken merges the neighbours whose union has the lowest rank, whatever they are; so every pair
/// of tokens whose union is one becomes a merge, in the order of the unions' ranks.
pub(super) fn byte_level_model(
    ranked: &[Vec<u8>],
    before: &[String],
) -> Result<Value, TokenizerError> {
    let characters = byte_characters();
    let text = |bytes: &[u8]| -> String {
        bytes.iter().map(|byte| characters[usize::from(*byte)]).collect()
    };
    let by_bytes: HashMap<&[u8], usize> =
        ranked.iter().enumerate().map(|(rank, bytes)| (bytes.as_slice(), rank)).collect();
    if by_bytes.len() != ranked.len() {
        return Err(damaged("a token stands in it twice"));
    }
    let singles: BTreeSet<u8> =
        ranked.iter().filter_map(|token| <[u8; 1]>::try_from(&**token).ok()).map(|[b]| b).collect();
    if singles.len() != 256 {
        return Err(damaged(format!("{} of 256 bytes are tokens", singles.len())));
    }
    let mut merges = Vec::new();
    for bytes in ranked {
        let split = |at: usize| {
            let (left, right) = bytes.split_at(at);
            Some((*by_bytes.get(left)?, *by_bytes.get(right)?))
        };
        let mut pairs: Vec<(usize, usize)> = (1..bytes.len()).filter_map(split).collect();
        pairs.sort_unstable();
        for (left, right) in pairs {
            merges.push(json!([text(&ranked[left]), text(&ranked[right])]));
        }
    }
    let mut vocab = Map::new();
    for (id, name) in before.iter().enumerate() {
        vocab.insert(name.clone(), id.into());
    }
    for (rank, bytes) in ranked.iter().enumerate() {
        if vocab.insert(text(bytes), (before.len() + rank).into()).is_some() {
            let name = text(bytes);
            return Err(damaged(format!("{name:?} is a token and a special token")));
        }
    }
    Ok(json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": null,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": false,
        "byte_fallback": false,
        "ignore_merges": true,
        "vocab": vocab,
        "merges": merges,
    }))
}

/// Puts tokens before and after a text; null for neither.
pub(super) fn surround(before: Option<(&str, u32)>, after: Option<(&str, u32)>) -> Value {
    let named = [before, after];
    if named.iter().all(Option::is_none) {
        return Value::Null;
    }
    let special = |name: &str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
    let mut single = Vec::new();
    single.extend(before.map(|(name, _)| special(name)));
    single.push(json!({ "Sequence": { "id": "A", "type_id": 0 } }));
    single.extend(after.map(|(name, _)| special(name)));
    let mut pair = single.clone();
    pair.extend(before.map(|(name, _)| special(name)));
    pair.push(json!({ "Sequence": { "id": "B", "type_id": 1 } }));
    pair.extend(after.map(|(name, _)| special(name)));
    let mut tokens = Map::new();
    for (name, id) in named.into_iter().flatten() {
        tokens.insert(name.to_owned(), json!({ "id": name, "ids": [id], "tokens": [name] }));
    }
    json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens })
}
