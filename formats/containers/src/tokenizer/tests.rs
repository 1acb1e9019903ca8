//! What is refused, and the small parts; that tokens are the same is tested where tokenizers run.

use serde_json::json;

use super::*;

fn check(file: &str, bytes: &[u8], config: &Value, expected: &str) {
    let files = [
        (file.to_owned(), bytes.to_vec()),
        ("tokenizer_config.json".to_owned(), config.to_string().into_bytes()),
    ];
    let (name, error) = convert(&files.into()).unwrap().unwrap_err();
    assert_eq!(name, file);
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn a_tokenizer_json_is_left_alone() {
    let files =
        |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), Vec::new())).collect();
    assert_eq!(convert(&files(&["tokenizer.json", "tokenizer.model"])), None);
    assert_eq!(convert(&files(&["vocab.json"])), None);
}

#[test]
fn foreign_and_damaged_files_are_refused_by_what_they_are() {
    let kimi = json!({ "tokenizer_class": "TikTokenTokenizer" });
    check("tiktoken.model", b"IQ== 0\n", &json!({}), "only Kimi's is known");
    check("tiktoken.model", b"IQ== 0\n", &kimi, "1 of 256 bytes are tokens");
    check("tiktoken.model", b"IQ== 0\nIg== 0\n", &kimi, "rank 0 is there twice");
    check("tiktoken.model", b"IQ== 0\nIg== 2\n", &kimi, "ranks without gaps");
    check("tiktoken.model", b"IQ= 0\n", &kimi, "line 1 is no token");
    check("tiktoken.model", b"IQ== 99999999\n", &kimi, "rank 99999999");
    check("tiktoken.model", b"", &kimi, "0 tokens");
    check("tokenizer.model", b"IQ== 0\nIg== 1\n", &json!({}), "ranks of tiktoken");
    check("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0fabc", &json!({}), "its end is missing");
    check("tokenizer.model", b"\x12\x02\x18\x03", &json!({}), "whole words");
    check("tokenizer.model", b"", &json!({}), "no pieces");
    check("tekken.json", b"{}", &json!({}), "missing field");
    let mut file = json!({
        "config": { "pattern": "x", "default_vocab_size": 3, "default_num_special_tokens": 4 },
        "vocab": [],
    });
    check("tekken.json", file.to_string().as_bytes(), &json!({}), "3 tokens, 4 of them special");
    file["config"]["default_num_special_tokens"] = 2.into();
    file["vocab"] = json!([{ "rank": 1, "token_bytes": "IQ==" }]);
    check("tekken.json", file.to_string().as_bytes(), &json!({}), "entry 0 of its vocabulary");
}

#[test]
fn pieces_that_the_document_cannot_say_are_refused() {
    // A piece of the user's: "▁▁".
    let piece = [b"\x0a\x06\xe2\x96\x81\xe2\x96\x81\x15\0\0\0\0\x18\x04".as_slice()].concat();
    let model = [&[0x0a, piece.len() as u8][..], &piece].concat();
    check("tokenizer.model", &model, &json!({}), "is found before spaces are put in");
}

#[test]
fn base_64_is_read_and_written() {
    for (bytes, text) in [
        (&b""[..], ""),
        (b"f", "Zg=="),
        (b"fo", "Zm8="),
        (b"foo", "Zm9v"),
        (b"foob", "Zm9vYg=="),
        (&[0, 255, 254, 62, 63], "AP/+Pj8="),
    ] {
        assert_eq!(base64::encode(bytes), text);
        assert_eq!(base64::decode(text.as_bytes()).as_deref(), Some(bytes));
    }
    for text in ["Z", "Zg", "Zg=", "Zh==", "=Zg=", "Zg==Zg==", "Z===", "Zm8-"] {
        assert_eq!(base64::decode(text.as_bytes()), None, "{text}");
    }
}

#[test]
fn every_byte_has_a_character_of_its_own() {
    let mut characters = document::byte_characters().to_vec();
    assert_eq!((characters[0], characters[32], characters[65]), ('\u{100}', '\u{120}', 'A'));
    characters.sort_unstable();
    assert!(characters.windows(2).all(|pair| pair[0] != pair[1]));
}
