//! The sandbox gives an ordinary request the same prompt; prints what it costs.

use std::time::{Duration, Instant};

use shardpack_chat::{ChatModel, PromptHome};

use super::{program, says};
use crate::harness::data;

#[test]
#[expect(clippy::print_stdout, reason = "the figures are for people")]
fn the_sandbox_says_what_the_servers_process_would() {
    let sandbox = program();
    let open = |home| ChatModel::open_in(&data("kjv-4m"), home).unwrap();
    let (own, sandboxed) = (open(PromptHome::InProcess), open(PromptHome::Sandboxed(&sandbox)));
    for bytes in [100, 1000, 10_000] {
        let request = says(&"In the beginning was the word. ".repeat(bytes / 31 + 1)[..bytes]);
        assert_eq!(own.tokens(&request).unwrap(), sandboxed.tokens(&request).unwrap());
        let median = |model: &ChatModel| {
            let mut times: Vec<Duration> = (0..20)
                .map(|_| {
                    let begun = Instant::now();
                    let tokens = model.tokens(&request).unwrap();
                    assert!(!tokens.0.is_empty());
                    begun.elapsed()
                })
                .collect();
            times.sort_unstable();
            times[times.len() / 2]
        };
        let (own, sandboxed) = (median(&own), median(&sandboxed));
        println!("{bytes} bytes: {own:?} in this process, {sandboxed:?} in the sandbox");
    }
    let request = says("In the beginning");
    assert_eq!(own.prompt(&request).unwrap(), sandboxed.prompt(&request).unwrap());
    assert_eq!(own.render(&request).unwrap(), sandboxed.render(&request).unwrap());
    assert_eq!(own.shows_tools(), sandboxed.shows_tools());
    let ids = own.vocabulary().token_ids();
    assert_eq!(ids, sandboxed.vocabulary().token_ids());
    assert!(ids.len() == 2048);
}
