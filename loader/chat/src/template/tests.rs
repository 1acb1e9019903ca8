//! Renders against jinja2.

use std::time::{Duration, UNIX_EPOCH};

use shardpack_formats::template::SOURCE_BYTES_MAX;

use super::*;

const CASES: &str = include_str!("golden/golden.json");

fn source(name: &str) -> &'static str {
    match name {
        "kjv-4m" => include_str!("../../../../tests/data/kjv-4m/chat_template.jinja"),
        "llama3" => include_str!("golden/llama3.jinja"),
        "qwen3" => include_str!("golden/qwen3.jinja"),
        "mistral" => include_str!("golden/mistral.jinja"),
        "coder" => include_str!("golden/coder.jinja"),
        "deepseek_v32" => {
            include_str!("../../../../formats/templates/deepseek_v32.jinja")
        }
        "deepseek_v4" => {
            include_str!("../../../../formats/templates/deepseek_v4.jinja")
        }
        "features" => include_str!("golden/features.jinja"),
        other => panic!("no template {other}"),
    }
}

/// With the clock and the special tokens that `golden/make.py` uses.
fn template(source: &str) -> ChatTemplate {
    let now = UNIX_EPOCH + Duration::from_secs(1_791_191_223);
    let specials = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let specials = specials.map(|(name, token)| (name.to_owned(), token.into()));
    let clock = Arc::new(move || now);
    ChatTemplate::parse_with_clock(source, specials.into_iter().collect(), clock).unwrap()
}

fn array(value: Option<&Json>) -> &[Json] {
    match value {
        Some(Json::Array(items)) => items,
        other => panic!("expected an array, found {other:?}"),
    }
}

fn user(text: &str) -> Message {
    let fields =
        [("role", "user"), ("content", text)].map(|(key, text)| (key.to_owned(), text.into()));
    Message::normalise(Json::Object(fields.into_iter().collect())).unwrap()
}

fn render(source: &str, kwargs: &str) -> Result<String, RenderError> {
    let Json::Object(kwargs) = Json::parse(kwargs.as_bytes()).unwrap() else { panic!("{kwargs}") };
    template(source).render(&[user("hi")], &[], &kwargs).map(|rendered| rendered.text)
}

#[test]
fn conversations_render_as_transformers_renders_them() {
    let cases = Json::parse(CASES.as_bytes()).unwrap();
    let mut faults = Vec::new();
    let cases = array(Some(&cases));
    for case in cases.iter().filter_map(Json::as_object) {
        let text = |key| case.get(key).and_then(Json::as_str);
        let name = text("template").unwrap();
        let messages = array(case.get("messages")).iter().cloned();
        let messages: Vec<Message> = messages.map(|m| Message::normalise(m).unwrap()).collect();
        let kwargs = case.get("kwargs").and_then(Json::as_object).unwrap();
        let template = template(source(name));
        // As it is: what the template refuses or leaves out is normalised only afterwards.
        let found = template.template.render(
            messages.iter().map(|message| template.fields(message)),
            array(case.get("tools")),
            kwargs.iter(),
            Next::Assistant,
        );
        let same = match (&found, text("expected"), text("refused")) {
            (Ok(found), Some(expected), None) => found == expected,
            (Err(RenderError::Refused(found)), None, Some(refused)) => found == refused,
            (Err(RenderError::Failed(_)), None, Some("")) => true,
            _ => false,
        };
        if !same {
            faults.push(format!("{name}, {}:\n{found:?}\n{case:?}", text("title").unwrap()));
        }
    }
    assert!(cases.len() >= 100, "only {} cases", cases.len());
    assert!(faults.is_empty(), "{} of {}\n{}", faults.len(), cases.len(), faults.join("\n\n"));
}

#[test]
fn thinking_of_past_turns_has_the_name_that_the_template_reads() {
    let check = |source: &str, message: &str, expected: &str| {
        let message = Message::normalise(Json::parse(message.as_bytes()).unwrap()).unwrap();
        let rendered = template(source).render(&[message], &[], &Object::default());
        assert_eq!(rendered.unwrap().text, expected, "{source}");
    };
    let turn = r#"{"role": "assistant", "content": "x", "reasoning_content": "hm"}"#;
    let own = "{% for message in messages %}";
    let loops = |body: &str| format!("{own}{{{{ {body} }}}}{{% endfor %}}");
    check(&loops("message.thinking"), turn, "hm");
    check(&loops("message.reasoning + ''"), turn, "hm");
    check(&loops("message.reasoning_content"), turn, "hm");
    check(&loops("'thinking' in message or message.reasoning_content"), turn, "hm");
    let calls = r#"{"role": "assistant", "content": "x", "reasoning_content": "hm", "tool_calls":
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}"#;
    check(&loops("message.thinking"), calls, "");
}

#[test]
fn past_calls_are_shown_where_the_template_forgets_them() {
    let turn = r#"{"role": "assistant", "content": "So:", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"a\": \"x\", \"b\": true}"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}"#;
    let message = Message::normalise(Json::parse(turn.as_bytes()).unwrap()).unwrap();
    let check = |mark: &str, expected: &str| {
        let source = format!("{{# {mark} #}}{{{{ messages[0].content }}}}");
        let rendered =
            template(&source).render(std::slice::from_ref(&message), &[], &Object::default());
        assert_eq!(rendered.unwrap().text, expected);
    };
    check(
        "<tool_call>",
        "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\", \"b\": true}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
    );
    check(
        "<|tool_call|>",
        "So:\n<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"a\": \"x\", \"b\": true}}, \
         {\"name\": \"g\", \"arguments\": {}}]",
    );
    check("List of tools: [", "So:\n<|tool_call_start|>[f(a=\"x\", b=True), g()]<|tool_call_end|>");
    check("<tool_call> message.tool_calls", "So:");
    check(
        "no calls at all",
        "So:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x\", \"b\": true}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
    );
}

#[test]
fn developer_is_the_system_where_the_template_knows_no_developer() {
    let message = |role: &str| {
        let fields =
            [("role", role), ("content", "x")].map(|(key, text)| (key.to_owned(), text.into()));
        Message::normalise(Json::Object(fields.into_iter().collect())).unwrap()
    };
    let check = |source: &str, expected: &str| {
        let rendered = template(source).render(&[message("developer")], &[], &Object::default());
        assert_eq!(rendered.unwrap().text, expected, "{source}");
    };
    check("{{ messages[0].role }}", "system");
    check("{{ messages[0].role }}{# developer #}", "developer");
}

#[test]
fn kwargs_reach_the_template_but_not_over_its_own_variables() {
    let check = |source: &str, kwargs: &str, expected: &str| {
        assert_eq!(render(source, kwargs).unwrap(), expected, "{source} {kwargs}");
    };
    check("{{ x }}{{ bos_token }}", r#"{"x": 1.5, "bos_token": "B"}"#, "1.5B");
    check("{{ messages | length }}", r#"{"messages": []}"#, "1");
    check("{{ tools is none }}", "{}", "True");
}

#[test]
fn hostile_templates_end() {
    let check = |source: &str| {
        let error = render(source, "{}").unwrap_err();
        assert!(matches!(error, RenderError::Failed(_)), "{source}: {error}");
    };
    check(
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    );
    check("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}");
    check("{% set t = 'x' * 99999 %}{% for a in range(9999) %}{{ t }}{% endfor %}");
    check("{{ {} | tojson(indent=999999999) }}");
    check("{% include 'chat_template' %}");
    check("{{ undefined_function() }}");
}

#[test]
fn a_template_that_does_not_parse_says_where() {
    let error = ChatTemplate::parse("a\n{% for %}", Object::default()).unwrap_err();
    assert!(error.to_string().contains("chat_template:2"), "{error}");
    let long = " ".repeat(SOURCE_BYTES_MAX + 1);
    assert!(matches!(
        ChatTemplate::parse(&long, Object::default()),
        Err(TemplateError::TooLong { .. })
    ));
}

#[test]
fn a_turn_that_goes_on_ends_with_what_it_says() {
    let own = |text: &str| {
        let fields = [("role", "assistant"), ("content", text)];
        let fields = fields.map(|(key, text)| (key.to_owned(), text.into()));
        Message::normalise(Json::Object(fields.into_iter().collect())).unwrap()
    };
    for name in ["kjv-4m", "llama3", "qwen3", "mistral", "coder"] {
        let messages = [user("hi"), own("In the beginning ")];
        let template = template(source(name));
        let open = template.render_open(&messages, &[], &Object::default()).unwrap().unwrap().text;
        assert!(open.ends_with("In the beginning"), "{name}: {open}");
        let open = template.render_open(&messages[..1], &[], &Object::default()).unwrap();
        assert_eq!(open, None, "{name}: there is no turn to go on with");
    }
    let shouts = template("{{ messages[1].content | upper }}");
    let open = shouts.render_open(&[user("a"), own("b")], &[], &Object::default()).unwrap();
    assert_eq!(open, None);
}

/// Sources with the refusals of published templates.
const REFUSING: [(&str, &str); 5] = [
    (
        "alternating",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}\
         {% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
         {{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\
         {% endfor %}",
    ),
    (
        "system first",
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
         {{ raise_exception('system first') }}{% endif %}<{{ m.role }}>{{ m.content }}\
         {% for c in m.tool_calls %}[{{ c.id }} {% for k, v in c.function.arguments | items %}\
         {{ k }}={{ v }}{% endfor %}]{% endfor %}{% endfor %}",
    ),
    (
        "nine letters",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}\
         {% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[{{ c.id }}]\
         {% endfor %}{% if m.tool_call_id is defined %}{{ m.tool_call_id }}{% endif %}{% endfor %}",
    ),
    (
        "one call",
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}\
         {{ raise_exception('one call') }}{% endif %}[{{ m.tool_calls[0].id }}]{% else %}\
         <{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}",
    ),
    (
        "asks",
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}\
         {{ raise_exception('no user') }}{% endif %}{% for m in messages %}<{{ m.role }}>\
         {{ m.content }}{% endfor %}",
    ),
];

fn conversation(text: &str) -> Vec<Message> {
    let json = Json::parse(text.as_bytes()).unwrap();
    json.as_array().unwrap().iter().map(|m| Message::normalise(m.clone()).unwrap()).collect()
}

#[test]
fn what_a_template_refuses_is_normalised_and_named() {
    let check = |name: &str, messages: &str, expected: &str, adjusted: &[&str]| {
        let source = REFUSING.iter().find(|(own, _)| *own == name).unwrap().1;
        let found = template(source).render(&conversation(messages), &[], &Object::default());
        let found = found.unwrap();
        assert_eq!(found.text, expected, "{name} {messages}");
        assert_eq!(found.adjustments, adjusted, "{name} {messages}");
    };
    let [s, u, v] = [
        r#"{"role":"system","content":"S"}"#,
        r#"{"role":"user","content":"U"}"#,
        r#"{"role":"user","content":"V"}"#,
    ];
    check("system first", &format!("[{s},{u}]"), "<system>S<user>U", &[]);
    check("system first", &format!("[{s},{s},{u}]"), "<system>S\n\nS<user>U", &["merged-system"]);
    check(
        "system first",
        &format!("[{s},{u},{s}]"),
        "<system>S<user>U<user>S",
        &["system-to-user"],
    );
    check("alternating", &format!("[{u},{v}]"), "<user>U\n\nV", &["joined-roles"]);
    check("alternating", &format!("[{s},{u}]"), "<user>S\n\nU", &["system-in-user"]);
    let call = |id: &str, arguments: &str| {
        format!(
            r#"{{"id":"{id}","type":"function","function":{{"name":"f","arguments":{arguments}}}}}"#
        )
    };
    let turn = |calls: &str| format!(r#"{{"role":"assistant","tool_calls":[{calls}]}}"#);
    let result = |id: &str| format!(r#"{{"role":"tool","tool_call_id":"{id}","content":"R{id}"}}"#);
    let (a, b) = (call("a", "{}"), call("b", "{}"));
    let two = format!("[{u},{},{},{}]", turn(&format!("{a},{b}")), result("b"), result("a"));
    check("one call", &two, "<user>U[a]<tool>Ra[b]<tool>Rb", &["split-calls"]);
    let foreign = format!("[{u},{},{}]", turn(&call("call_1", "{}")), result("call_1"));
    let rendered =
        template(REFUSING[2].1).render(&conversation(&foreign), &[], &Object::default()).unwrap();
    assert_eq!(rendered.adjustments, ["call-ids"]);
    let id = rendered.text.split(['[', ']']).nth(1).unwrap();
    assert_eq!(id.len(), 9);
    assert_eq!(rendered.text.matches(id).count(), 2, "call and result: {}", rendered.text);
    let broken = format!("[{u},{}]", turn(&call("a", r#""{\"a\": ""#)));
    check("system first", &broken, "<user>U<assistant>[a ]", &["broken-arguments"]);
    check("asks", &format!("[{s}]"), "<system>S<user>", &["inserted-user"]);
}

#[test]
fn tools_are_in_the_system_message_where_the_template_knows_none() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>";
    let tool = Json::parse(br#"{"type":"function","function":{"name":"f"}}"#).unwrap();
    let history = r#"[{"role":"user","content":"U"},
        {"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\"k\":1}"}}]},
        {"role":"tool","tool_call_id":"a","content":"R"}]"#;
    let rendered = template(source).render(&conversation(history), &[tool], &Object::default());
    let text = rendered.unwrap().text;
    assert!(text.starts_with("<system>You can call functions"), "{text}");
    assert!(text.contains(r#"{"type":"function","function":{"name":"f"}}"#), "{text}");
    let end = "<user>U<assistant><tool_call>\n{\"name\": \"f\", \"arguments\": {\"k\": 1}}\n\
               </tool_call><user><tool_response>\nR\n</tool_response><assistant>";
    assert!(text.ends_with(end), "{text}");
}

/// A conversation with a call whose result is there, from JSON.
fn called(content: &str, arguments: &str) -> Vec<Message> {
    let texts = [
        r#"{"role":"user","content":"hi"}"#.to_owned(),
        format!(
            r#"{{"role":"assistant","content":{content},"tool_calls":[{{"id":"c:0","function":{{"name":"f","arguments":{arguments}}}}}]}}"#
        ),
        r#"{"role":"tool","content":"r"}"#.to_owned(),
    ];
    let parse = |text: &String| Json::parse(text.as_bytes()).unwrap();
    texts.iter().map(|text| Message::normalise(parse(text)).unwrap()).collect()
}

fn rendered(source: &str, messages: &[Message]) -> Rendered {
    template(source).render(messages, &[], &Object::default()).unwrap()
}

/// A list that the template changes holds the ids of calls until their results come, as in Kimi K2's.
#[test]
fn templates_that_keep_calls_in_a_list_show_them_natively() {
    let source = "{% set queue = namespace(ids=[]) %}{% for m in messages %}{% if m.role == 'tool' %}<r {{ queue.ids.pop(0) }} {{ m.name }}>{{ m.content }}{% elif m.tool_calls %}{% for c in m.tool_calls %}{% set _ = queue.ids.append(c.id) %}<call {{ c.id }}>{{ c.function.arguments | tojson }}{% endfor %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let rendered = rendered(source, &called("null", r#""{\"a\": 1}""#));
    assert_eq!(rendered.text, "<user>hi<call c:0>{\"a\": 1}<r c:0 f>r<assistant>");
    assert_eq!(rendered.adjustments, Vec::<&str>::new());
}

#[test]
fn past_calls_come_in_the_form_that_the_template_takes() {
    let with = |call: &str| {
        format!(
            "{{% for m in messages %}}{{% if m.tool_calls %}}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{{% else %}}[{{{{ m.content }}}}]{{% endif %}}{{% endfor %}}"
        )
    };
    let check = |call: &str, content: &str, arguments: &str, expected: &str| {
        let found = rendered(&with(call), &called(content, arguments));
        assert_eq!(found.text, format!("[hi]{expected}[r]"), "{call}");
        assert_eq!(found.adjustments, Vec::<&str>::new(), "{call}");
    };
    let sent = r#""{\"n\":1.50}""#;
    let name = "{{ c.function.name }}";
    let call = |arguments: &str| format!("{name} {{{{ {arguments} }}}}");
    check(&call("c.function.arguments"), r#""""#, sent, r#"f {"n":1.50}"#);
    check(&call("c.function.arguments | trim"), r#""""#, r#"{"n":[1]}"#, r#"f {"n": [1]}"#);
    check(&call("c.function.arguments | tojson"), r#""""#, sent, r#"f {"n": 1.5}"#);
    let only_null = format!(
        "{{% if m.content is none %}}{}{{% endif %}}",
        call("c.function.arguments | tojson")
    );
    for content in ["null", r#""""#] {
        check(&only_null, content, sent, r#"f {"n": 1.5}"#);
    }
    // What Python has for null is nobody's text.
    check(
        &format!("{{{{ m.content }}}}{}", call("c.function.arguments | tojson")),
        "null",
        sent,
        r#"f {"n": 1.5}"#,
    );
}

#[test]
fn an_effort_that_the_template_refuses_is_left_out() {
    let source = "{% if reasoning_effort is defined and reasoning_effort != 'deep' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}";
    let mut kwargs = Object::default();
    kwargs.set("reasoning_effort", "medium".into());
    let rendered = template(source).render(&[user("hi")], &[], &kwargs).unwrap();
    assert_eq!((rendered.text.as_str(), rendered.adjustments), ("hi", vec!["no-reasoning-effort"]));
    assert_eq!(adjustment("no-reasoning-effort"), Some("no-reasoning-effort"));
}

#[test]
fn earlier_calls_are_written_as_the_prompt_teaches_them() {
    let source = "{% for m in messages %}{% if m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>\
        {% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n\
        {{ c.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>\
        {% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}\
        {% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}";
    let history = conversation(
        r#"[{"role":"user","content":"U"},
        {"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f","arguments":"{\"k\":1}"}}]},
        {"role":"tool","tool_call_id":"a","content":"R"}]"#,
    );
    let tool = Json::parse(br#"{"type":"function","function":{"name":"f"}}"#).unwrap();
    let template = template(source);
    let rendered = template.render(&history, &[tool], &Object::default()).unwrap();
    assert!(rendered.text.contains("between <tool_call> tags"), "{}", rendered.text);
    assert!(!rendered.text.contains("<｜tool▁calls▁begin｜>"), "{}", rendered.text);
    let end = "<user>U<assistant><tool_call>\n{\"name\": \"f\", \"arguments\": {\"k\": 1}}\n\
               </tool_call><user><tool_response>\nR\n</tool_response><｜Assistant｜><think>\n";
    assert!(rendered.text.ends_with(end), "{}", rendered.text);
    assert_eq!(rendered.adjustments, ["calls-as-text"]);
    // Without tools nothing is taught, and the template's own form stands.
    let rendered = template.render(&history, &[], &Object::default()).unwrap();
    assert!(rendered.text.contains("<｜tool▁calls▁begin｜>"), "{}", rendered.text);
    assert!(rendered.adjustments.is_empty());
}
