//! Random templates and tokenizers in the real sandbox, for as long as `SHARDPACK_SOAK_SECONDS` says
//! (`just soak`; with `SHARDPACK_SOAK_SEED` the same each time), else for a few seconds. What is looked for is a server's process that panics, waits
//! for ever or is talked into something; what becomes of the sandbox does not matter.

use std::{
    env, fs,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{attack, in_parallel};
use crate::harness::data;

/// Seconds in the ordinary tests.
const SECONDS: u64 = 5;

/// Parts that hostile templates are made of.
const PARTS: [&str; 28] = [
    "{% set n = namespace(t='aaaa') %}",
    "{% set n = namespace(t=[]) %}",
    "{% for i in range(1000) %}",
    "{% for i in range(90000) %}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% set n.t = [n.t] %}",
    "{% set n.t = n.t ~ n.t %}",
    "{% set n.t = n.t + n.t %}",
    "{% set n.t = n.t | map('string') %}",
    "{% set n.n = n %}",
    "{{ n.t }}",
    "{{ n.t | tojson }}",
    "{{ n.t | length }}",
    "{{ n.t | sort }}",
    "{{ n.t | replace('a', 'aaaaaaaaaaaaaaaa') }}",
    "{{ messages[0].content | indent(100000) }}",
    "{% macro m(a) %}{{ m(a) }}{% endmacro %}",
    "{{ m(1) }}",
    "{% include 'chat_template' %}",
    "{% if n.t %}",
    "{% else %}",
    "{% endif %}",
    "{{ raise_exception(n.t) }}",
    "{{ strftime_now('%Y-%m-%d') }}",
    "{{ '%100000d' | format(7) }}",
    "{{ (1, [2, {'a': n.t}])[1:] }}",
    "{{- messages[-1].content }}",
];

/// A small generator with a seed that is printed (`splitmix64`).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn template(&mut self, published: &str) -> Vec<u8> {
        let mut text = if self.below(2) == 0 { published.to_owned() } else { String::new() };
        for _ in 0..self.below(24) {
            let part = PARTS[self.below(PARTS.len())];
            // Now and then very often.
            let times = if self.below(12) == 0 { 1 << self.below(15) } else { 1 };
            let at = text.floor_char_boundary(self.below(text.len() + 1));
            text.insert_str(at, &part.repeat(times));
        }
        let mut bytes = text.into_bytes();
        self.noise(&mut bytes);
        bytes
    }

    fn noise(&mut self, bytes: &mut [u8]) {
        if self.below(3) > 0 || bytes.is_empty() {
            return;
        }
        for _ in 0..=self.below(8) {
            let at = self.below(bytes.len());
            bytes[at] = b" {}%[]()|~'\"0a"[self.below(14)];
        }
    }

    /// Changes one value of a tokenizer's document, other than those of its large tables.
    fn tokenizer(&mut self, published: &Value) -> Vec<u8> {
        let mut json = published.clone();
        let doubling = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#;
        let values = [
            "null",
            "-1",
            "1e308",
            "4294967296",
            "\"\"",
            "\"a\"",
            "[]",
            "{}",
            "true",
            "[[\"a\",\"b\"]]",
            doubling,
            r#"{"type":"Split","pattern":{"Regex":"(a*)*b"},"behavior":"Isolated","invert":false}"#,
            r#"{"type":"Metaspace","replacement":"a","prepend_scheme":"always","split":true}"#,
            r#"{"type":"Precompiled","precompiled_charsmap":"AAAAAA=="}"#,
            r#"{"type":"NFKC"}"#,
        ];
        let places = [
            "/normalizer",
            "/pre_tokenizer",
            "/decoder",
            "/post_processor",
            "/model/type",
            "/model/merges",
            "/model/unk_token",
            "/model/vocab/a",
            "/added_tokens/0/content",
            "/added_tokens/0/id",
            "/added_tokens/0/normalized",
            "/pre_tokenizer/use_regex",
            "/model/ignore_merges",
            "/model/byte_fallback",
            "/truncation",
            "/post_processor/single",
        ];
        for _ in 0..=self.below(3) {
            let mut value: Value = serde_json::from_str(values[self.below(values.len())]).unwrap();
            if self.below(4) == 0 {
                let many = vec![value; 1 << self.below(8)];
                value = serde_json::json!({ "type": "Sequence", "normalizers": many, "pretokenizers": many, "decoders": many, "processors": many });
            }
            if let Some(place) = json.pointer_mut(places[self.below(places.len())]) {
                *place = value;
            }
        }
        let mut bytes = json.to_string().into_bytes();
        if self.below(4) == 0 {
            self.noise(&mut bytes);
        }
        bytes
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "names the seeds; shown only when one fails")]
fn random_templates_and_tokenizers_take_nothing_with_them() {
    let asked = env::var("SHARDPACK_SOAK_SECONDS").ok();
    let seconds = asked.as_deref().map_or(SECONDS, |text| text.parse().unwrap());
    // The ordinary tests try the same few every time; a soak others each time, unless it is told which.
    let seed = env::var("SHARDPACK_SOAK_SEED").ok();
    let start = match (seed, asked) {
        (Some(seed), _) => seed.parse().unwrap(),
        (None, Some(_)) => u64::from(std::process::id()) << 32,
        (None, None) => 1,
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    let template = fs::read_to_string(data("kjv-4m/chat_template.jinja")).unwrap();
    let tokenizer = fs::read(data("kjv-4m/tokenizer.json")).unwrap();
    let tokenizer: Value = serde_json::from_slice(&tokenizer).unwrap();
    let seeds: Vec<u64> = (start..start + 1_000_000).collect();
    in_parallel(&seeds, |seed| {
        if Instant::now() >= end {
            return;
        }
        let mut random = Random(*seed);
        let (file, bytes) = if random.below(2) == 0 {
            ("chat_template.jinja", random.template(&template))
        } else {
            ("tokenizer.json", random.tokenizer(&tokenizer))
        };
        println!("seed {seed}: {file}");
        attack(&format!("seed {seed}"), &[(file, &bytes)]);
    });
}
