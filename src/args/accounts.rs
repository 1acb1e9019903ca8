//! Arguments of the commands about who used a server: `keys`, `usage` and `audit`.

use std::{num::NonZeroU32, path::PathBuf};

use clap::{Args, Subcommand};

use super::model::DEFAULT_SERVER;

/// `keys`.
#[derive(Args)]
#[command(after_help = "\
Running servers notice a change of the file within 2 seconds, or at once on SIGHUP.

Examples:
  shardpack keys keys.json add laptop                            prints the key, once
  shardpack keys keys.json add grafana --read-only               sees figures, computes nothing
  shardpack keys keys.json add team-b --models qwen3-32b --tokens-per-minute 100000
  shardpack keys keys.json set team-b --models all --concurrency 4
  shardpack keys keys.json list
  shardpack keys keys.json remove laptop")]
pub(crate) struct KeysArgs {
    /// The file; it holds only hashes of the keys.
    pub file: PathBuf,
    /// What to do.
    #[command(subcommand)]
    pub action: KeyAction,
}

/// What to do with a file of keys.
#[derive(Subcommand)]
pub(crate) enum KeyAction {
    /// Create a key and print it; it cannot be shown again.
    Add {
        /// Name of the key.
        name: String,
        /// Scopes of the key: infer, admin, metrics.
        #[arg(long, value_delimiter = ',', default_value = "infer", value_name = "SCOPE,…")]
        scopes: Vec<String>,
        /// The key sees what the server does (`/stats`, `/metrics`, `/events`, model lists) and
        /// computes nothing: the scope metrics alone.
        #[arg(long, conflicts_with = "scopes")]
        read_only: bool,
        /// What it may do.
        #[command(flatten)]
        limits: KeyLimitArgs,
    },
    /// Change what a key may do; what is not named stays.
    Set {
        /// Name of the key.
        name: String,
        /// Scopes of the key: infer, admin, metrics.
        #[arg(long, value_delimiter = ',', value_name = "SCOPE,…")]
        scopes: Vec<String>,
        /// What it may do.
        #[command(flatten)]
        limits: KeyLimitArgs,
        /// Take all its rate limits away first.
        #[arg(long)]
        no_limits: bool,
    },
    /// Remove a key.
    Remove {
        /// Name of the key.
        name: String,
    },
    /// Show the keys' names, scopes and limits.
    List {
        /// Print them as JSON.
        #[arg(long)]
        json: bool,
    },
}

/// What a key may do.
#[derive(Args)]
pub(crate) struct KeyLimitArgs {
    /// Rate limit in requests per minute.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests_per_minute: Option<u32>,
    /// Rate limit in tokens per minute, prompts and answers together.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens_per_minute: Option<u32>,
    /// Most requests at once.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency: Option<u32>,
    /// Rate limit in bytes of request bodies per minute.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub body_bytes_per_minute: Option<u64>,
    /// Rate limit in milliseconds of compiling grammars per minute.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub grammar_ms_per_minute: Option<u32>,
    /// Models that the key may use, each by one of its names; all by default, or with `all`.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub models: Vec<String>,
    /// Share of a busy server beside other keys; 1 by default.
    #[arg(long, value_name = "N")]
    pub weight: Option<NonZeroU32>,
    /// Group of keys that share the prefix cache; a key has its own by default, or with `none`.
    #[arg(long, value_name = "GROUP")]
    pub share_prefix_cache: Option<String>,
}

/// `usage`.
#[derive(Args)]
#[command(after_help = "\
A key of the scope admin shows the usage of all keys, any other its own.

Examples:
  shardpack usage
  shardpack usage --from 2026-11-01 --to 2026-12-01 --by day --csv --key admin.key")]
pub(crate) struct UsageArgs {
    /// URL of the running `serve`.
    #[arg(long, value_name = "URL", env = "SHARDPACK_SERVER", default_value = DEFAULT_SERVER)]
    pub server: String,
    /// File that holds the server's API key; `SHARDPACK_API_KEY` holds it by default.
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// From this time on, in UTC: 2026-01-31, 2026-01-31T12:00:00Z, or seconds since 1970.
    #[arg(long, value_name = "TIME")]
    pub from: Option<String>,
    /// Before this time.
    #[arg(long, value_name = "TIME")]
    pub to: Option<String>,
    /// Sums of each hour, of each day, or of all.
    #[arg(long, default_value = "total", value_name = "PERIOD", value_parser = ["hour", "day", "total"])]
    pub by: String,
    /// Print comma-separated values.
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `audit`.
#[derive(Args)]
pub(crate) struct AuditArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: AuditAction,
}

/// What to do with audit logs.
#[derive(Subcommand)]
pub(crate) enum AuditAction {
    /// Check that no line was changed, taken out or put in; exit code 1 says that one was.
    #[command(after_help = "\
Nothing follows the last line: keep the hash that is printed elsewhere, to notice that lines are
taken from the end.

Examples:
  shardpack audit verify audit.jsonl
  shardpack audit verify audit.jsonl.1 audit.jsonl     rotated logs, the oldest first")]
    Verify {
        /// Audit logs, the oldest first.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Print the result as JSON on standard output.
        #[arg(long)]
        json: bool,
    },
}
