//! Tokenizers that conversions make of other programs' files give the tokens that those programs
//! give (`tests/data/tokenizers`).

use std::{collections::BTreeMap, fs, path::PathBuf};

use shardpack_containers::tokenizer;

use super::*;

/// A tokenizer, its vocabulary, and texts with their tokens.
type Converted = (Encoder, Arc<Vocabulary>, Vec<(String, Vec<u32>)>);

/// The converted tokenizer of a folder.
fn read(name: &str) -> Converted {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/tokenizers");
    let mut files: BTreeMap<String, Vec<u8>> = fs::read_dir(PathBuf::from(folder).join(name))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())
        })
        .collect();
    let expected = files.remove("expected.json").unwrap();
    let converted = tokenizer::convert(&files).unwrap().unwrap();
    let vocabulary = Vocabulary::parse(&converted.json).unwrap();
    let encoder = Encoder::parse(&converted.json).unwrap();
    (encoder, Arc::new(vocabulary), serde_json::from_slice(&expected).unwrap())
}

#[track_caller]
fn check(name: &str) {
    let (encoder, _, cases) = read(name);
    assert!(cases.len() > 20);
    let mut wrong = Vec::new();
    for (text, expected) in cases {
        let found: Vec<u32> =
            encoder.encode(&text).unwrap().into_iter().map(|token| token.0).collect();
        if found != expected {
            wrong.push(format!("{text:?}: {found:?}, expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{name}\n{}", wrong.join("\n"));
}

#[test]
fn sentencepiece_by_pairs() {
    check("sentencepiece-bpe-prefix");
    check("sentencepiece-bpe-tidy");
    check("sentencepiece-bpe-user");
}

#[test]
fn sentencepiece_by_sums() {
    check("sentencepiece-unigram-prefix");
    check("sentencepiece-unigram-tidy");
    check("sentencepiece-unigram-user");
}

#[test]
fn ranks_of_kimi() {
    check("kimi");
    let (_, vocabulary, _) = read("kimi");
    let id = |name| vocabulary.added_token(name).map(|token| token.0);
    // 700 tokens come before.
    assert_eq!((id("[BOS]"), id("<think>")), (Some(700), Some(702)));
    assert_eq!((id("<|reserved_token_955|>"), id("<|reserved_token_956|>")), (Some(955), None));
}

#[test]
fn ranks_of_tekken() {
    check("tekken");
    let (_, vocabulary, _) = read("tekken");
    let id = |name| vocabulary.added_token(name).map(|token| token.0);
    assert_eq!((id("<s>"), id("[INST]"), id("<SPECIAL_29>")), (Some(1), Some(3), Some(29)));
}
