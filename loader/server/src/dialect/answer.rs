//! A whole answer, collected from its steps.

use crate::server::{
    generation::{AnswerUsage, Part, Step, TokenLogprob},
    inner::{EndReason, Piece},
};

/// One answer, complete.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::server) struct Answer {
    pub(in crate::server) reasoning: String,
    pub(in crate::server) content: String,
    pub(in crate::server) calls: Vec<AnswerCall>,
    /// Absent while it is being made.
    pub(in crate::server) reason: Option<EndReason>,
    pub(in crate::server) usage: AnswerUsage,
    pub(in crate::server) logprobs: Vec<TokenLogprob>,
}

/// A call of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::server) struct AnswerCall {
    pub(in crate::server) id: String,
    pub(in crate::server) name: String,
    /// JSON text; cut off where the call is not complete.
    pub(in crate::server) arguments: String,
    pub(in crate::server) is_complete: bool,
}

impl Answer {
    /// Adds a step to the answer that it belongs to.
    pub(in crate::server) fn collect(answers: &mut [Self], step: Step) {
        let answer = &mut answers[step.choice as usize];
        answer.logprobs.extend(step.logprobs);
        match step.part {
            Part::Piece(piece) => answer.push(piece),
            Part::End(reason, usage) => (answer.reason, answer.usage) = (Some(reason), usage),
        }
    }

    /// Adds a piece.
    pub(in crate::server) fn push(&mut self, piece: Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::Content(text) => self.content.push_str(&text),
            Piece::CallBegin { id, name, .. } => {
                self.calls.push(AnswerCall { id, name, ..AnswerCall::default() });
            }
            Piece::CallArguments { fragment, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&fragment);
                }
            }
            Piece::CallEnd { .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.is_complete = true;
                }
            }
        }
    }

    /// Why it ended; an answer without an end was cut off.
    #[must_use]
    pub(in crate::server) fn reason(&self) -> EndReason {
        self.reason.unwrap_or(EndReason::Length)
    }
}
