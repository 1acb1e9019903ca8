//! Arguments of `model`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::ClusterChoice;

/// Where `serve` listens unless it is told otherwise.
pub(super) const DEFAULT_SERVER: &str = "http://127.0.0.1:8080";

/// `model`.
#[derive(Args)]
#[command(after_help = "\
Exit codes: 0 done; 1 asked and not as it should be: a model has failed, packages are damaged, a
newer revision is there; 2 could not run. Loading a loaded model is done, and changes nothing.

A server with keys wants one of the scope admin for load, unload, update and verify, else infer:
in the file of --key, or in SHARDPACK_API_KEY.

Examples:
  shardpack model list
  shardpack model status llama-70b --detail
  shardpack model load qwen3-32b --server http://studio-1:8080 --key admin.key
  shardpack model unload qwen3-32b
  shardpack model verify                            every byte of what is served
  shardpack model update llama-70b --check          whether the hub has a newer one
  shardpack model update llama-70b                  converted, pushed, and served without a pause")]
pub(crate) struct ModelArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: ModelAction,
    /// URL of the running `serve`.
    #[arg(
        long,
        value_name = "URL",
        env = "SHARDPACK_SERVER",
        default_value = DEFAULT_SERVER,
        global = true
    )]
    pub server: String,
    /// File that holds the server's API key; `SHARDPACK_API_KEY` holds it by default.
    #[arg(long, value_name = "FILE", global = true)]
    pub key: Option<PathBuf>,
    /// Seconds for what the server is asked to do.
    #[arg(long, default_value_t = 7200, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..), global = true)]
    pub timeout: u64,
    /// Print the result as JSON on standard output.
    #[arg(long, global = true)]
    pub json: bool,
}

impl ModelArgs {
    /// The server's URL: a variable that is set to nothing counts as not set.
    pub(crate) fn url(&self) -> &str {
        if self.server.is_empty() { DEFAULT_SERVER } else { &self.server }
    }
}

/// What to do with the models of a server.
#[derive(Subcommand)]
pub(crate) enum ModelAction {
    /// List the models of a server, loaded or not.
    List,
    /// Load models, and wait until they answer.
    Load {
        /// Names of models.
        #[arg(required = true, value_name = "MODEL")]
        models: Vec<String>,
    },
    /// Unload models when their running requests have ended, and wait until their memory is free.
    Unload {
        /// Names of models.
        #[arg(required = true, value_name = "MODEL")]
        models: Vec<String>,
    },
    /// Show the state of models. Exit code 1 if one has failed or is recovering, or one that is named is
    /// not loaded.
    Status {
        /// Names of models; all by default.
        #[arg(value_name = "MODEL")]
        models: Vec<String>,
        /// Show memory by weights, KV cache and working memory, ranks, requests and tokens per second.
        #[arg(long)]
        detail: bool,
    },
    /// Serve the newest revision of a model that came from the hub: convert it into the managed store of
    /// this machine, push it to the nodes that serve the model, and have the server take it in place of
    /// the old one. Requests that run end on the old one.
    Update {
        /// Name of the model.
        #[arg(value_name = "MODEL")]
        model: String,
        /// Only say whether there is a newer revision; exit code 1 if so.
        #[arg(long)]
        check: bool,
        /// Branch, tag or commit of the repository.
        #[arg(long, default_value = "main", value_name = "REVISION")]
        revision: String,
        /// The cluster of the nodes that serve the model.
        #[command(flatten)]
        cluster: ClusterChoice,
    },
    /// Read every byte of the packages that serve models, and compare it with their manifests. Exit
    /// code 1 if something is damaged.
    Verify {
        /// Names of models; all by default.
        #[arg(value_name = "MODEL")]
        models: Vec<String>,
    },
}
