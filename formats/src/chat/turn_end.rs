//! What a chat template writes where an assistant's turn ends.

use std::{collections::BTreeMap, sync::Arc, time::UNIX_EPOCH};

use super::{PROBE_TIME, Probe, Templates, USER, message};
use crate::template::{ChatTemplate, Next};

// No template says it by itself.
const ANSWER: &str = "otter answers";

/// The texts that follow an assistant's answer: at the end of a conversation, and before the user's
/// next message. None for a template that does not render, in this process or where
/// [`super::probe_with`] says.
#[must_use]
pub fn after_answer(templates: &Templates, specials: &BTreeMap<String, String>) -> Vec<String> {
    super::prober::after_answer(templates, specials).unwrap_or_default()
}

/// The same, in this process.
#[must_use]
pub fn after_answer_here(
    templates: &Templates,
    specials: &BTreeMap<String, String>,
) -> Vec<String> {
    let now = Arc::new(|| UNIX_EPOCH + PROBE_TIME);
    let Ok(template) = ChatTemplate::parse_with_clock(&templates.default, specials, now) else {
        return Vec::new();
    };
    let probe = Probe::of(&template, &[]);
    let last = vec![message("user", USER), message("assistant", ANSWER)];
    let before = [last.clone(), vec![message("user", USER)]].concat();
    let after = |messages: &[serde_json::Value]| {
        let text = probe.render(messages, Next::Nobody).ok()?;
        let (_, rest) = text.rsplit_once(ANSWER)?;
        Some(rest.split(USER).next().unwrap_or_default().to_owned())
    };
    [after(&last), after(&before)].into_iter().flatten().collect()
}
