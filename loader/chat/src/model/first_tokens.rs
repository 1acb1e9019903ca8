//! Tokens that a tokenizer puts before a text, such as `<bos>`: models were trained on texts that begin
//! with them, and answer without them as if in the middle of a text.

use shardpack_engine_api::TokenId;

use super::{ChatModel, PromptError};
use crate::json::Json;

/// A text of one token, between what is put before and after it.
const PROBE: &str = "a";

/// What `tokenizer_config.json` says of the first token: transformers and llama.cpp follow it whatever
/// `tokenizer.json` says. `None` if it says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConfiguredBos {
    adds: bool,
    /// The token, if it is known.
    token: Option<TokenId>,
}

impl ConfiguredBos {
    pub(super) fn of(tokenizer_config: &Json, bos: Option<TokenId>) -> Option<Self> {
        match tokenizer_config.as_object()?.get("add_bos_token")? {
            Json::Bool(adds) => Some(Self { adds: *adds, token: bos }),
            _ => None,
        }
    }

    /// The first tokens, by those that `tokenizer.json` states.
    fn apply(self, mut stated: Vec<TokenId>) -> Vec<TokenId> {
        let Some(bos) = self.token else { return stated };
        let has = stated.first() == Some(&bos);
        if self.adds && !has {
            stated.insert(0, bos);
        } else if !self.adds && has {
            stated.remove(0);
        }
        stated
    }
}

impl ChatModel {
    /// The tokens of a text that the model is to continue, behind those that its tokenizer puts before a
    /// text: at least one, and room for one more.
    pub fn encode_text_prompt(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        self.check_first_part(text)?;
        self.check_prompt(self.encode_text(text)?)
    }

    /// The tokens of a text, behind those that the tokenizer puts before one. A text that begins with them
    /// gets them once.
    pub fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, PromptError> {
        let first = self.first_tokens()?;
        let tokens = self.encode(text)?;
        Ok(after_first(first, tokens))
    }

    /// Puts what a tokenizer puts before a text before these tokens, unless they begin with it.
    pub fn with_first_tokens(&self, tokens: Vec<TokenId>) -> Result<Vec<TokenId>, PromptError> {
        Ok(after_first(self.first_tokens()?, tokens))
    }

    fn first_tokens(&self) -> Result<&[TokenId], PromptError> {
        if let Some(first) = self.first_tokens.get() {
            return Ok(first);
        }
        let (plain, whole) = (self.encode(PROBE)?, self.encode_special(PROBE)?);
        let stated = whole[..added_before(&plain, &whole)].to_vec();
        let first = match self.configured_bos {
            Some(configured) => configured.apply(stated),
            None => stated,
        };
        Ok(self.first_tokens.get_or_init(|| first))
    }
}

/// How many tokens of `whole` stand before `plain`, the same text without what is put around it; 0 if
/// `whole` does not hold it.
pub(super) fn added_before(plain: &[TokenId], whole: &[TokenId]) -> usize {
    let added = whole.len().saturating_sub(plain.len());
    (0..=added).find(|start| whole[*start..].starts_with(plain)).unwrap_or(0)
}

fn after_first(first: &[TokenId], tokens: Vec<TokenId>) -> Vec<TokenId> {
    if first.is_empty() || tokens.starts_with(first) {
        return tokens;
    }
    [first, &tokens].concat()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use serde_json::{Value, json};

    use super::*;

    /// The model of the tests, whose tokenizer puts these special tokens before and after a text.
    fn model(before: &[&str], after: &[&str], config: &Value) -> ChatModel {
        let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/kjv-4m"));
        let read = |file| {
            let text = fs::read_to_string(source.join(file)).unwrap();
            serde_json::from_str::<Value>(&text).unwrap()
        };
        let (mut tokenizer, mut own) = (read("tokenizer.json"), read("tokenizer_config.json"));
        let special = |token: &&str| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let sequence = json!({"Sequence": {"id": "A", "type_id": 0}});
        let single: Vec<Value> = (before.iter().map(special))
            .chain([sequence])
            .chain(after.iter().map(special))
            .collect();
        let known = |token: &str, id: u32| json!({"id": token, "ids": [id], "tokens": [token]});
        tokenizer["post_processor"]["single"] = single.into();
        tokenizer["post_processor"]["special_tokens"] = json!({
            "<|endoftext|>": known("<|endoftext|>", 0), "<|im_end|>": known("<|im_end|>", 2),
        });
        own.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let folder = tempfile::tempdir().unwrap();
        fs::copy(source.join("config.json"), folder.path().join("config.json")).unwrap();
        let write = |file, value: &Value| {
            fs::write(folder.path().join(file), value.to_string()).unwrap();
        };
        write("tokenizer.json", &tokenizer);
        write("tokenizer_config.json", &own);
        ChatModel::open(folder.path()).unwrap()
    }

    #[test]
    fn a_text_begins_with_the_tokens_that_its_tokenizer_puts_first() {
        const BOS: &str = "<|endoftext|>";
        let check = |before: &[&str], after: &[&str], config: Value, expected: &[u32]| {
            let model = model(before, after, &config);
            let first = |text: &str| {
                let (plain, whole) = (model.encode(text), model.encode_text(text).unwrap());
                whole[..whole.len() - plain.unwrap().len()].to_vec()
            };
            let expected: Vec<TokenId> = expected.iter().copied().map(TokenId).collect();
            for text in ["In the beginning", " the", ""] {
                assert_eq!(first(text), expected, "{before:?} {after:?} {config} {text:?}");
            }
            // Not once more than the text has it.
            let begun = format!("{BOS}In the beginning");
            let tokens = model.encode(&begun).unwrap();
            assert_eq!(model.encode_text(&begun).unwrap(), tokens);
        };
        check(&[], &[], json!({}), &[]);
        check(&[BOS], &[], json!({}), &[0]);
        check(&[BOS], &["<|im_end|>"], json!({}), &[0]);
        check(&[], &["<|im_end|>"], json!({}), &[]);
        check(&[], &[], json!({"add_bos_token": true}), &[0]);
        check(&[BOS], &[], json!({"add_bos_token": true}), &[0]);
        check(&[BOS], &[], json!({"add_bos_token": false}), &[]);
        check(&[], &[], json!({"add_bos_token": true, "bos_token": null}), &[]);
        check(&[BOS], &[], json!({"add_bos_token": null}), &[0]);
    }

    #[test]
    fn an_empty_text_is_a_prompt_where_something_stands_before_it() {
        let with = model(&["<|endoftext|>"], &[], &json!({}));
        assert_eq!(with.encode_text_prompt("").unwrap(), [TokenId(0)]);
        let without = model(&[], &[], &json!({}));
        assert!(matches!(without.encode_text_prompt(""), Err(PromptError::Empty)));
    }
}
