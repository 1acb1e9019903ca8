//! Grammars of tool calls, per family: for required calls, and for the rest of a call that the
//! model has begun (lazy grammars).

use std::fmt::Write;

use serde_json::{Value, json};
use shardpack_formats::ToolFamily;

use super::{
    super::{
        gemma,
        json_calls::{self, PLUGIN},
        minimax,
        parser::pythonic_names,
        schema::{SchemaError, enforceable},
        tagged_arguments::{DSML, has_dsml},
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
            ToolFamily::JsonTags
            | ToolFamily::MistralJson
            | ToolFamily::ToolCallsJson
            | ToolFamily::NemotronJson
            | ToolFamily::NemotronTags
            | ToolFamily::LongcatJson
            | ToolFamily::GraniteJson
            | ToolFamily::HyperclovaJson => {
                self.call_object(name, "arguments", &closed(&tool.schema)?)
            }
            ToolFamily::CohereJson => {
                let id = "\"\\\"tool_call_id\\\"\" WS? \":\" WS? /\"[0-9]{1,3}\"/ WS? \",\" WS?";
                let schema = closed(&tool.schema)?;
                self.envelope_with(id, ["tool_name", "parameters"], name, &schema)
            }
            ToolFamily::ApertusJson => {
                let json = self.json(&closed(&tool.schema)?);
                let name = quoted(&Value::from(name.as_str()).to_string());
                format!("\"{{\" WS? {name} WS? \":\" WS? {json} WS? \"}}\"")
            }
            ToolFamily::LlamaJson | ToolFamily::InternlmJson => {
                self.call_object(name, "parameters", &closed(&tool.schema)?)
            }
            ToolFamily::LlamaPythonic | ToolFamily::Lfm2 | ToolFamily::Olmo3 => {
                self.pythonic(number, tool)?
            }
            ToolFamily::Gemma4 => self.gemma(tool)?,
            ToolFamily::MinimaxM3 => self.minimax(tool)?,
            ToolFamily::QwenXml
            | ToolFamily::SeedXml
            | ToolFamily::HunyuanXml
            | ToolFamily::DeepseekV4
            | ToolFamily::Glm4
            | ToolFamily::MinimaxM2
            | ToolFamily::DeepseekV32 => self.params(family, tool)?,
            _ => self.headed(family, tool, begun)?,
        })
    }

    /// A head with the name, and the arguments as JSON.
    fn headed(
        &mut self,
        family: ToolFamily,
        tool: &ConstrainedTool,
        begun: bool,
    ) -> Result<String, SchemaError> {
        let name = &tool.name;
        let json = self.json(&closed(&tool.schema)?);
        Ok(match family {
            ToolFamily::Solar => {
                let id = self.marker("<|tool_call:name|>");
                let arguments = self.marker("<|tool_call:args|>");
                format!("/[a-z0-9]{{10}}/ {id} {} {arguments} {json}", quoted(name))
            }
            ToolFamily::MistralNames => {
                let (id, arguments) = (self.marker("[CALL_ID]"), self.marker("[ARGS]"));
                format!("{} ({id} /[a-zA-Z0-9]{{9}}/)? {arguments} {json}", quoted(name))
            }
            ToolFamily::DeepseekV3 => {
                let sep = self.marker("<｜tool▁sep｜>");
                let head = quoted(&format!("{name}\n```json\n"));
                format!("\"function\" {sep} {head} {json} \"\\n```\"")
            }
            ToolFamily::DeepseekV31 => {
                let sep = self.marker("<｜tool▁sep｜>");
                format!("{} {sep} {json}", quoted(name))
            }
            ToolFamily::KimiK2 => {
                let arguments = self.marker("<|tool_call_argument_begin|>");
                let head = quoted(&format!("functions.{name}:"));
                format!("{head} /[0-9]{{1,4}}/ {arguments} {json}")
            }
            ToolFamily::Harmony => {
                let (channel, message) = (self.marker("<|channel|>"), self.marker("<|message|>"));
                let constrain = self.marker("<|constrain|>");
                // Where the recipient came with the role, the channel is still to be named.
                let again =
                    if begun { format!("({channel} \"commentary\")?") } else { String::new() };
                format!("{} {again} (\" \"? {constrain} \"json\")? {message} {json}", quoted(name))
            }
            _ => quoted(name) + " " + &json,
        })
    }

    fn call_object(&mut self, name: &str, arguments: &str, schema: &Value) -> String {
        // Some write the type first.
        let kind = match arguments {
            "parameters" => "(\"\\\"type\\\"\" WS? \":\" WS? \"\\\"function\\\"\" WS? \",\" WS?)?",
            _ => "",
        };
        self.envelope_with(kind, ["name", arguments], name, schema)
    }

    /// The JSON object of a call, with something before its keys.
    fn envelope_with(
        &mut self,
        before: &str,
        keys: [&str; 2],
        name: &str,
        schema: &Value,
    ) -> String {
        let json = self.json(schema);
        let name = quoted(&Value::from(name).to_string());
        let [name_key, key] = keys.map(|key| quoted(&Value::from(key).to_string()));
        format!(
            "\"{{\" WS? {before} {name_key} WS? \":\" WS? {name} WS? \",\" WS? {key} WS? \":\" WS? {json} WS? \"}}\""
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
        let mut last = ["\"\"".to_owned(), "\"\"".to_owned()];
        if let Some(schema) = params.rest() {
            let value = self.json(&enforceable(&schema)?);
            let argument = format!("PNAME \"=\" {value}");
            last[0] = format!("\"\" | {argument} (\",\" WS? {argument})*");
        }
        for (has, body) in [false, true].into_iter().zip(last) {
            self.rule(&rest(count, has), &body);
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
        let marker = |name: &str| self.marker(name);
        Ok(match family {
            ToolFamily::JsonTags
            | ToolFamily::NemotronTags
            | ToolFamily::LongcatJson
            | ToolFamily::QwenXml
            | ToolFamily::SeedXml => {
                let (open, close) = (marker(tag(family).0), marker(tag(family).1));
                many(format!("({open} WS? call WS? {close})"), "WS?", one)
            }
            ToolFamily::LlamaJson => "call".to_owned(),
            ToolFamily::LlamaPythonic => {
                format!("\"[\" {} \"]\"", many("call".to_owned(), "\",\" WS?", one))
            }
            ToolFamily::MistralNames => many(format!("({} call)", marker("[TOOL_CALLS]")), "", one),
            ToolFamily::InternlmJson | ToolFamily::Gemma4 | ToolFamily::Glm4 => {
                let (open, close) = self.opener(family);
                many(format!("({open} call {close})"), "WS?", one)
            }
            ToolFamily::DeepseekV32 | ToolFamily::DeepseekV4 => {
                let name = dsml_section(family);
                let tag = |slash: &str| self.tag(&format!("<{slash}{DSML}{name}>"));
                let calls = many("call".to_owned(), "WS?", one);
                format!("WS? {} WS? {calls} WS? {}", tag(""), tag("/"))
            }
            ToolFamily::Harmony => {
                let channel = marker("<|channel|>");
                let thinking = self.analysis();
                format!("{thinking} {channel} \"commentary to=functions.\" call")
            }
            ToolFamily::HyperclovaJson => {
                let head = format!("(\"\\n\"? {} \"assistant\")?", marker("<|im_start|>"));
                let list = self.begun_section(family, one);
                format!("{head} \" \"? {} {list}", self.opener(family).0)
            }
            ToolFamily::Solar => {
                let head = format!("({} \"assistant\")?", marker("<|begin|>"));
                format!("{head} {} {}", self.opener(family).0, self.begun_section(family, one))
            }
            _ => format!("{} {}", self.opener(family).0, self.begun_section(family, one)),
        })
    }

    /// What opens a family's calls, and what closes them.
    fn opener(&self, family: ToolFamily) -> (String, String) {
        match family {
            ToolFamily::Gemma4 => (self.marker(gemma::OPEN), self.marker(gemma::CLOSE)),
            ToolFamily::MinimaxM3 => {
                let tag = |name| format!("{} {}", self.marker(minimax::MARK), self.marker(name));
                (tag(minimax::SECTION_OPEN), tag(minimax::SECTION_CLOSE))
            }
            ToolFamily::InternlmJson => {
                let open = self.marker("<|action_start|>");
                (format!("{open} {}", self.marker(PLUGIN)), self.marker("<|action_end|>"))
            }
            family => (self.marker(tag(family).0), self.marker(tag(family).1)),
        }
    }

    /// The calls of a section and its end, after its opener.
    fn begun_section(&self, family: ToolFamily, one: bool) -> String {
        let calls = |between: &str| many("call".to_owned(), between, one);
        let (_, close) = self.opener(family);
        match family {
            ToolFamily::LlamaPythonic => format!("\"[\" WS? {} \"]\"", calls("\",\" WS?")),
            ToolFamily::Lfm2 => format!("\"[\" {} \"]\" {close}", calls("\", \"")),
            ToolFamily::Olmo3 => {
                format!("\"\\n\" {} \"\\n\" {close}", calls("\"\\n\""))
            }
            ToolFamily::MinimaxM2 | ToolFamily::MinimaxM3 => {
                format!("WS? {} WS? {close}", calls("WS?"))
            }
            ToolFamily::HunyuanXml => {
                let open = self.marker("<tool_call:opensource>");
                let unit = format!("({open} call {} WS?)", self.marker("</tool_call:opensource>"));
                format!("WS? {unit}{} {close}", if one { "" } else { "+" })
            }
            family if json_calls::is_list(family) => {
                let has_end =
                    json_calls::names(family).is_some_and(|names| names.call_close.is_some());
                // Granite's end is one that its kin write.
                let end = match family {
                    ToolFamily::GraniteJson => String::new(),
                    ToolFamily::HyperclovaJson => self.optional("<|im_end|>"),
                    _ if has_end => close,
                    _ => String::new(),
                };
                format!("WS? \"[\" WS? {} WS? \"]\" {end}", calls("WS? \",\" WS?"))
            }
            family => {
                let names = json_calls::names(family);
                let name = |name: Option<&'static str>| self.marker(name.unwrap_or_default());
                let open = name(names.as_ref().and_then(|names| names.call_open));
                let close = name(names.as_ref().and_then(|names| names.call_close));
                let end = name(names.as_ref().and_then(|names| names.section_close));
                let unit = format!("({open} call {close} WS?)");
                format!("WS? {unit}{} {end}", if one { "" } else { "+" })
            }
        }
    }

    /// What may follow a call's first marker where the model has forgotten the section around it.
    pub(in super::super) fn begun_call(
        &mut self,
        family: ToolFamily,
        tools: &[ConstrainedTool],
        one: bool,
    ) -> Result<String, SchemaError> {
        self.call(family, tools, true)?;
        let names = json_calls::names(family);
        let name = |name: Option<&'static str>| self.marker(name.unwrap_or_default());
        let open = name(names.as_ref().and_then(|names| names.call_open));
        let close = name(names.as_ref().and_then(|names| names.call_close));
        let end = name(names.as_ref().and_then(|names| names.section_close));
        let more = if one { String::new() } else { format!("(WS? {open} call {close})*") };
        Ok(format!("call {close} {more} (WS? {end})?"))
    }

    /// A marker that may stand here where it is a token.
    fn optional(&self, name: &str) -> String {
        self.format.marker_token(name).map_or_else(String::new, |_| self.marker(name) + "?")
    }

    /// What may follow a call's first marker.
    pub(in super::super) fn begun(
        &mut self,
        family: ToolFamily,
        tools: &[ConstrainedTool],
        one: bool,
    ) -> Result<String, SchemaError> {
        self.call(family, tools, true)?;
        let close = self.opener(family).1;
        Ok(match family {
            ToolFamily::JsonTags
            | ToolFamily::NemotronTags
            | ToolFamily::LongcatJson
            | ToolFamily::QwenXml
            | ToolFamily::SeedXml => format!("WS? call WS? {close}"),
            ToolFamily::Glm4 | ToolFamily::Gemma4 => format!("WS? call {close}"),
            ToolFamily::InternlmJson => format!("{} WS? call WS? {close}", self.marker(PLUGIN)),
            // The trigger is the beginning of the call itself.
            ToolFamily::LlamaJson | ToolFamily::Harmony | ToolFamily::MistralNames => {
                "call".to_owned()
            }
            family if has_dsml(family) => {
                let name = dsml_section(family);
                let close = self.tag(&format!("</{DSML}{name}>"));
                let calls = many("call".to_owned(), "WS?", one);
                format!("\"{name}>\" WS? {calls} WS? {close}")
            }
            // The trigger is the mark before the section's tag.
            ToolFamily::MinimaxM3 => {
                let open = self.marker(minimax::SECTION_OPEN);
                format!("{open} {}", self.begun_section(family, one))
            }
            family => self.begun_section(family, one),
        })
    }
}

/// One or more of a unit.
fn many(unit: String, between: &str, one: bool) -> String {
    if one { unit } else { format!("{unit} ({between} {unit})*") }
}

/// The tag about DeepSeek's calls.
const fn dsml_section(family: ToolFamily) -> &'static str {
    match family {
        ToolFamily::DeepseekV4 => "tool_calls",
        _ => "function_calls",
    }
}

/// What opens and closes a call, or a section of calls; the end may be nothing.
fn tag(family: ToolFamily) -> (&'static str, &'static str) {
    match family {
        ToolFamily::QwenXml | ToolFamily::Glm4 => ("<tool_call>", "</tool_call>"),
        ToolFamily::SeedXml => ("<seed:tool_call>", "</seed:tool_call>"),
        ToolFamily::MinimaxM2 => ("<minimax:tool_call>", "</minimax:tool_call>"),
        ToolFamily::HunyuanXml => ("<tool_calls:opensource>", "</tool_calls:opensource>"),
        family => pythonic_names(family)
            .map(|(openers, closer)| (openers[0], closer))
            .or_else(|| {
                let names = json_calls::names(family)?;
                Some((names.openers[0], names.call_close.unwrap_or_default()))
            })
            .unwrap_or_default(),
    }
}

/// A tool's schema, enforceable; arguments that it does not name are not invented.
pub(super) fn closed(schema: &Value) -> Result<Value, SchemaError> {
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
