//! The tool calls of one output so far: indices, ids and deltas. All output reaches the client
//! through here.

use std::sync::Arc;

use serde_json::Value;

use super::{
    argument_validator::ArgumentValidator,
    schema::{applicable::Applicable, references::followed},
};
use crate::conversation::OutputDelta;

/// A tool that the model may call, as far as parsing needs it.
#[derive(Clone, Debug)]
pub struct ToolSpec {
    /// Its name.
    pub name: String,
    /// Schema of its arguments; `true` where the client gave none.
    pub schema: Value,
    /// Validates a complete call, where no grammar enforces the schema.
    pub validator: Option<ArgumentValidator>,
}

/// Format of call ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdStyle {
    /// `call_` and 24 letters and digits.
    Call,
    /// Nine letters and digits, which Mistral's templates insist on.
    Nine,
}

/// The open call.
#[derive(Debug)]
struct Open {
    name: String,
    arguments: String,
    /// Deltas that are held back until the complete call is validated, where it is.
    held: Option<(ArgumentValidator, Vec<OutputDelta>)>,
}

/// The tool calls so far.
#[derive(Debug)]
pub(super) struct ToolCalls {
    tools: Arc<[ToolSpec]>,
    style: IdStyle,
    nonce: u64,
    next: u32,
    open: Option<Open>,
    /// How many were completed.
    completed: u32,
    pub deltas: Vec<OutputDelta>,
}

impl ToolCalls {
    /// `nonce` makes ids unique among answers.
    pub(super) fn new(tools: Arc<[ToolSpec]>, style: IdStyle, nonce: u64) -> Self {
        Self { tools, style, nonce, next: 0, open: None, completed: 0, deltas: Vec::new() }
    }

    pub(super) fn has_tools(&self) -> bool {
        !self.tools.is_empty()
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether the client has seen a part of the open call.
    pub(super) fn is_shown(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.held.is_none())
    }

    /// How many calls are complete.
    pub(super) const fn completed(&self) -> u32 {
        self.completed
    }

    /// The schemas that may apply to an argument of the open call's tool.
    pub(super) fn argument(&self, key: &str) -> Option<Applicable<'_>> {
        let open = self.open.as_ref()?;
        let tool = self.tools.iter().find(|tool| tool.name == open.name)?;
        Applicable::root(&tool.schema).member(key)
    }

    /// Whether the open call, with this behind what was written of it, has the arguments that its
    /// schema requires: one that was cut short has not.
    pub(super) fn has_required(&self, end: &str) -> bool {
        let Some(open) = &self.open else { return false };
        let Some(tool) = self.tools.iter().find(|tool| tool.name == open.name) else {
            return false;
        };
        let whole =
            if open.arguments.is_empty() { "{}" } else { &format!("{}{end}", open.arguments) };
        let Ok(Value::Object(arguments)) = serde_json::from_str(whole) else { return false };
        let required = followed(&tool.schema, &tool.schema).get("required");
        let mut required = required.and_then(Value::as_array).into_iter().flatten();
        required.all(|name| name.as_str().is_none_or(|name| arguments.contains_key(name)))
    }

    /// A call begins; false, without effect, if there is no such tool.
    pub(super) fn begin(&mut self, name: &str, id: Option<String>) -> bool {
        let Some(tool) = self.tools.iter().find(|tool| tool.name == name) else { return false };
        let validator = tool.validator.clone();
        let index = self.next;
        let id = id.unwrap_or_else(|| self.id(index));
        let begin = OutputDelta::ToolCallBegin { index, id, name: name.to_owned() };
        let held = if let Some(validator) = validator {
            Some((validator, vec![begin]))
        } else {
            self.deltas.push(begin);
            None
        };
        self.next += 1;
        self.open = Some(Open { name: name.to_owned(), arguments: String::new(), held });
        true
    }

    /// More of the open call's arguments.
    pub(super) fn arguments(&mut self, fragment: &str) {
        let Some(open) = self.open.as_mut().filter(|_| !fragment.is_empty()) else { return };
        open.arguments.push_str(fragment);
        let index = self.next - 1;
        let deltas = open.held.as_mut().map_or(&mut self.deltas, |(_, held)| held);
        if let Some(OutputDelta::ToolCallArguments { fragment: last, .. }) = deltas.last_mut() {
            last.push_str(fragment);
        } else {
            deltas.push(OutputDelta::ToolCallArguments { index, fragment: fragment.to_owned() });
        }
    }

    /// The open call is complete; false if its arguments are not an object that every JSON
    /// reader takes, such as one with a number beyond all floats, or do not validate.
    pub(super) fn end(&mut self) -> bool {
        if self.open.as_ref().is_some_and(|open| open.arguments.is_empty()) {
            self.arguments("{}");
        }
        let Some(open) = &mut self.open else { return false };
        let Ok(arguments @ Value::Object(_)) = serde_json::from_str(&open.arguments) else {
            return false;
        };
        if let Some((validator, held)) = &mut open.held {
            if !validator.accepts(&arguments) {
                return false;
            }
            self.deltas.append(held);
        }
        self.open = None;
        self.completed += 1;
        self.deltas.push(OutputDelta::ToolCallEnd { index: self.next - 1 });
        true
    }

    /// The open call turned out to be none: it never ends.
    pub(super) fn abandon(&mut self) {
        // Of a call that was held back nothing is known: its number is free.
        if self.open.take().is_some_and(|open| open.held.is_some()) {
            self.next -= 1;
        }
    }

    pub(super) fn content(&mut self, text: &str) {
        match self.deltas.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputDelta::Content(last)) => last.push_str(text),
            _ => self.deltas.push(OutputDelta::Content(text.to_owned())),
        }
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.deltas.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputDelta::Reasoning(last)) => last.push_str(text),
            _ => self.deltas.push(OutputDelta::Reasoning(text.to_owned())),
        }
    }

    fn id(&self, index: u32) -> String {
        const ALPHABET: &[u8; 62] =
            b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
        let mut input = self.nonce.to_le_bytes().to_vec();
        input.extend_from_slice(&index.to_le_bytes());
        let hash = blake3::hash(&input);
        let mut letters =
            hash.as_bytes().iter().map(|byte| char::from(ALPHABET[usize::from(*byte) % 62]));
        match self.style {
            IdStyle::Call => "call_".chars().chain(letters.by_ref().take(24)).collect(),
            IdStyle::Nine => letters.take(9).collect(),
        }
    }
}
