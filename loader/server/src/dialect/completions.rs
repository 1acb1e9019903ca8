//! Completions of the `OpenAI` API: raw prompts without a chat template.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};
use shardpack_chat::{
    conversation::{ChatRequest, Limits, OutputDelta},
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
    let prompt = parse_prompts(fields.take("prompt"), "prompt", PROMPTS_MAX)?;
    let mut sampling = parse_sampling(&mut fields)?;
    sampling.logprobs = parse_logprobs_count(&mut fields, "logprobs")?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let mut limits = parse_echo_limits(&mut fields, echo)?;
    limits.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS.max(limits.min_tokens));
    let format = parse_response_format(fields.object("response_format")?, "response_format")?;
    let response_format = parse_constraints(&mut fields)?.unwrap_or(format);
    let model = fields.string("model")?.filter(|model| !model.is_empty());
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = parse_stream_options(&mut fields)?;
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

/// Limits of the output; nothing may follow an echoed prompt.
fn parse_echo_limits(fields: &mut Fields, echo: bool) -> Result<Limits, ApiError> {
    let max_tokens = fields.take("max_tokens");
    let is_zero = echo && max_tokens.as_ref().and_then(integer) == Some(0);
    if let Some(value) = max_tokens.filter(|_| !is_zero) {
        fields.put("max_tokens", value);
    }
    let limits = parse_limits(fields, &["n_predict", "max_tokens"], "stop")?;
    Ok(if is_zero { Limits { max_tokens: Some(0), min_tokens: 0, ..limits } } else { limits })
}

/// A text, tokens, or several of either.
pub(super) fn parse_prompts(
    prompt: Option<Json>,
    name: &str,
    most: usize,
) -> Result<Vec<RawPrompt>, ApiError> {
    let prompts = match prompt {
        Some(Json::String(text)) => return Ok(vec![RawPrompt::Text(text)]),
        Some(Json::Array(items)) => items,
        Some(other) => return Err(mismatch(name, "a string or an array", &other)),
        None => {
            return Err(ApiError::param(name, format!("{name}: expected a string or an array")));
        }
    };
    if prompts.first().is_some_and(|first| integer(first).is_some()) {
        return tokens(&prompts, name).map(|tokens| vec![tokens]);
    }
    if prompts.is_empty() || prompts.len() > most {
        let message = format!("{name}: expected 1 to {most} of them, found {}", prompts.len());
        return Err(ApiError::param(name, message));
    }
    let prompt = |(index, prompt)| match prompt {
        Json::String(text) => Ok(RawPrompt::Text(text)),
        Json::Array(items) => tokens(&items, &format!("{name}[{index}]")),
        other => Err(mismatch(&format!("{name}[{index}]"), "a string or an array", &other)),
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
    /// Characters of each choice's tokens that were written.
    offsets: BTreeMap<u32, usize>,
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

/// Log probabilities of tokens, the first of which begins after `offset` characters; moves that on.
fn logprobs(tokens: &[TokenLogprob], offset: &mut usize) -> Option<Value> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut offsets = Vec::new();
    for token in tokens {
        offsets.push(*offset);
        *offset += text(&token.bytes).chars().count();
    }
    let top = |token: &TokenLogprob| {
        let logprob = token.logprob?;
        let mut top = serde_json::Map::new();
        // The token itself too, as in the API. Of several tokens with one text the likeliest counts.
        let all = token.top.iter().map(|top| (&top.bytes, top.logprob));
        for (bytes, logprob) in all.chain([(&token.bytes, logprob)]) {
            top.entry(text(bytes)).or_insert_with(|| json!(logprob));
        }
        Some(top)
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
        Self { identity, options, usages: Vec::new(), offsets: BTreeMap::new() }
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
        let logprobs = logprobs(&update.logprobs, self.offsets.entry(update.choice).or_default());
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
            logprobs: logprobs(&answer.logprobs, &mut 0),
            finish_reason: Some(finish_reason(answer.reason())),
        });
        let usages: Vec<AnswerUsage> = answers.iter().map(|answer| answer.usage).collect();
        to_json(&self.completion(choices.collect(), Some(self.identity.total(&usages))))
    }
}
