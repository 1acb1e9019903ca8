//! Several models over several nodes: each with a group of ranks of its own, loaded on demand within the
//! memory of each node.

use std::{path::Path, process::Command};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, fail, path, succeed},
    running::{Running, get, lives, post, wait_until},
    several_models::{NAME, VERSE, WHO, sets},
};

#[cfg(target_os = "linux")]
use crate::harness::data;

fn node(folder: &Path, options: &[&str]) -> Running {
    let store = ["node", "--listen", "127.0.0.1:0", "--json", "--threads", "1", "--store"];
    Running::start(&[&store[..], &[path(folder)], options].concat(), None)
}

fn push(set: &Path, nodes: &[&Running]) {
    let addresses: Vec<String> = nodes.iter().map(|node| node.address()).collect();
    succeed(&["push", path(set), "--to", &addresses.join(",")]);
}

fn list(nodes: &[Running]) -> String {
    nodes.iter().map(Running::address).collect::<Vec<_>>().join(",")
}

fn ask(server: &Running, model: &str, question: &str) -> String {
    let body = json!({
        "model": model, "messages": [{"role": "user", "content": question}],
        "temperature": 0, "max_tokens": 60,
    });
    let (status, answer) = post(&format!("{}/chat/completions", server.url()), &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

fn detail(server: &Running, model: &str) -> Value {
    let (status, text) = get(&format!("{}/models/{model}", server.url()));
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

fn state(server: &Running, model: &str) -> String {
    detail(server, model)["state"].as_str().unwrap().to_owned()
}

/// What a model takes of each machine.
fn needs(server: &Running, model: &str) -> Vec<(String, u64)> {
    let detail = detail(server, model);
    let share = |share: &Value| {
        let bytes = share["total_bytes"].as_u64().unwrap();
        (share["machine"].as_str().unwrap().to_owned(), bytes)
    };
    detail["memory"].as_array().unwrap().iter().map(share).collect()
}

/// Waits until the nodes have taken note that their ranks have ended.
fn await_no_ranks(nodes: &[Running]) {
    wait_until("ranks end with their front", || {
        nodes.iter().all(|node| node.children().is_empty())
    });
}

#[test]
fn models_share_nodes_each_in_a_group_of_its_own() {
    let folder = tempdir().unwrap();
    let [kjv, who, wide] = sets(folder.path());
    let nodes = ["a", "b", "c"].map(|name| node(&folder.path().join(name), &["--kv-memory", "8m"]));
    let [a, b, c] = &nodes;
    push(&kjv, &[a, b]);
    push(&who, &[c]);
    push(&wide, &[c]);
    let list = list(&nodes);
    let serve = |options: &[&str]| {
        let sets = [path(&who), path(&wide), "--nodes", &list];
        Running::serve(&kjv, &[&sets[..], options].concat())
    };

    // All at once, where there is room: node c has a rank of two models.
    let server = serve(&[]);
    assert_eq!(server.json["models"], json!(["kjv", "who", "wide"]));
    let ranks = [a, b, c].map(|node| node.children().len());
    assert_eq!(ranks, [1, 1, 2], "one process per rank of each");
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    assert_eq!(ask(&server, "wide", VERSE[0]), VERSE[1]);
    let sizes = ["kjv", "who", "wide"].map(|model| needs(&server, model));
    let [of_kjv, of_who, of_wide] = &sizes;
    let on = |needs: &[(String, u64)]| -> Vec<String> {
        needs.iter().map(|(machine, _)| machine.clone()).collect()
    };
    assert_eq!(on(of_who), [c.address()]);
    assert_eq!(on(of_kjv).len(), 2);
    // A lost rank concerns its own group alone.
    let kjv_rank = a.children()[0];
    let others = c.children();
    assert!(
        Command::new("kill").args(["-KILL", &kjv_rank.to_string()]).status().unwrap().success()
    );
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1], "the request waits for the next group");
    assert_eq!(c.children(), others);
    assert_ne!(a.children(), [kjv_rank]);
    assert_eq!(server.terminate(), Some(0));
    await_no_ranks(&nodes);

    // Room for one of the two models of node c.
    let most = of_who[0].1.max(of_wide[0].1).max(of_kjv[0].1).max(of_kjv[1].1);
    let limit = (most + (1 << 20)).to_string();
    let error = fail(
        1,
        &["serve", path(&kjv), path(&who), path(&wide), "--nodes", &list, "--memory", &limit],
    );
    for words in [&format!("on {}", c.address()), "weights", "KV cache 8.0 MiB", "can be had"] {
        assert!(error.contains(words), "{words}: {error}");
    }
    let server = serve(&["--on-demand", "--memory", &limit, "--pin", "kjv"]);
    let states = || ["kjv", "who", "wide"].map(|model| state(&server, model));
    // It is loaded from the start, and waits until it is there.
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    assert_eq!(states(), ["loaded", "unloaded", "unloaded"]);
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(states(), ["loaded", "loaded", "unloaded"]);
    let rank_of_who = c.children();
    assert_eq!(rank_of_who.len(), 1);
    let pinned = [a.children(), b.children()];
    // It leaves for another, and comes back.
    assert_eq!(ask(&server, "wide", VERSE[0]), VERSE[1]);
    assert_eq!(states(), ["loaded", "unloaded", "loaded"]);
    assert!(!lives(rank_of_who[0]), "its memory is free before the other one is loaded");
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(states(), ["loaded", "loaded", "unloaded"]);
    assert_eq!([a.children(), b.children()], pinned, "the pinned one was never unloaded");
    let taken = &detail(&server, "who")["memory"][0];
    assert_eq!(taken["machine_taken_bytes"], of_who[0].1, "{taken}");
    assert_eq!(taken["machine_limit_bytes"].to_string(), limit, "{taken}");
    assert_eq!(server.terminate(), Some(0));
    await_no_ranks(&nodes);
}

#[test]
fn models_are_placed_where_they_are_or_where_the_user_says() {
    let folder = tempdir().unwrap();
    let [kjv, who, wide] = sets(folder.path());
    let nodes = ["a", "b"].map(|name| node(&folder.path().join(name), &[]));
    let [a, b] = &nodes;
    push(&kjv, &[a, b]);
    push(&kjv, &[b, a]);
    push(&who, &[a]);
    push(&who, &[b]);
    let list = list(&nodes);
    let (first, second) = (a.address(), b.address());
    // Turned round, and the other one on the node of rank 0.
    let turned = format!("kjv={second},{first}");
    let options =
        [path(&who), "--nodes", &list, "--place", &turned, "--place", &format!("who={second}")];
    let server = Running::serve(&kjv, &options);
    let source = |model: &str| detail(&server, model)["source"]["nodes"].clone();
    assert_eq!(source("kjv"), json!([second, first]));
    assert_eq!(source("who"), json!([second]));
    assert_eq!([a.children().len(), b.children().len()], [1, 2]);
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(server.terminate(), Some(0));
    // What cannot be is refused with the reason.
    let check = |args: &[&str], words: &str| {
        let args = [&["serve", path(&kjv), path(&who)], args, &["--nodes", &list]].concat();
        let error = fail(2, &args);
        assert!(error.contains(words), "{words}: {error}");
    };
    check(&["--place", "gpt=a"], "expected one of kjv, who");
    check(&["--place", "who=127.0.0.1:9"], "127.0.0.1:9 is none of --nodes");
    check(&["--place", &format!("kjv={first}")], "the set has 2 packages and 1 nodes were given");
    check(&[path(&wide)], "rank 0 of wide");
    check(&["--kv-memory", "8m"], "--kv-memory is for ranks of this machine");
    check(&["--on", &first], "--on is for a server of one model");
    let twin = convert("kjv-4m", &folder.path().join("twin"), &["--nodes", "2", "--name", "twin"]);
    check(&[path(&twin)], "kjv and twin are the same packages");
}

/// How far, in percent, the ranks' memory may be from what was planned for them.
#[cfg(target_os = "linux")]
const TOLERATED_PERCENT: f64 = 5.0;

/// With weights that outweigh the program, and a text that fills a step.
#[cfg(target_os = "linux")]
#[test]
#[expect(clippy::print_stdout, reason = "the figures are worth their line")]
fn ranks_take_of_each_node_what_was_planned() {
    let folder = tempdir().unwrap();
    let source = folder.path().join("source");
    crate::memory_plan::write_model(&source);
    for file in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let from = data("kjv-4m").join(file);
        if from.exists() {
            std::fs::copy(from, source.join(file)).unwrap();
        }
    }
    // One rank: of half as much weight, the pages of the program's file would be more than the tolerance.
    let set = folder.path().join("set");
    succeed(&["convert", path(&source), "-o", path(&set), "--bits", "16", "--name", "large"]);
    let nodes = ["a", "b"].map(|name| node(&folder.path().join(name), &["--kv-memory", "32m"]));
    let [_, b] = &nodes;
    push(&set, &[b]);
    let server = Running::serve(&set, &["--nodes", &list(&nodes), "--on-demand", "--pin", "large"]);
    let body = json!({"model": "large", "prompt": "word ".repeat(480), "max_tokens": 2});
    let (status, answer) = post(&format!("{}/completions", server.url()), &body);
    assert_eq!(status, 200, "{answer}");
    let [(machine, planned)] = &needs(&server, "large")[..] else { panic!() };
    assert_eq!(*machine, b.address());
    let rank = b.children()[0];
    let status = std::fs::read_to_string(format!("/proc/{rank}/status")).unwrap();
    let bytes = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        value.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    };
    // How many pages of the program's file are in memory depends on what else reads them, and the
    // system drops them when it needs their place.
    let peak = bytes("VmHWM:") - bytes("RssFile:");
    let percent = (peak as f64 / *planned as f64 - 1.0) * 100.0;
    println!("planned {planned}, at most {peak} besides the program's pages: {percent:.1} %");
    assert!(percent.abs() <= TOLERATED_PERCENT, "planned {planned}, {peak}: {percent:.1} %");
    assert_eq!(server.terminate(), Some(0));
}
