//! `shardpack usage`: what API keys have used of a running server.

use std::{process::ExitCode, time::Duration};

use serde_json::Value;

use super::{Outcome, server_client::ServerClient};
use crate::{
    args::UsageArgs,
    progress::{result, table},
};

/// For what a server says at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the command.
pub(crate) fn run(args: &UsageArgs) -> Outcome {
    let server = ServerClient::at(&args.server, args.key.as_deref(), ANSWER_TIMEOUT)?;
    let mut query = format!("by={}", args.by);
    for (name, time) in [("from", &args.from), ("to", &args.to)] {
        if let Some(time) = time {
            query.push('&');
            query.push_str(name);
            query.push('=');
            query.push_str(time);
        }
    }
    if args.csv {
        result(server.usage(&format!("{query}&format=csv"))?.trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let text = server.usage(&query)?;
    if args.json {
        result(text.trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let usage: Value = serde_json::from_str(&text).map_err(anyhow::Error::from)?;
    result(table(&rows(&usage)).trim_end());
    Ok(ExitCode::SUCCESS)
}

fn rows(usage: &Value) -> Vec<Vec<String>> {
    let header = [
        "begin",
        "key",
        "model",
        "requests",
        "refused",
        "prompt",
        "cached",
        "completion",
        "seconds",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    let row = |begin: String, key: String, row: &Value| {
        let text = |name: &str| row[name].as_str().unwrap_or("-").to_owned();
        let number = |name: &str| row[name].as_u64().unwrap_or_default().to_string();
        let seconds = row["generation_seconds"].as_f64().unwrap_or_default();
        vec![
            begin,
            key,
            text("model"),
            number("requests"),
            number("refused"),
            number("prompt_tokens"),
            number("cached_tokens"),
            number("completion_tokens"),
            format!("{seconds:.1}"),
        ]
    };
    for entry in usage["data"].as_array().into_iter().flatten() {
        let text = |name: &str| entry[name].as_str().unwrap_or("-").to_owned();
        rows.push(row(text("begin"), text("key"), entry));
    }
    rows.push(row("total".to_owned(), String::new(), &usage["total"]));
    rows
}
