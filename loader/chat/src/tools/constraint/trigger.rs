//! Triggers of lazy grammars: what begins a tool call in free text, per family.

use std::sync::Arc;

use llguidance::Matcher;
use shardpack_engine_api::TokenId;
use shardpack_formats::ToolFamily;

use crate::tools::{
    gemma, json_calls, minimax,
    parser::{OutputFormat, pythonic_names},
    tagged_arguments::DSML,
};

/// Bytes of text kept to find a mark in; a header or the beginning of a bare call fits.
const TAIL_BYTES_MAX: usize = 1024;

/// A call has begun.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Trigger {
    /// Index of the grammar to continue with.
    pub matcher: usize,
    /// What the model has already written of it.
    pub feed: String,
}

#[derive(Clone, Debug)]
enum Mark {
    Token(TokenId),
    Text {
        text: &'static str,
        /// Index of the grammar that this text starts.
        matcher: usize,
        /// Whether the text itself is the beginning of that grammar.
        is_fed: bool,
    },
}

/// Watches free text.
#[derive(Clone, Default)]
pub(super) struct Triggers {
    family: Option<ToolFamily>,
    marks: Vec<Mark>,
    /// Markers after which a bare call may stand, and Harmony's ends of headers.
    resets: Vec<TokenId>,
    names: Vec<String>,
    text: String,
    /// Whether the text is the turn from its beginning, or a header.
    watches_whole: bool,
    /// Each at the beginning of its grammar.
    pub matchers: Vec<Arc<Matcher>>,
}

impl Triggers {
    pub(super) fn new(family: ToolFamily, format: &OutputFormat, names: Vec<String>) -> Self {
        let mut marks = Vec::new();
        let mut resets = Vec::new();
        let mut mark = |name: &'static str| {
            let text = Mark::Text { text: name, matcher: 0, is_fed: false };
            marks.push(format.marker_token(name).map_or(text, Mark::Token));
        };
        match family {
            ToolFamily::Glm4 => mark("<tool_call>"),
            ToolFamily::QwenXml | ToolFamily::SeedXml => {
                let is_seed = family == ToolFamily::SeedXml;
                mark(if is_seed { "<seed:tool_call>" } else { "<tool_call>" });
                marks.push(Mark::Text { text: "<function=", matcher: 1, is_fed: true });
            }
            ToolFamily::HunyuanXml => mark("<tool_calls:opensource>"),
            ToolFamily::Gemma4 => mark(gemma::OPEN),
            ToolFamily::Lfm2 | ToolFamily::Olmo3 => {
                for name in pythonic_names(family).map_or(&[][..], |(openers, _)| openers) {
                    mark(name);
                }
            }
            ToolFamily::MinimaxM2 => mark("<minimax:tool_call>"),
            ToolFamily::MinimaxM3 => mark(minimax::MARK),
            // Within its first tag, the rest of which belongs to the grammar.
            ToolFamily::DeepseekV32 | ToolFamily::DeepseekV4 => mark(DSML),
            ToolFamily::LlamaJson | ToolFamily::LlamaPythonic => {
                let names = ["<|python_tag|>", "<|python_start|>"];
                resets = names.into_iter().filter_map(|name| format.marker_token(name)).collect();
            }
            ToolFamily::Harmony => {
                let names = ["<|start|>", "<|channel|>", "<|message|>"];
                resets = names.into_iter().filter_map(|name| format.marker_token(name)).collect();
            }
            family => {
                for name in json_calls::names(family).map_or(&[][..], |names| names.openers) {
                    mark(name);
                }
            }
        }
        Self {
            family: Some(family),
            marks,
            resets,
            names,
            text: String::new(),
            watches_whole: true,
            matchers: Vec::new(),
        }
    }

    /// Continues with free text after a call.
    pub(super) fn restart(&mut self) {
        self.text.clear();
        self.watches_whole = false;
    }

    /// The next token and what it spells.
    pub(super) fn push(&mut self, token: TokenId, bytes: &str) -> Option<Trigger> {
        let family = self.family?;
        if self.marks.iter().any(|mark| matches!(mark, Mark::Token(id) if *id == token)) {
            self.text.clear();
            return Some(Trigger { matcher: 0, feed: String::new() });
        }
        if let Some(index) = self.resets.iter().position(|reset| *reset == token) {
            // Harmony: a header begins or ends; Llama: a bare call may begin.
            self.watches_whole = family != ToolFamily::Harmony || index < 2;
            if family != ToolFamily::Harmony || index != 1 {
                self.text.clear();
            }
            return None;
        }
        self.text.push_str(bytes);
        let found = match family {
            ToolFamily::LlamaJson => self.call_object(0),
            ToolFamily::LlamaPythonic => self.list().or_else(|| self.call_object(1)),
            ToolFamily::Harmony => self.header(),
            _ => self.marked(),
        };
        if found.is_some() {
            self.text.clear();
        } else if self.text.len() > TAIL_BYTES_MAX {
            let keep = self.text.ceil_char_boundary(self.text.len() - TAIL_BYTES_MAX / 2);
            self.text.drain(..keep);
            self.watches_whole = false;
        }
        found
    }

    fn marked(&self) -> Option<Trigger> {
        self.marks.iter().find_map(|mark| {
            let Mark::Text { text, matcher, is_fed } = mark else { return None };
            let at = self.text.find(text)?;
            let from = if *is_fed { at } else { at + text.len() };
            Some(Trigger { matcher: *matcher, feed: self.text[from..].to_owned() })
        })
    }

    /// `{` and a key of a call, as the turn's first text.
    fn call_object(&self, matcher: usize) -> Option<Trigger> {
        let text = self.text.trim_start();
        let rest = text.strip_prefix('{').filter(|_| self.watches_whole)?.trim_start();
        let keys = ["\"name\"", "\"type\"", "\"function\""];
        let begun = keys.iter().any(|key| rest.starts_with(key));
        begun.then(|| Trigger { matcher, feed: text.to_owned() })
    }

    /// `[` and a known tool's call, as the turn's first text.
    fn list(&self) -> Option<Trigger> {
        let text = self.text.trim_start();
        let rest = text.strip_prefix('[').filter(|_| self.watches_whole)?.trim_start();
        let (name, _) = rest.split_once('(')?;
        self.names
            .iter()
            .any(|own| own == name)
            .then(|| Trigger { matcher: 0, feed: text.to_owned() })
    }

    fn header(&self) -> Option<Trigger> {
        const RECIPIENT: &str = "to=functions.";
        let at = self.text.find(RECIPIENT).filter(|_| self.watches_whole)?;
        Some(Trigger { matcher: 0, feed: self.text[at + RECIPIENT.len()..].to_owned() })
    }
}
