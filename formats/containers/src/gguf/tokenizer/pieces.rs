//! Pieces of sentencepiece in a GGUF file's keys: llama.cpp's kinds `llama` (joined by the best
//! score) and `t5` (chosen by the best sum).
//!
//! llama.cpp puts a space before the text and after every token that is found before all else, as
//! `tokenizer.json` does; so pieces that users defined need no refusal here.
//!
//! Source: `_create_vocab_sentencepiece` of `convert_hf_to_gguf.py` and `llama-vocab.cpp` of
//! llama.cpp, whose values of absent keys these are.

use serde_json::Value as Json;

use super::{BESIDE, GgufError, Keys, Value, kinds, name};
use crate::tokenizer::sentencepiece::{Algorithm, Kind, Model, Piece};

/// Writes `tokenizer.json`.
pub(super) fn tokenizer(keys: &Keys, algorithm: Algorithm) -> Result<Json, GgufError> {
    let is_unigram = algorithm == Algorithm::Unigram;
    let pieces = pieces(keys)?;
    let flag = |key: &str, absent: bool| keys.get(key).and_then(Value::truth).unwrap_or(absent);
    let charsmap: &[u8] = match keys.get("precompiled_charsmap") {
        Some(Value::Numbers(numbers)) if numbers.bytes.len() == numbers.len() => &numbers.bytes,
        None => &[],
        Some(other) => {
            let problem = format!("is {}, expected bytes; {BESIDE}", other.words());
            return Err(GgufError::key(name("precompiled_charsmap"), problem));
        }
    };
    for (key, wanted) in [("treat_whitespace_as_suffix", false), ("escape_whitespaces", true)] {
        if flag(key, wanted) != wanted {
            return Err(GgufError::key(name(key), format!("is {}; {BESIDE}", !wanted)));
        }
    }
    let model = Model {
        byte_fallback: pieces.iter().any(|piece| piece.kind == Kind::Byte),
        pieces,
        algorithm,
        space_as_suffix: false,
        charsmap,
        add_dummy_prefix: flag("add_space_prefix", true),
        remove_extra_spaces: flag("remove_extra_whitespaces", false),
        escape_spaces: true,
    };
    let put = |flag_key: &str, absent: bool, key: &str| {
        if !flag(flag_key, absent) {
            return Ok(None);
        }
        let id = keys.id(key).and_then(|id| u32::try_from(id).ok());
        match (keys.token(key), id) {
            (Some(token), Some(id)) => Ok(Some((token, id))),
            // What is asked for by no key is not put where no token is named.
            _ if keys.get(flag_key).is_none() => Ok(None),
            _ => Err(GgufError::key(name(key), "is no token, but is to be added")),
        }
    };
    let before = put("add_bos_token", !is_unigram, "bos_token_id")?;
    let after = put("add_eos_token", is_unigram, "eos_token_id")?;
    model
        .document(before, after)
        .map_err(|error| GgufError::key(name("tokens"), format!("cannot be read: {error}")))
}

/// Texts, scores and kinds.
fn pieces<'a>(keys: &Keys<'a>) -> Result<Vec<Piece<'a>>, GgufError> {
    let texts = keys.texts("tokens")?;
    let kinds = kinds(keys, texts.len())?;
    let scores = match keys.get("scores") {
        Some(Value::Numbers(numbers)) if numbers.len() == texts.len() => numbers,
        _ => {
            let problem = format!("is not there for each of {} tokens; {BESIDE}", texts.len());
            return Err(GgufError::key(name("scores"), problem));
        }
    };
    let piece = |(index, (text, kind)): (usize, (&'a String, &i64))| {
        let kind = u64::try_from(*kind).ok().and_then(Kind::from_number).ok_or_else(|| {
            GgufError::key(name("token_type"), format!("gives {text:?} the unknown kind {kind}"))
        })?;
        let score = scores.decimal(index).ok_or_else(|| {
            GgufError::key(name("scores"), format!("gives {text:?} no finite number"))
        })?;
        Ok(Piece { text, score: score as f32, kind })
    };
    texts.iter().zip(&kinds).enumerate().map(piece).collect()
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs, path::Path};

    use serde_json::json;

    use super::*;
    use crate::{
        gguf::value::{NumberKind, Numbers},
        tokenizer::sentencepiece::sentencepiece,
    };

    fn numbers(kind: NumberKind, bytes: impl Iterator<Item = [u8; 4]>) -> Value {
        Value::Numbers(Numbers { kind, bytes: bytes.flatten().collect() })
    }

    fn truth(value: bool) -> Value {
        Value::Number(Numbers { kind: NumberKind::Bool, bytes: vec![value.into()] })
    }

    fn model_of(name: &str) -> Vec<u8> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tokenizers");
        fs::read(folder.join(name).join("tokenizer.model")).unwrap()
    }

    /// What llama.cpp's converter writes of a model.
    fn keys_of(model: &Model, bos: Option<u32>) -> BTreeMap<String, Value> {
        let number = |kind: Kind| {
            (1..=6).find(|number| Kind::from_number(*number) == Some(kind)).unwrap() as u32
        };
        let texts = model.pieces.iter().map(|piece| piece.text.to_owned()).collect();
        let scores = model.pieces.iter().map(|piece| piece.score.to_le_bytes());
        let kinds = model.pieces.iter().map(|piece| number(piece.kind).to_le_bytes());
        let charsmap = Numbers { kind: NumberKind::U8, bytes: model.charsmap.to_vec() };
        let mut keys = vec![
            ("tokens", Value::Texts(texts)),
            ("scores", numbers(NumberKind::F32, scores)),
            ("token_type", numbers(NumberKind::I32, kinds)),
            ("precompiled_charsmap", Value::Numbers(charsmap)),
            ("add_space_prefix", truth(model.add_dummy_prefix)),
            ("remove_extra_whitespaces", truth(model.remove_extra_spaces)),
            ("add_bos_token", truth(bos.is_some())),
            ("add_eos_token", truth(false)),
        ];
        if let Some(id) = bos {
            let id = Numbers { kind: NumberKind::U32, bytes: id.to_le_bytes().to_vec() };
            keys.push(("bos_token_id", Value::Number(id)));
        }
        keys.into_iter().map(|(key, value)| (name(key), value)).collect()
    }

    /// Expects the document that `tokenizer.model` itself becomes.
    #[track_caller]
    fn check_same(file: &str) {
        let bytes = model_of(file);
        let model = Model::parse(&bytes).unwrap();
        let bos = model.pieces.iter().position(|piece| piece.text == "<s>").unwrap() as u32;
        for bos in [None, Some(bos)] {
            let keys = keys_of(&model, bos);
            let found = tokenizer(&Keys(&keys), model.algorithm).unwrap();
            let config = json!({ "add_bos_token": bos.is_some() });
            assert_eq!(found, sentencepiece(&bytes, &config).unwrap(), "{file}");
        }
    }

    #[test]
    fn pieces_of_gguf_are_those_of_their_model() {
        for file in ["bpe-prefix", "bpe-tidy", "unigram-prefix", "unigram-tidy"] {
            check_same(&format!("sentencepiece-{file}"));
        }
    }

    #[test]
    fn pieces_that_lack_something_are_refused_by_key() {
        let bytes = model_of("sentencepiece-bpe-prefix");
        let model = Model::parse(&bytes).unwrap();
        let check = |key: &str, value: Option<Value>, expected: &str| {
            let mut keys = keys_of(&model, None);
            match value {
                None => keys.remove(&name(key)),
                Some(value) => keys.insert(name(key), value),
            };
            let error = tokenizer(&Keys(&keys), Algorithm::Bpe).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(expected), "{error}");
        };
        check("scores", None, "tokenizer.json");
        check("token_type", None, "tokenizer.json");
        check("tokens", None, "missing");
        check("escape_whitespaces", Some(truth(false)), "is false");
        check("treat_whitespace_as_suffix", Some(truth(true)), "is true");
        let kinds = model.pieces.iter().map(|_| 9_u32.to_le_bytes());
        check("token_type", Some(numbers(NumberKind::I32, kinds)), "unknown kind 9");
        let scores = model.pieces.iter().map(|_| f32::NAN.to_le_bytes());
        check("scores", Some(numbers(NumberKind::F32, scores)), "no finite number");
    }
}
