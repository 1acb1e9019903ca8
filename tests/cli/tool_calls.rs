//! Calls of tools over the whole way: a trained model at four bits on two ranks, asked as clients
//! ask.

use std::fs;

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, data},
    running::{HANG, Running, post},
};

fn cases() -> Value {
    serde_json::from_slice(&fs::read(data("kjv-4m/tools.json")).unwrap()).unwrap()
}

/// The events of a streamed answer.
fn stream(url: &str, body: &Value) -> Vec<Value> {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().timeout_global(Some(HANG)).build().into();
    let mut response =
        agent.post(url).content_type("application/json").send(body.to_string()).unwrap();
    let text = response.body_mut().read_to_string().unwrap();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// Id, name and arguments of a call.
type Call = (String, String, Value);

/// What a model said: its text, and id, name and arguments of its calls.
#[derive(Debug, Default, PartialEq)]
struct Said {
    text: String,
    calls: Vec<Call>,
    finish: String,
}

impl Said {
    /// Adds a call whose arguments are still to come.
    fn begin(&mut self, id: &Value, name: &Value) {
        self.calls.push((text(id), text(name), Value::Null));
    }

    /// Gives every call the arguments that came piece by piece.
    fn with_arguments(mut self, arguments: &[String]) -> Self {
        for (call, arguments) in self.calls.iter_mut().zip(arguments) {
            call.2 = serde_json::from_str(arguments).unwrap();
        }
        self
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn parsed(arguments: &Value) -> Value {
    serde_json::from_str(arguments.as_str().unwrap()).unwrap()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A way to ask: how it is written, and how its answers are read.
struct Dialect {
    path: &'static str,
    /// A question with tools, then perhaps the call that was made and its result.
    ask: fn(known: &Value, case: &Value, made: Option<&Call>) -> Value,
    whole: fn(&Value) -> Said,
    streamed: fn(&[Value]) -> Said,
    /// Its words for an answer that calls and one that does not.
    finishes: [&'static str; 2],
}

const CHAT: Dialect = Dialect {
    path: "/chat/completions",
    ask: |known, case, made| {
        let mut messages = vec![json!({ "role": "user", "content": case["question"] })];
        if let Some((id, name, arguments)) = made {
            let function = json!({ "name": name, "arguments": arguments.to_string() });
            let call = json!({ "id": id, "type": "function", "function": function });
            messages.push(json!({ "role": "assistant", "content": null, "tool_calls": [call] }));
            let content = &case["result"];
            messages.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
        }
        json!({ "messages": messages, "tools": known["tools"], "temperature": 0, "max_tokens": 80 })
    },
    whole: |answer| {
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        let mut said = Said {
            text: text(&message["content"]),
            finish: text(&choice["finish_reason"]),
            ..Said::default()
        };
        for call in list(&message["tool_calls"]) {
            said.begin(&call["id"], &call["function"]["name"]);
            said.calls.last_mut().unwrap().2 = parsed(&call["function"]["arguments"]);
        }
        said
    },
    streamed: |events| {
        let mut said = Said::default();
        let mut arguments: Vec<String> = Vec::new();
        for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
            said.text.push_str(&text(&choice["delta"]["content"]));
            if choice["finish_reason"].is_string() {
                said.finish = text(&choice["finish_reason"]);
            }
            for call in list(&choice["delta"]["tool_calls"]) {
                let index = call["index"].as_u64().unwrap() as usize;
                if index == arguments.len() {
                    said.begin(&call["id"], &call["function"]["name"]);
                    arguments.push(String::new());
                }
                arguments[index].push_str(&text(&call["function"]["arguments"]));
            }
        }
        said.with_arguments(&arguments)
    },
    finishes: ["tool_calls", "stop"],
};

const RESPONSES: Dialect = Dialect {
    path: "/responses",
    ask: |known, case, made| {
        let mut input = vec![json!({ "role": "user", "content": case["question"] })];
        if let Some((id, name, arguments)) = made {
            let arguments = arguments.to_string();
            input.push(json!({ "type": "function_call", "call_id": id, "name": name, "arguments": arguments }));
            let output = &case["result"];
            input.push(json!({ "type": "function_call_output", "call_id": id, "output": output }));
        }
        let tools = list(&known["tools"]).map(|tool| {
            let Value::Object(mut flat) = tool["function"].clone() else { panic!("{tool}") };
            flat.insert("type".to_owned(), "function".into());
            Value::Object(flat)
        });
        let tools: Vec<Value> = tools.collect();
        json!({ "input": input, "tools": tools, "temperature": 0, "max_output_tokens": 80 })
    },
    whole: |answer| {
        let mut said = Said { finish: text(&answer["status"]), ..Said::default() };
        for item in list(&answer["output"]) {
            match item["type"].as_str().unwrap() {
                "message" => said.text.push_str(&text(&item["content"][0]["text"])),
                "function_call" => {
                    said.begin(&item["call_id"], &item["name"]);
                    said.calls.last_mut().unwrap().2 = parsed(&item["arguments"]);
                }
                other => panic!("{other}: {answer}"),
            }
        }
        said
    },
    streamed: |events| {
        let mut said = Said::default();
        let mut arguments: Vec<String> = Vec::new();
        for event in events {
            match event["type"].as_str().unwrap() {
                "response.output_text.delta" => said.text.push_str(&text(&event["delta"])),
                "response.output_item.added" if event["item"]["type"] == "function_call" => {
                    said.begin(&event["item"]["call_id"], &event["item"]["name"]);
                    arguments.push(String::new());
                }
                "response.function_call_arguments.delta" => {
                    arguments.last_mut().unwrap().push_str(&text(&event["delta"]));
                }
                "response.completed" => said.finish = text(&event["response"]["status"]),
                _ => {}
            }
        }
        said.with_arguments(&arguments)
    },
    finishes: ["completed", "completed"],
};

const MESSAGES: Dialect = Dialect {
    path: "/messages",
    ask: |known, case, made| {
        let mut messages = vec![json!({ "role": "user", "content": case["question"] })];
        if let Some((id, name, input)) = made {
            let call = json!({ "type": "tool_use", "id": id, "name": name, "input": input });
            messages.push(json!({ "role": "assistant", "content": [call] }));
            let result =
                json!({ "type": "tool_result", "tool_use_id": id, "content": case["result"] });
            messages.push(json!({ "role": "user", "content": [result] }));
        }
        let tools = list(&known["tools"]).map(|tool| {
            let function = &tool["function"];
            json!({ "name": function["name"], "description": function["description"],
                "input_schema": function["parameters"] })
        });
        let tools: Vec<Value> = tools.collect();
        json!({ "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 80 })
    },
    whole: |answer| {
        let mut said = Said { finish: text(&answer["stop_reason"]), ..Said::default() };
        for block in list(&answer["content"]) {
            match block["type"].as_str().unwrap() {
                "text" => said.text.push_str(&text(&block["text"])),
                "tool_use" => {
                    said.begin(&block["id"], &block["name"]);
                    said.calls.last_mut().unwrap().2 = block["input"].clone();
                }
                other => panic!("{other}: {answer}"),
            }
        }
        said
    },
    streamed: |events| {
        let mut said = Said::default();
        let mut arguments: Vec<String> = Vec::new();
        for event in events {
            match event["type"].as_str().unwrap() {
                "content_block_start" if event["content_block"]["type"] == "tool_use" => {
                    said.begin(&event["content_block"]["id"], &event["content_block"]["name"]);
                    arguments.push(String::new());
                }
                "content_block_delta" if event["delta"]["type"] == "text_delta" => {
                    said.text.push_str(&text(&event["delta"]["text"]));
                }
                "content_block_delta" => {
                    let fragment = text(&event["delta"]["partial_json"]);
                    arguments.last_mut().unwrap().push_str(&fragment);
                }
                "message_delta" => said.finish = text(&event["delta"]["stop_reason"]),
                _ => {}
            }
        }
        said.with_arguments(&arguments)
    },
    finishes: ["tool_use", "end_turn"],
};

impl Dialect {
    fn whole(&self, url: &str, body: &Value) -> Said {
        let (status, answer) = post(&format!("{url}{}", self.path), body);
        assert_eq!(status, 200, "{answer}");
        (self.whole)(&answer)
    }

    fn streamed(&self, url: &str, body: &Value) -> Said {
        let mut body = body.clone();
        body["stream"] = true.into();
        (self.streamed)(&stream(&format!("{url}{}", self.path), &body))
    }

    /// What goes wrong with one case.
    fn check(&self, url: &str, known: &Value, case: &Value) -> Result<(), String> {
        let body = (self.ask)(known, case, None);
        let said = [self.whole(url, &body), self.streamed(url, &body)];
        let wrong = || format!("{}: {case}: {said:?}", self.path);
        for said in &said {
            let [(id, name, arguments)] = &said.calls[..] else { return Err(wrong()) };
            let is_right = *name == case["call"]["name"]
                && *arguments == case["call"]["arguments"]
                && !id.is_empty();
            if !is_right || !said.text.is_empty() || said.finish != self.finishes[0] {
                return Err(wrong());
            }
        }
        if said[0].calls[0].0 == said[1].calls[0].0 {
            return Err(wrong());
        }
        let body = (self.ask)(known, case, Some(&said[0].calls[0]));
        let told = [self.whole(url, &body), self.streamed(url, &body)];
        let city = case["call"]["arguments"]["city"].as_str().unwrap();
        let is_right = told[0] == told[1]
            && told[0].text.contains(city)
            && told[0].calls.is_empty()
            && told[0].finish == self.finishes[1];
        if is_right { Ok(()) } else { Err(format!("{}: {case}: {told:?}", self.path)) }
    }
}

/// The sensitive recipe, since some of the last words are close to a tie: see
/// [`last_words_that_hang_on_a_tie_are_lost_at_four_bits_throughout`].
#[test]
fn every_known_tool_call_is_made_and_its_result_answered() {
    let folder = tempdir().unwrap();
    let options = ["--nodes", "2", "--bits", "4", "--recipe", "sensitive"];
    let set = convert("kjv-4m", &folder.path().join("set"), &options);
    let server = Running::serve(&set, &[]);
    let known = cases();
    let cases = known["cases"].as_array().unwrap();
    let mut wrong = Vec::new();
    for dialect in [CHAT, RESPONSES, MESSAGES] {
        for case in cases {
            wrong.extend(dialect.check(&server.url(), &known, case).err());
        }
    }
    assert!(cases.len() == 54 && wrong.is_empty(), "{}: {wrong:#?}", wrong.len());
    assert_eq!(server.terminate(), Some(0));
}

/// What the model says after the call that is known to be right, and how likely each token was
/// beside its rivals.
fn last_words(server: &Running, known: &Value, case: &Value) -> (String, Value) {
    let call = &case["call"];
    let made = ("call_1".to_owned(), text(&call["name"]), call["arguments"].clone());
    let mut body = (CHAT.ask)(known, case, Some(&made));
    body["logprobs"] = true.into();
    body["top_logprobs"] = 2.into();
    let (status, answer) = post(&format!("{}/chat/completions", server.url()), &body);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    (text(&choice["message"]["content"]), choice["logprobs"]["content"].clone())
}

/// Not quantized and in the arithmetic of the reference, every last sentence is the reference's
/// word for word: the turn with the call and its result is rendered as the model learned it.
#[test]
fn answers_at_16_bits_match_the_reference() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2", "--bits", "16"]);
    let server = Running::serve(&set, &["--exact"]);
    let known = cases();
    for case in list(&known["cases"]) {
        assert_eq!(last_words(&server, &known, case).0, case["final"], "{case}");
    }
}

/// How much the two likeliest values of a token differ at most (in nats) at sixteen bits where four bits turn them round:
/// the likelier one has eight chances of fifteen against the other. Seen are 0.05 (two cities that begin alike) and 0.12
/// (two temperatures, of which neither has one chance in ten).
const TIE: f64 = 0.13;

/// With every matrix at four bits the calls are right, and so are the last words, but for answers
/// that are a coin's toss to the reference itself.
#[test]
fn answers_that_depend_on_a_tie_differ_at_4_bits() {
    let folder = tempdir().unwrap();
    let set = |bits: &str| {
        let options = ["--nodes", "2", "--bits", bits, "--recipe", "uniform"];
        convert("kjv-4m", &folder.path().join(bits), &options)
    };
    let server = Running::serve(&set("4"), &[]);
    let known = cases();
    let mut lost = Vec::new();
    for case in list(&known["cases"]) {
        let said = CHAT.whole(&server.url(), &(CHAT.ask)(&known, case, None));
        let [(_, name, arguments)] = &said.calls[..] else { panic!("{case}: {said:?}") };
        assert!(*name == case["call"]["name"] && *arguments == case["call"]["arguments"], "{case}");
        let city = case["call"]["arguments"]["city"].as_str().unwrap();
        let sentence = last_words(&server, &known, case).0;
        if !sentence.contains(city) {
            lost.push((case, sentence));
        }
    }
    assert!(lost.len() <= 2, "{lost:?}");
    let exact = Running::serve(&set("16"), &["--exact"]);
    for (case, sentence) in lost {
        let (right, tokens) = last_words(&exact, &known, case);
        let same = right.bytes().zip(sentence.bytes()).take_while(|(a, b)| a == b).count();
        // The token in which they part.
        let mut end = 0;
        let decided = list(&tokens).find(|token| {
            end += token["token"].as_str().unwrap().len();
            end > same
        });
        let decided = decided.unwrap_or_else(|| panic!("{right} and {sentence}"));
        let logprob = |rank: usize| decided["top_logprobs"][rank]["logprob"].as_f64().unwrap();
        assert!(logprob(0) - logprob(1) < TIE, "{right}, {sentence}: {decided}");
    }
}
