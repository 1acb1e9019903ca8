//! Chat completions and their chunks as clients of the `OpenAI` API parse them.

use serde::Serialize;

use crate::server::{
    generation::{AnswerUsage, EndReason},
    inner::Role,
};

/// What is the same in every chunk of an answer.
#[derive(Clone, Debug)]
pub(in crate::server) struct Writer {
    /// `chatcmpl-…`, unique.
    pub(in crate::server) id: String,
    /// Seconds since 1970.
    pub(in crate::server) created: u64,
    /// The model's name as the client knows it.
    pub(in crate::server) model: String,
}

/// A whole answer.
pub(in crate::server) struct Answer {
    pub(in crate::server) content: String,
    pub(in crate::server) reason: EndReason,
    pub(in crate::server) usage: AnswerUsage,
}

#[derive(Serialize)]
struct Completion<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: (),
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: (),
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: (),
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the API's names")]
struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
}

impl From<AnswerUsage> for Usage {
    fn from(usage: AnswerUsage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
        }
    }
}

const fn finish_reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Stop => "stop",
        EndReason::Length => "length",
    }
}

impl Writer {
    /// A whole completion.
    pub(in crate::server) fn completion(&self, answer: &Answer) -> String {
        let message =
            Message { role: Role::Assistant.name(), content: &answer.content, refusal: () };
        let finish_reason = finish_reason(answer.reason);
        let choice = Choice { index: 0, message, logprobs: (), finish_reason };
        self.json("chat.completion", [choice], Some(answer.usage))
    }

    /// The first chunk: who speaks.
    pub(in crate::server) fn start(&self) -> String {
        let delta = Delta { role: Some(Role::Assistant.name()), content: Some("") };
        self.chunk(delta, None)
    }

    /// A piece of the text.
    pub(in crate::server) fn text(&self, text: &str) -> String {
        self.chunk(Delta { role: None, content: Some(text) }, None)
    }

    /// The last chunk of the choice.
    pub(in crate::server) fn end(&self, reason: EndReason) -> String {
        self.chunk(Delta::default(), Some(finish_reason(reason)))
    }

    /// The chunk after the last, on request.
    pub(in crate::server) fn usage(&self, usage: AnswerUsage) -> String {
        self.json("chat.completion.chunk", [(); 0], Some(usage))
    }

    fn chunk(&self, delta: Delta<'_>, finish_reason: Option<&'static str>) -> String {
        let choice = ChunkChoice { index: 0, delta, logprobs: (), finish_reason };
        self.json("chat.completion.chunk", [choice], None)
    }

    fn json<C: Serialize>(
        &self,
        object: &'static str,
        choices: C,
        usage: Option<AnswerUsage>,
    ) -> String {
        let usage = usage.map(Usage::from);
        let (id, created, model) = (&self.id, self.created, &self.model);
        let completion = Completion { id, object, created, model, choices, usage };
        serde_json::to_string(&completion).expect("strings and integers are always JSON")
    }
}
