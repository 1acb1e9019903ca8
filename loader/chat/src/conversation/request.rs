//! A chat request, the same for every dialect.

use shardpack_engine_api::TokenId;

use super::Message;
use crate::json::{Json, Object};

/// A conversation to continue, normalised; built by the dialects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// Turns in order; not empty.
    pub messages: Vec<Message>,
    /// Whether the output continues the last turn, an assistant message (prefill).
    pub continues: bool,
    /// Functions that the model may call, in the client's order. Under [`ToolChoice::None`] the
    /// template does not see them.
    pub tools: Vec<Tool>,
    /// Whether the model may, must or must not call one.
    pub tool_choice: ToolChoice,
    /// Whether one answer may hold several calls.
    pub parallel_tool_calls: bool,
    /// Structured output of the content.
    pub response_format: ResponseFormat,
    /// Reasoning options.
    pub reasoning: Reasoning,
    /// Variables for the template beyond the standard ones.
    pub template_kwargs: Object,
    /// Sampling parameters.
    pub sampling: SamplingRequest,
    /// Limits of the output.
    pub limits: Limits,
    /// Predicted output.
    pub prediction: Option<String>,
}

impl ChatRequest {
    /// Definitions that the template shows the model, in the form of chat completions.
    #[must_use]
    pub fn visible_tools(&self) -> Vec<Json> {
        let is_visible = |tool: &&Tool| match &self.tool_choice {
            ToolChoice::None => false,
            ToolChoice::Allowed { names, .. } => names.contains(&tool.name),
            ToolChoice::Auto | ToolChoice::Required | ToolChoice::Named(_) => true,
        };
        self.tools.iter().filter(is_visible).map(|tool| tool.definition.clone()).collect()
    }
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name, not empty; no two tools of a request share one.
    pub name: String,
    /// As templates expect it: `{"type": "function", "function": {name, description,
    /// parameters}}`, members in the client's order.
    pub definition: Json,
    /// JSON schema of its arguments; absent: any object.
    pub parameters: Option<Json>,
    /// Whether a schema that cannot be enforced to the letter must be refused.
    pub strict: bool,
    /// What the client takes it for.
    pub kind: ToolKind,
    /// The form of a custom tool's text.
    pub format: Option<ToolFormat>,
    /// The client's name for it, where it stands within a namespace.
    pub namespaced: Option<NamespacedName>,
}

/// The form of a custom tool's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// Text that the expression matches in whole.
    Regex(String),
    /// Text of this grammar.
    Lark(String),
}

/// The name of a tool within a namespace, as the client writes both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespacedName {
    /// The namespace, such as that of an MCP server.
    pub namespace: String,
    /// The tool's name there.
    pub name: String,
}

impl Tool {
    /// The client's name for it: its namespace, if any, and its name there.
    #[must_use]
    pub fn client_name(&self) -> (Option<&str>, &str) {
        match &self.namespaced {
            Some(own) => (Some(&own.namespace), &own.name),
            None => (None, &self.name),
        }
    }

    /// Gives it another name for the model.
    pub fn rename(&mut self, name: String) {
        if let Json::Object(tool) = &mut self.definition
            && let Some(Json::Object(function)) = tool.get_mut("function")
        {
            function.set("name", name.as_str().into());
        }
        self.name = name;
    }
}

/// What a client takes a tool for; to the model all are functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolKind {
    /// A function with JSON arguments.
    Function,
    /// A tool that takes free text: to the model, a function with the one string `input`.
    Custom,
    /// The client's own search for further tools (responses).
    Search,
}

/// Whether the model may, must or must not call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// Text only.
    None,
    /// At least one call of any tool.
    Required,
    /// One call of this tool.
    Named(String),
    /// As `Auto` or `Required`, but of these tools only.
    Allowed {
        /// Their names.
        names: Vec<String>,
        /// Whether one must be called.
        required: bool,
    },
}

/// Structured output: the form of the content.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    /// Any.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON of this schema.
    JsonSchema {
        /// The schema.
        schema: Json,
        /// Whether a schema that cannot be enforced to the letter must be refused.
        strict: bool,
        /// The parameter that holds the schema, for messages.
        param: &'static str,
    },
    /// Text that the expression matches in whole.
    Regex(String),
    /// Text of this grammar (Lark, as llguidance reads it).
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Reasoning options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasoning {
    /// Absent: as the template has it.
    pub enabled: Option<bool>,
    /// `none`, `minimal`, `low`, `medium`, `high`, … as the client said.
    pub effort: Option<String>,
    /// Most tokens of thinking.
    pub budget_tokens: Option<u32>,
}

/// One of the reasoning options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningOption {
    /// On or off.
    Switch,
    /// How much.
    Effort,
    /// Most tokens.
    Budget,
}

/// Sampling parameters of the request; absent: the model's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingRequest {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Absent: drawn by the server.
    pub seed: Option<u64>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// 0 is no limit.
    pub top_k: Option<u32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// In [-2, 2].
    pub presence_penalty: Option<f32>,
    /// In [-2, 2].
    pub frequency_penalty: Option<f32>,
    /// Above 0.
    pub repetition_penalty: Option<f32>,
    /// Added to logits, in [-100, 100].
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Alternatives whose logarithmic probabilities are reported with each token's own.
    pub logprobs: Option<u32>,
    /// Answers to the one conversation; absent: one.
    pub choices: Option<u32>,
}

/// When an answer ends, besides the model's own stop tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens to generate; absent: to the model's last position.
    pub max_tokens: Option<u32>,
    /// Tokens before which no stop token counts.
    pub min_tokens: u32,
    /// Whether the model's own stop tokens are ordinary ones (for measurements).
    pub ignore_stop_tokens: bool,
    /// Texts that end the answer and are not part of it; none is empty.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_tokens: Vec<TokenId>,
}
