//! The demo's client: asks over HTTP and shows the answer as it comes.

use std::{
    io::{self, BufRead, BufReader},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::progress::result_part;

/// The demo's model, as its server names it.
const MODEL: &str = "kjv-4m";
/// For the whole answer.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(2);

/// What came back.
pub(in crate::commands) struct Answer {
    pub(in crate::commands) text: String,
    pub(in crate::commands) tokens: u64,
    pub(in crate::commands) first_token_seconds: f64,
    pub(in crate::commands) tokens_per_second: f64,
}

/// Asks and prints the answer while it streams.
pub(super) fn stream(url: &str, question: &str) -> anyhow::Result<Answer> {
    ask(url, Some(MODEL), question, &mut result_part)
}

/// Asks a server's model, or the one that is named, and shows the answer while it streams.
pub(in crate::commands) fn ask(
    url: &str,
    model: Option<&str>,
    question: &str,
    show: &mut dyn FnMut(&str) -> io::Result<()>,
) -> anyhow::Result<Answer> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(ANSWER_TIMEOUT))
        .http_status_as_error(false)
        .build()
        .into();
    let started = Instant::now();
    let mut response = agent
        .post(format!("{url}/chat/completions"))
        .content_type("application/json")
        .send(body(model, question, true).to_string())
        .context("the server does not answer")?;
    if response.status() != 200 {
        bail!(
            "the server answered {}: {}",
            response.status(),
            response.body_mut().read_to_string().unwrap_or_default()
        );
    }
    let mut answer =
        Answer { text: String::new(), tokens: 0, first_token_seconds: 0.0, tokens_per_second: 0.0 };
    let mut first = None;
    show("   ")?;
    for line in BufReader::new(response.body_mut().as_reader()).lines() {
        let line = line.context("the answer was interrupted")?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            break;
        }
        let event: Value =
            serde_json::from_str(data).context("the server sent an event that is not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("the server reported an error: {message}");
        }
        if let Some(text) =
            event["choices"][0]["delta"]["content"].as_str().filter(|text| !text.is_empty())
        {
            first.get_or_insert_with(Instant::now);
            answer.text += text;
            show(text)?;
        }
        answer.tokens = event["usage"]["completion_tokens"].as_u64().unwrap_or(answer.tokens);
    }
    show("\n")?;
    let first = first.context("the answer is empty")?;
    answer.first_token_seconds = (first - started).as_secs_f64();
    answer.tokens_per_second =
        answer.tokens.saturating_sub(1) as f64 / first.elapsed().as_secs_f64().max(1e-9);
    Ok(answer)
}

fn body(model: Option<&str>, question: &str, stream: bool) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": question }],
        "temperature": 0,
        "max_tokens": 200,
    });
    if let Some(model) = model {
        body["model"] = model.into();
    }
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true });
    }
    body
}

/// A line for a shell that asks the same server.
pub(super) fn curl(url: &str, question: &str) -> String {
    let body = body(Some(MODEL), question, false);
    format!("curl {url}/chat/completions -H 'content-type: application/json' -d '{body}'")
}
