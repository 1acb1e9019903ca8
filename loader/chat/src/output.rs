//! Plans the output of a request: its parser and its constraint. The seam between the dialects and
//! tool calls, reasoning and constrained decoding.

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
}

/// How one output is parsed and constrained.
pub struct OutputPlan {
    format: Arc<OutputFormat>,
    /// Absent for raw prompts, whose output holds neither tool calls nor reasoning.
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

/// Plans the output of a request that continues `prompt`; `is_raw`: without a chat template. What
/// cannot be enforced is refused by its parameter's name.
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
    // Without requirements, a lazy grammar constrains the calls that the model begins by itself.
    let needs_grammar = required || text.is_some() || !tools.is_empty();
    let (mut constraint, mut validated) = (None, Vec::new());
    if needs_grammar {
        let spec = ConstraintSpec {
            tools: tools.iter().map(|tool| constrained(tool)).collect(),
            required,
            one_call,
            text,
            in_thinking,
            stop_tokens: stop_tokens.to_vec(),
        };
        (constraint, validated) = compile(model, request, spec, &tools)?;
    }
    let specs = specs(request, &tools, &validated)?;
    let options = ParserOptions { tools: specs.into(), in_thinking, one_call, nonce: 0 };
    let options = (!is_raw).then_some(options);
    Ok(OutputPlan { format, options, constraint })
}

/// The tools for the parser. The `validated` ones get a validator for complete calls; a schema that
/// cannot be validated either is refused with the keyword that the grammar lacks.
fn specs(
    request: &ChatRequest,
    tools: &[&Tool],
    validated: &[(usize, GrammarError)],
) -> Result<Vec<ToolSpec>, OutputPlanError> {
    let mut specs: Vec<ToolSpec> = tools
        .iter()
        .map(|tool| ToolSpec { name: tool.name.clone(), schema: schema(tool), validator: None })
        .collect();
    for (index, error) in validated {
        let spec = &mut specs[*index];
        let validator = ArgumentValidator::new(&spec.schema).map_err(|own| {
            let reason = format!("{error}; the complete call cannot be validated either: {own}");
            not_enforceable(&place(request, tools[*index]), &reason)
        })?;
        spec.validator = Some(validator);
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
        let message = "tool_choice: a tool call is required, but no such tool is among the tools";
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

/// The constraint, and the tools whose complete calls are validated instead, with the reason why
/// the grammar cannot enforce their schema.
type Compiled = (Option<ConstraintSource>, Vec<(usize, GrammarError)>);

/// Compiles the grammar before anything runs, so that a schema that cannot be enforced is a 400.
///
/// Unless a constraint is required from the first token, a tool whose schema no grammar can enforce
/// is constrained to its name and to JSON only, and its complete calls are validated.
fn compile(
    model: &ChatModel,
    request: &ChatRequest,
    mut spec: ConstraintSpec,
    tools: &[&Tool],
) -> Result<Compiled, OutputPlanError> {
    let param = param(&spec, request);
    let is_demanded = spec.required || spec.text.is_some();
    if model.output().style().tools.is_none() && !is_demanded {
        // Calls in an unknown tool-call format are neither parsed nor constrained.
        return Ok((None, Vec::new()));
    }
    let is_strict = tools.iter().any(|tool| tool.strict);
    let Some(grammars) = model.grammars() else {
        let reason = "constrained decoding is not supported for this model's vocabulary";
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
    let mut validated = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let alone = ConstraintSpec { tools: vec![spec.tools[index].clone()], ..spec.clone() };
        let Err(error) = grammars.constraint(&alone) else { continue };
        if tool.strict || error == GrammarError::Busy {
            return Err(refused(&place(request, tool), &error, request));
        }
        spec.tools[index].schema = weak(&spec.tools[index].schema);
        validated.push((index, error));
    }
    match grammars.constraint(&spec) {
        Ok(_) => Ok((Some(spec.source()), validated)),
        Err(error) if is_strict || error == GrammarError::Busy => {
            Err(refused(param, &error, request))
        }
        // Together they are too large: all calls are validated instead.
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

/// The request's path to a tool's schema.
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

/// What is enforced of a schema that no grammar can enforce: an object, the names of its members
/// and their plain types.
fn weak(schema: &Value) -> Value {
    let properties = schema.get("properties").and_then(Value::as_object);
    let member = |(name, schema): (&String, &Value)| {
        let kind = schema.get("type").filter(|kind| kind.is_string());
        (name.clone(), kind.map_or(Value::Bool(true), |kind| json!({ "type": kind })))
    };
    let properties: Map<String, Value> = properties.into_iter().flatten().map(member).collect();
    json!({ "type": "object", "properties": properties })
}
