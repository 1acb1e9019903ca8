//! Folders that open, and those that do not.

use std::{error::Error, fs, iter};

use super::*;
use crate::conversation::{Message, Reasoning, Role, Tool, ToolKind};

const KJV: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/kjv-4m");

/// The real model's files with some replaced; an empty text removes the file.
fn open(changes: &[(&str, &str)]) -> Result<ChatModel, OpenModelError> {
    let folder = tempfile::tempdir().unwrap();
    for file in [TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, GENERATION, CONFIG] {
        fs::copy(Path::new(KJV).join(file), folder.path().join(file)).unwrap();
    }
    for (file, text) in changes {
        let path = folder.path().join(file);
        if text.is_empty() {
            fs::remove_file(path).unwrap();
        } else {
            fs::write(path, text).unwrap();
        }
    }
    ChatModel::open(folder.path())
}

fn user(content: &str) -> Vec<Message> {
    let message = format!(r#"{{"role":"user","content":{content:?}}}"#);
    vec![Message::normalise(Json::parse(message.as_bytes()).unwrap()).unwrap()]
}

fn request(tools: &[&str]) -> ChatRequest {
    let tool = |(index, definition): (usize, &&str)| Tool {
        name: format!("f{index}"),
        definition: Json::parse(definition.as_bytes()).unwrap(),
        parameters: None,
        strict: false,
        kind: ToolKind::Function,
        format: None,
        namespaced: None,
    };
    let tools = tools.iter().enumerate().map(tool).collect();
    ChatRequest { messages: user("hi"), tools, ..ChatRequest::default() }
}

#[test]
fn faults_name_the_file_and_what_is_wrong_in_it() {
    let check = |file: &str, text: &str, words: &[&str]| {
        let error = open(&[(file, text)]).err().expect(file);
        let first: &dyn Error = &error;
        let reasons = iter::successors(Some(first), |error| Error::source(*error));
        let all: Vec<String> = reasons.map(ToString::to_string).collect();
        let error = all.join(": ");
        // Each reason stands once, as the terminal shows them.
        let once = all.iter().all(|reason| error.matches(reason.as_str()).count() == 1);
        assert!(once, "{error}");
        assert!(error.starts_with(file), "{error}");
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    };
    check(TOKENIZER, "", &["cannot be read"]);
    check(TOKENIZER, "{}", &["not a tokenizer"]);
    check(CONFIG, "", &["cannot be read"]);
    check(CONFIG, "{", &["not the expected JSON"]);
    check(CONFIG, "{}", &["vocab_size", "found nothing"]);
    check(CONFIG, r#"{"vocab_size":9}"#, &["max_position_embeddings", "found nothing"]);
    check(CONFIG, r#"{"max_position_embeddings":9,"vocab_size":0}"#, &["vocab_size", "0"]);
    check(CONFIG, r#"{"max_position_embeddings":-1}"#, &["not the expected JSON"]);
    check(GENERATION, r#"{"temperature":-1}"#, &["temperature", "-1"]);
    check(TEMPLATE, "{% for %}", &["does not parse", ":1"]);
}

/// Templates of MiniMax M3 do not read what others do.
#[test]
fn a_wish_to_think_is_told_in_a_templates_own_words() {
    let variable = |effort: Option<&str>, own: &str, style| {
        let Json::Object(template_kwargs) = Json::parse(own.as_bytes()).unwrap() else {
            panic!("{own}")
        };
        let reasoning = Reasoning {
            enabled: effort.map(|effort| effort != "none"),
            effort: effort.map(str::to_owned),
            budget_tokens: None,
        };
        let request = ChatRequest {
            messages: user("hi"),
            reasoning,
            template_kwargs,
            ..ChatRequest::default()
        };
        let kwargs = super::template_kwargs(&request, style);
        let text = |name: &str| kwargs.get(name).and_then(Json::as_str).map(str::to_owned);
        text("thinking_mode")
    };
    let style = Some(ThinkingStyle::MinimaxTags);
    assert_eq!(variable(Some("none"), "{}", style).as_deref(), Some("disabled"));
    assert_eq!(variable(Some("none"), "{}", Some(ThinkingStyle::ThinkTags)), None);
    assert_eq!(variable(None, "{}", style), None);
    let own = r#"{"thinking_mode":"adaptive"}"#;
    assert_eq!(variable(Some("none"), own, style).as_deref(), Some("adaptive"));
}

#[test]
fn stop_tokens_are_those_of_all_files() {
    let check = |changes: &[(&str, &str)], expected: &[u32]| {
        let model = open(changes).unwrap();
        let found: Vec<u32> = model.stop_tokens().iter().map(|token| token.0).collect();
        assert_eq!(found, expected, "{changes:?}");
    };
    check(&[], &[2]);
    check(&[(GENERATION, r#"{"eos_token_id":[7,2,5]}"#)], &[2, 5, 7]);
    check(&[(GENERATION, r#"{"eos_token_id":null}"#), (TOKENIZER_CONFIG, "")], &[2]);
    let config = r#"{"eos_token_id":[9],"text_config":{"eos_token_id":8,"max_position_embeddings":5,"vocab_size":2048}}"#;
    check(&[(CONFIG, config), (GENERATION, ""), (TOKENIZER_CONFIG, "")], &[8, 9]);
    check(
        &[
            (CONFIG, config),
            (GENERATION, ""),
            (TOKENIZER_CONFIG, r#"{"eos_token":{"content":"<|endoftext|>"}}"#),
        ],
        &[0, 8, 9],
    );
}

#[test]
fn temperature_follows_the_generation_config() {
    let check = |generation: &str, expected: f32| {
        let model = open(&[(GENERATION, generation)]).unwrap();
        assert_eq!(
            model.default_sampling().temperature.to_bits(),
            expected.to_bits(),
            "{generation}"
        );
    };
    check("", 0.8);
    check("{}", 0.8);
    check(r#"{"top_p":0.9}"#, 1.0);
    check(r#"{"temperature":0.6}"#, 0.6);
    check(r#"{"do_sample":true,"temperature":0.6}"#, 0.6);
    check(r#"{"do_sample":false,"temperature":0.6}"#, 0.0);
}

#[test]
fn templates_come_from_either_file() {
    let check = |config: &str, tools: &[&str], expected: &str| {
        let model = open(&[(TEMPLATE, ""), (TOKENIZER_CONFIG, config)]).unwrap();
        let expected = model.encode(expected).unwrap();
        assert_eq!(model.prompt(&request(tools)).unwrap().0, expected, "{config}");
    };
    let list = r#"{"chat_template":[{"name":"default","template":"plain"},{"name":"tool_use","template":"tools"}]}"#;
    check(r#"{"chat_template":"one {{ eos_token }}","eos_token":"E"}"#, &[], "one E");
    check(list, &[], "plain");
    check(list, &[r#"{"function":{"name":"f"}}"#], "tools");
    let error = open(&[(TEMPLATE, ""), (TOKENIZER_CONFIG, r#"{"chat_template":[]}"#)]);
    assert!(error.err().unwrap().to_string().contains("default"));
}

#[test]
fn prompts_that_cannot_be_continued_are_refused() {
    let prompt = |template: &str, positions: u32| {
        let mut model = open(&[(TEMPLATE, template)]).unwrap();
        model.limit_positions(positions);
        model.prompt(&request(&[]))
    };
    assert!(matches!(prompt("{# nothing #}", 9), Err(PromptError::Empty)));
    assert_eq!(prompt("<|im_end|>", 2).unwrap().0, [TokenId(2)]);
    assert!(matches!(
        prompt("<|im_end|>", 1),
        Err(PromptError::TooLong { prompt_tokens: PromptLength::Exactly(1), .. })
    ));
    let error = prompt("{{ raise_exception('only poems') }}", 9).unwrap_err();
    assert!(error.to_string().ends_with("refuses this conversation: only poems"), "{error}");
    let small = open(&[
        (CONFIG, r#"{"max_position_embeddings":9,"vocab_size":2}"#),
        (TEMPLATE, "<|im_end|>"),
    ]);
    let error = small.unwrap().prompt(&request(&[])).unwrap_err();
    assert!(matches!(error, PromptError::Vocabulary { token: 2, vocab_size: 2 }));
}

#[test]
fn a_prompt_that_is_far_too_long_is_refused_by_its_first_part() {
    let mut model = open(&[(TEMPLATE, "<|im_end|>")]).unwrap();
    model.limit_positions(100);
    let text = "<|im_end|>".repeat(200_000);
    let error = model.encode_text_prompt(&text).unwrap_err();
    let PromptError::TooLong { prompt_tokens: PromptLength::MoreThan(counted), .. } = error else {
        panic!("{error}")
    };
    assert!((100..200_000 / 5).contains(&counted), "{counted} of 200,000 tokens were counted");
    assert_eq!(model.encode(&text).unwrap().len(), 200_000);
    // What is only a little too long is counted.
    let error = model.encode_text_prompt(&text[..1200]).unwrap_err();
    assert!(error.to_string().contains("have 120:"), "{error}");
}

#[test]
fn whoever_speaks_too_long_is_refused_by_the_first_part() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}";
    let mut model = open(&[(TEMPLATE, template)]).unwrap();
    model.limit_positions(100);
    let long = "<|im_end|>".repeat(100_000);
    let check = |request: &ChatRequest| {
        let Err(PromptError::TooLong { prompt_tokens, .. }) = model.prompt(request) else {
            panic!("too long")
        };
        assert!(matches!(prompt_tokens, PromptLength::MoreThan(_)), "{prompt_tokens}");
    };
    for role in [Role::System, Role::User, Role::Assistant, Role::Tool] {
        let messages = vec![Message::of(Role::User, "a"), Message::of(role, &long)];
        check(&ChatRequest { messages, ..request(&[]) });
    }
    let tool = format!(r#"{{"function":{{"name":"f","description":"{long}"}}}}"#);
    check(&request(&[&tool]));
}
