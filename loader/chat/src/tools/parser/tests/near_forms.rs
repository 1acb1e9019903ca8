//! Calls in forms near a family's own: without what stands around them, without an end, with white
//! space between.

use super::*;

/// The calls of a text, whole and streamed, with its markers as tokens and spelt out.
fn check(family: ToolFamily, texts: &[&str], calls: &str) {
    let style = OutputStyle { tools: Some(family), ..OutputStyle::default() };
    for text in texts {
        check_answer(style, text, "", "", calls);
    }
}

#[test]
fn sections_are_forgotten_at_either_end() {
    let call = r#"get_time{"city": "a"}"#;
    let json = r#"{"city": "a"}"#;
    let [open, begin, end] =
        ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"];
    let section = |what: &str| format!("<|tool_calls_section_{what}|>");
    let kimi = format!("{open}functions.get_time:0{begin}{json}{end}");
    let [opened, closed] = [section("begin"), section("end")];
    check(
        ToolFamily::KimiK2,
        &[
            &kimi,
            &format!("{kimi}{closed}"),
            &format!("{opened}{kimi}"),
            &format!("\n{opened}\n{open} functions.get_time:0 {begin}\n{json}\n{end}\n{closed}\n"),
            &format!("{open}get_time{begin}{json}"),
            &format!("<|tool_call_section_begin|>{kimi}<|tool_call_section_end|>"),
        ],
        call,
    );
    check(ToolFamily::KimiK2, &[&format!("{kimi}\n{kimi}")], &format!("{call} {call}"));
    let [open, sep, end] = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"];
    let v31 = format!("{open}get_time{sep}{json}{end}");
    check(ToolFamily::DeepseekV31, &[&v31, &format!("{v31}<｜tool▁calls▁end｜>")], call);
    let v3 = format!("{open}function{sep}get_time\n```json\n{json}\n```{end}");
    check(ToolFamily::DeepseekV3, &[&v3, &format!("<｜tool▁calls▁begin｜>\n{v3}")], call);
    let head = "<|tool_call:begin|>abcdefghij<|tool_call:name|>get_time<|tool_call:args|>";
    check(ToolFamily::Solar, &[&format!("{head}{json}<|tool_call:end|>")], call);
    let invoke = r#"<invoke name="get_time"><parameter name="city">a</parameter></invoke>"#;
    check(
        ToolFamily::MinimaxM2,
        &[
            invoke,
            &format!("{invoke}\n</minimax:tool_call>"),
            &format!("<minimax:tool_call>{invoke}"),
        ],
        call,
    );
    check(ToolFamily::MinimaxM2, &[&format!("{invoke}\n{invoke}")], &format!("{call} {call}"));
}

#[test]
fn mistral_writes_names_with_and_without_a_mark_behind_them() {
    let call = r#"get_time{"city": "a"}"#;
    for family in [ToolFamily::MistralJson, ToolFamily::MistralNames] {
        for between in ["", " ", "[ARGS]", "[CALL_ID]abcdefghi[ARGS]"] {
            let text = call.replacen('{', &format!("{between}{{"), 1);
            check(family, &[&format!("[TOOL_CALLS]{text}"), &format!("[TOOL_CALLS] {text}")], call);
            let two = format!("[TOOL_CALLS]{text}[TOOL_CALLS]{text}");
            check(family, &[&two], &format!("{call} {call}"));
        }
    }
    let broken = "[TOOL_CALLS]rm{\"city\": \"a\"}";
    let style = OutputStyle { tools: Some(ToolFamily::MistralJson), ..OutputStyle::default() };
    assert_eq!(Model::new(style, true).parse(broken).content, broken);
}

#[test]
fn what_a_prompt_teaches_is_parsed_besides_the_familys_own() {
    let json = r#"{"city": "a"}"#;
    let taught =
        format!("<tool_call>\n{{\"name\": \"get_time\", \"arguments\": {json}}}\n</tool_call>");
    for (family, own) in [
        (
            ToolFamily::DeepseekV3,
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{json}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            ToolFamily::LlamaJson,
            format!("<|python_tag|>{{\"name\": \"get_time\", \"parameters\": {json}}}"),
        ),
        (ToolFamily::Lfm2, "<|tool_call_start|>[get_time(city=\"a\")]<|tool_call_end|>".to_owned()),
        (
            ToolFamily::Gemma4,
            "<|tool_call>call:get_time{city:<|\"|>a<|\"|>}<tool_call|>".to_owned(),
        ),
    ] {
        let style = OutputStyle { tools: Some(family), ..OutputStyle::default() };
        for as_tokens in [true, false] {
            let tokens = Tokens::new(style, as_tokens);
            let format = OutputFormat::with_generic_calls(style, |name| tokens.id(name));
            let model = Model { format: Arc::new(format), tokens };
            for (text, calls) in [(&own, 1), (&taught, 1), (&format!("So:\n{taught}\n{taught}"), 2)]
            {
                for cuts in [&[][..], &[false]] {
                    let answer = model.parse_cut(&model.tokens.encode(text), cuts, false);
                    assert_eq!(answer.calls.len(), calls, "{family:?} {text} {answer:?}");
                    assert!(answer.calls.iter().all(|call| call.2 == json), "{answer:?}");
                    let said = if calls == 2 { "So:" } else { "" };
                    assert_eq!(answer.content, said, "{family:?} {text}");
                }
            }
        }
        // A template that shows its tools teaches no other format.
        assert!(Model::new(style, false).parse(&taught).calls.is_empty(), "{family:?}");
    }
}

#[test]
fn a_call_whose_end_is_forgotten_is_one_if_it_has_what_it_needs() {
    let call = r#"get_time{"city": "a"}"#;
    let qwen = "<tool_call>\n<function=get_time>\n<parameter=city>\na\n</parameter>";
    check(ToolFamily::QwenXml, &[qwen, &format!("{qwen}\n</tool_call>")], call);
    let glm = "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>a</arg_value>";
    check(ToolFamily::Glm4, &[glm, &format!("{glm}\n")], call);
    let other = "<tool_call>get_weather</tool_call>";
    check(ToolFamily::Glm4, &[&format!("{glm}\n{other}")], &format!("{call} get_weather{{}}"));
    check(ToolFamily::Glm4, &["<tool_call>get_time", "<tool_call>get_time\n"], "get_time{}");
    let m2 = r#"<invoke name="get_time"><parameter name="city">a</parameter>"#;
    let section = format!("<minimax:tool_call>{m2}</minimax:tool_call>");
    check(ToolFamily::MinimaxM2, &[m2, &section], call);
    let m3 = "~<tool_call>~<invoke name=\"get_time\">~<city>a~</city>";
    check(ToolFamily::MinimaxM3, &[&m3.replace('~', "]<]minimax[>[")], call);
    for tags in ["<tool_call>{}", "<tool_call>\n\n{}\n", "<tool_call>{}</tool_call>\n"] {
        let json = r#"{"name": "get_time", "arguments": {"city": "a"}}"#;
        check(ToolFamily::JsonTags, &[&tags.replace("{}", json)], call);
    }
}

#[test]
fn a_call_that_is_cut_short_has_no_end() {
    let schema = json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["b"],
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}}});
    let tools: Arc<[ToolSpec]> =
        [ToolSpec { name: "f".to_owned(), schema, validator: None }].into();
    let check = |family, text: &str, completed: usize| {
        let style = OutputStyle { tools: Some(family), ..OutputStyle::default() };
        let format = Arc::new(OutputFormat::new(style, |_| None));
        let options = ParserOptions {
            tools: Arc::clone(&tools),
            in_thinking: false,
            one_call: false,
            nonce: 1,
        };
        let mut parser = ToolCallParser::new(format, options);
        let mut deltas = parser.push(TokenId(0), text.as_bytes());
        deltas.extend(parser.finish());
        let answer = collect(deltas);
        assert_eq!((answer.calls.len(), answer.cut), (completed, 1 - completed), "{text}");
    };
    let qwen =
        |name: &str| format!("<tool_call>\n<function=f>\n<parameter={name}>\nx\n</parameter>\n");
    check(ToolFamily::QwenXml, &qwen("a"), 0);
    check(ToolFamily::QwenXml, &qwen("b"), 1);
    check(ToolFamily::QwenXml, &(qwen("b") + "<parameter=a>\nx"), 0);
    let m3 = |name: &str| {
        let text = format!("~<tool_call>~<invoke name=\"f\">~<{name}>x~</{name}>");
        text.replace('~', "]<]minimax[>[")
    };
    check(ToolFamily::MinimaxM3, &m3("a"), 0);
    check(ToolFamily::MinimaxM3, &m3("b"), 1);
}
