//! Which parser reads a model's output, and what it is held to. The seam between the dialects and
//! the handling of calls, thinking and constraints.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{
    error::{ApiError, ErrorKind},
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
    /// What calls are not held to, by the names of parameters.
    pub(super) unenforced: Vec<String>,
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
    let (mut constraint, mut unenforced) = (None, Vec::new());
    if needs_grammar {
        let spec = ConstraintSpec {
            tools: tools.iter().map(|tool| constrained(tool)).collect(),
            required,
            one_call,
            text,
            in_thinking,
            stop_tokens: stop_tokens.to_vec(),
        };
        (constraint, unenforced) = compile(model, request, spec, &tools)?;
    }
    let specs: Vec<ToolSpec> = tools
        .iter()
        .map(|tool| ToolSpec { name: tool.name.clone(), schema: schema(tool) })
        .collect();
    let options = ParserOptions { tools: specs.into(), in_thinking, one_call, nonce: 0 };
    let options = (!is_raw).then_some(options);
    Ok(OutputPlan { format, options, constraint, unenforced })
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

/// What is enforced, and the names of what is not.
type Compiled = (Option<ConstraintSource>, Vec<String>);

/// Compiles once before anything runs, so that what cannot be enforced is the request's fault.
///
/// Agents bring schemas of all kinds with their tools. Where nothing was asked to hold, a tool
/// whose schema cannot be enforced is held to its name and to JSON, and named; the others to theirs.
fn compile(
    model: &ChatModel,
    request: &ChatRequest,
    mut spec: ConstraintSpec,
    tools: &[&Tool],
) -> Result<Compiled, ApiError> {
    let param = param(&spec, request);
    let is_demanded = spec.required || spec.text.is_some();
    if model.output().style().tools.is_none() && !is_demanded {
        // Calls of an unknown form are neither parsed nor held to anything.
        return Ok((None, Vec::new()));
    }
    let is_demanded = is_demanded || tools.iter().any(|tool| tool.strict);
    let Some(grammars) = model.grammars() else {
        if !is_demanded {
            return Ok((None, vec![param.to_owned()]));
        }
        let message = format!("{param}: this model's vocabulary cannot be constrained");
        return Err(ApiError::param(param, message));
    };
    let Err(error) = grammars.constraint(&spec) else {
        return Ok((Some(spec.source()), Vec::new()));
    };
    if spec.required || spec.text.is_some() || error == GrammarError::Busy {
        return Err(refused(param, &error, tools));
    }
    let mut unenforced = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let alone = ConstraintSpec { tools: vec![spec.tools[index].clone()], ..spec.clone() };
        let Err(error) = grammars.constraint(&alone) else { continue };
        if tool.strict {
            return Err(refused(&format!("tools[{index}].function.parameters"), &error, tools));
        }
        spec.tools[index].schema = weak(&spec.tools[index].schema);
        unenforced.push(format!("tools.{}.parameters", tool.name));
    }
    match grammars.constraint(&spec) {
        Ok(_) => Ok((Some(spec.source()), unenforced)),
        Err(error) if is_demanded => Err(refused(param, &error, tools)),
        Err(_) => Ok((None, vec![param.to_owned()])),
    }
}

/// The parameter that the constraint comes from.
fn param(spec: &ConstraintSpec, request: &ChatRequest) -> &'static str {
    match (&spec.text, &request.response_format) {
        (Some(_), ResponseFormat::JsonSchema { param, .. }) => param,
        (Some(_), ResponseFormat::JsonObject) => "response_format",
        (Some(_), _) => "structured_outputs",
        (None, _) => "tools",
    }
}

fn refused(param: &str, error: &GrammarError, tools: &[&Tool]) -> ApiError {
    if *error == GrammarError::Busy {
        return ApiError::new(ErrorKind::Unavailable, error.to_string()).with_code("queue_full");
    }
    let of_tool = |reason: &str| {
        tools.iter().position(|tool| reason.ends_with(&format!("(tool {:?})", tool.name)))
    };
    let place = match error {
        GrammarError::Schema(error) => of_tool(&error.reason),
        _ => None,
    };
    let place = place
        .map_or_else(|| param.to_owned(), |index| format!("tools[{index}].function.parameters"));
    let message = format!("{place}: {error}");
    ApiError::param(place, message).with_code("unsupported_value")
}

/// What is left of a schema that cannot be enforced: an object, and what its members are called
/// and, where that is one word, of which type they are.
fn weak(schema: &Value) -> Value {
    let properties = schema.get("properties").and_then(Value::as_object);
    let member = |(name, schema): (&String, &Value)| {
        let kind = schema.get("type").filter(|kind| kind.is_string());
        (name.clone(), kind.map_or(Value::Bool(true), |kind| json!({ "type": kind })))
    };
    let properties: Map<String, Value> = properties.into_iter().flatten().map(member).collect();
    json!({ "type": "object", "properties": properties })
}
