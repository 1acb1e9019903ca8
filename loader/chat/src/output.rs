//! Plans the output of a request: its parser and its constraint. The seam between the dialects and
//! tool calls, reasoning and constrained decoding.

mod closed;
mod compiled;

use std::sync::Arc;

use serde_json::Value;
use shardpack_engine_api::{ConstraintSource, TokenId};

use super::{
    conversation::{
        ChatRequest, OutputParser, PlainText, ResponseFormat, Tool, ToolChoice, ToolFormat,
        ToolKind,
    },
    json::Json,
    model::ChatModel,
    tools::{
        ArgumentValidator, CompileBudget, ConstrainedTool, ConstraintSpec, GrammarError,
        OutputFormat, ParserOptions, TextForm, ToolCallParser, ToolSpec, lark, localised,
    },
};
use compiled::{Compiled, compile};

/// The output of a request cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OutputPlanError {
    /// A parameter that cannot be honoured.
    #[error("{message}")]
    Param {
        /// The parameter, as a path.
        param: String,
        /// Why, for people.
        message: String,
    },
    /// A parameter's value that no grammar and no check can enforce.
    #[error("{message}")]
    Unenforceable {
        /// The parameter, as a path.
        param: String,
        /// Why, for people.
        message: String,
    },
    /// Too many grammars are being compiled; the same request may succeed later.
    #[error("{0}")]
    Busy(String),
    /// A grammar has to be compiled first, which was not allowed.
    #[error("{}", GrammarError::Uncompiled)]
    Uncompiled,
}

/// How one output is parsed and constrained.
pub struct OutputPlan {
    format: Arc<OutputFormat>,
    /// Absent for raw prompts, whose output holds neither tool calls nor reasoning.
    options: Option<ParserOptions>,
    /// For the engine.
    pub constraint: Option<ConstraintSource>,
    /// Places in schemas that are not enforced.
    pub unenforced: Vec<String>,
}

impl OutputPlan {
    /// The parser of one answer; `nonce` makes ids of calls unique among answers.
    #[must_use]
    pub fn parser(&self, nonce: u64) -> Box<dyn OutputParser> {
        match &self.options {
            Some(options) => {
                let options = ParserOptions { nonce, ..options.clone() };
                Box::new(ToolCallParser::new(Arc::clone(&self.format), options))
            }
            None => Box::new(PlainText::default()),
        }
    }
}

/// Plans the output of a request that continues `prompt`; `is_raw`: without a chat template. What
/// cannot be enforced is refused by its parameter's name. Without a budget only grammars are used that
/// were compiled before.
pub fn plan(
    model: &ChatModel,
    request: &ChatRequest,
    prompt: &[TokenId],
    stop_tokens: &[TokenId],
    is_raw: bool,
    budget: Option<&CompileBudget>,
) -> Result<OutputPlan, OutputPlanError> {
    let format = Arc::clone(model.output());
    let in_thinking = !is_raw && model.opens_thinking(prompt);
    let CallableTools { tools, is_required: required, is_named } = callable(request)?;
    // A model that must call and was never trained on calls would repeat its call up to the limit.
    let repeats = required && !model.shows_tools();
    let one_call = is_named || repeats || !request.parallel_tool_calls;
    let text = text_form(&request.response_format);
    // Without requirements, a lazy grammar constrains the calls that the model begins by itself.
    let needs_grammar = required || text.is_some() || !tools.is_empty();
    let mut compiled = Compiled::default();
    if needs_grammar {
        let spec = ConstraintSpec {
            tools: tools.iter().map(|tool| constrained(tool)).collect(),
            required,
            one_call,
            text,
            in_thinking,
            stop_tokens: stop_tokens.to_vec(),
        };
        compiled = compile(model, request, spec, &tools, budget)?;
    }
    let specs = specs(&tools, &compiled);
    let options = ParserOptions { tools: specs.into(), in_thinking, one_call, nonce: 0 };
    let options = (!is_raw).then_some(options);
    let Compiled { constraint, unenforced, .. } = compiled;
    Ok(OutputPlan { format, options, constraint, unenforced })
}

/// The tools for the parser. Those of which the grammar enforces less than can be judged get a
/// validator for complete calls.
fn specs(tools: &[&Tool], compiled: &Compiled) -> Vec<ToolSpec> {
    let spec = |(index, tool): (usize, &&Tool)| {
        let judged = compiled.judged.iter().find(|(own, _)| *own == index);
        let validator = judged.and_then(|(_, schema)| ArgumentValidator::new(schema).ok());
        ToolSpec { name: tool.name.clone(), schema: schema(tool), validator }
    };
    tools.iter().enumerate().map(spec).collect()
}

/// The tools that `tool_choice` leaves.
struct CallableTools<'a> {
    tools: Vec<&'a Tool>,
    /// Whether the model must call one.
    is_required: bool,
    /// Whether `tool_choice` names the one tool to call.
    is_named: bool,
}

fn callable(request: &ChatRequest) -> Result<CallableTools<'_>, OutputPlanError> {
    let all = || request.tools.iter();
    let (is_required, is_named) = match &request.tool_choice {
        ToolChoice::None | ToolChoice::Auto => (false, false),
        ToolChoice::Required => (true, false),
        ToolChoice::Named(_) => (true, true),
        ToolChoice::Allowed { required, .. } => (*required, false),
    };
    let tools: Vec<&Tool> = match &request.tool_choice {
        ToolChoice::None => Vec::new(),
        ToolChoice::Auto | ToolChoice::Required => all().collect(),
        ToolChoice::Named(name) => all().filter(|tool| tool.name == *name).collect(),
        ToolChoice::Allowed { names, .. } => {
            all().filter(|tool| names.contains(&tool.name)).collect()
        }
    };
    if is_required && tools.is_empty() {
        let message = "tool_choice: a tool call is required, but no such tool is among the tools";
        return Err(OutputPlanError::Param {
            param: "tool_choice".to_owned(),
            message: message.to_owned(),
        });
    }
    Ok(CallableTools { tools, is_required, is_named })
}

/// A tool's schema, with references that everything after this follows.
fn schema(tool: &Tool) -> Value {
    let parameters = tool.parameters.as_ref().map(to_value);
    parameters.map_or(Value::Bool(true), |schema| localised(&schema))
}

/// A tool for the grammar: its objects are closed unless it is strict, as those of answers are.
fn constrained(tool: &Tool) -> ConstrainedTool {
    let schema = schema(tool);
    let is_open = tool.kind == ToolKind::Function && !tool.strict;
    let schema = if is_open { closed::closed(&schema) } else { schema };
    let mut constrained = ConstrainedTool { name: tool.name.clone(), schema };
    let Some(input) = constrained.schema.pointer_mut("/properties/input") else {
        return constrained;
    };
    match &tool.format {
        Some(ToolFormat::Regex(expression)) => {
            input["pattern"] = format!("^(?:{expression})$").into();
        }
        Some(ToolFormat::Lark(text)) => {
            if let Ok(within_json) = lark::within_json(text) {
                input[lark::WITHIN_JSON] = within_json.into();
                input[lark::BARE] = text.as_str().into();
            }
        }
        None => {}
    }
    constrained
}

fn to_value(json: &Json) -> Value {
    serde_json::to_value(json).expect("one kind of JSON is another")
}

fn text_form(format: &ResponseFormat) -> Option<TextForm> {
    Some(match format {
        ResponseFormat::Text => return None,
        ResponseFormat::JsonObject => TextForm::Grammar(JSON_OBJECT.to_owned()),
        ResponseFormat::JsonSchema { schema, strict, .. } if *strict => {
            TextForm::Schema(to_value(schema))
        }
        ResponseFormat::JsonSchema { schema, .. } => {
            TextForm::Schema(closed::closed(&to_value(schema)))
        }
        ResponseFormat::Regex(expression) => TextForm::Regex(expression.clone()),
        ResponseFormat::Grammar(text) => TextForm::Grammar(text.clone()),
        ResponseFormat::Choice(texts) => TextForm::Choice(texts.clone()),
    })
}

/// Any JSON object. Numbers have an end: without one a model may write digits for ever.
const JSON_OBJECT: &str = include_str!("output/json_object.lark");
