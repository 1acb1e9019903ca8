//! Ranks killed in the middle of an answer, and replaced: the answers go on.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::Command,
};

use serde_json::{Value, json};
use shardpack_mlx::runtime;
use tempfile::tempdir;

use crate::{
    harness::{fail, path, succeed},
    running::{Running, ask, get, lives, wait_until},
    sets::{kjv, kjv_for_two},
    skip::mlx_runtime,
};

fn kill(process: u32) {
    assert!(Command::new("kill").args(["-KILL", &process.to_string()]).status().unwrap().success());
}

/// A long answer, as its events come; an event that is no JSON is nothing.
fn stream(url: &str) -> impl Iterator<Item = Value> + use<> {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let body = json!({
        "messages": [{ "role": "user", "content": "John 3:16" }],
        "stream": true, "ignore_eos": true, "temperature": 0, "max_tokens": 250,
    });
    let response = agent
        .post(format!("{url}/chat/completions"))
        .content_type("application/json")
        .send(body.to_string())
        .unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let lines = BufReader::new(response.into_body().into_reader()).lines();
    lines.map_while(Result::ok).filter_map(|line| {
        line.strip_prefix("data: ").map(|data| serde_json::from_str(data).unwrap_or_default())
    })
}

/// The text of some events.
fn text_of(events: impl Iterator<Item = Value>) -> String {
    let text = |event: Value| {
        assert!(event["error"].is_null(), "{event}");
        event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
    };
    events.map(text).collect()
}

/// Kills `process` while an answer is being written: the answer goes on to its end as if nothing had
/// been, and the server comes back by itself.
pub(crate) fn lose(server: &Running, process: u32) {
    lose_with(server, process, true);
}

/// The same; an engine that does not promise bits may go on in other words.
fn lose_with(server: &Running, process: u32, is_exact: bool) {
    let undisturbed = text_of(stream(&server.url()));
    assert!(undisturbed.len() > 300, "{undisturbed}");
    let mut events = stream(&server.url());
    let mut text = text_of(events.by_ref().take(5));
    kill(process);
    text.push_str(&text_of(events));
    if is_exact {
        assert_eq!(text, undisturbed);
    } else {
        assert!(text.len() > 300, "{text}");
    }
    let ready = server.url().replace("/v1", "/readyz");
    wait_until("the lost rank is replaced", || {
        let (status, text) = get(&ready);
        assert!([200, 503].contains(&status), "{text}");
        status == 200
    });
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
}

/// Each rank of a server on this machine is lost once.
fn check_local(set: &Path, options: &[&str]) {
    let server = Running::serve(set, options);
    let first = server.children();
    assert_eq!(first.len(), 2);
    let is_exact = !options.contains(&"mlx");
    lose_with(&server, first[1], is_exact);
    let second = server.children();
    assert!(second.contains(&first[0]), "rank 0 keeps its process");
    assert!(second.len() == 2 && !second.contains(&first[1]), "{second:?}");
    // The leader, too.
    lose_with(&server, first[0], is_exact);
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
    let set = kjv_for_two(&folder.path().join("set"));
    check_local(&set, &["--threads", "1"]);
}

#[test]
fn a_rank_with_mlx_killed_in_the_middle_of_an_answer_is_replaced() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    check_local(&set, &["--threads", "1", "--engine", "mlx", "--collectives", "auto"]);
}

#[test]
fn a_killed_rank_on_a_node_is_replaced() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
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
#[cfg(target_os = "linux")]
fn a_node_whose_program_was_replaced_starts_ranks_of_its_own_build() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    let program = folder.path().join("shardpack");
    crate::harness::copy_program(&program);
    let mut command = Command::new(&program);
    command.args(["node", "--listen", "127.0.0.1:0", "--json", "--threads", "1", "--store"]);
    command.arg(folder.path().join("store"));
    let node = Running::spawn(command);
    // As an upgrade does, and with what would not start.
    std::fs::remove_file(&program).unwrap();
    std::fs::write(&program, "no program").unwrap();
    succeed(&["push", path(&set), "--to", &node.address()]);
    let server = Running::serve(&set, &["--nodes", &node.address()]);
    lose(&server, node.children()[0]);
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn a_second_server_does_not_take_the_ranks_of_the_first_unless_told_to() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    let node = Running::node(&folder.path().join("store"), None);
    succeed(&["push", path(&set), "--to", &node.address()]);
    let options = ["--nodes", &node.address()];
    let first = Running::serve(&set, &options);
    let rank = node.children()[0];
    let serve = ["serve", path(&set), "--listen", "127.0.0.1:0", "--json"];
    let refusal = fail(2, &[&serve[..], &options].concat());
    assert!(refusal.contains("served by process") && refusal.contains("--take-over"), "{refusal}");
    assert_eq!(ask(&first.url(), "John 11:35"), "Jesus wept.");
    assert_eq!(node.children(), [rank]);
    let second = Running::serve(&set, &[&options[..], &["--take-over"]].concat());
    assert_eq!(ask(&second.url(), "John 11:35"), "Jesus wept.");
    assert_ne!(node.children(), [rank]);
    // Whoever comes after a server that ended need not take anything over.
    drop(first);
    assert_eq!(second.terminate(), Some(0));
    let third = Running::serve(&set, &options);
    assert_eq!(ask(&third.url(), "John 11:35"), "Jesus wept.");
}

/// A server that is killed leaves its ranks to the nodes; the next one need not load.
#[test]
fn a_killed_server_leaves_its_ranks_to_the_next_one() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let nodes: Vec<Running> = (0..2)
        .map(|rank| Running::node(&folder.path().join(format!("store-{rank}")), None))
        .collect();
    let addresses = nodes.iter().map(Running::address).collect::<Vec<_>>().join(",");
    succeed(&["push", path(&set), "--to", &addresses]);
    let options = ["--nodes", &addresses];
    let ranks = || [nodes[0].children()[0], nodes[1].children()[0]];
    let mut server = Running::serve(&set, &options);
    let before = ranks();
    // Several in a row, each in the middle of an answer.
    for _ in 0..3 {
        let mut events = stream(&server.url());
        assert_eq!(events.by_ref().take(5).count(), 5);
        server.kill();
        server = Running::serve(&set, &options);
        assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
        assert_eq!(ranks(), before, "the ranks keep their processes, and with them their weights");
    }
    // One that is told to end ends them too.
    assert_eq!(server.terminate(), Some(0));
    wait_until("the ranks end with a server that ends", || !before.into_iter().any(lives));
}

#[test]
fn ranks_of_an_mlx_ring_are_replaced_together() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let options = ["--threads", "1", "--engine", "mlx", "--collectives", "ring"];
    let server = Running::serve(&set, &options);
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let before = server.children();
    lose_with(&server, before[1], false);
    let after = server.children();
    // The other one hangs in MLX when its peer is gone.
    assert!(after.len() == 2 && !after.iter().any(|it| before.contains(it)), "{after:?}");
    assert!(!before.into_iter().any(lives));
    assert_eq!(server.terminate(), Some(0));
    assert!(!after.into_iter().any(lives), "no rank outlives its front");
}
