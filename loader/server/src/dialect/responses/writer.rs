//! Responses and their events as clients of the `OpenAI` API parse them.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use serde_json::{Value, json};
use shardpack_chat::{
    conversation::{EndReason, NamespacedName, OutputDelta, ToolKind},
    json::Json,
};

use super::compaction::{Compaction, sealed};
use crate::{
    dialect::{Answer, AnswerCall, Identity, Writer, custom_input, json_logprob, to_json},
    error::{ApiError, ErrorKind},
    generation::{ChoiceUpdate, TokenLogprob, UpdateKind},
    response_store::{ResponseStore, StoredResponse},
    usage::AnswerUsage,
};

/// Request fields that a response repeats, and its tools.
#[derive(Debug)]
pub(crate) struct Options {
    pub(super) tools_by_name: BTreeMap<String, ClientTool>,
    /// `store`: whether a later request may continue the response.
    pub(super) store: bool,
    pub(super) previous_response_id: Json,
    /// Input items, earlier turns included; empty where the response is not stored.
    pub(super) items: Vec<Json>,
    /// Whether a summary takes the place of an answer.
    pub(super) compaction: Compaction,
    pub(super) keeper: Option<(Arc<ResponseStore>, Option<String>)>,
    pub(super) instructions: Json,
    pub(super) max_output_tokens: Json,
    pub(super) metadata: Json,
    pub(super) parallel_tool_calls: Json,
    pub(super) reasoning: Json,
    pub(super) temperature: Json,
    pub(super) text: Json,
    pub(super) tool_choice: Json,
    pub(super) tools: Json,
    pub(super) top_p: Json,
    pub(super) user: Json,
}

/// A tool as the client knows it, by the model's name for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClientTool {
    pub(super) kind: ToolKind,
    pub(super) namespaced: Option<NamespacedName>,
}

impl Options {
    /// Stores the finished response there, unless the client said `store: false`.
    pub(in crate::dialect) fn store_in(&mut self, store: &Arc<ResponseStore>, owner: Option<&str>) {
        self.keeper = self.store.then(|| (Arc::clone(store), owner.map(str::to_owned)));
    }
}

/// Writes responses.
pub(crate) struct ResponsesWriter {
    identity: Identity,
    options: Box<Options>,
    sequence: u64,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Open>,
    end: Option<(EndReason, AnswerUsage)>,
}

/// The item being written.
struct Open {
    id: String,
    text: String,
    logprobs: Vec<Value>,
    kind: Kind,
}

#[derive(Clone, PartialEq)]
enum Kind {
    Reasoning,
    Message,
    Summary,
    Call { call_id: String, name: String, namespace: Option<String>, tool: ToolKind },
}

impl ResponsesWriter {
    pub(crate) fn new(identity: Identity, options: Box<Options>) -> Self {
        let (output, open, end) = (Vec::new(), None, None);
        Self { identity, options, sequence: 0, output, open, end }
    }

    fn event(&mut self, name: &str, mut members: Value, out: &mut String) {
        members["type"] = name.into();
        members["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.push_str("event: ");
        out.push_str(name);
        out.push_str("\ndata: ");
        out.push_str(&to_json(&members));
        out.push_str("\n\n");
    }

    /// An event about the open item.
    fn item_event(&mut self, name: &str, mut members: Value, out: &mut String) {
        let Some(open) = &self.open else { return };
        members["item_id"] = open.id.as_str().into();
        members["output_index"] = self.output.len().into();
        self.event(name, members, out);
    }

    fn response(&self, status: &str) -> Value {
        if let Compaction::History(users) = &self.options.compaction {
            let users = users.iter().filter_map(|item| serde_json::to_value(item).ok());
            return json!({
                "id": format!("resp_{}", self.identity.id),
                "object": "response.compaction",
                "created_at": self.identity.created,
                "output": users.chain(self.output.iter().cloned()).collect::<Vec<Value>>(),
                "usage": self.end.map(|(_, usage)| self.usage(usage)),
            });
        }
        let Options { tools_by_name: _, instructions, max_output_tokens, metadata, .. } =
            &*self.options;
        let options = &*self.options;
        let incomplete = matches!(self.end, Some((EndReason::Length, _))) && status == "incomplete";
        json!({
            "id": format!("resp_{}", self.identity.id),
            "object": "response",
            "created_at": self.identity.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": incomplete.then(|| json!({"reason": "max_output_tokens"})),
            "instructions": instructions,
            "max_output_tokens": max_output_tokens,
            "max_tool_calls": null,
            "metadata": metadata,
            "model": self.identity.model,
            "output": self.output,
            "parallel_tool_calls": options.parallel_tool_calls,
            "previous_response_id": options.previous_response_id,
            "reasoning": options.reasoning,
            "service_tier": "default",
            "store": options.store,
            "temperature": options.temperature,
            "text": options.text,
            "tool_choice": options.tool_choice,
            "tools": options.tools,
            "top_p": options.top_p,
            "truncation": "disabled",
            "usage": self.end.map(|(_, usage)| self.usage(usage)),
            "user": options.user,
        })
    }

    /// Stores the response, so that later requests can continue it.
    fn store(&mut self, response: &Value) {
        let Some((store, owner)) = self.options.keeper.take() else { return };
        let mut items = std::mem::take(&mut self.options.items);
        if !self.options.compaction.is_none() {
            // The summary is what later requests continue.
            items.clear();
        }
        let inputs = items.len();
        let output = self.output.iter().map(|item| Json::parse(item.to_string().as_bytes()));
        items.extend(output.map(|item| item.expect("JSON is JSON")));
        let id = format!("resp_{}", self.identity.id);
        let body = to_json(response);
        store.put(StoredResponse { id, body, items, inputs }, owner, Instant::now());
    }

    fn usage(&self, usage: AnswerUsage) -> Value {
        let usage = self.identity.total(&[usage]);
        json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
        })
    }

    fn status(&self) -> &'static str {
        match self.end {
            Some((EndReason::Length, _)) => "incomplete",
            _ => "completed",
        }
    }

    fn open(&mut self, kind: Kind, out: &mut String) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind && !kind.is_call()) {
            return;
        }
        self.close("completed", out);
        let number = self.output.len();
        let id = format!("{}_{}_{number}", kind.prefix(), self.identity.id);
        let open = Open { id, text: String::new(), logprobs: Vec::new(), kind };
        let item = open.item("in_progress");
        let part = open.part();
        self.open = Some(open);
        let added = json!({"output_index": number, "item": item});
        self.event("response.output_item.added", added, out);
        if let Some(part) = part {
            let added = json!({"content_index": 0, "part": part});
            self.item_event("response.content_part.added", added, out);
        }
    }

    fn close(&mut self, status: &str, out: &mut String) {
        let Some(open) = &self.open else { return };
        let (text, part, kind) = (open.text.clone(), open.part(), open.kind.clone());
        let logprobs = open.logprobs.clone();
        let item = open.item(status);
        let is_complete = status == "completed";
        match &kind {
            Kind::Reasoning => {
                let done = json!({"content_index": 0, "text": text});
                self.item_event("response.reasoning_text.done", done, out);
            }
            Kind::Message => {
                let done = json!({"content_index": 0, "text": text, "logprobs": logprobs});
                self.item_event("response.output_text.done", done, out);
            }
            Kind::Call { tool: ToolKind::Function, name, .. } if is_complete => {
                let done = json!({"arguments": text, "name": name});
                self.item_event("response.function_call_arguments.done", done, out);
            }
            Kind::Call { tool: ToolKind::Custom, .. } if is_complete => {
                let input = custom_input(&text);
                self.item_event(
                    "response.custom_tool_call_input.delta",
                    json!({"delta": input}),
                    out,
                );
                let done = json!({"input": input});
                self.item_event("response.custom_tool_call_input.done", done, out);
            }
            Kind::Summary | Kind::Call { .. } => {}
        }
        if let Some(part) = part {
            let done = json!({"content_index": 0, "part": part});
            self.item_event("response.content_part.done", done, out);
        }
        let done = json!({"output_index": self.output.len(), "item": item});
        self.event("response.output_item.done", done, out);
        self.output.push(item);
        self.open = None;
    }

    fn write_delta(&mut self, delta: OutputDelta, tokens: &[TokenLogprob], out: &mut String) {
        match delta {
            OutputDelta::Content(text) if !self.options.compaction.is_none() => {
                // Blanks before a summary are none.
                if self.open.is_some() || !text.trim().is_empty() {
                    self.open(Kind::Summary, out);
                    self.grow(&text);
                }
            }
            // How the model comes to a summary is no item.
            _ if !self.options.compaction.is_none() => {}
            OutputDelta::Reasoning(text) => {
                self.open(Kind::Reasoning, out);
                self.grow(&text);
                let delta = json!({"content_index": 0, "delta": text});
                self.item_event("response.reasoning_text.delta", delta, out);
            }
            OutputDelta::Content(text) => {
                self.open(Kind::Message, out);
                self.grow(&text);
                let logprobs: Vec<Value> = tokens.iter().map(json_logprob).collect();
                let delta = json!({"content_index": 0, "delta": text, "logprobs": logprobs});
                if let Some(open) = &mut self.open {
                    open.logprobs.extend(logprobs);
                }
                self.item_event("response.output_text.delta", delta, out);
            }
            OutputDelta::ToolCallBegin { id, name, .. } => {
                let call = self.call(id, name);
                self.open(call, out);
            }
            OutputDelta::ToolCallArguments { fragment, .. } => {
                self.grow(&fragment);
                let is_function = self.open.as_ref().is_some_and(|open| {
                    matches!(open.kind, Kind::Call { tool: ToolKind::Function, .. })
                });
                // Free text is inside JSON and is only known at its end.
                if is_function {
                    let delta = json!({"delta": fragment});
                    self.item_event("response.function_call_arguments.delta", delta, out);
                }
            }
            OutputDelta::ToolCallEnd { .. } => self.close("completed", out),
        }
    }

    /// A call under the client's name for the tool.
    fn call(&self, call_id: String, name: String) -> Kind {
        let known = self.options.tools_by_name.get(&name);
        let tool = known.map_or(ToolKind::Function, |tool| tool.kind);
        match known.and_then(|tool| tool.namespaced.clone()) {
            Some(NamespacedName { namespace, name }) => {
                Kind::Call { call_id, name, namespace: Some(namespace), tool }
            }
            None => Kind::Call { call_id, name, namespace: None, tool },
        }
    }

    /// Whether a summary was asked for and the model wrote none.
    fn lacks_summary(&self) -> bool {
        !self.options.compaction.is_none() && self.output.is_empty()
    }

    fn grow(&mut self, text: &str) {
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
        }
    }
}

impl Kind {
    const fn is_call(&self) -> bool {
        matches!(self, Self::Call { .. })
    }

    const fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::Summary => "cmp",
            Self::Call { tool: ToolKind::Function, .. } => "fc",
            Self::Call { tool: ToolKind::Custom, .. } => "ctc",
            Self::Call { tool: ToolKind::Search, .. } => "tsc",
        }
    }
}

impl Open {
    /// The content of a message or of thinking.
    fn part(&self) -> Option<Value> {
        match self.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": self.text})),
            Kind::Message => Some(json!({
                "type": "output_text", "text": self.text, "annotations": [],
                "logprobs": self.logprobs,
            })),
            Kind::Summary | Kind::Call { .. } => None,
        }
    }

    fn item(&self, status: &str) -> Value {
        let begun = status != "in_progress";
        let content: Vec<Value> = self.part().into_iter().filter(|_| begun).collect();
        match &self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "summary": [], "content": content,
                "encrypted_content": null, "status": status,
            }),
            Kind::Message => json!({
                "id": self.id, "type": "message", "role": "assistant", "status": status,
                "content": content,
            }),
            Kind::Summary => {
                let content = if begun { sealed(&self.text) } else { String::new() };
                json!({"id": self.id, "type": "compaction", "encrypted_content": content})
            }
            Kind::Call { call_id, name, namespace, tool } => {
                let mut item = json!({
                    "id": self.id, "type": "function_call", "call_id": call_id, "status": status,
                });
                match tool {
                    ToolKind::Function => item["arguments"] = self.text.as_str().into(),
                    ToolKind::Custom => {
                        item["type"] = "custom_tool_call".into();
                        item["input"] = custom_input(&self.text).into();
                    }
                    ToolKind::Search => {
                        item["type"] = "tool_search_call".into();
                        item["execution"] = "client".into();
                        let arguments = serde_json::from_str(&self.text);
                        item["arguments"] = arguments.unwrap_or_else(|_| json!({}));
                        return item;
                    }
                }
                item["name"] = name.as_str().into();
                if let Some(namespace) = namespace {
                    item["namespace"] = namespace.as_str().into();
                }
                item
            }
        }
    }
}

fn no_summary() -> ApiError {
    let message = "the model wrote no summary of the conversation: ask again, or with a larger max_output_tokens";
    ApiError::new(ErrorKind::Internal, message)
}

impl Writer for ResponsesWriter {
    fn begin(&mut self, out: &mut String) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.event(name, json!({"response": response}), out);
        }
    }

    fn update(&mut self, update: ChoiceUpdate, out: &mut String) {
        match update.kind {
            UpdateKind::Delta(delta) => self.write_delta(delta, &update.logprobs, out),
            UpdateKind::End(reason, usage) => self.end = Some((reason, usage)),
        }
    }

    fn end(&mut self, out: &mut String) {
        let status = self.status();
        // A call that is still open was cut off, whatever ended the answer.
        let is_call = self.open.as_ref().is_some_and(|open| open.kind.is_call());
        self.close(if is_call { "incomplete" } else { status }, out);
        if self.lacks_summary() {
            return self.fail(&no_summary(), out);
        }
        let response = self.response(status);
        self.store(&response);
        self.event(&format!("response.{status}"), json!({"response": response}), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        let mut response = self.response("failed");
        let code = error.code.unwrap_or("server_error");
        response["error"] = json!({"code": code, "message": error.message});
        self.event("response.failed", json!({"response": response}), out);
    }

    fn refused(&self, answers: &[Answer]) -> Option<ApiError> {
        let is_empty = answers.iter().all(|answer| answer.content.trim().is_empty());
        (!self.options.compaction.is_none() && is_empty).then(no_summary)
    }

    fn whole(&mut self, answers: Vec<Answer>) -> String {
        let mut unused = String::new();
        for answer in answers {
            let (reason, usage) = (answer.reason(), answer.usage);
            if !answer.reasoning.is_empty() {
                self.write_delta(OutputDelta::Reasoning(answer.reasoning), &[], &mut unused);
            }
            if !answer.content.is_empty() {
                self.write_delta(
                    OutputDelta::Content(answer.content),
                    &answer.logprobs,
                    &mut unused,
                );
            }
            for (AnswerCall { id, name, arguments, is_complete }, index) in
                answer.calls.into_iter().zip(0..)
            {
                self.write_delta(OutputDelta::ToolCallBegin { index, id, name }, &[], &mut unused);
                self.grow(&arguments);
                self.close(if is_complete { "completed" } else { "incomplete" }, &mut unused);
            }
            self.end = Some((reason, usage));
        }
        let status = self.status();
        self.close(status, &mut unused);
        let response = self.response(status);
        self.store(&response);
        to_json(&response)
    }
}
