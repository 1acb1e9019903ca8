//! The grammar of calls, per family: what a model must write where it must call, and what may
//! follow once a call has begun.

use std::fmt::Write;

use serde_json::{Value, json};
use shardpack_formats::ToolFamily;

use super::{
    super::{
        params::DSML,
        schema::{SchemaError, enforceable},
    },
    ConstrainedTool, Writer,
    arguments::Params,
    quoted,
};

/// Keywords of a schema whose unnamed members may be forbidden without changing what it means for
/// the others.
const CLOSABLE: [&str; 6] = ["type", "properties", "required", "description", "title", "$defs"];

impl Writer<'_> {
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

    /// What the model must write from the beginning of its answer.
    pub(in super::super) fn required(
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
    pub(in super::super) fn begun(
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
