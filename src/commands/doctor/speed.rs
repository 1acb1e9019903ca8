//! Tokens per second through the whole program: server, ranks, text.

use std::path::Path;

use anyhow::ensure;
use serde_json::json;

use super::report::Finding;
use crate::commands::demo::{ask, children, model};

/// A verse that the bundled model has memorised.
const QUESTION: &str = "John 3:16";

/// Serves a set and asks it one question. `verse` says whether it is the bundled model, whose
/// answer is known.
pub(super) fn check(
    set: &Path,
    nodes: &[String],
    options: &[String],
    verse: Verse,
) -> anyhow::Result<Finding> {
    let server = children::serve(set, nodes, options)?;
    let answer = ask::ask(&server.address, None, QUESTION, &mut |_| Ok(()))?;
    if let (Verse::Known, Some(expected)) = (verse, model::known(QUESTION)) {
        ensure!(answer.text.trim() == expected, "the answer is {:?}", answer.text.trim());
    }
    let detail = format!(
        "{:.1} tokens per second after the first, which took {:.0} ms; {} tokens",
        answer.tokens_per_second,
        answer.first_token_seconds * 1000.0,
        answer.tokens
    );
    let figures = json!({
        "tokens_per_second": answer.tokens_per_second,
        "first_token_seconds": answer.first_token_seconds,
        "tokens": answer.tokens,
    });
    Ok(Finding::new(detail, figures))
}

/// Whether the answer is known.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Verse {
    Known,
    Unknown,
}
