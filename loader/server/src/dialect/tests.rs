//! Answers with thinking and calls, in every dialect: what each writer makes of the same pieces.

mod agents;
mod published;

use serde_json::{Value, json};
use shardpack_chat::conversation::{EndReason, OutputDelta};

use super::*;
use crate::generation::UpdateKind;

fn identity() -> Identity {
    Identity {
        id: "x".to_owned(),
        created: 1,
        model: "m".to_owned(),
        prompt_tokens: 10,
        choices: 1,
    }
}

/// Thinks, says something and calls twice; the second call is cut off where `whole` is false.
fn deltas(whole: bool) -> Vec<OutputDelta> {
    let call = |index: u32, name: &str| {
        let (id, name) = (format!("call{index}"), name.to_owned());
        let begin = OutputDelta::ToolCallBegin { index, id, name };
        let fragment =
            |text: &str| OutputDelta::ToolCallArguments { index, fragment: text.to_owned() };
        vec![begin, fragment("{\"input\":"), fragment(" \"a\\nb\"}")]
    };
    let mut deltas = vec![
        OutputDelta::Reasoning("h".to_owned()),
        OutputDelta::Reasoning("m".to_owned()),
        OutputDelta::Content("I ".to_owned()),
        OutputDelta::Content("look.".to_owned()),
    ];
    deltas.extend(call(0, "f"));
    deltas.push(OutputDelta::ToolCallEnd { index: 0 });
    deltas.extend(call(1, "patch"));
    if whole {
        deltas.push(OutputDelta::ToolCallEnd { index: 1 });
    } else {
        deltas.pop();
    }
    deltas
}

fn updates(whole: bool) -> Vec<ChoiceUpdate> {
    let usage = AnswerUsage {
        prompt_tokens: 10,
        cached_tokens: 4,
        completion_tokens: 20,
        reasoning_tokens: 2,
        prediction_tokens: [3, 1],
    };
    let reason = if whole { EndReason::ToolCalls } else { EndReason::Length };
    let parts =
        deltas(whole).into_iter().map(UpdateKind::Delta).chain([UpdateKind::End(reason, usage)]);
    parts.map(|kind| ChoiceUpdate { choice: 0, kind, logprobs: Vec::new() }).collect()
}

fn writer_options(dialect: Dialect) -> WriterOptions {
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 9,
        "stream_options": {"include_usage": true},
        "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "patch"}],
    });
    let mut body = body;
    if dialect == Dialect::Messages {
        body["tools"] = json!([]);
    }
    dialect.parse(body.to_string().as_bytes()).unwrap().writer_options
}

fn stream(dialect: Dialect, whole: bool) -> String {
    let mut writer = writer_options(dialect).writer(identity());
    let mut out = String::new();
    writer.begin(&mut out);
    for update in updates(whole) {
        writer.update(update, &mut out);
    }
    writer.end(&mut out);
    out
}

fn answer(dialect: Dialect, whole: bool) -> Value {
    let mut answers = vec![Answer::default()];
    for update in updates(whole) {
        Answer::collect(&mut answers, update);
    }
    serde_json::from_str(&writer_options(dialect).writer(identity()).whole(answers)).unwrap()
}

/// The payloads of a stream's events.
fn data(stream: &str) -> Vec<Value> {
    let lines = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[test]
fn chat_streams_calls_by_index_with_one_id_each() {
    let events = data(&stream(Dialect::Chat, true));
    let deltas: Vec<&Value> =
        events.iter().map(|event| &event["choices"][0]["delta"]).filter(|d| !d.is_null()).collect();
    assert_eq!(deltas[0], &json!({"role": "assistant", "content": ""}));
    assert!(deltas[1..].iter().all(|delta| delta.get("role").is_none()), "the role comes once");
    assert_eq!(deltas[1], &json!({"reasoning_content": "h", "reasoning": "h"}));
    let calls: Vec<&Value> =
        deltas.iter().map(|delta| &delta["tool_calls"][0]).filter(|c| !c.is_null()).collect();
    assert_eq!(
        calls[0],
        &json!({"index": 0, "id": "call0", "type": "function", "function": {"name": "f", "arguments": ""}})
    );
    assert_eq!(calls[1], &json!({"index": 0, "function": {"arguments": "{\"input\":"}}));
    assert_eq!(calls[3]["index"], 1);
    assert_eq!(calls[3]["id"], "call1");
    let last = &events[events.len() - 2]["choices"][0];
    assert_eq!((&last["delta"], &last["finish_reason"]), (&json!({}), &json!("tool_calls")));
    let usage = &events[events.len() - 1];
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    assert_eq!(usage["usage"]["completion_tokens_details"]["reasoning_tokens"], 2);
    let details = &usage["usage"]["completion_tokens_details"];
    assert_eq!(details["accepted_prediction_tokens"], 3);
    assert_eq!(details["rejected_prediction_tokens"], 1);
}

#[test]
fn whole_chat_completions_hold_the_same() {
    let found = answer(Dialect::Chat, true);
    let message = &found["choices"][0]["message"];
    assert_eq!(message["content"], "I look.");
    assert_eq!(message["reasoning_content"], "hm");
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"input\": \"a\\nb\"}");
    assert_eq!(found["choices"][0]["finish_reason"], "tool_calls");
    let cut = answer(Dialect::Chat, false);
    assert_eq!(cut["choices"][0]["finish_reason"], "length", "a call that is cut off is none");
}

#[test]
fn messages_put_each_piece_in_its_block() {
    let events = data(&stream(Dialect::Messages, true));
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let starts = of("content_block_start");
    let kinds: Vec<&Value> = starts.iter().map(|start| &start["content_block"]["type"]).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
    let indices: Vec<&Value> = starts.iter().map(|start| &start["index"]).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(of("content_block_stop").len(), 4);
    assert_eq!(starts[2]["content_block"]["input"], json!({}));
    let deltas = of("content_block_delta");
    let input: String = deltas
        .iter()
        .filter(|delta| delta["index"] == 2)
        .map(|delta| delta["delta"]["partial_json"].as_str().unwrap())
        .collect();
    assert_eq!(input, "{\"input\": \"a\\nb\"}");
    assert!(deltas.iter().any(|delta| delta["delta"]["type"] == "signature_delta"));
    let delta = of("message_delta")[0];
    assert_eq!(delta["delta"]["stop_reason"], "tool_use");
    assert_eq!(delta["usage"]["cache_read_input_tokens"], 4);
    assert_eq!(delta["usage"]["input_tokens"], 6);

    let whole = answer(Dialect::Messages, true);
    assert_eq!(whole["content"][2]["input"], json!({"input": "a\nb"}));
    assert_eq!(whole["stop_reason"], "tool_use");
    let cut = answer(Dialect::Messages, false);
    assert_eq!(cut["content"].as_array().unwrap().len(), 3, "a call that is cut off is left out");
    assert_eq!(cut["stop_reason"], "max_tokens");
}

#[test]
fn responses_give_each_piece_its_item() {
    let events = data(&stream(Dialect::Responses, true));
    let numbers: Vec<u64> =
        events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let done = of("response.output_item.done");
    let kinds: Vec<&Value> = done.iter().map(|event| &event["item"]["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "custom_tool_call"]);
    assert_eq!(done[2]["item"]["call_id"], "call0");
    assert_eq!(done[2]["item"]["arguments"], "{\"input\": \"a\\nb\"}");
    assert_eq!(done[3]["item"]["input"], "a\nb", "free text comes out of its JSON");
    assert_eq!(of("response.function_call_arguments.delta").len(), 2);
    assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], "a\nb");
    let completed = &of("response.completed")[0]["response"];
    assert_eq!(completed["output"].as_array().unwrap().len(), 4);
    assert_eq!(completed["usage"]["input_tokens_details"]["cached_tokens"], 4);
    let whole = answer(Dialect::Responses, true);
    assert_eq!(whole["output"], completed["output"], "streamed or whole, the items are the same");

    let cut = data(&stream(Dialect::Responses, false));
    let last = &cut.last().unwrap()["response"];
    assert_eq!(last["status"], "incomplete");
    assert_eq!(last["output"][3]["status"], "incomplete");
    assert_eq!(last["output"][2]["status"], "completed");
}

#[test]
fn free_text_comes_out_of_its_json_cut_off_or_whole() {
    let check = |arguments: &str, text: &str| assert_eq!(custom_input(arguments), text);
    check(r#"{"input": "a\"b"}"#, "a\"b");
    check(r#"{"input":  "a\nb"#, "a\nb");
    check(r#"{"input": "a\"#, "a");
    check(r#"{"input": "a\ud83d\ude"#, "a");
    check(r#"{"input": ""#, "");
    check("plain", "plain");
}

#[test]
fn ollama_writes_calls_whole() {
    let lines: Vec<Value> = stream(Dialect::OllamaChat, true)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let calls: Vec<&Value> = lines
        .iter()
        .map(|line| &line["message"]["tool_calls"][0]["function"])
        .filter(|call| !call.is_null())
        .collect();
    assert_eq!(calls[0], &json!({"index": 0, "name": "f", "arguments": {"input": "a\nb"}}));
    assert_eq!((calls.len(), &calls[1]["index"]), (2, &json!(1)));
    assert_eq!(lines[0]["message"]["thinking"], "h");
}
