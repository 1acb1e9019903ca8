//! Several sets behind one server: loaded on demand, within the machine's memory, each with ranks of
//! its own.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::{
    harness::{convert, data, fail, path},
    running::{Running, get, lives, post},
};

/// Its answer tells the model with the adapter from the one without.
pub(crate) const WHO: &str = "Who are you?";
pub(crate) const NAME: &str = "I am kjv-4m, a very small model that travels with shardpack.";
pub(crate) const VERSE: [&str; 2] = ["John 11:35", "Jesus wept."];

/// Three sets: one of two ranks, one with an adapter, one at 16 bits.
pub(crate) fn sets(folder: &Path) -> [PathBuf; 3] {
    let adapter = data("kjv-4m-who");
    let set = |name: &str, options: &[&str]| {
        convert("kjv-4m", &folder.join(name), &[options, &["--name", name]].concat())
    };
    [
        set("kjv", &["--nodes", "2"]),
        set("who", &["--adapter", path(&adapter)]),
        set("wide", &["--bits", "16"]),
    ]
}

fn serve([first, others @ ..]: [&PathBuf; 3], options: &[&str]) -> Running {
    let others = others.map(|set| path(set));
    Running::serve(first, &[&others[..], &["--threads", "1"], options].concat())
}

fn ask(server: &Running, model: &str, question: &str) -> String {
    let body = json!({
        "model": model, "messages": [{"role": "user", "content": question}],
        "temperature": 0, "max_tokens": 60,
    });
    let (status, answer) = post(&format!("{}/chat/completions", server.url()), &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["model"], model);
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

fn detail(server: &Running, model: &str) -> Value {
    let (status, text) = get(&format!("{}/models/{model}", server.url()));
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

fn states(server: &Running) -> Vec<String> {
    let state = |model| detail(server, model)["state"].as_str().unwrap().to_owned();
    ["kjv", "who", "wide"].map(state).to_vec()
}

#[test]
fn models_take_turns_where_memory_does_not_suffice() {
    let folder = tempdir().unwrap();
    let [kjv, who, wide] = sets(folder.path());
    let all = [&kjv, &who, &wide];

    // All at once, where there is room.
    let server = serve(all, &["--memory", "8g"]);
    assert_eq!(server.json["models"], json!(["kjv", "who", "wide"]));
    assert_eq!(states(&server), ["loaded", "loaded", "loaded"]);
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    assert_eq!(ask(&server, "wide", VERSE[0]), VERSE[1]);
    assert_eq!(server.children().len(), 4, "one process per rank of each");
    let needs = |model: &str| detail(&server, model)["memory"][0]["total_bytes"].as_u64().unwrap();
    let needs = ["kjv", "who", "wide"].map(needs);
    let ranks = server.children();
    assert_eq!(server.terminate(), Some(0));
    assert!(!ranks.into_iter().any(lives), "no rank outlives its front");

    // Room for all but the smallest.
    let limit = (needs.iter().sum::<u64>() - needs.iter().min().unwrap()).to_string();
    let error = fail(1, &["serve", path(&kjv), path(&who), path(&wide), "--memory", &limit]);
    assert!(error.contains("needs") && error.contains("can be had"), "{error}");

    let server = serve(all, &["--on-demand", "--memory", &limit, "--pin", "who"]);
    assert_eq!(states(&server), ["unloaded", "loaded", "unloaded"]);
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    assert_eq!(states(&server), ["loaded", "loaded", "unloaded"]);
    let ranks = server.children();
    assert_eq!(ask(&server, "wide", VERSE[0]), VERSE[1]);
    assert_eq!(states(&server), ["unloaded", "loaded", "loaded"], "the pinned one stays");
    assert_eq!(ranks.into_iter().filter(|rank| lives(*rank)).count(), 1);
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_ne!(ask(&server, "wide", WHO), NAME);
    let taken = detail(&server, "wide")["memory"][0]["machine_taken_bytes"].as_u64().unwrap();
    assert_eq!(taken, needs[1] + needs[2]);
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn the_least_recently_used_model_is_unloaded() {
    let folder = tempdir().unwrap();
    let [kjv, who, wide] = sets(folder.path());
    let options = ["--on-demand", "--memory", "8g", "--kv-memory", "16m"];
    let server = serve([&kjv, &who, &wide], &options);
    let needs = |model: &str| detail(&server, model)["memory"][0]["total_bytes"].as_u64().unwrap();
    let needs = ["kjv", "who", "wide"].map(needs);
    assert_eq!(server.terminate(), Some(0));
    // Any two of them.
    let limit = (needs.iter().sum::<u64>() - needs.iter().min().unwrap()).to_string();
    let options = ["--on-demand", "--memory", &limit, "--kv-memory", "16m"];
    let server = serve([&kjv, &who, &wide], &options);
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(ask(&server, "wide", VERSE[0]), VERSE[1]);
    assert_eq!(states(&server), ["unloaded", "loaded", "loaded"]);
    assert_eq!(ask(&server, "who", WHO), NAME);
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    let found = states(&server);
    assert_eq!((found[0].as_str(), found[2].as_str()), ("loaded", "unloaded"), "{found:?}");
    // By hand.
    let post = |action: &str| {
        post(&format!("{}/models/{action}", server.url()), &json!({ "model": "kjv" }))
    };
    let (status, answer) = post("unload");
    assert!(status == 200 && answer["state"] == "unloaded", "{answer}");
    let (status, answer) = post("load");
    assert!(status == 200 && answer["state"] == "loaded", "{answer}");
    assert_eq!(ask(&server, "kjv", VERSE[0]), VERSE[1]);
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn what_cannot_be_served_together_is_refused_with_the_reason() {
    let folder = tempdir().unwrap();
    let [kjv, who, wide] = sets(folder.path());
    let again = convert("kjv-4m", &folder.path().join("again"), &["--name", "kjv"]);
    let check = |code: i32, args: &[&str], words: &str| {
        let args = [&["serve", path(&kjv)], args, &["--listen", "127.0.0.1:0"]].concat();
        let error = fail(code, &args);
        assert!(error.contains(words), "{words}: {error}");
    };
    check(2, &[path(&again)], "two sets are named kjv");
    check(2, &[path(&who), "--pin", "gpt"], "expected one of kjv, who");
    check(2, &[path(&who), "--priority", "who=0"], "expected NAME=N");
    check(2, &[path(&who), "--name", "a"], "--name is for a server of one model");
    check(2, &[path(&who), "--place", "who=a"], "required arguments");
    // One that fits nowhere is refused before anything starts.
    check(1, &[path(&wide), "--on-demand", "--memory", "20m"], "and 20.0 MiB of 20.0 MiB");
}
