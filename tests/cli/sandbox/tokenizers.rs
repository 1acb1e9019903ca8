//! Tokenizers that grow what they normalize, never come to an end, or are none.

use std::fs;

use serde_json::{Value, json};

use super::{Outcome, attack, in_parallel};
use crate::harness::data;

/// A tokenizer that is not what it seems.
struct Hostile {
    name: &'static str,
    json: String,
}

fn kjv() -> Value {
    serde_json::from_slice(&fs::read(data("kjv-4m/tokenizer.json")).unwrap()).unwrap()
}

fn changed(name: &'static str, change: impl FnOnce(&mut Value)) -> Hostile {
    let mut tokenizer = kjv();
    change(&mut tokenizer);
    Hostile { name, json: tokenizer.to_string() }
}

fn sequence(normalizers: &[Value]) -> Value {
    json!({ "type": "Sequence", "normalizers": normalizers })
}

fn cases() -> Vec<Hostile> {
    let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let doubling = replace(json!({ "String": "a" }), "aa");
    let added = |content: &str, id: usize| json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": true, "special": false });
    let deep = format!(
        "{}null{}",
        r#"{"type":"Sequence","normalizers":["#.repeat(100_000),
        "]}".repeat(100_000)
    );
    let mut nested = kjv().to_string();
    nested = nested.replacen(r#""normalizer":null"#, &format!(r#""normalizer":{deep}"#), 1);
    vec![
        changed("a normalizer that doubles, 60 times", |it| {
            it["normalizer"] = sequence(&vec![doubling.clone(); 60]);
        }),
        changed("a normalizer of every letter", |it| {
            let pattern = json!({ "Regex": "" });
            it["normalizer"] = sequence(&vec![replace(pattern, &"a".repeat(1 << 16)); 8]);
        }),
        changed("a megabyte before each text, 4,000 times", |it| {
            let prepend = json!({ "type": "Prepend", "prepend": "b".repeat(1 << 14) });
            it["normalizer"] = sequence(&vec![prepend; 1 << 12]);
        }),
        changed("an expression that never ends", |it| {
            let pattern = json!({ "Regex": "(a+)+(a+)+(a+)+(a+)+\\1\\2\\3(?=b)" });
            it["pre_tokenizer"] = json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false });
        }),
        changed("a charsmap of noise", |it| {
            it["normalizer"] = json!({ "type": "Precompiled", "precompiled_charsmap": "/////////////////////w==" });
        }),
        changed("added tokens that a normalizer grows", |it| {
            it["normalizer"] = sequence(&vec![doubling.clone(); 28]);
            let more = (0..50).map(|id| added(&format!("a{id}"), 2048 + id));
            it["added_tokens"].as_array_mut().unwrap().extend(more);
        }),
        Hostile { name: "100,000 sequences in one another", json: nested },
        changed("merges of tokens that are none", |it| {
            it["model"]["merges"] = json!([["nobody", "knows"], ["th", "th"]]);
        }),
        changed("a post-processor that repeats", |it| {
            let piece = json!({ "Sequence": { "id": "A", "type_id": 0 } });
            it["post_processor"]["single"] = json!(vec![piece; 1 << 20]);
        }),
        changed("unigrams without a score", |it| {
            it["model"] =
                json!({ "type": "Unigram", "unk_id": 7, "vocab": [], "byte_fallback": true });
        }),
        changed("an id beyond 32 bits", |it| it["model"]["vocab"]["zebra"] = json!(1_u64 << 32)),
        changed("a decoder that doubles", |it| {
            it["decoder"] = json!({ "type": "Sequence", "decoders": vec![doubling.clone(); 64] });
        }),
        changed("a decoder that strips for ever", |it| {
            let strip =
                json!({ "type": "Strip", "content": " ", "start": u64::MAX, "stop": u64::MAX });
            it["decoder"] = json!({ "type": "Sequence", "decoders": [{ "type": "Fuse" }, strip] });
        }),
    ]
}

/// The library gives the expression up in time: it must end, and no more.
const HARMLESS: &str = "an expression that never ends";

#[test]
#[expect(clippy::print_stdout, reason = "what became of each; shown where one fails")]
fn hostile_tokenizers_take_nothing_with_them() {
    let cases = cases();
    assert!(cases.len() >= 9);
    in_parallel(&cases, |Hostile { name, json }| {
        let begun = std::time::Instant::now();
        let outcome = attack(name, &[("tokenizer.json", json.as_bytes())]);
        let seconds = begun.elapsed().as_secs_f32();
        let shown = format!("{name}: {seconds:.1} s, {}", outcome.shown());
        println!("{shown:.300}");
        assert!(*name == HARMLESS || !matches!(outcome, Outcome::Harmless), "{name}");
    });
}
