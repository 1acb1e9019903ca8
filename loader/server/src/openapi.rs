//! The `OpenAPI` description, made from the table of routes and from what the parsers take.

use serde_json::{Map, Value, json};

use super::{
    dialect::Dialect,
    error::Shape,
    keys::Access,
    routes::{ROUTES, Route, Target},
};

/// A member of a request body, or a parameter of a query.
#[derive(Clone, Copy)]
struct Member {
    name: &'static str,
    /// JSON schema, as text.
    schema: &'static str,
    is_required: bool,
}

const fn required(name: &'static str, schema: &'static str) -> Member {
    Member { name, schema, is_required: true }
}

const fn optional(name: &'static str, schema: &'static str) -> Member {
    Member { name, schema, is_required: false }
}

const STRING: &str = r#"{"type":"string"}"#;
const BOOLEAN: &str = r#"{"type":"boolean"}"#;
const OBJECT: &str = r#"{"type":"object"}"#;
const COUNT: &str = r#"{"type":"integer","minimum":1}"#;
const PROBABILITY: &str = r#"{"type":"number","minimum":0,"maximum":1}"#;
const SHARE: &str = r#"{"type":"number","exclusiveMinimum":0,"maximum":1}"#;
const TEMPERATURE: &str = r#"{"type":"number","minimum":0,"maximum":2}"#;
const PENALTY: &str = r#"{"type":"number","minimum":-2,"maximum":2}"#;
const FACTOR: &str = r#"{"type":"number","exclusiveMinimum":0,"maximum":100}"#;
const SEED: &str = r#"{"type":"integer","format":"int64"}"#;
const TOP_K: &str = r#"{"type":"integer","minimum":-1}"#;
const STOP: &str = r#"{"oneOf":[{"type":"string","minLength":1},{"type":"array","maxItems":16,"items":{"type":"string","minLength":1}}]}"#;
const TOKENS: &str =
    r#"{"type":"array","items":{"type":"integer","minimum":0,"maximum":4294967295}}"#;
const STREAM_OPTIONS: &str =
    r#"{"type":"object","properties":{"include_usage":{"type":"boolean"}}}"#;
const CONTENT: &str = r#"{"oneOf":[{"type":"string"},{"type":"array","items":{"type":"object","properties":{"type":{"type":"string","enum":["text"]},"text":{"type":"string"}},"required":["type","text"]}}]}"#;
const MESSAGES: &str = r##"{"type":"array","minItems":1,"items":{"type":"object","required":["role","content"],"properties":{"role":{"type":"string","enum":["system","developer","user","assistant","tool"]},"content":{"$ref":"#/components/schemas/Content"}}}}"##;
const TURNS: &str = r##"{"type":"array","minItems":1,"items":{"type":"object","required":["role","content"],"properties":{"role":{"type":"string","enum":["user","assistant"]},"content":{"$ref":"#/components/schemas/Content"}}}}"##;
const TOOLS: &str = r#"{"type":"array","items":{"type":"object","required":["type","function"],"properties":{"type":{"const":"function"},"function":{"type":"object","required":["name"],"properties":{"name":{"type":"string","minLength":1,"maxLength":64},"description":{"type":"string"},"parameters":{"type":"object"},"strict":{"type":"boolean"}}}}}}"#;
const FLAT_TOOLS: &str = r#"{"type":"array","items":{"type":"object","required":["type","name"],"properties":{"type":{"type":"string"},"name":{"type":"string","minLength":1,"maxLength":64},"description":{"type":"string"},"parameters":{"type":"object"},"strict":{"type":"boolean"}}}}"#;
const INPUT_TOOLS: &str = r#"{"type":"array","items":{"type":"object","required":["name","input_schema"],"properties":{"name":{"type":"string","minLength":1,"maxLength":64},"description":{"type":"string"},"input_schema":{"type":"object"}}}}"#;
const CHOICE: &str = r#"{"oneOf":[{"type":"string","enum":["auto","none","required"]},{"type":"object","required":["type"],"properties":{"type":{"type":"string"}}}]}"#;
const FORMAT: &str = r#"{"type":"object","required":["type"],"properties":{"type":{"type":"string","enum":["text","json_object","json_schema"]}}}"#;
const PREDICTION: &str = r##"{"type":"object","required":["type","content"],"properties":{"type":{"const":"content"},"content":{"$ref":"#/components/schemas/Content"}}}"##;
const PROMPT: &str = r#"{"oneOf":[{"type":"string"},{"type":"array","minItems":1,"items":{"type":"string"}},{"type":"array","minItems":1,"items":{"type":"integer","minimum":0}}]}"#;
const INPUT: &str = r#"{"oneOf":[{"type":"string"},{"type":"array","items":{"type":"object"}}]}"#;
const SYSTEM: &str = r#"{"oneOf":[{"type":"string"},{"type":"array","items":{"type":"object","required":["type","text"],"properties":{"type":{"const":"text"},"text":{"type":"string"}}}}]}"#;

/// Sampling parameters: the same in both of `OpenAI`'s older dialects.
const SAMPLING: &[Member] = &[
    optional("temperature", TEMPERATURE),
    optional("top_p", SHARE),
    optional("top_k", TOP_K),
    optional("min_p", PROBABILITY),
    optional("presence_penalty", PENALTY),
    optional("frequency_penalty", PENALTY),
    optional("repetition_penalty", FACTOR),
    optional("logit_bias", OBJECT),
    optional("seed", SEED),
    optional("n", COUNT),
    optional("max_tokens", COUNT),
    optional("min_tokens", r#"{"type":"integer","minimum":0}"#),
    optional("ignore_eos", BOOLEAN),
    optional("stop", STOP),
    optional("stop_token_ids", TOKENS),
    optional("model", STRING),
    optional("stream", BOOLEAN),
    optional("stream_options", STREAM_OPTIONS),
    optional("response_format", FORMAT),
    optional("structured_outputs", OBJECT),
];

const CHAT: &[Member] = &[
    required("messages", MESSAGES),
    optional("tools", TOOLS),
    optional("tool_choice", CHOICE),
    optional("parallel_tool_calls", BOOLEAN),
    optional("max_completion_tokens", COUNT),
    optional("logprobs", BOOLEAN),
    optional("top_logprobs", r#"{"type":"integer","minimum":0,"maximum":20}"#),
    optional("reasoning_effort", STRING),
    optional("prediction", PREDICTION),
    optional("chat_template_kwargs", OBJECT),
];

const COMPLETIONS: &[Member] = &[
    required("prompt", PROMPT),
    optional("echo", BOOLEAN),
    optional("logprobs", r#"{"type":"integer","minimum":0,"maximum":20}"#),
];

const RESPONSES: &[Member] = &[
    required("input", INPUT),
    optional("instructions", STRING),
    optional("model", STRING),
    optional("stream", BOOLEAN),
    optional("temperature", TEMPERATURE),
    optional("top_p", SHARE),
    optional("max_output_tokens", COUNT),
    optional("tools", FLAT_TOOLS),
    optional("tool_choice", CHOICE),
    optional("parallel_tool_calls", BOOLEAN),
    optional("reasoning", OBJECT),
    optional("text", OBJECT),
    optional("metadata", OBJECT),
    optional("store", BOOLEAN),
    optional("previous_response_id", STRING),
    optional("include", r#"{"type":"array","items":{"type":"string"}}"#),
    optional("top_logprobs", r#"{"type":"integer","minimum":0,"maximum":20}"#),
];

const ANTHROPIC: &[Member] = &[
    required("messages", TURNS),
    optional("system", SYSTEM),
    optional("model", STRING),
    optional("tools", INPUT_TOOLS),
    optional("tool_choice", OBJECT),
    optional("thinking", OBJECT),
    optional("stream", BOOLEAN),
    optional("temperature", TEMPERATURE),
    optional("top_p", SHARE),
    optional("top_k", TOP_K),
    optional(
        "stop_sequences",
        r#"{"type":"array","maxItems":16,"items":{"type":"string","minLength":1}}"#,
    ),
    optional("metadata", OBJECT),
];

const OLLAMA: &[Member] = &[
    optional("model", STRING),
    optional("stream", BOOLEAN),
    optional("options", OBJECT),
    optional("format", r#"{"oneOf":[{"const":"json"},{"type":"object"}]}"#),
    optional("think", r#"{"oneOf":[{"type":"boolean"},{"type":"string"}]}"#),
    optional("keep_alive", r#"{"oneOf":[{"type":"string"},{"type":"number"}]}"#),
    optional("logprobs", BOOLEAN),
    optional("top_logprobs", r#"{"type":"integer","minimum":0,"maximum":20}"#),
];

const EMBEDDINGS: &[Member] = &[
    optional("model", STRING),
    optional("dimensions", COUNT),
    optional("encoding_format", r#"{"type":"string","enum":["float","base64"]}"#),
    optional("truncate", BOOLEAN),
];

const RERANK: &[Member] = &[
    required("query", STRING),
    required("documents", r#"{"type":"array","minItems":1,"items":{"type":"string"}}"#),
    optional("model", STRING),
    optional("top_n", COUNT),
    optional("return_documents", BOOLEAN),
    optional("instruction", STRING),
];

/// The members of a route's body; none where it has none.
fn members(target: Target) -> Vec<Member> {
    let all = |lists: &[&[Member]]| lists.concat();
    match target {
        Target::Generate(Dialect::Chat) => all(&[CHAT, SAMPLING]),
        Target::Generate(Dialect::Completions) => all(&[COMPLETIONS, SAMPLING]),
        Target::Generate(Dialect::Responses | Dialect::Compaction) | Target::CountInputTokens => {
            RESPONSES.to_vec()
        }
        Target::Generate(Dialect::Messages) => all(&[ANTHROPIC, &[required("max_tokens", COUNT)]]),
        Target::CountTokens => ANTHROPIC.to_vec(),
        Target::Generate(Dialect::OllamaChat) => {
            all(&[OLLAMA, &[optional("messages", MESSAGES), optional("tools", TOOLS)]])
        }
        Target::Generate(Dialect::OllamaGenerate) => {
            let own: &[Member] =
                &[optional("prompt", STRING), optional("system", STRING), optional("raw", BOOLEAN)];
            all(&[OLLAMA, own])
        }
        Target::Embed(dialect) => {
            let input = match dialect.input() {
                "prompt" => required("prompt", STRING),
                _ => required("input", PROMPT),
            };
            all(&[&[input], EMBEDDINGS])
        }
        Target::Rerank => RERANK.to_vec(),
        Target::OllamaShow | Target::LoadModel | Target::UnloadModel | Target::VerifyModel => {
            vec![required("model", STRING)]
        }
        Target::SwapModel => vec![required("model", STRING), required("set", STRING)],
        Target::OllamaPull => vec![required("model", STRING), optional("stream", BOOLEAN)],
        Target::Tokenize => vec![required("prompt", STRING)],
        Target::Detokenize => vec![required("tokens", TOKENS)],
        Target::ApplyTemplate => vec![required("messages", MESSAGES), optional("tools", TOOLS)],
        _ => Vec::new(),
    }
}

const OF_EVENTS: &[Member] = &[optional("since", r#"{"type":"integer","minimum":0}"#)];

const OF_USAGE: &[Member] = &[
    optional("from", STRING),
    optional("to", STRING),
    optional("by", r#"{"type":"string","enum":["hour","day","total"]}"#),
    optional("format", r#"{"type":"string","enum":["json","csv"]}"#),
];

const OF_A_MODEL: &[Member] = &[optional("model", STRING)];

/// The parameters that a route takes in its query.
const fn query(target: Target) -> &'static [Member] {
    match target {
        Target::Events => OF_EVENTS,
        Target::Usage => OF_USAGE,
        Target::Props | Target::TokenizerInfo => OF_A_MODEL,
        _ => &[],
    }
}

/// The parameters of a route's address.
fn parameters(route: &Route) -> Vec<Value> {
    let id = json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}});
    let in_path = route.path.contains("id}").then_some(id);
    let in_query = query(route.target).iter().map(|member| {
        json!({
            "name": member.name, "in": "query", "required": member.is_required,
            "schema": member.schema(),
        })
    });
    in_path.into_iter().chain(in_query).collect()
}

impl Member {
    fn schema(&self) -> Value {
        serde_json::from_str(self.schema).expect("constants of this file")
    }
}

fn schema(members: &[Member]) -> Value {
    let properties: Map<String, Value> =
        members.iter().map(|member| (member.name.to_owned(), member.schema())).collect();
    let required: Vec<&str> =
        members.iter().filter(|member| member.is_required).map(|member| member.name).collect();
    json!({"type": "object", "properties": properties, "required": required})
}

fn operation(route: &Route) -> Value {
    let error = |description: &str| {
        let name = match route.shape {
            Shape::OpenAi => "OpenAiError",
            Shape::Anthropic => "AnthropicError",
            Shape::Ollama => "OllamaError",
        };
        let schema = json!({"$ref": format!("#/components/schemas/{name}")});
        json!({"description": description, "content": {"application/json": {"schema": schema}}})
    };
    let content = match route.target {
        Target::Page => json!({"text/html": {}}),
        Target::Live | Target::Ready => json!({"text/plain": {}}),
        Target::Metrics => json!({"application/openmetrics-text": {}}),
        Target::Generate(Dialect::OllamaChat | Dialect::OllamaGenerate) => {
            json!({"application/json": {}, "application/x-ndjson": {}})
        }
        Target::Generate(_) => json!({"application/json": {}, "text/event-stream": {}}),
        _ => json!({"application/json": {}}),
    };
    let busy = if route.shape == Shape::Anthropic { "529" } else { "503" };
    let mut operation = json!({
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "400": error("Invalid request; the error names the parameter"),
            "401": error("Missing or unknown API key"),
            "403": error("The API key lacks the scope of this route"),
            "404": error("No such model"),
            "408": error("The body did not arrive in time"),
            "413": error("The body is too large"),
            "429": error("Rate limit of the API key reached; retry-after says how long to wait"),
            busy: error("At the limit of requests, starting or shutting down; retry-after says how long to wait"),
            "504": error("The engine did not respond in time"),
        },
    });
    if route.target == Target::Health {
        operation["responses"]["503"] =
            json!({"description": "Not ready, and why", "content": {"application/json": {}}});
    }
    if route.method == "POST" {
        let schema = schema(&members(route.target));
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    let parameters = parameters(route);
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if route.access != Access::Public {
        operation["security"] = json!([{}, {"bearer": []}, {"key": []}]);
    }
    operation
}

/// The description.
pub(super) fn document() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let path = route.path.replace("{*id}", "{id}");
        // Several methods may live at one address.
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[route.method.to_lowercase()] = operation(route);
    }
    let error = json!({"type": "object", "required": ["error"], "properties": {"error": {
        "type": "object", "required": ["message", "type"], "properties": {
            "message": {"type": "string"}, "type": {"type": "string"},
        },
    }}});
    let content: Value = serde_json::from_str(CONTENT).expect("a constant of this file");
    json!({
        "openapi": "3.1.0",
        "info": {"title": "shardpack", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {
            "schemas": {
                "Content": content,
                "OpenAiError": error,
                "AnthropicError": error,
                "OllamaError": {
                    "type": "object", "required": ["error"],
                    "properties": {"error": {"type": "string"}},
                },
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_described_parameter_is_known_to_its_parser() {
        for route in ROUTES {
            let Target::Generate(dialect) = route.target else { continue };
            for Member { name, schema, .. } in members(route.target) {
                // Of the wrong type: a parser that knows the parameter complains of it by name.
                let wrong = if schema == STRING || schema.contains(r#""type":"string""#) {
                    "[[7]]"
                } else {
                    r#"[["x"]]"#
                };
                let mut body = json!({
                    "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a",
                    "max_tokens": 1,
                });
                body[name] = serde_json::from_str(wrong).unwrap();
                if let Ok(call) = dialect.parse(body.to_string().as_bytes()) {
                    let unread = call.ignored.iter().any(|ignored| ignored == name);
                    assert!(!unread, "{}: {name} is described and not read", route.path);
                }
            }
        }
    }

    #[test]
    fn parameters_of_addresses_are_described() {
        let document = document();
        let named = |path: &str| -> Vec<String> {
            let found = document["paths"][path]["get"]["parameters"].as_array();
            let name = |it: &Value| format!("{} {}", it["in"].as_str().unwrap(), it["name"]);
            found.into_iter().flatten().map(|it| name(it).replace('"', "")).collect()
        };
        assert_eq!(named("/events"), ["query since"]);
        assert_eq!(named("/v1/usage"), ["query from", "query to", "query by", "query format"]);
        assert_eq!(named("/props"), ["query model"]);
        assert_eq!(named("/v1/models/{id}"), ["path id"]);
        assert_eq!(named("/stats"), [""; 0]);
        let since = &document["paths"]["/events"]["get"]["parameters"][0];
        assert_eq!(since["required"], false);
        assert_eq!(since["schema"], json!({"type": "integer", "minimum": 0}));
    }

    #[test]
    fn description_has_every_route() {
        let document = document();
        for route in ROUTES {
            let path = route.path.replace("{*id}", "{id}");
            let found = &document["paths"][&path][route.method.to_lowercase()]["summary"];
            assert_eq!(found, route.summary);
        }
    }
}
