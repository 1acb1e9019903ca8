//! What a tokenizer says of itself, as vLLM's `/tokenizer_info` has it: the members of
//! `tokenizer_config.json` with special tokens as texts, and the chat template.

use super::special_tokens;
use crate::json::{Json, Object};

/// By the tokenizer's config; `eos` where that names no end.
pub(super) fn tokenizer_info(config: &Json, eos: Option<String>) -> Object {
    let mut info = Object::default();
    let members = config.as_object().cloned().unwrap_or_default().into_members();
    for (name, value) in members {
        match (&name[..], &value) {
            // Names that older libraries wrote for themselves.
            ("chat_template" | "tokenizer_file" | "name_or_path", _) => {}
            (_, Json::Object(token)) if token.get("content").is_some() => {}
            _ => info.set(&name, value),
        }
    }
    for (name, token) in special_tokens(config).into_members() {
        info.set(&name, token);
    }
    if info.get("eos_token").is_none_or(|eos| *eos == Json::Null) {
        info.set("eos_token", eos.map_or(Json::Null, |eos| eos.as_str().into()));
    }
    if info.get("tokenizer_class").is_none() {
        info.set("tokenizer_class", "PreTrainedTokenizerFast".into());
    }
    info
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_are_texts() {
        let config = br#"{"bos_token": {"content": "<s>", "lstrip": false}, "pad_token": null,
            "chat_template": "x", "add_bos_token": true, "tokenizer_class": "LlamaTokenizer"}"#;
        let info = tokenizer_info(&Json::parse(config).unwrap(), Some("</s>".to_owned()));
        let text = |name: &str| info.get(name).and_then(Json::as_str);
        assert_eq!(text("bos_token"), Some("<s>"));
        assert_eq!(text("eos_token"), Some("</s>"));
        assert_eq!(text("tokenizer_class"), Some("LlamaTokenizer"));
        assert_eq!(info.get("chat_template"), None);
        assert_eq!(info.get("add_bos_token"), Some(&Json::Bool(true)));
        let nothing = tokenizer_info(&Json::Null, None);
        assert_eq!(nothing.get("eos_token"), Some(&Json::Null));
    }
}
