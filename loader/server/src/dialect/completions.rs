//! Completions of the `OpenAI` API: raw prompts without a chat template.

use serde::Serialize;
use serde_json::{Value, json};
use shardpack_chat::{
    conversation::{ChatRequest, OutputDelta},
    json::Json,
};

use super::{
    Answer, Identity, ParsedRequest, Prompt, RawPrompt, Writer, WriterOptions,
    chat::{Usage, finish_reason},
    fields::{Fields, integer, mismatch},
    params::{
        Neutral, leftover, parse_constraints, parse_limits, parse_logprobs_count,
        parse_response_format, parse_sampling, parse_stream_options, parse_token,
        refuse_unsupported,
    },
    parse_object, push_data, to_json,
};
use crate::{
    error::{ApiError, Shape},
    generation::{ChoiceUpdate, TokenLogprob, UpdateKind},
    usage::AnswerUsage,
};

/// Prompts of one request.
const PROMPTS_MAX: usize = 128;
/// Tokens of a completion whose length nobody chose: the API's own default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Options of the completions writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    include_usage: bool,
    /// Whether the answer begins with the prompt.
    pub(super) echo: bool,
}

const UNSUPPORTED: [(&str, Neutral); 3] = [
    ("best_of", Neutral::Numbers(&[1.0])),
    ("suffix", Neutral::Empty),
    ("prompt_logprobs", Neutral::Nothing),
];

/// Parses a body.
pub(super) fn parse(body: &[u8]) -> Result<ParsedRequest, ApiError> {
    let mut fields = Fields::new(parse_object(body)?);
    let prompt = parse_prompt(fields.take("prompt"))?;
    let mut sampling = parse_sampling(&mut fields)?;
    sampling.logprobs = parse_logprobs_count(&mut fields, "logprobs")?;
    let mut limits = parse_limits(&mut fields, &["n_predict", "max_tokens"], "stop")?;
    limits.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS.max(limits.min_tokens));
    let format = parse_response_format(fields.object("response_format")?, "response_format")?;
    let response_format = parse_constraints(&mut fields)?.unwrap_or(format);
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = parse_stream_options(&mut fields)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    if echo && sampling.logprobs.is_some() {
        let message = "logprobs: log probabilities of the prompt are not supported: leave out echo or logprobs";
        return Err(ApiError::param("logprobs", message).with_code("unsupported_value"));
    }
    refuse_unsupported(&mut fields, &UNSUPPORTED)?;
    let request = ChatRequest { response_format, sampling, limits, ..ChatRequest::default() };
    let writer_options = WriterOptions::Completions(Options { include_usage, echo });
    let ignored = leftover(fields, Vec::new());
    Ok(ParsedRequest {
        request,
        prompt: Prompt::Raw(prompt),
        model,
        stream,
        ignored,
        writer_options,
    })
}

/// A text, tokens, or several of either.
fn parse_prompt(prompt: Option<Json>) -> Result<Vec<RawPrompt>, ApiError> {
    let prompts = match prompt {
        Some(Json::String(text)) => return Ok(vec![RawPrompt::Text(text)]),
        Some(Json::Array(items)) => items,
        Some(other) => return Err(mismatch("prompt", "a string or an array", &other)),
        None => return Err(ApiError::param("prompt", "prompt: expected a string or an array")),
    };
    if prompts.first().is_some_and(|first| integer(first).is_some()) {
        return tokens(&prompts, "prompt").map(|tokens| vec![tokens]);
    }
    if prompts.is_empty() || prompts.len() > PROMPTS_MAX {
        let message = format!("prompt: expected 1 to {PROMPTS_MAX} prompts");
        return Err(ApiError::param("prompt", message));
    }
    let prompt = |(index, prompt)| match prompt {
        Json::String(text) => Ok(RawPrompt::Text(text)),
        Json::Array(items) => tokens(&items, &format!("prompt[{index}]")),
        other => Err(mismatch(&format!("prompt[{index}]"), "a string or an array", &other)),
    };
    prompts.into_iter().enumerate().map(prompt).collect()
}

fn tokens(items: &[Json], name: &str) -> Result<RawPrompt, ApiError> {
    let tokens = items.iter().enumerate().map(|(index, item)| parse_token(item, name, index));
    tokens.collect::<Result<_, _>>().map(RawPrompt::Tokens)
}

/// Writes completions.
pub(crate) struct CompletionsWriter {
    identity: Identity,
    options: Options,
    usages: Vec<AnswerUsage>,
}

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

#[derive(Serialize)]
struct Choice<'a> {
    text: &'a str,
    index: u32,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
}

fn logprobs(tokens: &[TokenLogprob]) -> Option<Value> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut offset = 0;
    let mut offsets = Vec::new();
    for token in tokens {
        offsets.push(offset);
        offset += text(&token.bytes).chars().count();
    }
    let top = |token: &TokenLogprob| -> serde_json::Map<String, Value> {
        token.top.iter().map(|top| (text(&top.bytes), json!(top.logprob))).collect()
    };
    (!tokens.is_empty()).then(|| {
        json!({
            "tokens": tokens.iter().map(|token| text(&token.bytes)).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    })
}

impl CompletionsWriter {
    pub(crate) fn new(identity: Identity, options: Options) -> Self {
        let identity = Identity { id: format!("cmpl-{}", identity.id), ..identity };
        Self { identity, options, usages: Vec::new() }
    }

    fn completion<'a>(
        &'a self,
        choices: Vec<Choice<'a>>,
        usage: Option<AnswerUsage>,
    ) -> Completion<'a> {
        let Identity { id, created, model, .. } = &self.identity;
        let usage = usage.map(Usage::from);
        Completion { id, object: "text_completion", created: *created, model, choices, usage }
    }
}

impl Writer for CompletionsWriter {
    fn begin(&mut self, _: &mut String) {}

    fn update(&mut self, update: ChoiceUpdate, out: &mut String) {
        let logprobs = logprobs(&update.logprobs);
        let (text, finish_reason) = match &update.kind {
            UpdateKind::Delta(OutputDelta::Content(text) | OutputDelta::Reasoning(text)) => {
                (text.as_str(), None)
            }
            UpdateKind::Delta(_) => return,
            UpdateKind::End(reason, usage) => {
                self.usages.push(*usage);
                ("", Some(finish_reason(*reason)))
            }
        };
        let choice = Choice { text, index: update.choice, logprobs, finish_reason };
        push_data(&self.completion(vec![choice], None), out);
    }

    fn end(&mut self, out: &mut String) {
        if self.options.include_usage {
            let usage = Some(self.identity.total(&self.usages));
            push_data(&self.completion(Vec::new(), usage), out);
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        push_data(&error.shaped(Shape::OpenAi), out);
    }

    fn whole(&mut self, answers: Vec<Answer>) -> String {
        let choices = answers.iter().zip(0..).map(|(answer, index)| Choice {
            text: &answer.content,
            index,
            logprobs: logprobs(&answer.logprobs),
            finish_reason: Some(finish_reason(answer.reason())),
        });
        let usages: Vec<AnswerUsage> = answers.iter().map(|answer| answer.usage).collect();
        to_json(&self.completion(choices.collect(), Some(self.identity.total(&usages))))
    }
}
