//! Ranks killed in the middle of an answer, and replaced while the server goes on.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use shardpack_mlx::runtime;
use tempfile::tempdir;

use crate::{
    harness::{convert, path, succeed},
    running::{Running, ask, get, lives},
    skip::mlx_runtime,
};

/// By when a request of a lost group has its error: the deadline of a call between ranks.
const DEADLINE: Duration = Duration::from_secs(20);

/// By when a lost rank must have been replaced; generous, for a busy machine.
const REPLACED: Duration = Duration::from_mins(1);

fn kill(process: u32) {
    assert!(Command::new("kill").args(["-KILL", &process.to_string()]).status().unwrap().success());
}

/// An endless answer, as its events come; an event that is no JSON is nothing.
fn stream(url: &str) -> impl Iterator<Item = Value> + use<> {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let body = json!({
        "messages": [{ "role": "user", "content": "John 3:16" }],
        "stream": true, "ignore_eos": true, "temperature": 0,
    });
    let response = agent.post(format!("{url}/chat/completions")).send_json(&body).unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let lines = BufReader::new(response.into_body().into_reader()).lines();
    lines.map_while(Result::ok).filter_map(|line| {
        line.strip_prefix("data: ").map(|data| serde_json::from_str(data).unwrap_or_default())
    })
}

/// Kills `process` while an answer is being written; the answer ends with an error in time, and
/// the server comes back by itself.
pub(crate) fn lose(server: &Running, process: u32) {
    let mut events = stream(&server.url());
    for _ in 0..5 {
        let event = events.next().expect("an endless answer");
        assert!(event["error"].is_null(), "{event}");
    }
    let begun = Instant::now();
    kill(process);
    let error = events.find(|event| !event["error"].is_null());
    let error = error.expect("an error, not only an end");
    assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("rank "), "{message}");
    let ready = server.url().replace("/v1", "/readyz");
    loop {
        let (status, text) = get(&ready);
        if status == 200 {
            break;
        }
        assert_eq!(status, 503, "{text}");
        assert!(begun.elapsed() < REPLACED, "{text}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
}

/// Each rank of a server on this machine is lost once.
fn check_local(set: &Path, options: &[&str]) {
    let server = Running::serve(set, options);
    let first = server.children();
    assert_eq!(first.len(), 2);
    lose(&server, first[1]);
    let second = server.children();
    assert!(second.contains(&first[0]), "rank 0 keeps its process");
    assert!(second.len() == 2 && !second.contains(&first[1]), "{second:?}");
    // The leader, too.
    lose(&server, first[0]);
    let third = server.children();
    assert!(third.len() == 2 && !third.contains(&first[0]), "{third:?}");
    assert!(third.iter().any(|it| second.contains(it)), "rank 1 keeps its process");
    server.wait_for("it is started again (attempt 1 of");
    server.wait_for("serve: ready");
    assert_eq!(server.terminate(), Some(0));
    assert!(!third.into_iter().any(lives), "no rank outlives its front");
}

#[test]
fn a_rank_killed_in_the_middle_of_an_answer_is_replaced() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2"]);
    check_local(&set, &["--threads", "1"]);
}

#[test]
fn a_rank_with_mlx_killed_in_the_middle_of_an_answer_is_replaced() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2"]);
    check_local(&set, &["--threads", "1", "--engine", "mlx", "--collectives", "own"]);
}

#[test]
fn a_killed_rank_on_a_node_is_replaced() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2"]);
    let nodes: Vec<Running> = (0..2)
        .map(|rank| Running::node(&folder.path().join(format!("store-{rank}")), None))
        .collect();
    let addresses = nodes.iter().map(Running::address).collect::<Vec<_>>().join(",");
    succeed(&["push", path(&set), "--to", &addresses]);
    let server = Running::serve(&set, &["--nodes", &addresses]);
    let ranks = || [nodes[0].children()[0], nodes[1].children()[0]];
    let before = ranks();
    lose(&server, before[1]);
    let after = ranks();
    assert_eq!(after[0], before[0], "rank 0 keeps its process");
    assert_ne!(after[1], before[1]);
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn ranks_of_an_mlx_ring_are_replaced_together() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2"]);
    let options = ["--threads", "1", "--engine", "mlx", "--collectives", "ring"];
    let server = Running::serve(&set, &options);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let before = server.children();
    lose(&server, before[1]);
    let after = server.children();
    // The other one hangs in MLX when its peer is gone.
    assert!(after.len() == 2 && !after.iter().any(|it| before.contains(it)), "{after:?}");
    assert!(!before.into_iter().any(lives));
    assert_eq!(server.terminate(), Some(0));
    assert!(!after.into_iter().any(lives), "no rank outlives its front");
}
