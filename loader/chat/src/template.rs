//! The model's chat template over `conversation` messages: which messages and variables it sees.
//! Rendering itself is [`shardpack_formats::template`]'s.

mod adjust;
mod effort;
mod generic_tools;
mod implied;
mod past_calls;
mod turn_form;

pub use shardpack_formats::template::TemplateError;
pub use shardpack_formats::template::{RESERVED, RenderError};

use std::{sync::Arc, time::SystemTime};

use shardpack_formats::{
    OutputStyle, ToolFamily,
    template::{self, Next},
};

use super::{
    conversation::{Message, Role},
    json::{Json, Object},
};
use adjust::Adjustment;
use effort::{EFFORT, Efforts};
use past_calls::PastCalls;
use turn_form::TurnForm;

/// Marks the end of a last turn that is to be continued: a name between private-use characters.
const OPEN_END: &str = "\u{f8fe}goes on\u{f8fe}";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    template: template::ChatTemplate,
    source: String,
    knows_developer: bool,
    /// The name by which it reads the thinking of past turns, if it has one of its own.
    thinking_key: Option<&'static str>,
    past_calls: Option<PastCalls>,
    /// The form in which it takes past turns.
    turn_form: TurnForm,
    /// Words for efforts of thinking.
    efforts: Efforts,
    /// Whether it shows the definitions of tools in a tool-call format that is known.
    shows_tools: bool,
    /// What it would leave out in silence or show in an unknown tool-call format.
    forced: Vec<Adjustment>,
    /// How it writes a call, where it shows calls but no definitions.
    native_call: Option<String>,
    /// Whether a prompt with tools teaches a format that the template writes no calls in: then earlier
    /// calls are written in that one, too.
    teaches_other: bool,
}

/// A prompt, and what was changed in the conversation so that the template rendered it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt.
    pub text: String,
    /// Names of the changes.
    pub adjustments: Vec<&'static str>,
}

/// Tools in the generic format, which the template itself does not show.
pub const GENERIC_TOOLS: &str = "generic-tools";

/// `reasoning_effort` left out, which the template refuses.
const NO_EFFORT: &str = "no-reasoning-effort";

/// The name of a change, where there is one of that name.
#[must_use]
pub fn adjustment(name: &str) -> Option<&'static str> {
    let known = || Adjustment::parse(name).map(Adjustment::name);
    [GENERIC_TOOLS, NO_EFFORT].into_iter().find(|own| *own == name).or_else(known)
}

/// Members of messages in which templates look for thinking, and how they name them there.
const THINKING_KEYS: [(&str, [&str; 3]); 2] = [
    ("thinking", ["message.thinking", "message['thinking']", "message[\"thinking\"]"]),
    ("reasoning", ["message.reasoning ", "message['reasoning']", "message[\"reasoning\"]"]),
];

impl ChatTemplate {
    /// Compiles a template; `specials` are the tokenizer's named special tokens, which templates
    /// read as variables.
    pub fn parse(source: &str, specials: Object) -> Result<Self, TemplateError> {
        Self::parse_with_clock(source, specials, Arc::new(SystemTime::now))
    }

    fn parse_with_clock(
        source: &str,
        specials: Object,
        now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
    ) -> Result<Self, TemplateError> {
        let specials = specials.into_members();
        let template = template::ChatTemplate::parse_with_clock(source, specials, now)?;
        let knows_developer = source.contains("developer");
        let reads = |names: &[&str; 3]| names.iter().any(|name| source.contains(name));
        let thinking_key = THINKING_KEYS
            .iter()
            .find(|(_, names)| reads(names) && !source.contains("reasoning_content"))
            .map(|(key, _)| *key);
        let past_calls = PastCalls::of(source);
        let family = OutputStyle::detect(source).tools;
        let turn_form = TurnForm::of(&template);
        let efforts = Efforts::of(source);
        let source = source.to_owned();
        let mut own = Self {
            template,
            source,
            knows_developer,
            thinking_key,
            past_calls,
            turn_form,
            efforts,
            shows_tools: false,
            forced: Vec::new(),
            native_call: None,
            teaches_other: false,
        };
        own.shows_tools = family.is_some() && own.probe_tools();
        own.forced = own.probe_forced(family);
        if family.is_some() && !own.shows_tools {
            own.native_call = generic_tools::native_call(&own);
            own.teaches_other = own.native_call.is_none() && family != Some(ToolFamily::JsonTags);
        }
        Ok(own)
    }

    /// Whether the definition of a tool changes the prompt and is in it.
    fn probe_tools(&self) -> bool {
        let tool = Json::parse(
            br#"{"type":"function","function":{"name":"fetch_quokka","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string","description":"d"}},"required":["a"]}}}"#,
        );
        let tool = tool.expect("a constant");
        let messages = [Message::of(Role::System, "s"), Message::of(Role::User, "u")];
        let shows = |messages: &[Message]| {
            let messages = messages.iter().map(|message| self.fields(message));
            let none: [(&str, Json); 0] = [];
            let rendered = self.template.render(messages, [&tool], none, Next::Assistant);
            rendered.is_ok_and(|text| text.contains("fetch_quokka"))
        };
        shows(&messages) || shows(&messages[1..])
    }

    fn probe_forced(&self, family: Option<ToolFamily>) -> Vec<Adjustment> {
        let [user, late] = ["zebra", "gecko"].map(|text| Message::of(Role::User, text));
        let system = Message::of(Role::System, "walrus");
        let said = Message::of(Role::Assistant, "heron");
        // A template that does not show who asks tells nothing.
        let drops = |messages: &[Message], word: &str| {
            let text = self.plain(messages, Next::Assistant);
            text.is_some_and(|text| text.contains("zebra") && !text.contains(word))
        };
        let mut forced = Vec::new();
        let turns = [user.clone(), said, system.clone(), late.clone()];
        // A template that counts its turns refuses one of these and drops the other.
        if drops(&turns, "walrus") || drops(&[user.clone(), system.clone(), late], "walrus") {
            forced.push(Adjustment::SystemToUser);
        }
        let no_system = drops(&[system.clone(), user.clone()], "walrus");
        if no_system {
            forced.push(Adjustment::SystemInUser);
        }
        let second = Message::of(Role::System, "lemur");
        if !no_system && drops(&[system, second, user.clone()], "lemur") {
            forced.push(Adjustment::MergedSystem);
        }
        let shows = self.plain(std::slice::from_ref(&user), Next::Assistant);
        let shows = shows.is_some_and(|text| text.contains("zebra"));
        let knows_no_calls = family.is_none() && shows && !self.source.contains("tool_call");
        if knows_no_calls || self.drops_results(user) {
            forced.push(Adjustment::CallsAsText);
        }
        forced
    }

    fn drops_results(&self, user: Message) -> bool {
        let parse = |text: &str| {
            let json = Json::parse(text.as_bytes()).expect("a constant");
            Message::normalise(json).expect("a message")
        };
        let called = parse(
            r#"{"role":"assistant","content":"","tool_calls":[{"id":"abcdefghi","type":"function","function":{"name":"fetch_quokka","arguments":{"a":"b"}}}]}"#,
        );
        let result = parse(
            r#"{"role":"tool","name":"fetch_quokka","tool_call_id":"abcdefghi","content":"puffin"}"#,
        );
        let later = Message::of(Role::User, "gecko");
        let text = self.plain(&[user, called, result, later], Next::Assistant);
        text.is_some_and(|text| {
            text.contains("zebra") && text.contains("gecko") && !text.contains("puffin")
        })
    }

    /// A rendering without tools and variables, if the template gives one.
    fn plain(&self, messages: &[Message], next: Next) -> Option<String> {
        let messages = messages.iter().map(|message| self.fields(message));
        let none: [(&str, Json); 0] = [];
        let no_tools: [Json; 0] = [];
        self.template.render(messages, no_tools, none, next).ok()
    }

    fn native_call(&self) -> Option<String> {
        self.native_call.clone()
    }

    /// Whether it shows the definitions of tools, in a tool-call format that is known.
    pub(crate) const fn shows_tools(&self) -> bool {
        self.shows_tools
    }

    /// Its text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a conversation, up to where the assistant's next turn begins. `tools` may be
    /// empty, as may `kwargs`; [`RESERVED`] names in `kwargs` are not seen. A conversation that the
    /// template refuses is normalised.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Json],
        kwargs: &Object,
    ) -> Result<Rendered, RenderError> {
        self.with_effort(kwargs, |kwargs| {
            let forced = self.forced_with(tools);
            let (told, tools) = self.told(messages, tools);
            let render = |messages: &[Message]| {
                let messages = messages.iter().map(|message| self.fields(message));
                self.template.render(messages, tools, kwargs.iter(), Next::Assistant)
            };
            let (text, adjustments) = adjust::render(&told, &forced, render, may_adjust)?;
            let adjustments = adjustments.into_iter().map(Adjustment::name).collect();
            Ok(Rendered { text, adjustments })
        })
    }

    /// Renders with an effort that the template names, and without one if it refuses that.
    fn with_effort(
        &self,
        kwargs: &Object,
        render: impl Fn(&Object) -> Result<Rendered, RenderError>,
    ) -> Result<Rendered, RenderError> {
        let mut kwargs = self.efforts.known(kwargs);
        let refusal = match render(&kwargs) {
            Err(error) if may_adjust(&error) && kwargs.remove(EFFORT).is_some() => error,
            other => return other,
        };
        let mut rendered = render(&kwargs).map_err(|_| refusal)?;
        rendered.adjustments.push(NO_EFFORT);
        Ok(rendered)
    }

    /// The prompt of a conversation whose last turn is continued, up to the end of its text.
    /// Nothing where the template does not show that.
    pub fn render_open(
        &self,
        messages: &[Message],
        tools: &[Json],
        kwargs: &Object,
    ) -> Result<Option<Rendered>, RenderError> {
        let Some(said) = messages.last().and_then(Message::own_text) else { return Ok(None) };
        let kwargs = &self.efforts.known(kwargs);
        let forced = self.forced_with(tools);
        let (told, tools) = self.told(messages, tools);
        let render = |messages: &[Message]| {
            let Some((last, before)) = messages.split_last() else { return Ok(None) };
            // A mark that no template writes by itself tells where the turn's text ends.
            let open = last.clone().with_text(&format!("{}{OPEN_END}", last.text().trim_end()));
            let messages = before.iter().chain([&open]).map(|message| self.fields(message));
            let rendered = self.template.render(messages, tools, kwargs.iter(), Next::Nobody)?;
            let end = rendered.rfind(OPEN_END);
            let end = end.filter(|&end| rendered[..end].ends_with(said));
            Ok(end.map(|end| rendered[..end].to_owned()))
        };
        let (text, adjustments) = adjust::render(&told, &forced, render, may_adjust)?;
        let adjustments = adjustments.into_iter().map(Adjustment::name).collect();
        Ok(text.map(|text| Rendered { text, adjustments }))
    }

    /// The adjustments of every conversation with these tools.
    fn forced_with(&self, tools: &[Json]) -> Vec<Adjustment> {
        let mut forced = self.forced.clone();
        if self.teaches_other && !tools.is_empty() && !forced.contains(&Adjustment::CallsAsText) {
            forced.push(Adjustment::CallsAsText);
        }
        forced
    }

    /// The conversation as the template is to see it, and the tools that it shows by itself.
    fn told<'a>(&self, messages: &[Message], tools: &'a [Json]) -> (Vec<Message>, &'a [Json]) {
        let messages = implied::filled(messages);
        if self.shows_tools || tools.is_empty() {
            return (messages, tools);
        }
        (generic_tools::with_definitions(&messages, tools, self), &[])
    }

    fn fields(&self, message: &Message) -> Object {
        if message.role() == Role::Developer && !self.knows_developer {
            // A template without the role would drop the instructions or refuse the conversation.
            return self.turn_form.fields(&message.clone().with_role(Role::System));
        }
        let mut fields = self.turn_form.fields(message);
        let has = |key: &str| fields.get(key).is_some_and(|value| *value != Json::Null);
        if let Some(key) = self.thinking_key.filter(|key| !has(key))
            // gpt-oss refuses thinking beside what is said with a call.
            && !(key == "thinking" && has("tool_calls") && says(&fields))
            && let Some(thinking) = fields.get("reasoning_content").cloned()
        {
            fields.set(key, thinking);
        }
        if let Some(past_calls) = &self.past_calls {
            past_calls.write(&mut fields);
        }
        fields
    }
}

/// Whether another form of the conversation may help: not where the template runs for too long.
fn may_adjust(error: &RenderError) -> bool {
    !error.to_string().contains("fuel")
}

fn says(fields: &Object) -> bool {
    fields.get("content").and_then(Json::as_str).is_some_and(|text| !text.is_empty())
}

#[cfg(test)]
mod tests;
