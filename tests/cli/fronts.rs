//! Servers that nodes run: they outlive the controller's command, are started again, and stop when they
//! are told to.

use std::{path::Path, process::Command};

use serde_json::Value;

use crate::{
    cluster::{Scene, TLS},
    harness::{fail, path, shardpack, succeed},
    ports::free_port,
    running::{ask, lives, wait_until},
    sets::{kjv, kjv_for_two},
};

/// A port that is this test's alone.
fn free_address() -> String {
    format!("127.0.0.1:{}", free_port())
}

fn kill(process: u32) {
    assert!(Command::new("kill").args(["-KILL", &process.to_string()]).status().unwrap().success());
}

/// The only front, as the cluster lists it.
fn front(scene: &Scene) -> Value {
    let fronts = scene.cluster(&["fronts"])["fronts"].clone();
    assert_eq!(fronts.as_array().unwrap().len(), 1, "{fronts}");
    fronts[0].clone()
}

/// Waits until the front of this address answers.
fn await_front(address: &str) {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().http_status_as_error(false).build().into();
    wait_until(&format!("{address} answers"), || {
        let answer = agent.get(format!("http://{address}/readyz")).call();
        answer.is_ok_and(|response| response.status().as_u16() == 200)
    });
}

fn serve_on(scene: &Scene, set: &Path, address: &str, node: &str) -> Value {
    let args = ["serve", path(set), "--nodes", "a,b", "--on", node, "--listen", address];
    scene.cluster(&[&args[..], &["--drain-timeout", "1", "--name", "kjv"]].concat())
}

#[test]
fn a_node_serves_while_the_controller_is_away() {
    let scene = Scene::new();
    let set = kjv_for_two(&scene.store("set"));
    let [a, b] = scene.pair(&TLS);
    scene.push(&set);
    let address = free_address();
    let started = serve_on(&scene, &set, &address, "a");
    assert_eq!((&started["on"], &started["ranks"]), (&"a".into(), &2.into()), "{started}");
    let url = started["url"].as_str().unwrap().to_owned();
    assert_eq!(ask(&url, "John 11:35"), "Jesus wept.");
    let state = front(&scene);
    assert_eq!((&state["state"], &state["name"]), (&"serving".into(), &"kjv".into()), "{state}");
    // The same again changes nothing.
    let process = state["process"].as_u64().unwrap() as u32;
    serve_on(&scene, &set, &address, "a");
    assert_eq!(front(&scene)["process"], process);
    // It ends, and its node starts it again; the ranks keep their weights.
    let rank_of_b = b.children();
    kill(process);
    await_front(&address);
    assert_eq!(ask(&url, "John 11:35"), "Jesus wept.");
    assert_eq!(b.children(), rank_of_b);
    let again = front(&scene);
    assert_ne!(again["process"], process);
    assert!(again["fault"].as_str().unwrap().contains("signal: 9"), "{again}");
    let logs = scene.cluster(&["logs", "kjv"]);
    assert!(logs["lines"].as_array().unwrap().len() >= 2, "{logs}");
    // A stopped one stays stopped; another node may serve then.
    assert_eq!(scene.cluster(&["stop", "kjv"])["fronts"][0]["state"]["state"], "stopped");
    assert!(!lives(again["process"].as_u64().unwrap() as u32));
    assert!(std::net::TcpStream::connect(&address).is_err());
    scene.cluster(&["start", "kjv"]);
    await_front(&address);
    scene.cluster(&["restart", "kjv"]);
    await_front(&address);
    let removed = scene.cluster(&["stop", "kjv", "--forget"]);
    assert_eq!(removed["ok"], true, "{removed}");
    assert_eq!(scene.cluster(&["fronts"])["fronts"].as_array().unwrap().len(), 0);
    let unknown = fail(2, &[&["cluster", "stop", "kjv"][..], &scene.choice()].concat());
    assert!(unknown.contains("no node that answers has a server"), "{unknown}");
    serve_on(&scene, &set, &address, "b");
    assert_eq!(ask(&url, "John 11:35"), "Jesus wept.");
    drop(a);
}

#[test]
fn a_front_starts_again_with_its_node() {
    let scene = Scene::new();
    let set = kjv_for_two(&scene.store("set"));
    let [a, b] = scene.pair(&TLS);
    scene.push(&set);
    let address = free_address();
    let started = serve_on(&scene, &set, &address, "b");
    let front_process = front(&scene)["process"].as_u64().unwrap() as u32;
    let listening = b.address();
    // The front ends with its node, whatever became of that.
    b.kill();
    wait_until("the front ends with its node", || !lives(front_process));
    let b = scene.start("b", &["--listen", &listening]);
    await_front(&address);
    let url = started["url"].as_str().unwrap();
    assert_eq!(ask(url, "John 11:35"), "Jesus wept.");
    // And with a node that ends in order.
    let front_process = front(&scene)["process"].as_u64().unwrap() as u32;
    assert_eq!(b.terminate(), Some(0));
    assert!(!lives(front_process));
    drop(a);
}

#[test]
fn a_node_without_the_set_serves_nothing() {
    let scene = Scene::new();
    let set = kjv_for_two(&scene.store("set"));
    let _nodes = scene.pair(&TLS);
    let choice = scene.choice();
    let serve = ["serve", path(&set), "--nodes", "a,b", "--listen", "127.0.0.1:0"];
    let refusal = fail(2, &[&serve[..], &["--on", "a"], &choice].concat());
    assert!(refusal.contains("no package of layout"), "{refusal}");
    let refusal = fail(2, &[&serve[..], &["--on", "a", "--name", "a/b"], &choice].concat());
    assert!(refusal.contains("cannot name a front"), "{refusal}");
    let refusal = fail(2, &[&serve[..], &["--on", "c"], &choice].concat());
    assert!(refusal.contains("c is no node of cluster"), "{refusal}");
}

#[test]
fn a_detached_server_answers_after_its_command_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    let mut command = shardpack();
    command.env("XDG_STATE_HOME", folder.path());
    command.args(["serve", path(&set), "--listen", "127.0.0.1:0", "--detach", "--json"]);
    let output = command.output().unwrap();
    assert!(output.status.success());
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let url = json["url"].as_str().unwrap();
    assert_eq!(ask(url, "John 11:35"), "Jesus wept.");
    let process = json["process"].as_u64().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &process]).status().unwrap().success());
    wait_until("the server ends", || !lives(process.parse().unwrap()));
    let log = std::fs::read_to_string(json["log"].as_str().unwrap()).unwrap();
    assert!(!log.contains("error"), "{log}");
}

#[test]
fn a_node_is_installed_as_a_service_of_either_manager() {
    let node = ["--listen", "127.0.0.1:7420", "--store", "/srv/shardpack"];
    let install = ["node", "install", "--print", "--user", "llm", "--program", "/bin/shardpack"];
    let print = |target: &str| succeed(&[&install[..], &["--target", target], &node].concat());
    let unit = print("systemd");
    let line =
        "ExecStart=/bin/shardpack node --listen 127.0.0.1:7420 --store /srv/shardpack\nUser=llm\n";
    assert!(unit.contains(line), "{unit}");
    let list = print("launchd");
    assert!(list.contains("<string>org.shardpack.node</string>"), "{list}");
    assert!(list.contains("<string>/srv/shardpack</string>"), "{list}");
    // What would not start is not installed.
    let refusal = fail(2, &[&install[..], &["--listen", "127.0.0.1:7420"]].concat());
    assert!(refusal.contains("required arguments were not provided"), "{refusal}");
    let removed = succeed(&["node", "uninstall", "--print", "--target", "systemd"]);
    assert!(removed.contains("systemctl disable --now shardpack-node.service"), "{removed}");
}

/// Strangers who say nothing, from many addresses, cost a node with few descriptors no caller.
#[test]
#[cfg(target_os = "linux")]
fn silent_callers_leave_a_node_its_descriptors() {
    let scene = Scene::new();
    let store = scene.store("few");
    let mut command = Command::new("sh");
    let line = r#"ulimit -n 64; exec "$0" "$@""#;
    command.args(["-c", line, env!("CARGO_BIN_EXE_shardpack"), "node", "--json", "--threads", "1"]);
    command.args(["--store", path(&store), "--listen", "127.0.0.1:0", "--tls"]);
    let node = crate::running::Running::spawn(command);
    scene.add(&node, "few");
    let address: std::net::SocketAddr = node.address().parse().unwrap();
    let mut silent = Vec::new();
    for caller in 0..300_u32 {
        let from = std::net::SocketAddr::from(([127, 0, 1, (caller % 60 + 1) as u8], 0));
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            None,
        )
        .unwrap();
        rustix::net::bind(&socket, &from).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        silent.push(socket);
        if caller % 60 == 59 {
            let status = scene.cluster(&["status"]);
            assert_eq!(status["members"][0]["reachable"], true, "{status}");
        }
    }
    assert_eq!(silent.len(), 300);
}
