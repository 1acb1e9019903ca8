//! Triggers of lazy grammars: what begins a tool call in free text, per family.

use std::sync::Arc;

use llguidance::Matcher;
use shardpack_engine_api::TokenId;
use shardpack_formats::ToolFamily;

use crate::tools::{
    gemma, json_calls, minimax,
    parser::{GENERIC, OutputFormat, pythonic_names},
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
    Token {
        token: TokenId,
        /// Index of the grammar that continues after it.
        matcher: usize,
    },
    Text {
        text: &'static str,
        /// Index of the grammar that this text starts.
        matcher: usize,
        /// Whether the text itself is the beginning of that grammar.
        is_fed: bool,
    },
}

/// What begins a call of families whose calls stand in sections, which models forget.
pub(super) fn call_opener(family: ToolFamily) -> Option<&'static str> {
    json_calls::names(family)?.call_open
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
        let mut mark_of = |name: &'static str, matcher: usize| {
            let text = Mark::Text { text: name, matcher, is_fed: false };
            let token = format.marker_token(name).map(|token| Mark::Token { token, matcher });
            marks.push(token.unwrap_or(text));
        };
        if let Some(name) = call_opener(family) {
            mark_of(name, 1);
        }
        let mut mark = |name| mark_of(name, 0);
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
            ToolFamily::MinimaxM2 => {
                mark("<minimax:tool_call>");
                marks.push(Mark::Text { text: "<invoke name=\"", matcher: 1, is_fed: true });
            }
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

    /// Watches for a call in the generic format, too, and continues with the grammar of that number.
    pub(super) fn add_generic(&mut self, format: &OutputFormat, matcher: usize) {
        for name in json_calls::names(GENERIC).map_or(&[][..], |names| names.openers) {
            let text = Mark::Text { text: name, matcher, is_fed: false };
            let token = format.marker_token(name).map(|token| Mark::Token { token, matcher });
            self.marks.push(token.unwrap_or(text));
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
        let marked = self.marks.iter().find_map(|mark| match mark {
            Mark::Token { token: own, matcher } => (*own == token).then_some(*matcher),
            Mark::Text { .. } => None,
        });
        if let Some(matcher) = marked {
            self.text.clear();
            return Some(Trigger { matcher, feed: String::new() });
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
            _ => None,
        };
        let found = found.or_else(|| self.marked());
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
