//! Ollama's own API: conversations and prompts, answered by lines of JSON.

mod keep_alive;
mod request;
mod writer;

pub(super) use request::{parse_chat, parse_generate};
pub(super) use writer::{LINES, OllamaWriter, Options, Route, without_prompt};
