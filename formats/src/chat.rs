//! What a model's chat template can do, found out by rendering conversations with it, and where
//! templates are kept. The answers are part of a package, so nothing here depends on the clock.

mod prober;
pub mod turn_end;

pub use prober::{Prober, probe, probe_with};

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{
    template::{ChatTemplate, Next},
    tool_family::{OutputStyle, ThinkingStyle},
};

/// Name of a template that stands alone.
pub const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The older form: JSON with a `chat_template` member.
pub const LEGACY_FILE: &str = "chat_template.json";
/// The tokenizer's configuration, which may hold templates too.
const CONFIG_FILE: &str = "tokenizer_config.json";

/// When templates that ask for the date are rendered: 1 January 2025.
const PROBE_TIME: Duration = Duration::from_hours(482_136);

/// A model's templates, by the order in which transformers looks for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Templates {
    /// The file that they are from.
    pub file: &'static str,
    /// The template of ordinary conversations.
    pub default: String,
    /// One of its own for conversations with tools.
    pub tools: Option<String>,
}

/// What a template can do; a manifest's `chat`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is the answer to a question of its own")]
pub struct Chat {
    /// The file that the template is from.
    pub file: String,
    /// Why the template cannot be used, if so; the rest is false then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// System messages are shown to the model.
    pub system: bool,
    /// Definitions of tools are.
    pub tools: bool,
    /// Results of tools are.
    pub tool_results: bool,
    /// Calls of past turns are shown when their arguments are an object.
    pub arguments_object: bool,
    /// They are when their arguments are a string of JSON.
    pub arguments_string: bool,
    /// Several calls of one turn are shown.
    pub parallel_calls: bool,
    /// Contents may be lists of parts.
    pub content_parts: bool,
    /// The variable `enable_thinking`, or one of the template's own, changes the prompt.
    pub thinking_switch: bool,
    /// Thinking of the turn that is under way is shown.
    pub reasoning: bool,
    /// The prompt ends where the assistant's turn begins.
    pub generation_prompt: bool,
    /// How the model writes calls and thinking, where the template tells.
    #[serde(default)]
    pub output: OutputStyle,
}

/// Finds the templates among a model's text files, in transformers' order.
pub fn lookup(texts: &BTreeMap<String, Vec<u8>>) -> Result<Option<Templates>, String> {
    let text = |file: &str| texts.get(file).map(|bytes| String::from_utf8_lossy(bytes));
    if let Some(template) = text(TEMPLATE_FILE) {
        let default = template.into_owned();
        return Ok(Some(Templates { file: TEMPLATE_FILE, default, tools: None }));
    }
    for file in [CONFIG_FILE, LEGACY_FILE] {
        let Some(text) = text(file) else { continue };
        let value: Value =
            serde_json::from_str(&text).map_err(|error| format!("{file} is not JSON: {error}"))?;
        if let Some(found) = templates(file, &value["chat_template"])? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The template of a kind of model whose checkpoints have a program in place of one; it renders what
/// the program writes.
#[must_use]
pub fn published(model_type: &str) -> Option<&'static str> {
    match model_type {
        "deepseek_v32" => Some(include_str!("../templates/deepseek_v32.jinja")),
        "deepseek_v4" => Some(include_str!("../templates/deepseek_v4.jinja")),
        _ => None,
    }
}

/// One template, or a list of named ones.
fn templates(file: &'static str, value: &Value) -> Result<Option<Templates>, String> {
    match value {
        Value::Null => Ok(None),
        Value::String(template) => {
            Ok(Some(Templates { file, default: template.clone(), tools: None }))
        }
        Value::Array(list) => {
            let named = |name: &str| {
                let entry = list.iter().find(|entry| entry["name"] == name)?;
                entry["template"].as_str().map(str::to_owned)
            };
            let default = named("default")
                .ok_or_else(|| format!("{file}: no template of the list is named \"default\""))?;
            Ok(Some(Templates { file, default, tools: named("tool_use") }))
        }
        other => Err(format!("{file}: chat_template is neither a text nor a list: {other:.60}")),
    }
}

/// The named special tokens of a tokenizer's configuration, as templates see them.
#[must_use]
pub fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let members = config.as_object().into_iter().flatten();
    let token = |(name, value): (&String, &Value)| {
        let text = value.as_str().or_else(|| value["content"].as_str())?;
        name.ends_with("_token").then(|| (name.clone(), text.to_owned()))
    };
    members.filter_map(token).collect()
}

/// Renders conversations in this process and says what of them the model would see.
#[must_use]
pub fn probe_here(templates: &Templates, specials: &BTreeMap<String, String>) -> Chat {
    let parse = |source: &str| {
        let now = Arc::new(|| UNIX_EPOCH + PROBE_TIME);
        ChatTemplate::parse_with_clock(source, specials, now)
    };
    let tools_source = templates.tools.as_ref().unwrap_or(&templates.default);
    let mut chat = Chat::unusable(templates, tools_source);
    let (default, tools) = match (parse(&templates.default), parse(tools_source)) {
        (Ok(default), Ok(tools)) => (default, tools),
        (Err(error), _) | (_, Err(error)) => {
            chat.problem = Some(error.to_string());
            return chat;
        }
    };
    let plain = Probe::of(&default, &[]);
    let user = [message("user", USER)];
    match plain.render(&user, Next::Assistant) {
        Ok(text) if text.contains(USER) => {}
        Ok(_) => chat.problem = Some("the template does not show what the user says".to_owned()),
        Err(problem) => chat.problem = Some(problem),
    }
    if chat.problem.is_some() {
        return chat;
    }
    let tool = [tool_definition()];
    let with_tools = Probe::of(&tools, &tool);
    chat.system = plain.shows(&[message("system", SYSTEM), user[0].clone()], &[SYSTEM]);
    chat.tools = with_tools.shows(&user, &[TOOL, USER]);
    chat.content_parts = plain.shows_parts();
    let prompt = plain.render(&user, Next::Assistant).unwrap_or_default();
    let closed = plain.render(&user, Next::Nobody).unwrap_or_default();
    chat.generation_prompt = prompt.len() > closed.len() && prompt.starts_with(closed.trim_end());
    let style = chat.output.thinking;
    chat.thinking_switch = plain.thinking(style, true) != plain.thinking(style, false);
    let object = json!({ KEY: VALUE });
    let string = Value::from(object.to_string());
    chat.arguments_object = with_tools.shows_arguments(&object);
    chat.arguments_string = with_tools.shows_arguments(&string);
    let arguments = if chat.arguments_object { object } else { string };
    let called = conversation(&[call("call_1", &arguments)]);
    chat.tool_results = with_tools.shows(&called, &[RESULT]);
    chat.reasoning = with_tools.shows(&called, &[THOUGHT]);
    let other = json!({ KEY: OTHER_VALUE });
    let other = if arguments.is_string() { other.to_string().into() } else { other };
    let two = conversation(&[call("call_1", &arguments), call("call_2", &other)]);
    chat.parallel_calls = with_tools.shows(&two, &[VALUE, OTHER_VALUE]);
    chat
}

// Words that no template says by itself.
const USER: &str = "zebra asks";
const SYSTEM: &str = "walrus rules";
const TOOL: &str = "fetch_quokka";
const KEY: &str = "ibex_key";
const VALUE: &str = "lemur value";
const OTHER_VALUE: &str = "gecko value";
const RESULT: &str = "puffin result";
const THOUGHT: &str = "heron thought";

fn message(role: &str, content: impl Into<Value>) -> Value {
    json!({ "role": role, "content": content.into() })
}

fn tool_definition() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": { KEY: { "type": "string", "description": "what to look for" } },
        "required": [KEY],
    });
    json!({
        "type": "function",
        "function": { "name": TOOL, "description": "looks for it", "parameters": parameters },
    })
}

/// Nine letters or digits of an id: the strictest published template asks for that.
fn call(id: &str, arguments: &Value) -> Value {
    let id = format!("{id}abcdefghi").replace('_', "")[..9].to_owned();
    json!({ "id": id, "type": "function", "function": { "name": TOOL, "arguments": arguments } })
}

/// A question, the assistant's calls, and a result for each.
fn conversation(calls: &[Value]) -> Vec<Value> {
    let mut turn = message("assistant", "");
    turn["tool_calls"] = calls.into();
    turn["reasoning_content"] = THOUGHT.into();
    let mut messages = vec![message("user", USER), turn];
    for call in calls {
        let mut result = message("tool", RESULT);
        result["tool_call_id"] = call["id"].clone();
        result["name"] = TOOL.into();
        messages.push(result);
    }
    messages
}

struct Probe<'a> {
    template: &'a ChatTemplate,
    tools: &'a [Value],
}

impl<'a> Probe<'a> {
    const fn of(template: &'a ChatTemplate, tools: &'a [Value]) -> Self {
        Self { template, tools }
    }

    fn render(&self, messages: &[Value], next: Next) -> Result<String, String> {
        self.render_with(messages, &Map::new(), next)
    }

    fn render_with(
        &self,
        messages: &[Value],
        variables: &Map<String, Value>,
        next: Next,
    ) -> Result<String, String> {
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value));
        let rendered = self.template.render(messages, self.tools, variables, next);
        rendered.map_err(|error| error.to_string())
    }

    fn shows(&self, messages: &[Value], words: &[&str]) -> bool {
        let rendered = self.render(messages, Next::Assistant);
        rendered.is_ok_and(|text| words.iter().all(|word| text.contains(word)))
    }

    /// Arguments are shown as what they are, not as the text of a text or in Python's spelling.
    fn shows_arguments(&self, arguments: &Value) -> bool {
        let messages = conversation(&[call("call_1", arguments)]);
        self.render(&messages, Next::Assistant).is_ok_and(|text| {
            let encoded = format!("\\\"{KEY}\\\"");
            let python = format!("'{KEY}'");
            text.contains(KEY)
                && text.contains(VALUE)
                // The definition of the tool names the key as well.
                && !text.contains(&encoded)
                && !text.contains(&python)
        })
    }

    fn shows_parts(&self) -> bool {
        let parts = json!([{ "type": "text", "text": USER }]);
        self.render(&[message("user", parts)], Next::Assistant).is_ok_and(|text| {
            text.contains(USER) && !text.contains("'type'") && !text.contains("\"type\"")
        })
    }

    fn thinking(&self, style: Option<ThinkingStyle>, enabled: bool) -> Result<String, String> {
        let mut variables = Map::from_iter([("enable_thinking".to_owned(), enabled.into())]);
        let own = style.and_then(|style| style.switch(enabled));
        variables.extend(own.map(|(name, value)| (name.to_owned(), value.into())));
        self.render_with(&[message("user", USER)], &variables, Next::Assistant)
    }
}

impl Chat {
    /// What is known without rendering.
    fn unusable(templates: &Templates, tools_source: &str) -> Self {
        Self {
            file: templates.file.to_owned(),
            problem: None,
            system: false,
            tools: false,
            tool_results: false,
            arguments_object: false,
            arguments_string: false,
            parallel_calls: false,
            content_parts: false,
            thinking_switch: false,
            reasoning: false,
            generation_prompt: false,
            output: OutputStyle::detect(tools_source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)]) -> BTreeMap<String, Vec<u8>> {
        files.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
    }

    fn probed(template: &str) -> Chat {
        let templates = lookup(&texts(&[(TEMPLATE_FILE, template)])).unwrap().unwrap();
        let specials = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let specials = specials.map(|(name, token)| (name.to_owned(), token.to_owned()));
        probe_here(&templates, &BTreeMap::from(specials))
    }

    #[test]
    fn templates_are_looked_up_in_the_order_of_transformers() {
        let config = r#"{"chat_template":[{"name":"tool_use","template":"t"},{"name":"default","template":"d"}]}"#;
        let legacy = r#"{"chat_template":"l"}"#;
        let all = [(TEMPLATE_FILE, "j"), (CONFIG_FILE, config), (LEGACY_FILE, legacy)];
        let found =
            |files: &[(&str, &str)]| lookup(&texts(files)).unwrap().map(|t| (t.default, t.tools));
        assert_eq!(found(&all), Some(("j".to_owned(), None)));
        assert_eq!(found(&all[1..]), Some(("d".to_owned(), Some("t".to_owned()))));
        assert_eq!(found(&all[2..]), Some(("l".to_owned(), None)));
        assert_eq!(
            found(&[(CONFIG_FILE, "{}"), (LEGACY_FILE, legacy)]),
            Some(("l".to_owned(), None))
        );
        assert_eq!(found(&[]), None);
        assert!(lookup(&texts(&[(CONFIG_FILE, r#"{"chat_template":[]}"#)])).is_err());
        assert!(lookup(&texts(&[(CONFIG_FILE, r#"{"chat_template":1}"#)])).is_err());
    }

    #[test]
    fn published_templates_can_what_they_can() {
        let qwen3 = probed(include_str!("../../loader/chat/src/template/golden/qwen3.jinja"));
        assert_eq!(qwen3.problem, None);
        assert!(qwen3.system && qwen3.tools && qwen3.tool_results && qwen3.parallel_calls);
        assert!(qwen3.arguments_object && qwen3.generation_prompt && qwen3.thinking_switch);
        assert!(qwen3.reasoning, "of the turn that is under way");
        let llama = probed(include_str!("../../loader/chat/src/template/golden/llama3.jinja"));
        assert!(llama.system && llama.tools && llama.tool_results && llama.arguments_object);
        assert!(!llama.parallel_calls, "it refuses more than one call");
        assert!(!llama.thinking_switch && !llama.reasoning);
        let kjv = probed(include_str!("../../tests/data/kjv-4m/chat_template.jinja"));
        assert_eq!(kjv.problem, None);
        assert!(kjv.tools && kjv.tool_results && kjv.generation_prompt, "{kjv:?}");
    }

    #[test]
    fn a_template_in_place_of_a_program_can_what_the_program_can() {
        for (model_type, family) in [
            ("deepseek_v32", crate::ToolFamily::DeepseekV32),
            ("deepseek_v4", crate::ToolFamily::DeepseekV4),
        ] {
            let chat = probed(published(model_type).unwrap());
            assert_eq!(chat.problem, None);
            assert!(chat.system && chat.tools && chat.tool_results && chat.parallel_calls);
            assert!(chat.arguments_object && chat.generation_prompt && chat.thinking_switch);
            let (tools, thinking) = (Some(family), Some(crate::ThinkingStyle::ThinkTags));
            assert_eq!(chat.output, OutputStyle { tools, thinking, answer: None });
        }
        assert_eq!(published("deepseek_v3"), None);
    }

    #[test]
    fn small_differences_are_seen() {
        let turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
        let plain =
            probed(&format!("{turns}{{% if add_generation_prompt %}}assistant:{{% endif %}}"));
        assert!(plain.system && plain.generation_prompt && plain.tool_results);
        assert!(!plain.tools && !plain.content_parts && !plain.arguments_object);
        assert!(!probed(turns).generation_prompt);
        let calls = |arguments: &str| {
            probed(&format!(
                "{turns}{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{{{{ c.function.arguments{arguments} }}}}{{% endfor %}}{{% endfor %}}"
            ))
        };
        let (raw, encoded) = (calls(""), calls(" | tojson"));
        assert_eq!((raw.arguments_object, raw.arguments_string), (false, true));
        assert_eq!((encoded.arguments_object, encoded.arguments_string), (true, false));
        let switch = format!("{turns}{{% if enable_thinking %}}<think>{{% endif %}}");
        assert!(probed(&switch).thinking_switch);
        let own = "{% if thinking_mode == 'disabled' %}</mm:think>{% else %}<mm:think>{% endif %}";
        assert!(probed(&format!("{turns}{own}")).thinking_switch);
    }

    #[test]
    fn an_unusable_template_says_why() {
        let problem = |template: &str| probed(template).problem.unwrap();
        assert!(problem("{% for %}").contains("does not parse"));
        assert!(problem("{{ raise_exception('no') }}").contains("refuses"));
        assert!(problem("hello").contains("does not show"));
    }
}
