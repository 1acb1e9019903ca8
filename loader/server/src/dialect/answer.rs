//! A complete choice, collected from its updates.

use serde_json::{Value, json};
use shardpack_chat::conversation::{EndReason, OutputDelta};

use crate::{
    generation::{ChoiceUpdate, TokenLogprob, UpdateKind},
    usage::AnswerUsage,
};

/// One complete choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<AnswerCall>,
    /// Absent until it has ended.
    pub(crate) reason: Option<EndReason>,
    pub(crate) usage: AnswerUsage,
    pub(crate) logprobs: Vec<TokenLogprob>,
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerCall {
    pub(crate) id: String,
    pub(crate) name: String,
    /// JSON text; cut off where the call is not complete.
    pub(crate) arguments: String,
    pub(crate) is_complete: bool,
}

impl Answer {
    /// Applies an update to the choice that it belongs to.
    pub(crate) fn collect(answers: &mut [Self], update: ChoiceUpdate) {
        let answer = &mut answers[update.choice as usize];
        answer.logprobs.extend(update.logprobs);
        match update.kind {
            UpdateKind::Delta(delta) => answer.push(delta),
            UpdateKind::End(reason, usage) => (answer.reason, answer.usage) = (Some(reason), usage),
        }
    }

    /// Appends a delta.
    pub(crate) fn push(&mut self, delta: OutputDelta) {
        match delta {
            OutputDelta::Reasoning(text) => self.reasoning.push_str(&text),
            OutputDelta::Content(text) => self.content.push_str(&text),
            OutputDelta::ToolCallBegin { id, name, .. } => {
                self.calls.push(AnswerCall { id, name, ..AnswerCall::default() });
            }
            OutputDelta::ToolCallArguments { fragment, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&fragment);
                }
            }
            OutputDelta::ToolCallEnd { .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.is_complete = true;
                }
            }
        }
    }

    /// Why it ended; an answer without an end was cut off.
    #[must_use]
    pub(crate) fn reason(&self) -> EndReason {
        self.reason.unwrap_or(EndReason::Length)
    }
}

/// A token with its log probability, its bytes and the likeliest others, as responses and Ollama's
/// answers have them.
pub(super) fn json_logprob(token: &TokenLogprob) -> Value {
    let entry = |bytes: &[u8], logprob: Option<f32>| json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes});
    let mut value = entry(&token.bytes, token.logprob);
    let top = token.top.iter().map(|top| entry(&top.bytes, Some(top.logprob)));
    value["top_logprobs"] = top.collect();
    value
}
