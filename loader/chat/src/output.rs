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
        ParserOptions, SchemaError, TextForm, ToolCallParser, ToolSpec, advice,
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
        compiled = compile(model, request, spec, &tools)?;
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

/// What becomes of a request's tools and text form.
#[derive(Default)]
struct Compiled {
    constraint: Option<ConstraintSource>,
    /// Tools whose complete calls are judged, and by which schema.
    judged: Vec<(usize, Value)>,
    /// Places in schemas that are not enforced.
    unenforced: Vec<String>,
}

/// Compiles the grammar before anything runs, so that a schema that cannot be enforced is a 400.
///
/// Unless a constraint is required from the first token, the schema of a tool is advice: what no
/// grammar can enforce is judged when the call is complete, and what cannot be judged either is
/// left out and named.
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
        return Ok(Compiled::default());
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
        return Ok(judge_all(request, tools));
    };
    let Err(error) = grammars.constraint(&spec) else {
        return Ok(Compiled { constraint: Some(spec.source()), ..Compiled::default() });
    };
    if is_demanded || error == GrammarError::Busy {
        return Err(refused(param, &error, request));
    }
    let mut compiled = Compiled::default();
    for (index, tool) in tools.iter().enumerate() {
        let alone = |schema: &Value| {
            let tool = ConstrainedTool { name: tool.name.clone(), schema: schema.clone() };
            grammars.constraint(&ConstraintSpec { tools: vec![tool], ..spec.clone() })
        };
        let Err(error) = alone(&spec.tools[index].schema) else { continue };
        if tool.strict || error == GrammarError::Busy {
            return Err(refused(&place(request, tool), &error, request));
        }
        let advice = advise(&spec.tools[index].schema, |schema| alone(schema).err());
        let path = place(request, tool);
        let places = advice.left_out.iter().map(|left_out| format!("{path}.{left_out}"));
        compiled.unenforced.extend(places);
        if alone(&advice.schema).is_ok() {
            spec.tools[index].schema = advice.schema;
        } else {
            spec.tools[index].schema = weak(&advice.schema);
            compiled.judged.push((index, advice.schema));
        }
    }
    match grammars.constraint(&spec) {
        Ok(_) => Ok(Compiled { constraint: Some(spec.source()), ..compiled }),
        Err(error) if is_strict || error == GrammarError::Busy => {
            Err(refused(param, &error, request))
        }
        // Together they are too large: all calls are judged instead.
        Err(_) => Ok(judge_all(request, tools)),
    }
}

/// The part of a schema that a grammar enforces, or that a complete call can be judged by.
fn advise(schema: &Value, grammar: impl Fn(&Value) -> Option<GrammarError>) -> advice::Advice {
    advice::soften_until(schema, |schema| {
        if grammar(schema).is_none() {
            return Ok(());
        }
        ArgumentValidator::new(schema).map(|_| ())
    })
}

/// Without a grammar: complete calls are judged by what can be judged.
fn judge_all(request: &ChatRequest, tools: &[&Tool]) -> Compiled {
    let mut compiled = Compiled::default();
    for (index, tool) in tools.iter().enumerate() {
        let check = |schema: &Value| -> Result<(), SchemaError> {
            ArgumentValidator::new(schema).map(|_| ())
        };
        let advice = advice::soften_until(&schema(tool), check);
        let path = place(request, tool);
        let places = advice.left_out.iter().map(|left_out| format!("{path}.{left_out}"));
        compiled.unenforced.extend(places);
        compiled.judged.push((index, advice.schema));
    }
    compiled
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
    let tool = tool.or_else(|| {
        request.tools.iter().find(|tool| tool_place(request, tool, error, param).is_some())
    });
    let place = tool.map_or_else(|| param.to_owned(), |tool| place(request, tool));
    let within = tool.and_then(|tool| keyword_place(tool, error));
    let message = match within {
        Some(within) => format!("{place}.{within}: {error}"),
        None => format!("{place}: {error}"),
    };
    OutputPlanError::Unenforceable { param: place, message }
}

/// The place of a refused keyword, where a tool's schema is what was refused.
fn tool_place(
    request: &ChatRequest,
    tool: &Tool,
    error: &GrammarError,
    param: &str,
) -> Option<String> {
    (param == "tools" || param == place(request, tool))
        .then(|| keyword_place(tool, error))
        .flatten()
}

fn keyword_place(tool: &Tool, error: &GrammarError) -> Option<String> {
    let schema = schema(tool);
    match error {
        GrammarError::Schema(error) => advice::place_of(&schema, &error.keyword),
        // The compiler speaks of types without their keyword.
        GrammarError::Grammar(_) => advice::soften(&schema).left_out.into_iter().next(),
        _ => None,
    }
}

/// The request's path to a tool's schema.
fn place(request: &ChatRequest, tool: &Tool) -> String {
    let index = request.tools.iter().position(|other| other.name == tool.name).unwrap_or_default();
    format!("tools[{index}].function.parameters")
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
