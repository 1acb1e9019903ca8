//! `shardpack chat`: a conversation in the terminal, with a server or with a set that is served
//! for as long as it lasts.

use std::{
    fs,
    io::{self, BufRead, BufReader, IsTerminal},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};

use super::{Outcome, demo::children, store};
use crate::{
    args::ChatArgs,
    failure::Failure,
    progress::{result_part, say},
};

/// Timeout for connecting to the server; answers have none.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest pause in a stream: servers send keep-alives every few seconds.
const SILENCE_TIMEOUT: Duration = Duration::from_mins(10);

/// Runs the command.
pub(crate) fn run(args: &ChatArgs) -> Outcome {
    let is_url = args.target.starts_with("http://") || args.target.starts_with("https://");
    // Ends the server when the conversation ends.
    let server = if is_url {
        None
    } else {
        let set = store::model(Path::new(&args.target))?;
        if !set.exists() {
            let error = anyhow!("{}: no such folder", args.target);
            return Err(Failure::from(error).hint("give a package set, or the URL of a server"));
        }
        Some(children::serve(&set, &[], &[""; 0])?)
    };
    let url = server.as_ref().map_or(args.target.as_str(), |server| &server.address);
    let mut chat = Chat::new(args, url)?;
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        say(&format!("chat: {} (/clear forgets, /quit ends)", chat.url));
    }
    loop {
        if is_terminal {
            show("> ")?;
        }
        let mut line = String::new();
        if io::stdin().read_line(&mut line).context("standard input")? == 0 {
            break;
        }
        match line.trim() {
            "" => {}
            "/quit" => break,
            "/clear" => chat.clear(),
            text => match chat.say(text) {
                Ok(()) => {}
                // At a terminal one may ask again.
                Err(error) if is_terminal => say(&format!("error: {error:#}")),
                Err(error) => return Err(error.into()),
            },
        }
        chat.save()?;
    }
    Ok(ExitCode::SUCCESS)
}

struct Chat<'a> {
    args: &'a ChatArgs,
    url: String,
    key: Option<String>,
    agent: ureq::Agent,
    messages: Vec<Value>,
}

impl<'a> Chat<'a> {
    fn new(args: &'a ChatArgs, url: &str) -> anyhow::Result<Self> {
        let url = url.trim_end_matches('/');
        let url = format!("{}/v1", url.strip_suffix("/v1").unwrap_or(url));
        let key = match &args.key {
            Some(file) => Some(
                fs::read_to_string(file)
                    .with_context(|| file.display().to_string())?
                    .trim()
                    .to_owned(),
            ),
            None => None,
        };
        let agent = ureq::Agent::config_builder()
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(SILENCE_TIMEOUT))
            .http_status_as_error(false)
            .build()
            .into();
        let mut chat = Self { args, url, key, agent, messages: Vec::new() };
        chat.clear();
        if let Some(file) = args.history.as_ref().filter(|file| file.exists()) {
            let text = fs::read(file).with_context(|| file.display().to_string())?;
            chat.messages = serde_json::from_slice(&text)
                .with_context(|| format!("{}: not a conversation", file.display()))?;
        }
        Ok(chat)
    }

    fn clear(&mut self) {
        let system = self.args.system.as_ref();
        self.messages =
            system.map(|text| json!({"role": "system", "content": text})).into_iter().collect();
    }

    fn save(&self) -> anyhow::Result<()> {
        let Some(file) = &self.args.history else { return Ok(()) };
        let text = serde_json::to_vec_pretty(&self.messages).context("messages are always JSON")?;
        fs::write(file, text).with_context(|| file.display().to_string())
    }

    /// Sends a message and streams the answer; both are added to the conversation.
    fn say(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(json!({"role": "user", "content": text}));
        let answer = self.ask();
        show("\n")?;
        match answer {
            Ok(answer) => self.messages.push(json!({"role": "assistant", "content": answer})),
            Err(error) => {
                // A message without an answer is removed again.
                self.messages.pop();
                return Err(error);
            }
        }
        Ok(())
    }

    fn ask(&self) -> anyhow::Result<String> {
        let mut body = json!({"messages": self.messages, "stream": true});
        if let Some(model) = &self.args.model {
            body["model"] = model.as_str().into();
        }
        if let Some(temperature) = self.args.temperature {
            body["temperature"] = temperature.into();
        }
        if let Some(max_tokens) = self.args.max_tokens {
            body["max_tokens"] = max_tokens.into();
        }
        let mut request = self.agent.post(format!("{}/chat/completions", self.url));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request
            .content_type("application/json")
            .send(body.to_string())
            .context("the server does not answer")?;
        if response.status() != 200 {
            let text = response.body_mut().read_to_string().unwrap_or_default();
            let json: Value = serde_json::from_str(&text).unwrap_or_default();
            let message = json["error"]["message"].as_str().unwrap_or(&text);
            bail!("the server answered {}: {message}", response.status());
        }
        read_answer(BufReader::new(response.body_mut().as_reader()))
    }
}

/// Shows the events of a stream and returns the content.
fn read_answer(stream: impl BufRead) -> anyhow::Result<String> {
    let mut answer = String::new();
    let mut is_thinking = false;
    for line in stream.lines() {
        let line = line.context("the stream was interrupted")?;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            return Ok(answer);
        }
        let event: Value = serde_json::from_str(data).context("an event that is not JSON")?;
        if let Some(message) = event["error"]["message"].as_str() {
            bail!("the server: {message}");
        }
        let delta = &event["choices"][0]["delta"];
        if let Some(text) = delta["reasoning_content"].as_str() {
            if !is_thinking {
                show("[thinking] ")?;
            }
            is_thinking = true;
            show(text)?;
        }
        if let Some(text) = delta["content"].as_str().filter(|text| !text.is_empty()) {
            if std::mem::take(&mut is_thinking) {
                show("\n[answer] ")?;
            }
            answer.push_str(text);
            show(text)?;
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                show(&format!("\n[calls {name}] "))?;
            }
            show(call["function"]["arguments"].as_str().unwrap_or_default())?;
        }
    }
    bail!("the stream ended before the answer was complete")
}

/// Writes streamed text to standard output.
fn show(text: &str) -> anyhow::Result<()> {
    result_part(text).context("standard output")
}
