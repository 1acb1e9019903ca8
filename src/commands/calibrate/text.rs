//! The built-in calibration text: prose, code, a manual, several languages, and conversations as the
//! model's own template writes them. Of works in the public domain and of this project.
//!
//! The files are copies that do not change with what they were copied from: the same text gives the same
//! moments.

use std::path::Path;

use anyhow::Context as _;
use serde_json::json;
use shardpack_chat::{
    ChatModel, PromptHome,
    conversation::{ChatRequest, Message},
    json::Json,
};

use crate::commands::text_worker;

const PLAIN: [&str; 4] = [
    include_str!("texts/prose.txt"),
    include_str!("texts/code.txt"),
    include_str!("texts/languages.txt"),
    include_str!("texts/manual.txt"),
];

/// Questions and answers.
const CONVERSATIONS: &str = include_str!("texts/conversations.json");

/// Texts of several kinds, for the model in a package. A model without a template reads questions and
/// answers without it.
pub(super) fn builtin(folder: &Path) -> anyhow::Result<Vec<String>> {
    let pairs: Vec<[String; 2]> =
        serde_json::from_str(CONVERSATIONS).context("the built-in conversations")?;
    let model = ChatModel::open_in(folder, PromptHome::Sandboxed(&text_worker::program())).ok();
    let written = |[question, answer]: &[String; 2]| {
        let rendered = model.as_ref().and_then(|model| rendered(model, question, answer));
        rendered.unwrap_or_else(|| format!("{question}\n\n{answer}\n\n"))
    };
    let conversations: String = pairs.iter().map(written).collect();
    Ok(PLAIN.into_iter().map(str::to_owned).chain([conversations]).collect())
}

/// A conversation by the model's template; none where that refuses it.
fn rendered(model: &ChatModel, question: &str, answer: &str) -> Option<String> {
    let message = |role: &str, content: &str| {
        let text = json!({ "role": role, "content": content }).to_string();
        Message::normalise(Json::parse(text.as_bytes()).ok()?).ok()
    };
    let messages = vec![message("user", question)?, message("assistant", answer)?];
    Some(model.render(&ChatRequest { messages, ..ChatRequest::default() }).ok()?.text)
}
