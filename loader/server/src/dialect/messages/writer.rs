//! Messages and their events as clients of the Anthropic API parse them.

use serde_json::{Value, json};
use shardpack_chat::conversation::{EndReason, OutputDelta};

use crate::{
    dialect::{Answer, Identity, Writer, to_json},
    error::{ApiError, Shape},
    generation::{ChoiceUpdate, UpdateKind},
    usage::AnswerUsage,
};

/// What a client of messages chose that its answer repeats.
#[derive(Debug)]
pub(crate) struct Options {
    /// Its stop texts.
    pub(super) stop: Vec<String>,
}

/// Writes messages.
pub(crate) struct MessagesWriter {
    identity: Identity,
    options: Options,
    /// Blocks that have begun.
    blocks: u32,
    open: Option<Block>,
    end: Option<(EndReason, AnswerUsage)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Text,
    Thinking,
    ToolUse,
}

/// Stands where the service puts proof that it was the one who thought; histories bring it back.
const SIGNATURE: &str = "unsigned";

impl MessagesWriter {
    pub(crate) fn new(identity: Identity, options: Options) -> Self {
        Self { identity, options, blocks: 0, open: None, end: None }
    }

    fn usage(&self, usage: AnswerUsage) -> Value {
        let usage = self.identity.total(&[usage]);
        json!({
            // Tokens that were found again are not counted twice, and there is always one.
            "input_tokens": (usage.prompt_tokens - usage.cached_tokens).max(1),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        })
    }

    fn message(&self, content: &[Value], end: Option<EndReason>, usage: AnswerUsage) -> Value {
        let (stop_reason, stop_sequence) = self.stop(end);
        json!({
            "id": format!("msg_{}", self.identity.id),
            "type": "message",
            "role": "assistant",
            "model": self.identity.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self.usage(usage),
        })
    }

    fn stop(&self, end: Option<EndReason>) -> (Option<&'static str>, Option<&str>) {
        match end {
            None => (None, None),
            Some(EndReason::Stop) => (Some("end_turn"), None),
            Some(EndReason::StopText(index)) => {
                (Some("stop_sequence"), self.options.stop.get(index).map(String::as_str))
            }
            Some(EndReason::Length) => (Some("max_tokens"), None),
            Some(EndReason::ToolCalls) => (Some("tool_use"), None),
        }
    }

    fn open(&mut self, block: Block, start: &Value, out: &mut String) {
        if self.open == Some(block) && block != Block::ToolUse {
            return;
        }
        self.close(out);
        push("content_block_start", json!({"index": self.blocks, "content_block": start}), out);
        self.open = Some(block);
        self.blocks += 1;
    }

    fn delta(&self, delta: &Value, out: &mut String) {
        push("content_block_delta", json!({"index": self.blocks - 1, "delta": delta}), out);
    }

    fn close(&mut self, out: &mut String) {
        let Some(block) = self.open.take() else { return };
        if block == Block::Thinking {
            self.delta(&json!({"type": "signature_delta", "signature": SIGNATURE}), out);
        }
        push("content_block_stop", json!({"index": self.blocks - 1}), out);
    }

    fn write_delta(&mut self, delta: OutputDelta, out: &mut String) {
        match delta {
            OutputDelta::Reasoning(text) => {
                let start = json!({"type": "thinking", "thinking": "", "signature": ""});
                self.open(Block::Thinking, &start, out);
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), out);
            }
            OutputDelta::Content(text) => {
                self.open(Block::Text, &json!({"type": "text", "text": ""}), out);
                self.delta(&json!({"type": "text_delta", "text": text}), out);
            }
            OutputDelta::ToolCallBegin { id, name, .. } => {
                let start = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(Block::ToolUse, &start, out);
            }
            OutputDelta::ToolCallArguments { fragment, .. } => {
                self.delta(&json!({"type": "input_json_delta", "partial_json": fragment}), out);
            }
            OutputDelta::ToolCallEnd { .. } => self.close(out),
        }
    }
}

fn push(name: &str, mut members: Value, out: &mut String) {
    members["type"] = name.into();
    out.push_str("event: ");
    out.push_str(name);
    out.push_str("\ndata: ");
    out.push_str(&to_json(&members));
    out.push_str("\n\n");
}

impl Writer for MessagesWriter {
    fn keep_alive(&self) -> &'static str {
        "event: ping\ndata: {\"type\": \"ping\"}\n\n"
    }

    fn begin(&mut self, out: &mut String) {
        let message = self.message(&[], None, AnswerUsage::default());
        push("message_start", json!({"message": message}), out);
        out.push_str(self.keep_alive());
    }

    fn update(&mut self, update: ChoiceUpdate, out: &mut String) {
        match update.kind {
            UpdateKind::Delta(delta) => self.write_delta(delta, out),
            UpdateKind::End(reason, usage) => self.end = Some((reason, usage)),
        }
    }

    fn end(&mut self, out: &mut String) {
        self.close(out);
        let (reason, usage) = self.end.unwrap_or((EndReason::Length, AnswerUsage::default()));
        let (stop_reason, stop_sequence) = self.stop(Some(reason));
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        push("message_delta", json!({"delta": delta, "usage": self.usage(usage)}), out);
        push("message_stop", json!({}), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        out.push_str("event: error\ndata: ");
        out.push_str(&to_json(&error.shaped(Shape::Anthropic)));
        out.push_str("\n\n");
    }

    fn whole(&mut self, answers: Vec<Answer>) -> String {
        let answer = answers.into_iter().next().unwrap_or_default();
        let mut content = Vec::new();
        if !answer.reasoning.is_empty() {
            let thinking = &answer.reasoning;
            let block = json!({"type": "thinking", "thinking": thinking, "signature": SIGNATURE});
            content.push(block);
        }
        if !answer.content.is_empty() {
            content.push(json!({"type": "text", "text": answer.content}));
        }
        // A call that was cut off has no input that could be shown as JSON.
        for call in answer.calls.iter().filter(|call| call.is_complete) {
            let input: shardpack_chat::json::Json =
                shardpack_chat::json::Json::parse(call.arguments.as_bytes()).unwrap_or_default();
            content.push(
                json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}),
            );
        }
        to_json(&self.message(&content, Some(answer.reason()), answer.usage))
    }
}
