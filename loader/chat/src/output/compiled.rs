//! The constraint of a request, compiled before anything runs: what is enforced, what is judged when
//! a call is complete, and what is left out.

use serde_json::Value;
use shardpack_engine_api::ConstraintSource;

use super::{OutputPlanError, schema};
use crate::{
    conversation::{ChatRequest, ResponseFormat, Tool, ToolFormat, ToolKind},
    model::ChatModel,
    tools::{
        ArgumentValidator, CompileBudget, ConstrainedTool, ConstraintSpec, GrammarError, Grammars,
        SchemaError, TextForm, advice, outline,
    },
};

/// What becomes of a request's tools and text form.
#[derive(Default)]
pub(super) struct Compiled {
    pub(super) constraint: Option<ConstraintSource>,
    /// Tools whose complete calls are judged, and by which schema.
    pub(super) judged: Vec<(usize, Value)>,
    /// Places in schemas that are not enforced.
    pub(super) unenforced: Vec<String>,
}

/// The grammars of a model, compiled within a budget; without one, only those that were compiled before.
#[derive(Clone, Copy)]
struct Within<'a> {
    grammars: &'a Grammars,
    budget: Option<&'a CompileBudget>,
}

impl Within<'_> {
    fn constraint(self, spec: &ConstraintSpec) -> Result<(), GrammarError> {
        self.grammars.constraint_within(spec, self.budget).map(|_| ())
    }
}

/// Compiles the grammar before anything runs, so that a schema that cannot be enforced is a 400.
///
/// Unless a constraint is required from the first token, the schema of a tool is advice: what no
/// grammar can enforce is judged when the call is complete, and what cannot be judged either is
/// left out and named.
pub(super) fn compile(
    model: &ChatModel,
    request: &ChatRequest,
    mut spec: ConstraintSpec,
    tools: &[&Tool],
    budget: Option<&CompileBudget>,
) -> Result<Compiled, OutputPlanError> {
    let grammars = model.grammars().map(|grammars| Within { grammars, budget });
    let param = param(&spec, request);
    let is_demanded = spec.required || spec.text.is_some();
    if model.output().style().tools.is_none() && !is_demanded {
        // Calls in an unknown tool-call format are neither parsed nor constrained.
        return Ok(Compiled::default());
    }
    let is_strict = tools.iter().any(|tool| tool.strict);
    let formats = without_formats(&mut spec, tools, request, grammars)?;
    let mut compiled = Compiled { unenforced: formats, ..Compiled::default() };
    let Some(grammars) = grammars else {
        let reason = "constrained decoding is not supported for this model's vocabulary";
        if is_demanded || is_strict {
            return Err(OutputPlanError::Param {
                param: param.to_owned(),
                message: format!("{param}: {reason}"),
            });
        }
        return Ok(judge_all(request, tools, compiled));
    };
    advise_text(grammars, &mut spec, request, &mut compiled);
    let Err(error) = grammars.constraint(&spec) else {
        return Ok(Compiled { constraint: Some(spec.source()), ..compiled });
    };
    let is_texts = || {
        let text = ConstraintSpec { tools: Vec::new(), ..spec.clone() };
        spec.text.is_some() && grammars.constraint(&text).is_err()
    };
    if spec.required || error.is_transient() || is_texts() {
        return Err(refused(param, &error, request));
    }
    for (index, tool) in tools.iter().enumerate() {
        let alone = |schema: &Value| {
            let tool = ConstrainedTool { name: tool.name.clone(), schema: schema.clone() };
            grammars.constraint(&ConstraintSpec { tools: vec![tool], ..spec.clone() })
        };
        let Err(error) = alone(&spec.tools[index].schema) else { continue };
        if tool.strict || error.is_transient() {
            return Err(refused(&place(request, tool), &error, request));
        }
        let own = as_it_came(tool, &spec.tools[index]);
        let advice = advise(&own, |schema| alone(schema).err());
        let path = place(request, tool);
        let places = advice.left_out.iter().map(|left_out| format!("{path}.{left_out}"));
        compiled.unenforced.extend(places);
        if alone(&advice.schema).is_ok() {
            spec.tools[index].schema = advice.schema;
        } else {
            spec.tools[index].schema = outline(&advice.schema);
            compiled.judged.push((index, advice.schema));
        }
    }
    match grammars.constraint(&spec) {
        Ok(()) => Ok(Compiled { constraint: Some(spec.source()), ..compiled }),
        Err(error) if is_strict || spec.text.is_some() || error.is_transient() => {
            Err(refused(param, &error, request))
        }
        // Together they are too large: all calls are judged instead.
        Err(_) => {
            let formats = |place: &String| place.ends_with(".format");
            let unenforced = compiled.unenforced.into_iter().filter(formats).collect();
            Ok(judge_all(request, tools, Compiled { unenforced, ..Compiled::default() }))
        }
    }
}

/// The schema that a complete call is judged by: without what closing its objects has added.
fn as_it_came(tool: &Tool, constrained: &ConstrainedTool) -> Value {
    match tool.kind {
        ToolKind::Function => schema(tool),
        ToolKind::Custom | ToolKind::Search => constrained.schema.clone(),
    }
}

/// Takes away the formats of custom tools that cannot be enforced, and names their places.
fn without_formats(
    spec: &mut ConstraintSpec,
    tools: &[&Tool],
    request: &ChatRequest,
    grammars: Option<Within<'_>>,
) -> Result<Vec<String>, OutputPlanError> {
    let mut unenforced = Vec::new();
    for (index, tool) in tools.iter().enumerate().filter(|(_, tool)| tool.format.is_some()) {
        let own = spec.tools[index].clone();
        let has_format = own.schema != schema(tool);
        let alone = ConstraintSpec { tools: vec![own], ..spec.clone() };
        let enforced = |grammars: Within<'_>| match grammars.constraint(&alone) {
            Err(error) if error.is_transient() => Err(transient(&error)),
            result => Ok(result.is_ok()),
        };
        // An expression can be judged when the call is complete.
        let is_judged = !spec.required
            && matches!(tool.format, Some(ToolFormat::Regex(_)))
            && ArgumentValidator::new(&spec.tools[index].schema).is_ok();
        if has_format && (is_judged || grammars.map(enforced).transpose()? == Some(true)) {
            continue;
        }
        spec.tools[index].schema = schema(tool);
        let same = |other: &Tool| other.name == tool.name;
        let place = request.tools.iter().position(same).unwrap_or_default();
        unenforced.push(format!("tools[{place}].format"));
    }
    Ok(unenforced)
}

/// The schema of an answer is advice unless it is strict, as that of a tool is.
fn advise_text(
    grammars: Within<'_>,
    spec: &mut ConstraintSpec,
    request: &ChatRequest,
    compiled: &mut Compiled,
) {
    let ResponseFormat::JsonSchema { strict: false, param, .. } = &request.response_format else {
        return;
    };
    let Some(TextForm::Schema(schema)) = spec.text.clone() else { return };
    let alone = |schema: &Value| {
        let text = Some(TextForm::Schema(schema.clone()));
        let tools = Vec::new();
        let own = ConstraintSpec { text, tools, required: false, ..spec.clone() };
        grammars.constraint(&own).err()
    };
    if alone(&schema).is_none_or(|error| error.is_transient()) {
        return;
    }
    let mut is_refused = false;
    let advice = advice::soften_until(&schema, |schema| match alone(schema) {
        None => Ok(()),
        Some(GrammarError::Schema(error)) => {
            // An answer with another number than the one asked for is worse than none.
            is_refused |= advice::NUMBERS.contains(&error.keyword.as_str());
            Err(error)
        }
        Some(error) => Err(SchemaError::new("schema", error.to_string())),
    });
    if is_refused || advice.left_out.iter().any(|place| place == "schema") {
        // Nothing of it remains: a refusal says more.
        return;
    }
    let places = advice.left_out.iter().map(|place| format!("{param}.{place}"));
    compiled.unenforced.extend(places);
    spec.text = Some(TextForm::Schema(advice.schema));
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
fn judge_all(request: &ChatRequest, tools: &[&Tool], mut compiled: Compiled) -> Compiled {
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

/// The grammar is not refused, there is only none yet.
fn transient(error: &GrammarError) -> OutputPlanError {
    match error {
        GrammarError::Uncompiled => OutputPlanError::Uncompiled,
        _ => OutputPlanError::Busy(error.to_string()),
    }
}

fn refused(param: &str, error: &GrammarError, request: &ChatRequest) -> OutputPlanError {
    if error.is_transient() {
        return transient(error);
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
