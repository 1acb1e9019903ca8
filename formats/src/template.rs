//! Chat templates, rendered byte for byte as transformers renders them: its jinja2 environment,
//! filters and functions over minijinja. Templates are foreign code: instructions, depth and
//! output are bounded, and they see nothing but the conversation. What minijinja cannot bound is the
//! memory of one value (`t ~ t`, over and over) and the stack of deep ones: a hostile template can end
//! the process, so the program renders in a sandbox (`shardpack_chat::sandbox`).

mod arguments;
mod clock;
mod containers;
mod filters;
mod jinja;
mod methods;
mod percent;
mod python;
mod scan;
mod source;
mod tojson;
mod wrap;

use std::{collections::BTreeMap, fmt, io, sync::Arc, time::SystemTime};

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value,
    syntax::SyntaxConfig,
    value::{Rest, Serde, ValueKind},
};
use serde::Serialize;

/// Instructions of one render. The longest published templates take some 500 per message, so this
/// is 100,000 messages; a template that loops for ever ends within seconds.
const FUEL: u64 = 50_000_000;
/// Depth of macros, includes and loops; published templates stay below 20.
const RECURSION_LIMIT: usize = 200;
/// Bytes of one rendered prompt; a million tokens are about 4 MiB.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Bytes of a template; the longest published ones have 30 KiB.
pub const SOURCE_BYTES_MAX: usize = 1 << 20;

const NAME: &str = "chat_template";

/// Variables that the renderer sets and a request cannot.
pub const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and their kin, by name.
    specials: BTreeMap<String, Value>,
    /// Whether it changes lists or dictionaries.
    changes: bool,
    /// Whether tools are given as `xml_tools`, too.
    knows_xml_tools: bool,
}

/// Who speaks after the rendered conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The assistant: the prompt ends where its turn begins (`add_generation_prompt`).
    Assistant,
    /// Nobody: the conversation is rendered as it stands.
    Nobody,
}

/// The template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// Too long to be one.
    #[error("a chat template of {found} bytes: at most {SOURCE_BYTES_MAX}")]
    TooLong {
        /// Its bytes.
        found: usize,
    },
    /// Not jinja, or not jinja that we understand.
    #[error("the chat template does not parse: {0}")]
    Parse(Error),
}

/// A conversation that the template does not render.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The template itself refused, in its author's words.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template failed on it.
    #[error("the model's chat template fails on this conversation: {0}")]
    Failed(Error),
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("specials", &self.specials).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template; `specials` are the tokenizer's named special tokens, which templates
    /// read as variables.
    pub fn parse<K: Into<String>, V: Serialize>(
        source: &str,
        specials: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, TemplateError> {
        Self::parse_with_clock(source, specials, Arc::new(SystemTime::now))
    }

    /// Like [`Self::parse`], for templates that ask for the date: `now` tells it.
    pub fn parse_with_clock<K: Into<String>, V: Serialize>(
        source: &str,
        specials: impl IntoIterator<Item = (K, V)>,
        now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
    ) -> Result<Self, TemplateError> {
        if source.len() > SOURCE_BYTES_MAX {
            return Err(TemplateError::TooLong { found: source.len() });
        }
        let mut environment = environment(now).map_err(TemplateError::Parse)?;
        let (rewritten, changes) = source::rewritten(source);
        environment.add_template_owned(NAME, rewritten).map_err(TemplateError::Parse)?;
        let specials = specials.into_iter();
        let specials = specials.map(|(name, token)| (name.into(), Value::from(Serde(token))));
        let knows_xml_tools = source.contains("xml_tools");
        Ok(Self { environment, specials: specials.collect(), changes, knows_xml_tools })
    }

    /// The text of a conversation. `tools` may be empty, as may `kwargs`, further variables of the
    /// template; [`RESERVED`] names among them are not seen. Members of messages and tools come in
    /// the order in which they serialise.
    pub fn render<'k, M: Serialize, T: Serialize, K: Serialize>(
        &self,
        messages: impl IntoIterator<Item = M>,
        tools: impl IntoIterator<Item = T>,
        kwargs: impl IntoIterator<Item = (&'k str, K)>,
        next: Next,
    ) -> Result<String, RenderError> {
        let messages = messages.into_iter().map(|message| Value::from(Serde(message)));
        let messages: Value = messages.collect();
        let tools: Vec<Value> = tools.into_iter().map(|tool| Value::from(Serde(tool))).collect();
        let tools: Value = if tools.is_empty() { ().into() } else { tools.into() };
        let generates = next == Next::Assistant;
        let specials = self.specials.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let kwargs = kwargs.into_iter().map(|(name, value)| (name, Value::from(Serde(value))));
        // SmolLM3 knows its tools by another name.
        let also = [("xml_tools", tools.clone())].into_iter().filter(|_| self.knows_xml_tools);
        let own = RESERVED.into_iter().zip([messages, tools, ().into(), generates.into()]);
        let context = specials.chain(also).chain(kwargs).chain(own);
        let context = if self.changes {
            Value::from_pairs(context.map(|(name, value)| (name, containers::own_all(&value))))
        } else {
            Value::from_pairs(context)
        };

        let template = self.environment.get_template(NAME).map_err(RenderError::Failed)?;
        let mut output = Bounded(Vec::new());
        template.render_captured_to(context, &mut output).map_err(refusal)?;
        String::from_utf8(output.0).map_err(|_| {
            RenderError::Failed(Error::new(ErrorKind::InvalidOperation, "output is not text"))
        })
    }
}

/// A template's own refusal is told from its failures by the error's innermost cause.
fn refusal(error: Error) -> RenderError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(Refusal(message)) = current.downcast_ref() {
            return RenderError::Refused(message.clone());
        }
        cause = current.source();
    }
    RenderError::Failed(error)
}

/// What `raise_exception` was called with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// jinja2 as transformers sets it up: `ImmutableSandboxedEnvironment(trim_blocks=True,
/// lstrip_blocks=True, extensions=[AssistantTracker, loopcontrols])` with its `tojson`,
/// `raise_exception` and `strftime_now`.
fn environment(
    now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION_LIMIT);
    env.set_debug(false);
    env.set_unknown_method_callback(methods::call);
    filters::add_to(&mut env);
    containers::add_to(&mut env);
    env.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    env.set_formatter(|output: &mut Output, _: &mut State, value: &Value| {
        output.write_str(&python::str(value)).map_err(Error::from)
    });
    env.add_filter("tojson", tojson::tojson);
    env.add_filter("string", |value: &Value| -> Result<Value, Error> {
        let is_string = value.kind() == ValueKind::String;
        Ok(if is_string { value.clone() } else { python::str(value).into() })
    });
    for name in ["length", "count"] {
        env.add_filter(name, length);
    }
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", is_sequence);
    env.add_test("callable", jinja::is_callable);
    env.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    env.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let message = python::str(message);
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception")
            .with_source(Refusal(message)))
    });
    env.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        clock::strftime(now(), format).map_err(|unknown| {
            let message = format!("strftime_now: unknown directive {unknown:?}");
            Error::new(ErrorKind::InvalidOperation, message)
        })
    });
    Ok(env)
}

/// To jinja2 whatever has a length and members is one: texts and mappings too. Published templates
/// ask `tools is iterable` and then for the length, which nothing (`none`) has not.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq
            | ValueKind::Map
            | ValueKind::String
            | ValueKind::Bytes
            | ValueKind::Undefined
    )
}

/// jinja2 counts an undefined value as empty.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    value.len().ok_or_else(|| {
        let message = format!("a value of type {} has no length", value.kind());
        Error::new(ErrorKind::InvalidOperation, message)
    })
}

/// Takes output up to a limit.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other(format!("a prompt of over {OUTPUT_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_kinds_are_those_of_jinja2() {
        let source = "{% for v in values %}{{ [v is iterable, v is sequence, v is number] | tojson }}{% endfor %}{{ nothing is iterable }}{{ (tools is iterable and tools | length > 0) }}";
        let specials: [(&str, &str); 0] = [];
        let template = ChatTemplate::parse(source, specials).unwrap();
        let values = serde_json::json!([null, "a", [1], {"a": 1}, 1.5, true]);
        let none: [serde_json::Value; 0] = [];
        let text = template.render(&none, &none, [("values", values)], Next::Assistant).unwrap();
        let expected = "[false, false, false][true, true, false][true, true, false]\
            [true, true, false][false, false, true][false, false, true]TrueFalse";
        assert_eq!(text, expected);
    }

    #[test]
    fn tools_are_seen_by_the_name_that_the_template_has_for_them() {
        let source = "{{ xml_tools[0].name if xml_tools else 'none' }}";
        let specials: [(&str, &str); 0] = [];
        let none: [(&str, serde_json::Value); 0] = [];
        let template = ChatTemplate::parse(source, specials).unwrap();
        let render = |tools: Vec<serde_json::Value>| {
            let messages: [serde_json::Value; 0] = [];
            template.render(messages, tools, none.clone(), Next::Assistant).unwrap()
        };
        assert_eq!(render(vec![serde_json::json!({"name": "f"})]), "f");
        assert_eq!(render(Vec::new()), "none");
    }
}
