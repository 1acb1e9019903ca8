//! The grammar of calls, per family: what a model must write where it must call, and what may
//! follow once a call has begun.

use std::fmt::Write;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use shardpack_formats::ToolFamily;

use super::{
    params::DSML,
    parser::OutputFormat,
    schema::{SchemaError, enforceable},
    value::{Reading, reading},
};

/// A tool as a constraint knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::server) struct ConstrainedTool {
    pub(in crate::server) name: String,
    pub(in crate::server) schema: Value,
}

/// The form of an answer's text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::server) enum TextForm {
    /// JSON of this schema.
    Schema(Value),
    /// Text that the expression matches in whole.
    Regex(String),
    /// A grammar in llguidance's Lark.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// White space between lexemes of JSON: one space, or a line break with its indentation. Without a
/// bound a model may write nothing else for ever.
const SPACE: &str = r"[ ]|\n[ \t]{0,24}";

/// Keywords of texts that a model writes bare which the grammar holds it to, and remarks.
const FREE: [&str; 10] = [
    "type",
    "description",
    "title",
    "minLength",
    "maxLength",
    "anyOf",
    "$defs",
    "definitions",
    "default",
    "examples",
];

/// Keywords of a schema whose unnamed members may be forbidden without changing what it means for
/// the others.
const CLOSABLE: [&str; 6] = ["type", "properties", "required", "description", "title", "$defs"];

/// A grammar's text in the making.
pub(super) struct Writer<'a> {
    format: &'a OutputFormat,
    text: String,
    subgrammars: Vec<GrammarWithLexer>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(format: &'a OutputFormat) -> Self {
        Self { format, text: String::new(), subgrammars: Vec::new() }
    }

    /// The whole, with its start rule.
    pub(super) fn finish(mut self, start: &str) -> TopLevelGrammar {
        let text = format!("start: {start}\n{}WS: /[ \\n]{{1,4}}/\nANY: /(?s:.+)/\n", self.text);
        let mut grammars = vec![GrammarWithLexer::from_lark(text)];
        grammars.append(&mut self.subgrammars);
        TopLevelGrammar { grammars, max_tokens: None }
    }

    fn rule(&mut self, name: &str, body: &str) {
        writeln!(self.text, "{name}: {body}").expect("strings take any text");
    }

    /// A marker: its token, or its letters.
    fn marker(&self, name: &str) -> String {
        match self.format.marker_token(name) {
            Some(token) => format!("<[{}]>", token.0),
            None => quoted(name),
        }
    }

    /// A tag of DeepSeek V3.2: letters about a marker.
    fn tag(&self, text: &str) -> String {
        let letters: Vec<String> = text.split(DSML).map(quoted).collect();
        match self.format.marker_token(DSML) {
            Some(_) => format!("({})", letters.join(&format!(" {} ", self.marker(DSML)))),
            None => quoted(text),
        }
    }

    /// JSON of a schema that is enforceable already.
    fn json(&mut self, schema: &Value) -> String {
        let name = format!("json_{}", self.subgrammars.len());
        let schema = match schema {
            Value::Object(object) => {
                let mut object = object.clone();
                object.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": SPACE }));
                Value::Object(object)
            }
            Value::Bool(false) => json!({ "not": {} }),
            _ => json!({ "x-guidance": { "whitespace_pattern": SPACE } }),
        };
        let mut grammar = GrammarWithLexer::from_json_schema(schema);
        grammar.name = Some(name.clone());
        self.subgrammars.push(grammar);
        format!("@{name}")
    }

    /// A text of this form.
    pub(super) fn text_form(&mut self, form: &TextForm) -> Result<String, SchemaError> {
        Ok(match form {
            TextForm::Schema(schema) => {
                let schema = enforceable(schema)?;
                self.json(&schema)
            }
            TextForm::Regex(expression) => {
                let mut grammar = GrammarWithLexer::from_regex(expression);
                grammar.name = Some("form".to_owned());
                self.subgrammars.push(grammar);
                "@form".to_owned()
            }
            TextForm::Grammar(text) => {
                let mut grammar = GrammarWithLexer::from_lark(text.clone());
                grammar.name = Some("form".to_owned());
                self.subgrammars.push(grammar);
                "@form".to_owned()
            }
            TextForm::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
                format!("({})", texts.join(" | "))
            }
        })
    }

    /// Harmony's text: in the final channel, after thinking if the model likes.
    pub(super) fn in_final_channel(&mut self, text: &str) -> String {
        let (channel, message) = (self.marker("<|channel|>"), self.marker("<|message|>"));
        let constrain = self.marker("<|constrain|>");
        let thinking = self.analysis();
        format!("{thinking} {channel} \"final\" (\" \"? {constrain} \"json\")? {message} {text}")
    }

    fn analysis(&mut self) -> String {
        let (channel, message) = (self.marker("<|channel|>"), self.marker("<|message|>"));
        let (end, start) = (self.marker("<|end|>"), self.marker("<|start|>"));
        format!("({channel} \"analysis\" {message} ANY? {end} {start} \"assistant\")*")
    }

    /// The rules of one call of any of `tools`; `begun` where the model has begun it by itself.
    fn call(
        &mut self,
        family: ToolFamily,
        tools: &[ConstrainedTool],
        begun: bool,
    ) -> Result<(), SchemaError> {
        let mut alternatives = Vec::new();
        for (number, tool) in tools.iter().enumerate() {
            let body = self.one_call(family, number, tool, begun).map_err(|error| {
                let reason = format!("{} (tool {:?})", error.reason, tool.name);
                SchemaError { reason, ..error }
            })?;
            alternatives.push(body);
        }
        let body = alternatives.join(" | ");
        self.rule("call", &body);
        Ok(())
    }

    fn one_call(
        &mut self,
        family: ToolFamily,
        number: usize,
        tool: &ConstrainedTool,
        begun: bool,
    ) -> Result<String, SchemaError> {
        let name = &tool.name;
        Ok(match family {
            ToolFamily::JsonTags | ToolFamily::MistralJson => {
                self.envelope(name, "arguments", &closed(&tool.schema)?)
            }
            ToolFamily::LlamaJson => self.envelope(name, "parameters", &closed(&tool.schema)?),
            ToolFamily::MistralNames => {
                let (id, arguments) = (self.marker("[CALL_ID]"), self.marker("[ARGS]"));
                let json = self.json(&closed(&tool.schema)?);
                format!("{} ({id} /[a-zA-Z0-9]{{9}}/)? {arguments} {json}", quoted(name))
            }
            ToolFamily::DeepseekV3 => {
                let sep = self.marker("<｜tool▁sep｜>");
                let json = self.json(&closed(&tool.schema)?);
                let head = quoted(&format!("{name}\n```json\n"));
                format!("\"function\" {sep} {head} {json} \"\\n```\"")
            }
            ToolFamily::DeepseekV31 => {
                let sep = self.marker("<｜tool▁sep｜>");
                let json = self.json(&closed(&tool.schema)?);
                format!("{} {sep} {json}", quoted(name))
            }
            ToolFamily::KimiK2 => {
                let arguments = self.marker("<|tool_call_argument_begin|>");
                let json = self.json(&closed(&tool.schema)?);
                let head = quoted(&format!("functions.{name}:"));
                format!("{head} /[0-9]{{1,4}}/ {arguments} {json}")
            }
            ToolFamily::Harmony => {
                let (channel, message) = (self.marker("<|channel|>"), self.marker("<|message|>"));
                let constrain = self.marker("<|constrain|>");
                let json = self.json(&closed(&tool.schema)?);
                // Where the recipient came with the role, the channel is still to be named.
                let again =
                    if begun { format!("({channel} \"commentary\")?") } else { String::new() };
                format!("{} {again} (\" \"? {constrain} \"json\")? {message} {json}", quoted(name))
            }
            ToolFamily::LlamaPythonic => self.pythonic(number, tool)?,
            ToolFamily::QwenXml
            | ToolFamily::Glm4
            | ToolFamily::MinimaxM2
            | ToolFamily::DeepseekV32 => self.params(family, tool)?,
        })
    }

    fn envelope(&mut self, name: &str, arguments: &str, schema: &Value) -> String {
        let json = self.json(schema);
        let name = quoted(&Value::from(name).to_string());
        let key = quoted(&Value::from(arguments).to_string());
        // Some write the type first.
        let kind = match arguments {
            "parameters" => "(\"\\\"type\\\"\" WS? \":\" WS? \"\\\"function\\\"\" WS? \",\" WS?)?",
            _ => "",
        };
        format!(
            "\"{{\" WS? {kind} \"\\\"name\\\"\" WS? \":\" WS? {name} WS? \",\" WS? {key} WS? \":\" WS? {json} WS? \"}}\""
        )
    }

    /// `name(a=…, b=…)`, the values in JSON, which Python's readers here take.
    fn pythonic(&mut self, number: usize, tool: &ConstrainedTool) -> Result<String, SchemaError> {
        let params = Params::of(&tool.schema)?;
        let rest = |at: usize, has: bool| {
            format!("py_{number}_{at}_{}", if has { "more" } else { "first" })
        };
        let count = params.list.len();
        for (at, param) in params.list.iter().enumerate() {
            let value = self.json(&enforceable(&params.schema(param))?);
            let key = quoted(&format!("{}=", param.name));
            for has in [false, true] {
                let comma = if has { "\",\" WS? " } else { "" };
                let mut body = format!("{comma}{key} {value} {}", rest(at + 1, true));
                if !param.required {
                    let _ = write!(body, " | {}", rest(at + 1, has));
                }
                self.rule(&rest(at, has), &body);
            }
        }
        for has in [false, true] {
            self.rule(&rest(count, has), "\"\"");
        }
        Ok(format!("{} {} \")\"", quoted(&format!("{}(", tool.name)), rest(0, false)))
    }

    /// Arguments one by one between tags.
    fn params(
        &mut self,
        family: ToolFamily,
        tool: &ConstrainedTool,
    ) -> Result<String, SchemaError> {
        let params = Params::of(&tool.schema)?;
        let mut body = match family {
            ToolFamily::QwenXml => quoted(&format!("<function={}>", tool.name)) + " WS?",
            ToolFamily::MinimaxM2 => quoted(&format!("<invoke name=\"{}\">", tool.name)) + " WS?",
            ToolFamily::DeepseekV32 => {
                self.tag(&format!("<{DSML}invoke name=\"{}\">", tool.name)) + " WS?"
            }
            _ => quoted(&tool.name) + " WS?",
        };
        for param in &params.list {
            let optional = if param.required { "" } else { "?" };
            if family == ToolFamily::DeepseekV32 {
                let told = self.told_param(&params, param)?;
                let _ = write!(body, " ({told} WS?){optional}");
                continue;
            }
            let key = match family {
                ToolFamily::QwenXml => quoted(&format!("<parameter={}>\n", param.name)),
                ToolFamily::MinimaxM2 => quoted(&format!("<parameter name=\"{}\">", param.name)),
                _ => {
                    let (open, close) = (self.marker("<arg_key>"), self.marker("</arg_key>"));
                    let value = self.marker("<arg_value>");
                    format!("{open} {} {close} WS? {value}", quoted(param.name))
                }
            };
            let value = self.param_value(family, &params, param)?;
            let _ = write!(body, " ({key} {value} WS?){optional}");
        }
        match family {
            ToolFamily::QwenXml => body.push_str(" \"</function>\""),
            ToolFamily::MinimaxM2 => body.push_str(" \"</invoke>\""),
            ToolFamily::DeepseekV32 => {
                let _ = write!(body, " {}", self.tag(&format!("</{DSML}invoke>")));
            }
            _ => {}
        }
        Ok(body)
    }

    /// An argument that says by itself whether it is text or JSON (DeepSeek V3.2).
    fn told_param(
        &mut self,
        params: &Params<'_>,
        param: &Param<'_>,
    ) -> Result<String, SchemaError> {
        let whole = params.schema(param);
        let reading = reading(Some((&whole, &whole)));
        let head = |is_text: bool| {
            format!("<{DSML}parameter name=\"{}\" string=\"{is_text}\">", param.name)
        };
        let mut alternatives = Vec::new();
        if reading != Reading::Json {
            let value = self.text_value(ToolFamily::DeepseekV32, &whole)?;
            alternatives.push(format!("{} {value}", self.tag(&head(true))));
        }
        if reading != Reading::Text {
            let value = self.json(&enforceable(&whole)?);
            let (_, marker) = self.value_close(ToolFamily::DeepseekV32);
            alternatives.push(format!("{} {value} {marker}", self.tag(&head(false))));
        }
        Ok(format!("({})", alternatives.join(" | ")))
    }

    /// A value and the tag that closes it.
    fn param_value(
        &mut self,
        family: ToolFamily,
        params: &Params<'_>,
        param: &Param<'_>,
    ) -> Result<String, SchemaError> {
        let whole = params.schema(param);
        if reading(Some((&whole, &whole))) == Reading::Json {
            let (_, marker) = self.value_close(family);
            return Ok(format!("{} {marker}", self.json(&enforceable(&whole)?)));
        }
        self.text_value(family, &whole)
    }

    /// What closes a value: its letters, and itself in the grammar.
    fn value_close(&self, family: ToolFamily) -> (&'static str, String) {
        match family {
            ToolFamily::QwenXml => ("\n</parameter>", quoted("\n</parameter>")),
            ToolFamily::MinimaxM2 => ("</parameter>", quoted("</parameter>")),
            ToolFamily::DeepseekV32 => ("</｜DSML｜parameter>", self.tag("</｜DSML｜parameter>")),
            _ => ("</arg_value>", self.marker("</arg_value>")),
        }
    }

    /// A bare text and the tag that closes it.
    fn text_value(&mut self, family: ToolFamily, whole: &Value) -> Result<String, SchemaError> {
        let (close, marker) = self.value_close(family);
        let object = whole.as_object();
        let get = |key: &str| object.and_then(|object| object.get(key));
        if let Some(values) = get("enum").and_then(Value::as_array) {
            let texts: Vec<String> = values.iter().filter_map(Value::as_str).map(quoted).collect();
            return Ok(format!("({}) {marker}", texts.join(" | ")));
        }
        if let Some(text) = get("const").and_then(Value::as_str) {
            return Ok(format!("{} {marker}", quoted(text)));
        }
        if let Some(key) =
            object.into_iter().flat_map(Map::keys).find(|key| !FREE.contains(&key.as_str()))
        {
            let reason = "this model writes its texts bare, where only lengths and enums hold";
            return Err(SchemaError::new(key, reason));
        }
        let bounds =
            [get("minLength"), get("maxLength")].map(|bound| bound.and_then(Value::as_u64));
        let escaped = close.replace('\n', "\\n").replace('/', "\\/");
        if bounds == [None, None]
            && family == ToolFamily::DeepseekV32
            && let Some(token) = self.format.marker_token(DSML)
        {
            // Texts may hold what begins the tag; only the token within ends them.
            let piece = self.lazy("(?s:.*)<\\/");
            return Ok(format!("{piece}+ <[{}]> \"parameter>\"", token.0));
        }
        Ok(match (bounds, self.format.marker_token("</arg_value>")) {
            ([None, None], Some(_)) => format!("ANY? {marker}"),
            ([None, None], None) => self.lazy(&format!("(?s:.*){escaped}")),
            ([min, max], _) => {
                let max = max.map_or_else(String::new, |max| max.to_string());
                // Without the first letter of tags, so that length and end cannot disagree.
                format!("/[^<\\n]{{{},{max}}}/ {marker}", min.unwrap_or(1).max(1))
            }
        })
    }

    /// The shortest text that an expression matches.
    fn lazy(&mut self, expression: &str) -> String {
        let name = format!("lazy_{}", self.text.lines().count());
        self.rule(&format!("{name}[lazy]"), &format!("/{expression}/"));
        name
    }

    /// What the model must write from the beginning of its answer.
    pub(super) fn required(
        &mut self,
        family: ToolFamily,
        tools: &[ConstrainedTool],
        one: bool,
    ) -> Result<String, SchemaError> {
        self.call(family, tools, false)?;
        let many = |unit: String, between: &str| {
            if one { unit } else { format!("{unit} ({between} {unit})*") }
        };
        let marker = |name: &str| self.marker(name);
        Ok(match family {
            ToolFamily::JsonTags | ToolFamily::QwenXml => {
                let (open, close) = (marker("<tool_call>"), marker("</tool_call>"));
                many(format!("({open} WS? call WS? {close})"), "WS?")
            }
            ToolFamily::LlamaJson => "call".to_owned(),
            ToolFamily::LlamaPythonic => {
                format!("\"[\" {} \"]\"", many("call".to_owned(), "\",\" WS?"))
            }
            ToolFamily::MistralJson => {
                let calls = many("call".to_owned(), "\",\" WS?");
                format!("{} WS? \"[\" {calls} \"]\"", marker("[TOOL_CALLS]"))
            }
            ToolFamily::MistralNames => many(format!("({} call)", marker("[TOOL_CALLS]")), ""),
            ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31 | ToolFamily::KimiK2 => {
                let open = match family {
                    ToolFamily::KimiK2 => marker("<|tool_calls_section_begin|>"),
                    _ => marker("<｜tool▁calls▁begin｜>"),
                };
                format!("{open} {}", self.section(family, one))
            }
            ToolFamily::Glm4 => {
                let (open, close) = (marker("<tool_call>"), marker("</tool_call>"));
                many(format!("({open} call {close})"), "WS?")
            }
            ToolFamily::MinimaxM2 => {
                let (open, close) = (marker("<minimax:tool_call>"), marker("</minimax:tool_call>"));
                format!("{open} WS? {} WS? {close}", many("call".to_owned(), "WS?"))
            }
            ToolFamily::DeepseekV32 => {
                let tag = |slash: &str| self.tag(&format!("<{slash}{DSML}function_calls>"));
                let calls = many("call".to_owned(), "WS?");
                format!("WS? {} WS? {calls} WS? {}", tag(""), tag("/"))
            }
            ToolFamily::Harmony => {
                let channel = marker("<|channel|>");
                let thinking = self.analysis();
                format!("{thinking} {channel} \"commentary to=functions.\" call")
            }
        })
    }

    /// The calls of a section and its end.
    fn section(&self, family: ToolFamily, one: bool) -> String {
        let (open, close, end) = match family {
            ToolFamily::KimiK2 => {
                ("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")
            }
            _ => ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        };
        let unit = format!("({} call {} WS?)", self.marker(open), self.marker(close));
        format!("WS? {unit}{} {}", if one { "" } else { "+" }, self.marker(end))
    }

    /// What may follow a call's first marker.
    pub(super) fn begun(
        &mut self,
        family: ToolFamily,
        tools: &[ConstrainedTool],
        one: bool,
    ) -> Result<String, SchemaError> {
        self.call(family, tools, true)?;
        let marker = |name: &str| self.marker(name);
        let more = |between: &str| {
            if one { String::new() } else { format!("({between} call)*") }
        };
        Ok(match family {
            ToolFamily::JsonTags | ToolFamily::QwenXml => {
                format!("WS? call WS? {}", marker("</tool_call>"))
            }
            ToolFamily::Glm4 => format!("WS? call {}", marker("</tool_call>")),
            // The trigger is the beginning of the call itself.
            ToolFamily::LlamaJson | ToolFamily::Harmony | ToolFamily::MistralNames => {
                "call".to_owned()
            }
            ToolFamily::LlamaPythonic => format!("\"[\" WS? call {} \"]\"", more("\",\" WS?")),
            ToolFamily::MistralJson => {
                format!("WS? \"[\" WS? call {} WS? \"]\"", more("WS? \",\" WS?"))
            }
            ToolFamily::DeepseekV3 | ToolFamily::DeepseekV31 | ToolFamily::KimiK2 => {
                self.section(family, one)
            }
            ToolFamily::MinimaxM2 => {
                format!("WS? call {} WS? {}", more("WS?"), marker("</minimax:tool_call>"))
            }
            ToolFamily::DeepseekV32 => {
                let close = self.tag(&format!("</{DSML}function_calls>"));
                format!("\"function_calls>\" WS? call {} WS? {close}", more("WS?"))
            }
        })
    }
}

/// A text of Lark that stands for this one.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A tool's schema, enforceable; arguments that it does not name are not invented.
fn closed(schema: &Value) -> Result<Value, SchemaError> {
    let mut schema = enforceable(schema)?;
    let Value::Object(object) = &mut schema else { return Ok(json!({ "type": "object" })) };
    if object.keys().all(|key| CLOSABLE.contains(&key.as_str()) || key == "definitions")
        && object.contains_key("properties")
    {
        object.insert("additionalProperties".to_owned(), Value::Bool(false));
    }
    // Arguments are an object whatever the schema leaves open.
    object.entry("type").or_insert_with(|| Value::from("object"));
    Ok(schema)
}

struct Param<'a> {
    name: &'a str,
    schema: &'a Value,
    required: bool,
}

/// Arguments that are written one by one, and what their references point into.
struct Params<'a> {
    list: Vec<Param<'a>>,
    definitions: Vec<(&'a str, &'a Value)>,
}

impl<'a> Params<'a> {
    fn of(schema: &'a Value) -> Result<Self, SchemaError> {
        const PLAIN: [&str; 12] = [
            "type",
            "properties",
            "required",
            "additionalProperties",
            "description",
            "title",
            "$schema",
            "$id",
            "$defs",
            "definitions",
            "default",
            "examples",
        ];
        let Value::Object(object) = schema else {
            return Ok(Self { list: Vec::new(), definitions: Vec::new() });
        };
        if let Some(key) = object.keys().find(|key| !PLAIN.contains(&key.as_str())) {
            let reason = "this model writes arguments one by one: between them nothing can hold";
            return Err(SchemaError::new(key, reason));
        }
        let names = object.get("required").and_then(Value::as_array);
        let required: Vec<&str> = names.into_iter().flatten().filter_map(Value::as_str).collect();
        let properties = object.get("properties").and_then(Value::as_object);
        let properties = || properties.into_iter().flatten();
        if let Some(name) = required.iter().find(|name| properties().all(|(own, _)| own != *name)) {
            return Err(SchemaError::new(
                "required",
                format!("{name:?} is not among the properties"),
            ));
        }
        let list = properties().map(|(name, schema)| Param {
            name,
            schema,
            required: required.contains(&name.as_str()),
        });
        let definitions = ["$defs", "definitions"]
            .into_iter()
            .filter_map(|key| object.get(key).map(|definitions| (key, definitions)));
        Ok(Self { list: list.collect(), definitions: definitions.collect() })
    }

    /// One argument's schema by itself.
    fn schema(&self, param: &Param<'_>) -> Value {
        let mut schema = param.schema.clone();
        if let Value::Object(object) = &mut schema {
            for (key, definitions) in &self.definitions {
                object.insert((*key).to_owned(), (*definitions).clone());
            }
        }
        schema
    }
}
