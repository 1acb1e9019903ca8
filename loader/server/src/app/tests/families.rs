//! One answer of each family, as its model writes it, comes to the same in every dialect of the
//! API, whole and streamed.

use serde_json::{Value, json};
use shardpack_chat::model::ChatModel;
use shardpack_formats::{AnswerFrame, OutputStyle, ThinkingStyle, ToolFamily};

use super::{
    STOP,
    scripted::{PATIENT, Reply, Scripted, Step, kjv, named_events, start_with},
};

/// What a client got.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, Value)>,
}

impl Answer {
    fn call(&mut self, name: &Value, arguments: &str) {
        let arguments = serde_json::from_str(arguments).unwrap();
        self.calls.push((name.as_str().unwrap().to_owned(), arguments));
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn serve(style: OutputStyle, says: &'static str) -> Scripted {
    let model = ChatModel::open(kjv()).unwrap().with_style(Some(style));
    start_with(vec![Step::Say(says), STOP], PATIENT, model)
}

fn schema() -> Value {
    json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}})
}

fn chat(server: &Scripted) -> [Answer; 2] {
    let tools = ["f", "g"].map(
        |name| json!({"type": "function", "function": {"name": name, "parameters": schema()}}),
    );
    let mut body = json!({"messages": [{"role": "user", "content": "a"}], "tools": tools});
    let found = server.post("/v1/chat/completions", &body).json();
    let message = &found["choices"][0]["message"];
    let mut whole = Answer {
        reasoning: text(&message["reasoning_content"]).to_owned(),
        content: text(&message["content"]).to_owned(),
        ..Answer::default()
    };
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let call = &call["function"];
        whole.call(&call["name"], text(&call["arguments"]));
    }
    body["stream"] = true.into();
    let reply = server.post("/v1/chat/completions", &body);
    let mut streamed = Answer::default();
    let mut open: Vec<(Value, String)> = Vec::new();
    for event in reply.events().iter().filter(|event| **event != "[DONE]") {
        let event: Value = serde_json::from_str(event).unwrap();
        let delta = &event["choices"][0]["delta"];
        streamed.reasoning.push_str(text(&delta["reasoning_content"]));
        streamed.content.push_str(text(&delta["content"]));
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if index == open.len() {
                open.push((call["function"]["name"].clone(), String::new()));
            }
            open[index].1.push_str(text(&call["function"]["arguments"]));
        }
    }
    for (name, arguments) in open {
        streamed.call(&name, &arguments);
    }
    [whole, streamed]
}

fn responses_items(items: &[Value]) -> Answer {
    let mut answer = Answer::default();
    for item in items {
        match text(&item["type"]) {
            "reasoning" => answer.reasoning.push_str(text(&item["content"][0]["text"])),
            "message" => answer.content.push_str(text(&item["content"][0]["text"])),
            "function_call" => answer.call(&item["name"], text(&item["arguments"])),
            other => panic!("an item of type {other:?}"),
        }
    }
    answer
}

fn responses(server: &Scripted) -> [Answer; 2] {
    let tools =
        ["f", "g"].map(|name| json!({"type": "function", "name": name, "parameters": schema()}));
    let mut body = json!({"input": "a", "tools": tools});
    let found = server.post("/v1/responses", &body).json();
    let whole = responses_items(found["output"].as_array().unwrap());
    body["stream"] = true.into();
    let events = named_events(&server.post("/v1/responses", &body));
    let done = events.iter().filter(|(name, _)| name == "response.output_item.done");
    let items: Vec<Value> = done.map(|(_, event)| event["item"].clone()).collect();
    [whole, responses_items(&items)]
}

fn messages(server: &Scripted) -> [Answer; 2] {
    let tools = ["f", "g"].map(|name| json!({"name": name, "input_schema": schema()}));
    let messages = [json!({"role": "user", "content": "a"})];
    let mut body = json!({"messages": messages, "tools": tools, "max_tokens": 99});
    let found = server.post("/v1/messages", &body).json();
    let mut whole = Answer::default();
    for block in found["content"].as_array().unwrap() {
        match text(&block["type"]) {
            "thinking" => whole.reasoning.push_str(text(&block["thinking"])),
            "text" => whole.content.push_str(text(&block["text"])),
            _ => whole.call(&block["name"], &block["input"].to_string()),
        }
    }
    body["stream"] = true.into();
    [whole, streamed_messages(&server.post("/v1/messages", &body))]
}

fn streamed_messages(reply: &Reply) -> Answer {
    let mut answer = Answer::default();
    let mut open: Option<(Value, String)> = None;
    for (name, event) in named_events(reply) {
        let delta = &event["delta"];
        match name.as_str() {
            "content_block_start" if event["content_block"]["type"] == "tool_use" => {
                open = Some((event["content_block"]["name"].clone(), String::new()));
            }
            "content_block_delta" => {
                answer.reasoning.push_str(text(&delta["thinking"]));
                answer.content.push_str(text(&delta["text"]));
                if let Some((_, arguments)) = &mut open {
                    arguments.push_str(text(&delta["partial_json"]));
                }
            }
            "content_block_stop" => {
                if let Some((name, arguments)) = open.take() {
                    let arguments = if arguments.is_empty() { "{}" } else { &arguments };
                    answer.call(&name, arguments);
                }
            }
            _ => {}
        }
    }
    answer
}

/// Two calls, `f` with typed arguments and `g` with none, unless the family has one at a time.
fn check(
    tools: ToolFamily,
    thinking: Option<ThinkingStyle>,
    answer: Option<AnswerFrame>,
    says: &'static str,
    is_one: bool,
) {
    let server = serve(OutputStyle { tools: Some(tools), thinking, answer }, says);
    let mut calls = vec![("f".to_owned(), json!({"city": "Rome", "days": 2, "exact": true}))];
    if !is_one {
        calls.push(("g".to_owned(), json!({})));
    }
    let reasoning = if thinking.is_some() { "Hm." } else { "" }.to_owned();
    let expected = Answer { reasoning, content: String::new(), calls };
    let [chat, chat_stream] = chat(&server);
    assert_eq!(chat, expected, "{tools:?} {says}");
    assert_eq!(chat_stream, expected, "{tools:?}, streamed");
    let [whole, streamed] = responses(&server);
    assert_eq!(whole, expected, "{tools:?}, responses");
    assert_eq!(streamed, expected, "{tools:?}, responses, streamed");
    let [whole, streamed] = messages(&server);
    assert_eq!(whole, expected, "{tools:?}, messages");
    assert_eq!(streamed, expected, "{tools:?}, messages, streamed");
}

#[test]
fn calls_in_json_are_the_same_in_every_dialect() {
    use ThinkingStyle::{CohereTags, HyperclovaTurn, InnerTags, SolarTurn, ThinkTags};
    use ToolFamily::*;
    macro_rules! list {
        ($before:literal, $name:literal, $arguments:literal, $after:literal) => {
            concat!(
                $before,
                "[{\"",
                $name,
                "\": \"f\", \"",
                $arguments,
                "\": ",
                r#"{"city": "Rome", "days": 2, "exact": true}"#,
                "}, {\"",
                $name,
                "\": \"g\", \"",
                $arguments,
                "\": {}}]",
                $after
            )
        };
    }
    check(
        JsonTags,
        Some(ThinkTags),
        None,
        concat!(
            "<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": ",
            r#"{"city": "Rome", "days": 2, "exact": true}"#,
            "}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>"
        ),
        false,
    );
    let mistral = list!("[TOOL_CALLS]", "name", "arguments", "");
    check(MistralJson, None, None, mistral, false);
    let hunyuan = list!(
        "<think>\nHm.\n</think>\n<answer>\n<tool_calls>",
        "name",
        "arguments",
        "</tool_calls>\n</answer>"
    );
    check(ToolCallsJson, Some(ThinkTags), Some(AnswerFrame::AnswerTags), hunyuan, false);
    let nemotron =
        list!("<think>\nHm.\n</think>\n\n<TOOLCALL>", "name", "arguments", "</TOOLCALL>");
    check(NemotronJson, Some(ThinkTags), None, nemotron, false);
    check(GraniteJson, None, None, list!("<|tool_call|>", "name", "arguments", ""), false);
    let cohere = list!(
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>",
        "tool_name",
        "parameters",
        "<|END_ACTION|>"
    );
    check(CohereJson, Some(CohereTags), Some(AnswerFrame::CohereResponse), cohere, false);
    let hyperclova = list!(
        "/think\nHm.<|im_end|>\n<|im_start|>assistant -> tool/function_call\n",
        "name",
        "arguments",
        "<|im_end|>"
    );
    let turns = Some(AnswerFrame::HyperclovaTurns);
    check(HyperclovaJson, Some(HyperclovaTurn), turns, hyperclova, false);
    let apertus = "<|inner_prefix|>Hm.<|inner_suffix|><|tools_prefix|>[{\"f\": \
        {\"city\": \"Rome\", \"days\": 2, \"exact\": true}}, {\"g\": {}}]<|tools_suffix|>";
    check(ApertusJson, Some(InnerTags), None, apertus, false);
    let solar = "<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1\
        <|tool_call:name|>f<|tool_call:args|>{\"city\": \"Rome\", \"days\": 2, \"exact\": true}\
        <|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>g<|tool_call:args|>{}\
        <|tool_call:end|><|calls|>";
    check(Solar, Some(SolarTurn), Some(AnswerFrame::SolarTurns), solar, false);
}

#[test]
fn calls_in_tags_of_another_name_are_the_same_in_every_dialect() {
    check(
        ToolFamily::LongcatJson,
        Some(ThinkingStyle::LongcatTags),
        None,
        concat!(
            "<longcat_think>\nHm.\n</longcat_think>\n<longcat_tool_call>\n{\"name\": \"f\", ",
            r#""arguments": {"city": "Rome", "days": 2, "exact": true}}"#,
            "\n</longcat_tool_call>\n<longcat_tool_call>\n{\"name\": \"g\", \"arguments\": {}}",
            "\n</longcat_tool_call>"
        ),
        false,
    );
}

#[test]
fn calls_in_other_words_are_the_same_in_every_dialect() {
    use ThinkingStyle::{HunyuanTags, MinimaxTags, SeedTags, ThinkTags, ThoughtChannel};
    use ToolFamily::*;
    let seed = "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=f>\n\
        <parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n\
        <parameter=exact>True</parameter>\n</function>\n</seed:tool_call>\n\
        <seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>";
    check(SeedXml, Some(SeedTags), None, seed, false);
    let qwen = "<think>\nHm.\n</think>\n\n<tool_call>\n<function=f>\n<parameter=city>\nRome\n\
        </parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n\
        </function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>";
    check(QwenXml, Some(ThinkTags), None, qwen, false);
    let hunyuan = "<think:opensource>Hm.</think:opensource><tool_calls:opensource>\n\
        <tool_call:opensource>f<tool_sep:opensource>\n\
        <arg_key:opensource>city</arg_key:opensource>\n\
        <arg_value:opensource>Rome</arg_value:opensource>\n\
        <arg_key:opensource>days</arg_key:opensource>\n\
        <arg_value:opensource>2</arg_value:opensource>\n\
        <arg_key:opensource>exact</arg_key:opensource>\n\
        <arg_value:opensource>true</arg_value:opensource>\n</tool_call:opensource>\n\
        <tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource>\n\
        </tool_calls:opensource>";
    check(HunyuanXml, Some(HunyuanTags), None, hunyuan, false);
    let glm = "<think>Hm.</think><tool_call>f<arg_key>city</arg_key><arg_value>Rome</arg_value>\
        <arg_key>days</arg_key><arg_value>2</arg_value><arg_key>exact</arg_key>\
        <arg_value>true</arg_value></tool_call><tool_call>g</tool_call>";
    check(Glm4, Some(ThinkTags), None, glm, false);
    let dsml = "<think>Hm.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
        <｜DSML｜parameter name=\"city\" string=\"true\">Rome</｜DSML｜parameter>\n\
        <｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n\
        <｜DSML｜parameter name=\"exact\" string=\"false\">true</｜DSML｜parameter>\n\
        </｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    check(DeepseekV4, Some(ThinkTags), None, dsml, false);
    let minimax = "<mm:think>Hm.</mm:think>]<]minimax[>[<tool_call>\n\
        ]<]minimax[>[<invoke name=\"f\">]<]minimax[>[<city>Rome]<]minimax[>[</city>\
        ]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[<exact>true]<]minimax[>[</exact>\
        ]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name=\"g\">]<]minimax[>[</invoke>\n\
        ]<]minimax[>[</tool_call>";
    check(MinimaxM3, Some(MinimaxTags), None, minimax, false);
    let gemma = "<|channel>thought\nHm.\n<channel|><|tool_call>call:f{city:<|\"|>Rome<|\"|>,\
        days:2,exact:true}<tool_call|><|tool_call>call:g{}<tool_call|>";
    check(Gemma4, Some(ThoughtChannel), None, gemma, false);
    let lfm = "<think>Hm.</think><|tool_call_start|>[f(city=\"Rome\", days=2, exact=True), g()]\
        <|tool_call_end|>";
    check(Lfm2, Some(ThinkTags), None, lfm, false);
    let olmo = "<think>Hm.</think><function_calls>\nf(city='Rome', days=2, exact=True)\ng()\n\
        </function_calls>";
    check(Olmo3, Some(ThinkTags), None, olmo, false);
    let llama =
        "{\"name\": \"f\", \"parameters\": {\"city\": \"Rome\", \"days\": 2, \"exact\": true}}";
    check(LlamaJson, None, None, llama, true);
}
