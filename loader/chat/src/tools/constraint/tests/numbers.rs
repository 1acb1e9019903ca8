//! A model that writes digits wherever it may: its numbers end all the same.

use super::*;

/// Tokens of a model that writes a digit, a point or an exponent wherever it may, else at random.
fn walk_digits(model: &Model, constraint: &mut GrammarConstraint, seed: u64) -> (String, bool) {
    let mut random = Random(seed);
    let mut text = Vec::new();
    for _ in 0..400 {
        if constraint.must_stop() {
            return (String::from_utf8_lossy(&text).into_owned(), true);
        }
        let mut mask = TokenMask::all(model.vocab_size());
        constraint.mask(&mut mask).unwrap();
        let is_text = mask.is_allowed(TokenId(u32::from(b'z')));
        let mut favourites = [b'7', b'1', b'.', b'e'].map(|byte| TokenId(byte.into())).into_iter();
        let token = favourites.find(|token| !is_text && mask.is_allowed(*token));
        let token = token.unwrap_or_else(|| random.choose(&mask));
        constraint.accept(token).unwrap();
        if token == model.stop {
            return (String::from_utf8_lossy(&text).into_owned(), true);
        }
        text.extend(model.bytes(token));
    }
    (String::from_utf8_lossy(&text).into_owned(), false)
}

fn longest_run(text: &str) -> usize {
    let runs = text.split(|c: char| !c.is_ascii_digit()).map(str::len);
    runs.max().unwrap_or_default()
}

#[test]
fn numbers_of_schemas_end() {
    let model = Model::new(OutputStyle::default(), true);
    for kind in [
        json!({"type": "number"}),
        json!({"type": "integer"}),
        json!({"type": "integer", "minimum": 5}),
        json!({"type": "number", "minimum": 0.5, "maximum": 8}),
        json!({"type": "number", "exclusiveMaximum": 100}),
        json!({"type": "number", "multipleOf": 0.5}),
        json!({"type": ["number", "null"]}),
        json!({"type": "array", "items": {"type": "number"}, "maxItems": 3}),
    ] {
        let schema = json!({"type": "object", "properties": {"n": kind}, "required": ["n"],
            "additionalProperties": false});
        let spec = text_spec(&model, TextForm::Schema(schema.clone()));
        let mut constraint = model.grammars.constraint(&spec).unwrap();
        let (text, ended) = walk_digits(&model, &mut constraint, 3);
        assert!(ended && longest_run(&text) <= 20, "{kind}: {text}");
        judge(&schema, &serde_json::from_str(&text).unwrap(), &text);
    }
}

#[test]
fn what_is_text_or_must_be_long_is_not_cut() {
    let model = Model::new(OutputStyle::default(), true);
    let check = |form: TextForm, expected: usize| {
        let mut constraint = model.grammars.constraint(&text_spec(&model, form.clone())).unwrap();
        let (text, ended) = walk_digits(&model, &mut constraint, 3);
        assert!(ended && longest_run(&text) == expected, "{form:?}: {text}");
    };
    let pattern = |pattern: &str| TextForm::Schema(json!({"type": "string", "pattern": pattern}));
    check(pattern("^[0-9]{1,64}$"), 64);
    check(pattern("^[0-9]{40}$"), 40);
    check(TextForm::Schema(json!({"const": 1_u64 << 60})), 19);
    check(TextForm::Regex("[0-9]{1,50}".to_owned()), 50);
    check(TextForm::Grammar("start: /[0-9]{30}/".to_owned()), 30);
}

#[test]
fn numbers_of_calls_end_in_every_format() {
    let schema = json!({"type": "object", "properties": {"n": {"type": "number"}},
        "required": ["n"], "additionalProperties": false});
    for family in FAMILIES {
        for as_tokens in [true, false] {
            if !as_tokens && family == ToolFamily::Harmony {
                // Its markers are always tokens.
                continue;
            }
            let model = Model::family(family, as_tokens);
            let mut spec = model.spec(&[("f", schema.clone())], true);
            spec.one_call = true;
            let mut constraint = model.grammars.constraint(&spec).unwrap();
            let (text, ended) = walk_digits(&model, &mut constraint, 5);
            // Ids of calls have digits too.
            let long = longest_run(&text);
            assert!(ended && long <= 20, "{family:?}: {text}");
            assert!(text.contains("77777777777777777777"), "{family:?}: {text}");
        }
    }
}
