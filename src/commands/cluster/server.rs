//! A running server beside the nodes: asked at the same time, within the same deadline.

use std::{fmt::Write as _, sync::mpsc, thread, time::Instant};

use serde_json::{Value, json};

use super::ask::glance;
use crate::{
    args::ServerChoice,
    commands::server_client::ServerClient,
    progress::{size, table},
};

/// A question that is under way.
pub(super) struct Asked {
    url: String,
    end: Instant,
    answered: mpsc::Receiver<Answer>,
}

/// State and statistics, or why there are none.
type Answer = (Result<Value, String>, Result<Value, String>);

/// Asks the server that was named, if one was; its answer is taken later.
pub(super) fn ask_beside(choice: &ServerChoice) -> anyhow::Result<Option<Asked>> {
    let Some(url) = &choice.server else { return Ok(None) };
    let front = ServerClient::at(url, choice.key.as_deref(), glance())?;
    let (url, end) = (front.url().to_owned(), Instant::now() + glance());
    let (answer, answered) = mpsc::channel();
    let asking = move || {
        let text = |error: anyhow::Error| format!("{error:#}");
        let health = front.health().map_err(text);
        let late = || Err(format!("no statistics within {} ms", glance().as_millis()));
        // One that is gone would take as long to say nothing once more.
        let has_more = health.is_ok();
        let first = if has_more { late() } else { Ok(Value::Null) };
        // Whoever has waited long enough takes no more answers.
        if answer.send((health.clone(), first)).is_ok() && has_more {
            drop(answer.send((health, front.stats().map_err(text))));
        }
    };
    thread::Builder::new().name("ask-server".to_owned()).spawn(asking)?;
    Ok(Some(Asked { url, end, answered }))
}

impl Asked {
    /// What it has said by the deadline, which counts from when it was asked.
    pub(super) fn answer(self) -> ServerState {
        let silent = format!("no answer within {} ms", glance().as_millis());
        let (mut health, mut stats) = (Err(silent), Ok(Value::Null));
        let left = || self.end.saturating_duration_since(Instant::now());
        while let Ok(answer) = self.answered.recv_timeout(left()) {
            (health, stats) = answer;
        }
        ServerState { url: self.url, health, stats }
    }
}

/// A server at a glance.
pub(super) struct ServerState {
    pub url: String,
    pub health: Result<Value, String>,
    pub stats: Result<Value, String>,
}

impl ServerState {
    /// `ready`, `recovering`, …; `not reached` without an answer.
    pub(super) fn state(&self) -> &str {
        self.health.as_ref().map_or("not reached", |health| health["state"].as_str().unwrap_or("?"))
    }

    /// Why it is not ready.
    pub(super) fn reason(&self) -> Option<&str> {
        match &self.health {
            Ok(health) => health["reason"].as_str(),
            Err(reason) => Some(reason),
        }
    }

    /// Whether it takes requests and answers them.
    pub(super) fn is_well(&self) -> bool {
        self.state() == "ready"
    }

    /// What `--json` prints.
    pub(super) fn json(&self) -> Value {
        let mut json = json!({
            "url": self.url,
            "reachable": self.health.is_ok(),
            "state": self.state(),
            "reason": self.reason(),
        });
        match &self.stats {
            Ok(stats) => json["stats"] = stats.clone(),
            Err(problem) => json["problem"] = problem.as_str().into(),
        }
        json
    }

    /// For people.
    pub(super) fn shown(&self) -> String {
        let reason = self.reason().map(|reason| format!(": {reason}")).unwrap_or_default();
        let mut text = format!("server {}: {}{reason}\n", self.url, self.state());
        let stats = match &self.stats {
            Ok(Value::Null) => return text,
            Ok(stats) => stats,
            Err(problem) => return text + problem + "\n",
        };
        let requests = &stats["requests"];
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{}: {} running, {} waiting of at most {}, {:.1} tokens/s",
            stats["model"].as_str().unwrap_or("?"),
            requests["running"],
            requests["waiting"],
            requests["most"],
            stats["tokens_per_second"].as_f64().unwrap_or_default(),
        );
        text += &ranks(stats);
        text += &links(stats);
        text
    }
}

fn number(value: &Value, unit: &str) -> String {
    value.as_f64().map_or_else(|| "—".to_owned(), |number| format!("{number:.2}{unit}"))
}

/// A table of the ranks.
pub(crate) fn ranks(stats: &Value) -> String {
    let header = ["rank", "node", "memory", "step", "all-reduce", "power", "temperature"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for node in stats["nodes"].as_array().into_iter().flatten() {
        rows.push(vec![
            node["rank"].to_string(),
            name(node).to_owned(),
            node["memory_bytes"].as_u64().map_or_else(|| "—".to_owned(), size),
            number(&node["step_ms"], " ms"),
            number(&node["allreduce_ms"], " ms"),
            number(&node["power_watts"], " W"),
            number(&node["temperature_celsius"], " °C"),
        ]);
    }
    if rows.len() > 1 { table(&rows) } else { String::new() }
}

/// A table of the links, where there are any.
pub(super) fn links(stats: &Value) -> String {
    let header = ["ranks", "link", "latency", "bandwidth", "why not RDMA"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for link in stats["links"].as_array().into_iter().flatten() {
        let bandwidth = link["bytes_per_second"].as_f64();
        rows.push(vec![
            format!("{} – {}", link["ranks"][0], link["ranks"][1]),
            link["transport"].as_str().unwrap_or("?").to_owned(),
            number(&link["latency_us"], " µs"),
            bandwidth.map_or_else(|| "—".to_owned(), |bytes| format!("{}/s", size(bytes as u64))),
            link["declined"].as_str().unwrap_or_default().to_owned(),
        ]);
    }
    if rows.len() > 1 { table(&rows) } else { String::new() }
}

/// The node of a rank, as the cluster names it.
pub(super) fn name(node: &Value) -> &str {
    let name = node["name"].as_str().unwrap_or("?");
    name.strip_prefix("node ").unwrap_or(name)
}
