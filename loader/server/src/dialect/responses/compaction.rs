//! Compaction: a client asks for a summary in the place of a conversation (`compaction_trigger`,
//! `/v1/responses/compact`) and sends it with later requests as an item whose content it does not read.
//!
//! The content is the summary itself with a mark before it: the server keeps no keys and no state for it.

use base64ct::{Base64, Encoding as _};
use shardpack_chat::json::{Json, Object};

use crate::error::ApiError;

/// Asks the model for the summary.
const REQUEST: &str = "Summarize this conversation so that you can continue from the summary alone: \
    what was asked for, what was done and found (names of files, commands, values and errors in full), what was \
    decided and why, and what is left to do. Answer with the summary only and call no tool.";
/// Stands before a summary that takes the place of a conversation.
const INTRODUCTION: &str = "The conversation before this was replaced by this summary of it:";
/// Tells our contents from those of other servers.
const MARK: &str = "shardpack1.";

/// What a response is made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Compaction {
    /// What the model answers.
    #[default]
    None,
    /// One item: the summary.
    Item,
    /// The users' messages, and the summary behind them, as an object of its own.
    History(Vec<Json>),
}

impl Compaction {
    pub(super) const fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Takes the trigger from the end of an input.
    pub(super) fn take(input: &mut Option<Json>) -> Result<Self, ApiError> {
        let Some(Json::Array(items)) = input else { return Ok(Self::None) };
        let Some(index) = items.iter().position(|item| is_of(item, "compaction_trigger")) else {
            return Ok(Self::None);
        };
        if index + 1 < items.len() {
            let path = format!("input[{index}]");
            let message = format!(
                "{path}: expected compaction_trigger as the last item, found {} behind it",
                items.len() - index - 1
            );
            return Err(ApiError::param(path, message));
        }
        items.pop();
        Ok(Self::Item)
    }

    /// The users' messages of an input, and a summary of all of it.
    pub(super) fn of_history(input: Option<&Json>) -> Self {
        let items = super::request::items(input).unwrap_or_default();
        let is_users = |item: &Json| {
            let role = item.as_object().and_then(|item| item.get("role")).and_then(Json::as_str);
            role == Some("user")
        };
        Self::History(items.into_iter().filter(is_users).map(as_message).collect())
    }
}

/// An item as a response lists it: with its type.
fn as_message(mut item: Json) -> Json {
    if let Json::Object(item) = &mut item
        && item.get("type").is_none()
    {
        item.set("type", "message".into());
    }
    item
}

fn is_of(item: &Json, kind: &str) -> bool {
    item.as_object().and_then(|item| item.get("type")).and_then(Json::as_str) == Some(kind)
}

/// The message that asks for the summary.
pub(super) fn request() -> Json {
    message(REQUEST)
}

/// The message in the place of what a summary is of.
pub(super) fn summary(item: &Object) -> Option<Json> {
    let sealed = item.get("encrypted_content")?.as_str()?.strip_prefix(MARK)?;
    let text = String::from_utf8(Base64::decode_vec(sealed).ok()?).ok()?;
    Some(message(&format!("{INTRODUCTION}\n{text}")))
}

/// A summary as the content of an item.
pub(super) fn sealed(summary: &str) -> String {
    format!("{MARK}{}", Base64::encode_string(summary.trim().as_bytes()))
}

fn message(text: &str) -> Json {
    let mut message = Object::default();
    message.set("role", "user".into());
    message.set("content", text.into());
    Json::Object(message)
}
