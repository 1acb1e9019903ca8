//! Frequencies against independently computed ones.

use serde_json::json;

use super::*;
use crate::spec::{Rope, RopeStyle};

/// transformers evaluates in f32. The error of the exponent, half a unit of 2⁻²⁴, is multiplied
/// by ln(theta) ≤ 14, and a handful of operations follow: below 16 units of 2⁻²⁴.
const F32_TOLERANCE: f64 = 16.0 / (1 << 24) as f64;

fn parse(config: &Value, max_positions: u32) -> Result<RopeParameters, RopeError> {
    let request = RopeRequest::plain(10_000.0, max_positions);
    RopeParameters::parse(config.as_object().unwrap(), &request)
}

fn bits(value: &Value) -> u32 {
    u32::from_str_radix(value.as_str().unwrap(), 16).unwrap()
}

fn golden() -> Value {
    serde_json::from_str(include_str!("../../tests/data/rope.json")).unwrap()
}

fn resolve(case: &Value) -> Rope {
    let number = |key: &str| u32::try_from(case[key].as_u64().unwrap()).unwrap();
    let parameters = parse(&case["config"], number("max_positions")).unwrap();
    parameters.resolve(number("width"), RopeStyle::Half).unwrap()
}

#[test]
fn frequencies_are_those_of_transformers() {
    for (name, case) in golden().as_object().unwrap() {
        let rope = resolve(case);
        assert_eq!(rope.inv_freq.len(), case["f32"].as_array().unwrap().len(), "{name}");
        for (pair, found) in rope.inv_freq.iter().enumerate() {
            let single = f64::from(f32::from_bits(bits(&case["f32"][pair])));
            let error = (f64::from(found.0) - single).abs();
            assert!(error <= F32_TOLERANCE * single, "{name} pair {pair}: {} {single}", found.0);
            // The same formula in f64 by another library: one rounding apart at most.
            let double = bits(&case["f64"][pair]);
            assert!(found.0.to_bits().abs_diff(double) <= 1, "{name} pair {pair} in f64");
        }
        let attention = bits(&case["attention_factor"]);
        assert!(rope.attention_factor.0.to_bits().abs_diff(attention) <= 1, "{name}");
    }
}

#[test]
fn both_spellings_written_for_packages_say_the_same() {
    for (name, case) in golden().as_object().unwrap() {
        let max_positions = u32::try_from(case["max_positions"].as_u64().unwrap()).unwrap();
        let parameters = parse(&case["config"], max_positions).unwrap();
        let older = json!({
            "rope_theta": parameters.theta, "rope_scaling": parameters.rope_scaling()
        });
        let newer = json!({ "rope_parameters": parameters.rope_parameters() });
        let mut both = older.clone();
        both["rope_parameters"] = newer["rope_parameters"].clone();
        for (config, newer_spelling) in
            [(older, Spelling::Absent), (newer, Spelling::Flat), (both, Spelling::Flat)]
        {
            let expected = RopeParameters { newer_spelling, ..parameters.clone() };
            // Every default is spelled out: another longest sequence changes nothing.
            assert_eq!(parse(&config, 7), Ok(expected), "{name}: {config}");
        }
    }
}

#[test]
fn defaults_need_no_key() {
    for config in [
        json!({}),
        json!({"rope_scaling": null, "rope_parameters": null}),
        json!({"rope_scaling": {}}),
        json!({"rope_scaling": {"rope_type": "default", "factor": 1.0}}),
    ] {
        let parameters = parse(&config, 64).unwrap();
        assert_eq!((parameters.theta, parameters.scaling), (10_000.0, Scaling::Default));
    }
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let check = |config: Value, expected: &str| {
        assert_eq!(parse(&config, 4096).unwrap_err().to_string(), expected);
    };
    check(
        json!({"rope_scaling": {"type": "longrope", "factor": 4.0}}),
        "rope_scaling.short_factor is null, expected a list of positive numbers",
    );
    check(
        json!({"rope_scaling": {"type": "spiral"}}),
        "rope_scaling has rope_type \"spiral\"; known: default, linear, dynamic, llama3, \
         proportional, yarn, longrope",
    );
    check(
        json!({"rope_scaling": {"factor": 8.0}}),
        "rope_scaling of rope_type \"default\" has unknown keys: factor = 8.0",
    );
    check(
        json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        "rope_parameters of rope_type \"default\" has unknown keys: partial_rotary_factor = 0.5",
    );
    check(
        json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
        "rope_parameters of rope_type \"default\" has unknown keys: \
         full_attention = {\"rope_theta\": 1000000.0}",
    );
    check(
        json!({"rope_scaling": {"type": "linear"}}),
        "rope_scaling.factor is null, expected a number of at least 1",
    );
    check(
        json!({"rope_scaling": {"type": "yarn", "factor": "4"}}),
        "rope_scaling.factor is \"4\", expected a positive number",
    );
    check(
        json!({"rope_scaling": {
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 0.5
        }}),
        "rope_scaling.original_max_position_embeddings is 0.5, expected a positive integer",
    );
    check(
        json!({"rope_scaling": {
            "type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3
        }}),
        "rope_scaling.high_freq_factor is 3, expected low_freq_factor at least",
    );
    check(json!({"rope_theta": 1.0}), "config.rope_theta is 1.0, expected a number above 1");
    check(json!({"rope_scaling": 4}), "config.rope_scaling is 4, expected an object or null");
    check(
        json!({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}),
        "the configuration contradicts itself: rope_scaling has rope_type \"yarn\" and type \
         \"linear\"",
    );
    check(
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}),
        "the configuration contradicts itself: theta is 10000.0 and 1000000.0",
    );
    assert!(
        parse(
            &json!({
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"}
            }),
            4096
        )
        .is_err()
    );
}

#[test]
fn odd_and_huge_widths_are_refused() {
    let parameters = parse(&json!({}), 64).unwrap();
    for width in [0, 1, 33, MAX_WIDTH + 2] {
        assert_eq!(parameters.resolve(width, RopeStyle::Half), Err(RopeError::Width(width)));
    }
}
