//! Which parser reads a model's output, and what it is held to. The seam between the dialects and
//! the handling of calls, thinking and constraints.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    error::ApiError,
    inner::{ChatRequest, OutputParser, PlainText, ResponseFormat, Tool, ToolChoice},
    json::Json,
    model::ChatModel,
    tools::{
        CallParser, ConstrainedTool, ConstraintSpec, GrammarError, OutputFormat, ParserOptions,
        TextForm, ToolSpec,
    },
};
use crate::engine::{ConstraintSource, TokenId};

/// How one answer is read and constrained.
pub(super) struct OutputPlan {
    format: Arc<OutputFormat>,
    /// Absent for bare continuations, which are neither calls nor thinking.
    options: Option<ParserOptions>,
    /// For the engine.
    pub(super) constraint: Option<ConstraintSource>,
}

impl OutputPlan {
    /// The parser of one answer; `nonce` makes ids of calls unique among answers.
    pub(super) fn parser(&self, nonce: u64) -> Box<dyn OutputParser> {
        match &self.options {
            Some(options) => {
                let options = ParserOptions { nonce, ..options.clone() };
                Box::new(CallParser::new(Arc::clone(&self.format), options))
            }
            None => Box::new(PlainText::default()),
        }
    }
}

/// Reads off a request how its answer, which continues `prompt`, is read and constrained: `is_raw`
/// is a bare continuation. What cannot be enforced is refused by its parameter's name.
pub(super) fn plan(
    model: &ChatModel,
    request: &ChatRequest,
    prompt: &[TokenId],
    stop_tokens: &[TokenId],
    is_raw: bool,
) -> Result<OutputPlan, ApiError> {
    let format = Arc::clone(model.output());
    let in_thinking = !is_raw && model.opens_thinking(prompt);
    let (tools, required, named) = callable(request)?;
    let one_call = named || !request.parallel_tool_calls;
    let text = text_form(&request.response_format);
    // Where nothing is demanded, a call that the model begins by itself is held to its form.
    let needs_grammar = required || text.is_some() || !tools.is_empty();
    let mut constraint = None;
    if needs_grammar {
        let spec = ConstraintSpec {
            tools: tools.iter().map(|tool| constrained(tool)).collect(),
            required,
            one_call,
            text,
            in_thinking,
            stop_tokens: stop_tokens.to_vec(),
        };
        constraint = compile(model, request, &spec, &tools)?;
    }
    let specs: Vec<ToolSpec> = tools
        .iter()
        .map(|tool| ToolSpec { name: tool.name.clone(), schema: schema(tool) })
        .collect();
    let options = ParserOptions { tools: specs.into(), in_thinking, one_call, nonce: 0 };
    let options = (!is_raw).then_some(options);
    Ok(OutputPlan { format, options, constraint })
}

/// The tools that may be called, whether one must, and whether it was named.
fn callable(request: &ChatRequest) -> Result<(Vec<&Tool>, bool, bool), ApiError> {
    let all = || request.tools.iter();
    let found = match &request.tool_choice {
        ToolChoice::None => (Vec::new(), false, false),
        ToolChoice::Auto => (all().collect(), false, false),
        ToolChoice::Required => (all().collect(), true, false),
        ToolChoice::Named(name) => {
            (all().filter(|tool| tool.name == *name).collect::<Vec<_>>(), true, true)
        }
        ToolChoice::Allowed { names, required } => {
            (all().filter(|tool| names.contains(&tool.name)).collect(), *required, false)
        }
    };
    if found.1 && found.0.is_empty() {
        let message = "tool_choice: it asks for a call, but no such tool is among the tools";
        return Err(ApiError::param("tool_choice", message));
    }
    Ok(found)
}

fn schema(tool: &Tool) -> Value {
    tool.parameters.as_ref().map_or(Value::Bool(true), to_value)
}

fn constrained(tool: &Tool) -> ConstrainedTool {
    ConstrainedTool { name: tool.name.clone(), schema: schema(tool) }
}

fn to_value(json: &Json) -> Value {
    serde_json::to_value(json).expect("one kind of JSON is another")
}

fn text_form(format: &ResponseFormat) -> Option<TextForm> {
    Some(match format {
        ResponseFormat::Text => return None,
        ResponseFormat::JsonObject => TextForm::Schema(json!({ "type": "object" })),
        ResponseFormat::JsonSchema { schema, .. } => TextForm::Schema(to_value(schema)),
        ResponseFormat::Regex(expression) => TextForm::Regex(expression.clone()),
        ResponseFormat::Grammar(text) => TextForm::Grammar(text.clone()),
        ResponseFormat::Choice(texts) => TextForm::Choice(texts.clone()),
    })
}

/// Compiles once before anything runs, so that what cannot be enforced is the request's fault.
fn compile(
    model: &ChatModel,
    request: &ChatRequest,
    spec: &ConstraintSpec,
    tools: &[&Tool],
) -> Result<Option<ConstraintSource>, ApiError> {
    let param: &'static str = match (&spec.text, &request.response_format) {
        (Some(_), ResponseFormat::JsonSchema { param, .. }) => param,
        (Some(_), ResponseFormat::JsonObject) => "response_format",
        (Some(_), _) => "structured_outputs",
        (None, _) => "tools",
    };
    let is_demanded = spec.required || spec.text.is_some() || tools.iter().any(|tool| tool.strict);
    let is_known = model.output().style().tools.is_some();
    if !is_known && !spec.required && spec.text.is_none() {
        // Calls of an unknown form are neither parsed nor held to anything.
        return Ok(None);
    }
    let Some(grammars) = model.grammars() else {
        if !is_demanded {
            return Ok(None);
        }
        let message = format!("{param}: this model's vocabulary cannot be constrained");
        return Err(ApiError::param(param, message));
    };
    match grammars.constraint(spec) {
        Ok(_) => Ok(Some(spec.source())),
        // Schemas of all kinds come with tools: only what was asked to hold must.
        Err(_) if !is_demanded => Ok(None),
        Err(GrammarError::Schema(error)) => {
            let place = match tools
                .iter()
                .position(|tool| error.reason.ends_with(&format!("(tool {:?})", tool.name)))
            {
                Some(index) => format!("tools[{index}].function.parameters"),
                None => param.to_owned(),
            };
            let message = format!("{place}: {error}");
            Err(ApiError::param(place, message).with_code("unsupported_value"))
        }
        Err(error) => {
            Err(ApiError::param(param, format!("{param}: {error}")).with_code("unsupported_value"))
        }
    }
}
