//! Which parser reads a model's output, and what it is held to. The seam between the dialects and
//! the handling of calls, thinking and constraints.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use shardpack_engine_api::{ConstraintSource, TokenId};

use super::{
    conversation::{ChatRequest, OutputParser, PlainText, ResponseFormat, Tool, ToolChoice},
    json::Json,
    model::ChatModel,
    tools::{
        ArgumentValidator, ConstrainedTool, ConstraintSpec, GrammarError, OutputFormat,
        ParserOptions, TextForm, ToolCallParser, ToolSpec,
    },
};

/// A request whose answer cannot be planned.
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
}

/// How one answer is read and constrained.
pub struct OutputPlan {
    format: Arc<OutputFormat>,
    /// Absent for bare continuations, which are neither calls nor thinking.
    options: Option<ParserOptions>,
    /// For the engine.
    pub constraint: Option<ConstraintSource>,
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

/// Reads off a request how its answer, which continues `prompt`, is read and constrained: `is_raw`
/// is a bare continuation. What cannot be enforced is refused by its parameter's name.
pub fn plan(
    model: &ChatModel,
    request: &ChatRequest,
    prompt: &[TokenId],
    stop_tokens: &[TokenId],
    is_raw: bool,
) -> Result<OutputPlan, OutputPlanError> {
    let format = Arc::clone(model.output());
    let in_thinking = !is_raw && model.opens_thinking(prompt);
    let CallableTools { tools, is_required: required, is_named } = callable(request)?;
    let one_call = is_named || !request.parallel_tool_calls;
    let text = text_form(&request.response_format);
    // Where nothing is demanded, a call that the model begins by itself is held to its form.
    let needs_grammar = required || text.is_some() || !tools.is_empty();
    let (mut constraint, mut judged) = (None, Vec::new());
    if needs_grammar {
        let spec = ConstraintSpec {
            tools: tools.iter().map(|tool| constrained(tool)).collect(),
            required,
            one_call,
            text,
            in_thinking,
            stop_tokens: stop_tokens.to_vec(),
        };
        (constraint, judged) = compile(model, request, spec, &tools)?;
    }
    let specs = specs(request, &tools, &judged)?;
    let options = ParserOptions { tools: specs.into(), in_thinking, one_call, nonce: 0 };
    let options = (!is_raw).then_some(options);
    Ok(OutputPlan { format, options, constraint })
}

/// What the parser is told of the tools, of which some are judged; what cannot be judged either is
/// refused with the keyword that the grammar lacks.
fn specs(
    request: &ChatRequest,
    tools: &[&Tool],
    judged: &[(usize, GrammarError)],
) -> Result<Vec<ToolSpec>, OutputPlanError> {
    let mut specs: Vec<ToolSpec> = tools
        .iter()
        .map(|tool| ToolSpec { name: tool.name.clone(), schema: schema(tool), check: None })
        .collect();
    for (index, error) in judged {
        let spec = &mut specs[*index];
        let check = ArgumentValidator::new(&spec.schema).map_err(|own| {
            let reason = format!("{error}; nor can a call be judged when it is complete: {own}");
            not_enforceable(&place(request, tools[*index]), &reason)
        })?;
        spec.check = Some(check);
    }
    Ok(specs)
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
        let message = "tool_choice: it asks for a call, but no such tool is among the tools";
        return Err(OutputPlanError::Param {
            param: "tool_choice".to_owned(),
            message: message.to_owned(),
        });
    }
    Ok(CallableTools { tools, is_required, is_named })
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

/// What a grammar enforces, and the tools that calls are judged for when they are complete, with
/// the reason why the grammar cannot.
type Compiled = (Option<ConstraintSource>, Vec<(usize, GrammarError)>);

/// Compiles once before anything runs, so that what cannot be enforced is the request's fault.
///
/// Agents bring schemas of all kinds with their tools. Where nothing was asked to hold from the
/// first token, a tool whose schema no grammar can enforce is held to its name and to JSON, and its
/// calls are judged when they are complete; the others are held to theirs.
fn compile(
    model: &ChatModel,
    request: &ChatRequest,
    mut spec: ConstraintSpec,
    tools: &[&Tool],
) -> Result<Compiled, OutputPlanError> {
    let param = param(&spec, request);
    let is_demanded = spec.required || spec.text.is_some();
    if model.output().style().tools.is_none() && !is_demanded {
        // Calls of an unknown form are neither parsed nor held to anything.
        return Ok((None, Vec::new()));
    }
    let is_strict = tools.iter().any(|tool| tool.strict);
    let Some(grammars) = model.grammars() else {
        let reason = "this model's vocabulary cannot be constrained";
        if is_demanded || is_strict {
            return Err(OutputPlanError::Param {
                param: param.to_owned(),
                message: format!("{param}: {reason}"),
            });
        }
        let error = GrammarError::Grammar(reason.to_owned());
        return Ok((None, (0..tools.len()).map(|index| (index, error.clone())).collect()));
    };
    let Err(error) = grammars.constraint(&spec) else {
        return Ok((Some(spec.source()), Vec::new()));
    };
    if is_demanded || error == GrammarError::Busy {
        return Err(refused(param, &error, request));
    }
    let mut judged = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let alone = ConstraintSpec { tools: vec![spec.tools[index].clone()], ..spec.clone() };
        let Err(error) = grammars.constraint(&alone) else { continue };
        if tool.strict || error == GrammarError::Busy {
            return Err(refused(&place(request, tool), &error, request));
        }
        spec.tools[index].schema = weak(&spec.tools[index].schema);
        judged.push((index, error));
    }
    match grammars.constraint(&spec) {
        Ok(_) => Ok((Some(spec.source()), judged)),
        Err(error) if is_strict || error == GrammarError::Busy => {
            Err(refused(param, &error, request))
        }
        // Together they are too much: each is judged.
        Err(error) => Ok((None, (0..tools.len()).map(|index| (index, error.clone())).collect())),
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

fn refused(param: &str, error: &GrammarError, request: &ChatRequest) -> OutputPlanError {
    if *error == GrammarError::Busy {
        return OutputPlanError::Busy(error.to_string());
    }
    let is_of = |tool: &&Tool| match error {
        GrammarError::Schema(error) => error.reason.ends_with(&format!("(tool {:?})", tool.name)),
        _ => false,
    };
    let tool = request.tools.iter().find(is_of);
    let place = tool.map_or_else(|| param.to_owned(), |tool| place(request, tool));
    not_enforceable(&place, &error.to_string())
}

/// Where a request says what a tool's arguments are.
fn place(request: &ChatRequest, tool: &Tool) -> String {
    let index = request.tools.iter().position(|other| other.name == tool.name).unwrap_or_default();
    format!("tools[{index}].function.parameters")
}

fn not_enforceable(place: &str, reason: &str) -> OutputPlanError {
    OutputPlanError::Unenforceable {
        param: place.to_owned(),
        message: format!("{place}: {reason}"),
    }
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
