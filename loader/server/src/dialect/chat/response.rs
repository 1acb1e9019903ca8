//! Chat completions and their chunks as clients of the `OpenAI` API parse them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use shardpack_chat::conversation::{EndReason, OutputDelta, Role};

use crate::{
    dialect::{Answer, AnswerCall, Identity, Writer, custom_input, push_data, to_json},
    error::{ApiError, Shape},
    generation::{ChoiceUpdate, TokenLogprob, UpdateKind},
    usage::AnswerUsage,
};

/// Options of the chat completions writer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Whether a chunk with the usage follows the last.
    pub(crate) include_usage: bool,
    /// Names of the tools that take free text.
    pub(crate) customs: BTreeSet<String>,
}

/// Writes chat completions.
pub(crate) struct ChatWriter {
    identity: Identity,
    options: Options,
    /// What each answer cost, once it has ended.
    usages: Vec<AnswerUsage>,
    /// Arguments of open calls of custom tools, by answer: their text is known at the end.
    custom_calls: BTreeMap<u32, String>,
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
    logprobs: Option<Logprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: (),
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    /// The same under the name of vLLM and `OpenRouter`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

#[derive(Serialize)]
struct Call<'a> {
    id: &'a str,
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<Function<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<Custom<'a>>,
}

/// A call of a tool that takes free text.
#[derive(Serialize)]
struct Custom<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    input: String,
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

#[derive(Serialize)]
struct CallDelta<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<FunctionDelta<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom: Option<Custom<'a>>,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

#[derive(Serialize)]
struct Logprobs<'a> {
    content: Vec<Logprob<'a>>,
    refusal: (),
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the API's names")]
struct Logprob<'a> {
    token: String,
    logprob: Option<f32>,
    bytes: &'a [u8],
    top_logprobs: Vec<TopLogprob<'a>>,
}

#[derive(Serialize)]
struct TopLogprob<'a> {
    token: String,
    logprob: f32,
    bytes: &'a [u8],
}

/// Usage as chat completions and completions report it.
#[derive(Serialize)]
pub(in crate::dialect) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the API's names")]
struct CompletionDetails {
    reasoning_tokens: u32,
    accepted_prediction_tokens: u32,
    rejected_prediction_tokens: u32,
}

impl From<AnswerUsage> for Usage {
    fn from(usage: AnswerUsage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: usage.reasoning_tokens,
                accepted_prediction_tokens: usage.prediction_tokens[0],
                rejected_prediction_tokens: usage.prediction_tokens[1],
            },
        }
    }
}

/// The API's name of an end.
pub(in crate::dialect) const fn finish_reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Stop | EndReason::StopText(_) => "stop",
        EndReason::Length => "length",
        EndReason::ToolCalls => "tool_calls",
    }
}

fn logprobs(tokens: &[TokenLogprob]) -> Option<Logprobs<'_>> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let content = tokens.iter().map(|token| Logprob {
        token: text(&token.bytes),
        logprob: token.logprob,
        bytes: &token.bytes,
        top_logprobs: token
            .top
            .iter()
            .map(|top| TopLogprob {
                token: text(&top.bytes),
                logprob: top.logprob,
                bytes: &top.bytes,
            })
            .collect(),
    });
    (!tokens.is_empty()).then(|| Logprobs { content: content.collect(), refusal: () })
}

impl ChatWriter {
    pub(crate) fn new(identity: Identity, options: Options) -> Self {
        let identity = Identity { id: format!("chatcmpl-{}", identity.id), ..identity };
        Self { identity, options, usages: Vec::new(), custom_calls: BTreeMap::new() }
    }

    fn chunk(&self, choice: ChunkChoice<'_>, out: &mut String) {
        push_data(&self.completion("chat.completion.chunk", [choice], None), out);
    }

    fn delta(&self, index: u32, delta: Delta<'_>, tokens: &[TokenLogprob], out: &mut String) {
        let logprobs = logprobs(tokens);
        self.chunk(ChunkChoice { index, delta, logprobs, finish_reason: None }, out);
    }

    fn completion<C>(
        &self,
        object: &'static str,
        choices: C,
        usage: Option<AnswerUsage>,
    ) -> Completion<'_, C> {
        let Identity { id, created, model, .. } = &self.identity;
        let usage = usage.map(Usage::from);
        Completion { id, object, created: *created, model, choices, usage }
    }

    fn write_delta(
        &mut self,
        choice: u32,
        output: &OutputDelta,
        tokens: &[TokenLogprob],
        out: &mut String,
    ) {
        let delta = match output {
            OutputDelta::Reasoning(text) => {
                Delta { reasoning_content: Some(text), reasoning: Some(text), ..Delta::default() }
            }
            OutputDelta::Content(text) => Delta { content: Some(text), ..Delta::default() },
            OutputDelta::ToolCallBegin { index, id, name } => {
                if self.options.customs.contains(name) {
                    self.custom_calls.insert(choice, String::new());
                    let custom = Custom { name: Some(name), input: String::new() };
                    custom_delta(*index, Some(id), custom)
                } else {
                    call_delta(*index, Some((id, name)), "")
                }
            }
            OutputDelta::ToolCallArguments { index, fragment } => {
                if let Some(arguments) = self.custom_calls.get_mut(&choice) {
                    arguments.push_str(fragment);
                    return;
                }
                call_delta(*index, None, fragment)
            }
            OutputDelta::ToolCallEnd { index } => {
                let Some(arguments) = self.custom_calls.remove(&choice) else { return };
                let custom = Custom { name: None, input: custom_input(&arguments) };
                custom_delta(*index, None, custom)
            }
        };
        self.delta(choice, delta, tokens, out);
    }
}

fn call_delta<'a>(
    index: u32,
    begin: Option<(&'a String, &'a String)>,
    arguments: &'a str,
) -> Delta<'a> {
    let (id, name) = (begin.map(|(id, _)| id.as_str()), begin.map(|(_, name)| name.as_str()));
    let r#type = begin.map(|_| "function");
    let function = Some(FunctionDelta { name, arguments });
    let call = CallDelta { index, id, r#type, function, custom: None };
    Delta { tool_calls: Some([call]), ..Delta::default() }
}

fn custom_delta<'a>(index: u32, id: Option<&'a String>, custom: Custom<'a>) -> Delta<'a> {
    let r#type = id.map(|_| "custom");
    let id = id.map(String::as_str);
    let call = CallDelta { index, id, r#type, function: None, custom: Some(custom) };
    Delta { tool_calls: Some([call]), ..Delta::default() }
}

impl Writer for ChatWriter {
    fn begin(&mut self, out: &mut String) {
        for index in 0..self.identity.choices {
            let role = Some(Role::Assistant.name());
            self.delta(index, Delta { role, content: Some(""), ..Delta::default() }, &[], out);
        }
    }

    fn update(&mut self, update: ChoiceUpdate, out: &mut String) {
        match &update.kind {
            UpdateKind::Delta(output) => {
                self.write_delta(update.choice, output, &update.logprobs, out);
            }
            UpdateKind::End(reason, usage) => {
                self.usages.push(*usage);
                let finish_reason = Some(finish_reason(*reason));
                let (index, delta) = (update.choice, Delta::default());
                let logprobs = logprobs(&update.logprobs);
                self.chunk(ChunkChoice { index, delta, logprobs, finish_reason }, out);
            }
        }
    }

    fn end(&mut self, out: &mut String) {
        if self.options.include_usage {
            let usage = Some(self.identity.total(&self.usages));
            push_data(&self.completion("chat.completion.chunk", [(); 0], usage), out);
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        push_data(&error.shaped(Shape::OpenAi), out);
    }

    fn whole(&mut self, answers: Vec<Answer>) -> String {
        let customs = &self.options.customs;
        let choices: Vec<Choice<'_>> =
            answers.iter().zip(0..).map(|answer| choice(answer, customs)).collect();
        let usages: Vec<AnswerUsage> = answers.iter().map(|answer| answer.usage).collect();
        let usage = Some(self.identity.total(&usages));
        to_json(&self.completion("chat.completion", choices, usage))
    }
}

fn choice<'a>((answer, index): (&'a Answer, u32), customs: &BTreeSet<String>) -> Choice<'a> {
    let reasoning = Some(answer.reasoning.as_str()).filter(|text| !text.is_empty());
    // A message of calls alone has no content, as the API's own.
    let is_empty = answer.content.is_empty() && !answer.calls.is_empty();
    let message = Message {
        role: Role::Assistant.name(),
        content: (!is_empty).then_some(answer.content.as_str()),
        refusal: (),
        reasoning_content: reasoning,
        reasoning,
        tool_calls: answer.calls.iter().map(|own| call(own, customs)).collect(),
    };
    let logprobs = logprobs(&answer.logprobs);
    Choice { index, message, logprobs, finish_reason: finish_reason(answer.reason()) }
}

fn call<'a>(call: &'a AnswerCall, customs: &BTreeSet<String>) -> Call<'a> {
    let AnswerCall { id, name, arguments, .. } = call;
    if customs.contains(name) {
        let custom = Custom { name: Some(name), input: custom_input(arguments) };
        return Call { id, r#type: "custom", function: None, custom: Some(custom) };
    }
    Call { id, r#type: "function", function: Some(Function { name, arguments }), custom: None }
}
