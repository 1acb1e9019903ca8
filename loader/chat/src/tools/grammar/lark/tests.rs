//! Grammars as clients send them, and what they allow within JSON.

use std::sync::Arc;

use shardpack_engine_api::{Constraint, TokenId};
use shardpack_formats::OutputStyle;

use super::*;
use crate::tools::{ConstraintSpec, Grammars, OutputFormat, TextForm, TokenText};

/// The grammar of Codex's patches.
const PATCH: &str = include_str!("patch.lark");

/// Whether a grammar allows a text from beginning to end, byte by byte.
fn allows(grammars: &Grammars, grammar: &str, text: &str) -> bool {
    let end = TokenId(256);
    let spec = ConstraintSpec {
        tools: Vec::new(),
        required: false,
        one_call: false,
        text: Some(TextForm::Grammar(grammar.to_owned())),
        in_thinking: false,
        stop_tokens: vec![end],
    };
    let mut constraint =
        grammars.constraint(&spec).unwrap_or_else(|error| panic!("{error}\n{grammar}"));
    let is_allowed = |constraint: &mut dyn Constraint, token: TokenId| {
        let mut mask = shardpack_engine_api::TokenMask::all(257);
        constraint.mask(&mut mask).unwrap();
        mask.is_allowed(token)
    };
    for byte in text.bytes() {
        let token = TokenId(u32::from(byte));
        if constraint.must_stop() || !is_allowed(&mut constraint, token) {
            return false;
        }
        constraint.accept(token).unwrap();
    }
    constraint.must_stop() || is_allowed(&mut constraint, end)
}

fn grammars() -> Grammars {
    let format = Arc::new(OutputFormat::new(OutputStyle::default(), |_| None));
    let bytes = (0..=255).map(|byte| TokenText::Bytes(vec![byte]));
    let end = [TokenText::Added("<end>".to_owned())];
    Grammars::new(format, bytes.chain(end)).unwrap()
}

#[test]
fn what_a_grammar_allows_is_what_it_allows_within_json() {
    let grammars = grammars();
    let check = |grammar: &str, texts: &[(&str, bool)]| {
        let rewritten = within_json(grammar).unwrap();
        for &(text, expected) in texts {
            assert_eq!(allows(&grammars, grammar, text), expected, "{text:?}\n{grammar}");
            let json = escaped(text);
            assert_eq!(allows(&grammars, &rewritten, &json), expected, "{json:?}\n{rewritten}");
        }
    };
    check(
        PATCH,
        &[
            ("*** Begin Patch\n*** Add File: a\n+say \"\\hi\\\"\tü\n+\n*** End Patch\n", true),
            ("*** Begin Patch\n*** Delete File: a \"b\"\n*** End Patch", true),
            (
                "*** Begin Patch\n*** Update File: a\n@@ f(\"x\")\n-\\n\n+\\\\\n b\n*** End Patch",
                true,
            ),
            ("*** Begin Patch\n*** End Patch", false),
            ("*** Begin Patch\n*** Add File: a\nsay\n*** End Patch", false),
            ("{}", false),
        ],
    );
    check(
        "start: pair (\",\" pair)*\npair: NAME \"=\" TEXT\nNAME: LETTER (LETTER | DIGIT)*\n\
         TEXT: /\"[^\"\\n]*\"/\nLETTER: \"a\"..\"z\"\nDIGIT: /[0-9]/\n%ignore WS\n%import common.WS\n",
        &[
            ("a1=\"x\",\n\tb=\"\\\"", true),
            ("a = \"\"", true),
            ("1a=\"x\"", false),
            ("a=\"x\n\"", false),
        ],
    );
    check(
        "start: line+\nline: word \"\\n\"\n    | \"\\t\" word NL // the end\nword: /[a-z\"]+/i\n\
         %import common.NEWLINE -> NL\n",
        &[("a\n\tB\"\r\n", true), ("a\n\n", false), ("\"\n", true)],
    );
    check("start: /a.*;/ \"\\n\"", &[("a\"b\";\n", true), ("ab\n", false)]);
}

#[test]
fn what_cannot_be_rewritten_is_named() {
    for (grammar, words) in [
        ("start: %json {}", "%json"),
        ("start: @other", "@"),
        ("start: <think>", "<"),
        ("start: \"a\nb\"", "end"),
        ("start \"a\"", "colon"),
        ("%declare A\nstart: A", "%declare"),
        ("start: /^a/", "anchor"),
        ("start: \"\\n\"i", "case"),
    ] {
        let error = within_json(grammar).expect_err(grammar);
        assert!(error.contains(words), "{grammar}: {error}");
    }
}
