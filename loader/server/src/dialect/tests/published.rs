//! Every field of the published request schemas: it works, it changes nothing and need not, it is
//! ignored by its name, or it is refused by its name. None vanishes.

use serde_json::{Value, json};

use super::super::*;

/// What becomes of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The parsed request differs.
    Works,
    /// It is about something that is not done here, or that is done anyway.
    Harmless,
    /// The client is told.
    Ignored,
    /// The client gets an error.
    Refused,
}
use Fate::{Harmless, Ignored, Refused, Works};

type Table = Vec<(&'static str, Value, Fate)>;

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
}

fn parsed(dialect: Dialect, body: &Value) -> Result<(String, Vec<String>), ApiError> {
    let ParsedRequest { request, prompt, model, stream, ignored, writer_options } =
        dialect.parse(body.to_string().as_bytes())?;
    let shown = format!("{request:?} {prompt:?} {model:?} {stream} {writer_options:?}");
    Ok((shown, ignored))
}

fn check(dialect: Dialect, base: &Value, table: Table) {
    let (plain, none) = parsed(dialect, base).unwrap();
    assert!(none.is_empty(), "{dialect:?}: {none:?}");
    for (path, value, expected) in table {
        let mut body = base.clone();
        let pointer = format!("/{}", path.replace('.', "/"));
        match path.split_once('.') {
            None => body[path] = value.clone(),
            Some((parent, name)) => body[parent][name] = value.clone(),
        }
        assert_eq!(body.pointer(&pointer), Some(&value));
        let found = match parsed(dialect, &body) {
            Err(error) => {
                let param = error.param.clone().unwrap_or_default();
                assert!(param.starts_with(path), "{dialect:?} {path}: refused as {error:?}");
                Refused
            }
            Ok((_, ignored)) if ignored.iter().any(|name| name == path) => Ignored,
            Ok((shown, ignored)) => {
                assert!(ignored.is_empty(), "{dialect:?} {path}: {ignored:?}");
                if shown == plain { Harmless } else { Works }
            }
        };
        assert_eq!(found, expected, "{dialect:?} {path}: {value}");
    }
}

/// Of `OpenAI`'s older dialects.
fn sampling() -> Table {
    vec![
        ("model", json!("m"), Works),
        ("frequency_penalty", json!(0.5), Works),
        ("presence_penalty", json!(0.5), Works),
        ("logit_bias", json!({"5": 1}), Works),
        ("n", json!(2), Works),
        ("seed", json!(3), Works),
        ("stop", json!(["x"]), Works),
        ("stream", json!(true), Works),
        ("stream_options", json!({"include_usage": true}), Works),
        ("temperature", json!(0.5), Works),
        ("top_p", json!(0.5), Works),
        ("user", json!("u"), Harmless),
        // vLLM's and llama.cpp's.
        ("top_k", json!(5), Works),
        ("min_p", json!(0.1), Works),
        ("repetition_penalty", json!(1.1), Works),
        ("repeat_penalty", json!(1.1), Works),
        ("min_tokens", json!(1), Works),
        ("ignore_eos", json!(true), Works),
        ("stop_token_ids", json!([3]), Works),
        ("n_predict", json!(7), Works),
        ("response_format", json!({"type": "json_object"}), Works),
        ("json_schema", json!({"type": "object"}), Works),
        ("grammar", json!("start: \"a\""), Works),
        ("guided_json", json!({"type": "object"}), Works),
        ("guided_regex", json!("a+"), Works),
        ("guided_choice", json!(["a"]), Works),
        ("guided_grammar", json!("start: \"a\""), Works),
        ("structured_outputs", json!({"regex": "a+"}), Works),
        ("cache_prompt", json!(true), Harmless),
        ("cache_salt", json!("s"), Harmless),
        ("request_id", json!("r"), Harmless),
        ("typical_p", json!(0.5), Ignored),
        ("mirostat", json!(2), Ignored),
        ("dry_multiplier", json!(0.8), Ignored),
        ("repeat_last_n", json!(64), Ignored),
        ("priority", json!(1), Ignored),
        ("skip_special_tokens", json!(true), Ignored),
        ("best_of", json!(2), Refused),
    ]
}

#[test]
fn of_chat_completions() {
    let user = json!([{"role": "user", "content": "a"}]);
    let base = json!({"messages": user, "tools": tools()});
    let mut table = sampling();
    let prediction = json!({"type": "content", "content": "b"});
    table.extend(vec![
        ("max_tokens", json!(5), Works),
        ("max_completion_tokens", json!(5), Works),
        ("logprobs", json!(true), Works),
        ("tool_choice", json!("required"), Works),
        ("parallel_tool_calls", json!(false), Works),
        ("prediction", prediction, Works),
        ("reasoning_effort", json!("low"), Works),
        ("reasoning", json!({"effort": "low"}), Works),
        ("enable_thinking", json!(true), Works),
        ("thinking", json!({"type": "enabled"}), Works),
        ("think", json!("high"), Works),
        ("chat_template_kwargs", json!({"x": 1}), Works),
        ("metadata", json!({"k": "v"}), Harmless),
        ("modalities", json!(["text"]), Harmless),
        ("prompt_cache_key", json!("k"), Harmless),
        ("prompt_cache_options", json!({"k": 1}), Harmless),
        ("prompt_cache_retention", json!("24h"), Harmless),
        ("safety_identifier", json!("k"), Harmless),
        ("service_tier", json!("flex"), Harmless),
        ("moderation", json!({"k": 1}), Harmless),
        ("store", json!(true), Harmless),
        ("verbosity", json!("low"), Harmless),
        ("return_token_ids", json!(true), Ignored),
        ("schema", json!({"type": "object"}), Ignored),
        ("top_logprobs", json!(3), Refused),
        ("modalities", json!(["text", "audio"]), Refused),
        ("audio", json!({"voice": "x"}), Refused),
        ("functions", json!([{"name": "f"}]), Refused),
        ("function_call", json!("auto"), Refused),
        ("web_search_options", json!({}), Refused),
        ("echo", json!(true), Refused),
    ]);
    check(Dialect::Chat, &base, table);
    let with_logprobs = json!({"messages": user, "logprobs": true});
    check(Dialect::Chat, &with_logprobs, vec![("top_logprobs", json!(3), Works)]);
    // The nearest to neutral that clients send.
    for (name, value) in [("best_of", json!(1)), ("functions", json!([])), ("echo", json!(false))] {
        check(Dialect::Chat, &base, vec![(name, value, Harmless)]);
    }
}

#[test]
fn of_completions() {
    let mut table = sampling();
    table.extend(vec![
        ("prompt", json!(["a", "b"]), Works),
        ("max_tokens", json!(5), Works),
        ("logprobs", json!(3), Works),
        ("echo", json!(true), Works),
        ("suffix", json!(""), Harmless),
        ("suffix", json!("b"), Refused),
    ]);
    check(Dialect::Completions, &json!({"prompt": "a"}), table);
}

#[test]
fn of_responses() {
    let base = json!({
        "input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    });
    let format = json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}});
    let table = vec![
        ("input", json!([{"role": "user", "content": "b"}]), Works),
        ("instructions", json!("b"), Works),
        ("model", json!("m"), Works),
        ("max_output_tokens", json!(5), Works),
        ("metadata", json!({"k": "v"}), Works),
        ("parallel_tool_calls", json!(false), Works),
        ("reasoning", json!({"effort": "low"}), Works),
        ("store", json!(false), Works),
        ("stream", json!(true), Works),
        ("temperature", json!(0.5), Works),
        ("text", json!({"format": format}), Works),
        ("tool_choice", json!("required"), Works),
        ("top_p", json!(0.5), Works),
        ("user", json!("u"), Works),
        ("include", json!(["message.output_text.logprobs"]), Works),
        ("include", json!(["reasoning.encrypted_content"]), Harmless),
        ("top_logprobs", json!(3), Harmless),
        ("max_tool_calls", json!(3), Harmless),
        ("prompt_cache_key", json!("k"), Harmless),
        ("prompt_cache_options", json!({"k": 1}), Harmless),
        ("prompt_cache_retention", json!("24h"), Harmless),
        ("safety_identifier", json!("k"), Harmless),
        ("service_tier", json!("flex"), Harmless),
        ("stream_options", json!({"include_obfuscation": false}), Harmless),
        ("truncation", json!("disabled"), Harmless),
        ("moderation", json!({"k": 1}), Harmless),
        ("background", json!(false), Harmless),
        ("background_options", json!({"k": 1}), Ignored),
        ("access_programs", json!({"k": 1}), Ignored),
        ("context_management", json!([{"k": 1}]), Ignored),
        ("image", json!({"k": 1}), Ignored),
        ("background", json!(true), Refused),
        ("conversation", json!("c"), Refused),
        ("previous_response_id", json!("r"), Refused),
        ("prompt", json!({"id": "p"}), Refused),
    ];
    check(Dialect::Responses, &base, table);
}

#[test]
fn of_messages() {
    let base = json!({
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    });
    let schema = json!({"type": "json_schema", "schema": {"type": "object"}});
    let table = vec![
        ("max_tokens", json!(5), Works),
        ("messages", json!([{"role": "user", "content": "b"}]), Works),
        ("model", json!("m"), Works),
        ("output_config", json!({"effort": "low"}), Works),
        ("output_config", json!({"format": schema}), Works),
        ("output_format", schema, Works),
        ("output_config.task_budget", json!({"total": 5}), Ignored),
        ("stop_sequences", json!(["x"]), Works),
        ("stream", json!(true), Works),
        ("system", json!("b"), Works),
        ("temperature", json!(0.5), Works),
        ("thinking", json!({"type": "enabled", "budget_tokens": 5}), Works),
        ("thinking", json!({"type": "adaptive"}), Harmless),
        ("tool_choice", json!({"type": "any"}), Works),
        ("top_k", json!(5), Works),
        ("top_p", json!(0.5), Works),
        ("cache_control", json!({"type": "ephemeral"}), Harmless),
        ("metadata", json!({"user_id": "u"}), Harmless),
        ("service_tier", json!("auto"), Harmless),
        ("betas", json!(["b"]), Ignored),
        ("billing_policy", json!({"k": 1}), Ignored),
        ("compaction", json!({"k": 1}), Ignored),
        ("container", json!("c"), Ignored),
        ("context_management", json!({"edits": []}), Ignored),
        ("diagnostics", json!({"k": 1}), Ignored),
        ("fallbacks", json!([{"k": 1}]), Ignored),
        ("inference_geo", json!("eu"), Ignored),
        ("mcp_servers", json!([{"k": 1}]), Ignored),
        ("speed", json!("fast"), Ignored),
        ("thread", json!({"k": 1}), Ignored),
        ("n", json!(2), Refused),
        ("thinking", json!({"type": "hard"}), Refused),
    ];
    check(Dialect::Messages, &base, table);
}

/// Of both of Ollama's routes.
fn ollamas() -> Table {
    let mut table = vec![
        ("model", json!("m:latest"), Works),
        ("stream", json!(false), Works),
        ("format", json!("json"), Works),
        ("format", json!({"type": "object"}), Works),
        ("format", json!(""), Harmless),
        ("options", json!({"num_predict": -1}), Harmless),
        ("think", json!(true), Works),
        ("think", json!("max"), Works),
        ("logprobs", json!(true), Works),
        ("top_logprobs", json!(3), Harmless),
        ("keep_alive", json!("5m"), Works),
        ("truncate", json!(true), Ignored),
        ("shift", json!(true), Ignored),
        ("width", json!(64), Ignored),
    ];
    let options: [(&'static str, Value, Fate); 25] = [
        ("options.seed", json!(3), Works),
        ("options.num_predict", json!(5), Works),
        ("options.top_k", json!(5), Works),
        ("options.top_p", json!(0.5), Works),
        ("options.min_p", json!(0.1), Works),
        ("options.temperature", json!(0.5), Works),
        ("options.repeat_penalty", json!(1.1), Works),
        ("options.presence_penalty", json!(0.5), Works),
        ("options.frequency_penalty", json!(0.5), Works),
        ("options.stop", json!(["x"]), Works),
        ("options.num_ctx", json!(4096), Harmless),
        ("options.num_batch", json!(512), Harmless),
        ("options.num_gpu", json!(1), Harmless),
        ("options.main_gpu", json!(0), Harmless),
        ("options.num_thread", json!(4), Harmless),
        ("options.num_keep", json!(4), Harmless),
        ("options.use_mmap", json!(true), Harmless),
        ("options.use_mlock", json!(true), Harmless),
        ("options.numa", json!(true), Harmless),
        ("options.draft_num_predict", json!(4), Harmless),
        ("options.typical_p", json!(0.5), Ignored),
        ("options.tfs_z", json!(0.5), Ignored),
        ("options.repeat_last_n", json!(64), Ignored),
        ("options.mirostat", json!(1), Ignored),
        ("options.penalize_newline", json!(true), Ignored),
    ];
    table.extend(options);
    table
}

#[test]
fn of_ollamas_conversations() {
    let base = json!({"messages": [{"role": "user", "content": "a"}]});
    let mut table = ollamas();
    table.extend(vec![
        ("messages", json!([]), Works),
        ("tools", tools(), Works),
        ("template", json!("t"), Refused),
        ("images", json!(["AA"]), Refused),
    ]);
    check(Dialect::OllamaChat, &base, table);
}

#[test]
fn of_ollamas_prompts() {
    let mut table = ollamas();
    table.extend(vec![
        ("prompt", json!("b"), Works),
        ("prompt", json!(""), Works),
        ("system", json!("b"), Works),
        ("raw", json!(true), Works),
        ("suffix", json!(""), Harmless),
        ("template", json!(""), Harmless),
        ("context", json!([]), Harmless),
        ("images", json!([]), Harmless),
        ("suffix", json!("b"), Refused),
        ("template", json!("t"), Refused),
        ("context", json!([1, 2]), Refused),
        ("images", json!(["AA"]), Refused),
    ]);
    check(Dialect::OllamaGenerate, &json!({"prompt": "a"}), table);
}
