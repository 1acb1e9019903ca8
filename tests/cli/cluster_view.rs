//! What is seen of a cluster: status with a node that is down, the events of a lost rank in their order,
//! health as exit codes, statistics of the network, metrics that parse. Nodes and servers are real.

use std::{
    collections::HashSet,
    path::PathBuf,
    process::{Command, Output},
    time::Duration,
};

use serde_json::Value;
use tempfile::{TempDir, tempdir};

use crate::{
    harness::{path, run, shardpack, succeed, text},
    running::{Running, ask, get, wait_until},
    sets::kjv_for_two,
};

/// For what happens by itself, on a busy machine.
/// Two nodes of this machine that hold a set, and a folder for the server's log.
struct Scene {
    folder: TempDir,
    set: PathBuf,
    nodes: Vec<Running>,
}

impl Scene {
    fn new() -> Self {
        let folder = tempdir().unwrap();
        let set = kjv_for_two(&folder.path().join("set"));
        let nodes = ["store-0", "store-1"];
        let nodes = nodes.map(|store| Running::node(&folder.path().join(store), None)).into();
        let scene = Self { folder, set, nodes };
        succeed(&["push", path(&scene.set), "--to", &scene.addresses().join(",")]);
        scene
    }

    fn addresses(&self) -> Vec<String> {
        self.nodes.iter().map(Running::address).collect()
    }

    /// The folder of a cluster that nobody has created: nodes of this machine need none, and the server's
    /// log stands there.
    fn cluster(&self) -> PathBuf {
        self.folder.path().join("shardpack/cluster")
    }

    fn serve(&self) -> Running {
        let nodes = self.addresses().join(",");
        let mut command = self.command();
        command.args(["serve", path(&self.set), "--listen", "127.0.0.1:0", "--json"]);
        command.args(["--nodes", &nodes]);
        Running::spawn(command)
    }

    /// A command over `nodes`.
    fn view(&self, what: &str, nodes: &[String], options: &[&str]) -> Output {
        let nodes = nodes.iter().map(String::as_str);
        let mut command = self.command();
        command.args(["cluster", what]).args(nodes).args(options).output().unwrap()
    }

    fn json(&self, what: &str, options: &[&str]) -> Value {
        let output = self.view(what, &self.addresses(), &[options, &["--json"]].concat());
        let parsed = serde_json::from_slice(&output.stdout);
        parsed.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)))
    }

    fn command(&self) -> Command {
        let mut command = shardpack();
        command.env("XDG_CONFIG_HOME", self.folder.path());
        command
    }
}

fn kill(process: u32) {
    assert!(Command::new("kill").args(["-KILL", &process.to_string()]).status().unwrap().success());
}

#[test]
fn status_tells_all_although_nodes_are_down() {
    let scene = Scene::new();
    let server = scene.serve();
    let mut nodes = scene.addresses();
    nodes.push("127.0.0.1:1".to_owned());
    let options = ["--server", &server.url(), "--json"];
    let output = scene.view("status", &nodes, &options);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["server"]["state"], "ready", "{status}");
    assert_eq!(status["server"]["stats"]["links"][0]["transport"], "tcp", "{status}");
    let members = status["members"].as_array().unwrap();
    for (rank, (member, node)) in members.iter().zip(&scene.nodes).enumerate() {
        let facts = &member["facts"];
        assert_eq!(facts["ranks"][0]["pid"], node.children()[0], "{member}");
        let package = facts["ranks"][0]["package"].as_str().unwrap();
        assert!(package.ends_with(&format!("-{rank}")), "{member}");
        assert_eq!(facts["ranks"][0]["front"], "present", "{member}");
        let served_by = facts["ranks"][0]["served_by"].as_str().unwrap();
        assert!(served_by.starts_with("process "), "{member}");
        assert!(facts["disk_free_bytes"].as_u64().unwrap() > 0, "{member}");
        assert!(facts["machine"]["memory_total_bytes"].as_u64().unwrap() > 1 << 28, "{member}");
        assert_eq!(facts["build"].as_str().unwrap().len(), 16, "{member}");
        assert!(member["clock_ahead_ms"].is_i64(), "{member}");
        assert_eq!(member["packages"].as_array().unwrap().len(), 1, "{member}");
    }
    let problem = |index: usize| members[index]["problem"].as_str().unwrap();
    assert!(problem(2).contains("could not connect"), "{status}");
    // For people, the same.
    let output = scene.view("status", &nodes, &options[..2]);
    let shown = text(&output.stdout);
    for part in ["not reached", "server http://", "tokens/s", "all-reduce", "memory free"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(text(&output.stderr).contains("127.0.0.1:1: not reached: "), "{output:?}");
}

#[test]
fn a_node_that_hangs_is_not_waited_for() {
    // Connections to it come about, and nothing answers.
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = hanging.local_addr().unwrap().to_string();
    let mut command = shardpack();
    command.env_remove("SHARDPACK_GLANCE_MS").args(["cluster", "status", &address, "--json"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    let problem = status["members"][0]["problem"].as_str().unwrap();
    assert!(problem.contains("no answer within 800 ms"), "{status}");
}

/// The same for people, of one kind, and since a moment ago.
fn check_ways_to_ask(scene: &Scene) {
    let options = ["--since", "10m"];
    let nodes = scene.addresses();
    let shown = scene.view("events", &nodes, &options);
    assert!(text(&shown.stdout).contains("ended by itself (signal: 9"), "{shown:?}");
    assert!(text(&shown.stderr).contains("recovered 1 times, after "), "{shown:?}");
    let failures = scene.json("events", &[&options[..], &["--kind", "rank_failed"]].concat());
    assert_eq!(failures["events"].as_array().unwrap().len(), 1);
    std::thread::sleep(Duration::from_millis(1100));
    let none = scene.json("events", &["--since", "1s"]);
    assert_eq!(none["events"].as_array().unwrap().len(), 0, "{none}");
    let unknown = scene.view("events", &nodes, &["--kind", "rank_faild"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).contains("rank_failed"), "{unknown:?}");
}

#[test]
fn events_tell_what_happened_to_a_killed_rank_in_order() {
    let scene = Scene::new();
    let server = scene.serve();
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let victim = scene.nodes[1].children()[0];
    kill(victim);
    let options = ["--since", "10m"];
    wait_until("the group is formed again", || {
        let formed = |event: &Value| event["kind"] == "group_formed";
        let events = scene.json("events", &options);
        events["events"].as_array().unwrap().iter().filter(|event| formed(event)).count() == 2
    });
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    assert_eq!(server.terminate(), Some(0));
    let mut told = Value::Null;
    // The node sees its ranks end after their server.
    wait_until("both ranks have ended", || {
        told = scene.json("events", &options);
        let ended = |event: &Value| event["kind"] == "rank_ended" || event["kind"] == "rank_failed";
        told["events"].as_array().unwrap().iter().filter(|event| ended(event)).count() == 3
    });
    assert_eq!(told["ok"], true);
    let events = told["events"].as_array().unwrap();
    let times: Vec<&str> = events.iter().map(|event| event["time"].as_str().unwrap()).collect();
    assert!(times.is_sorted(), "{told:#}");
    let b = scene.nodes[1].address();
    // What concerns the second node and the server, as it came about; the node and the server see the
    // loss at the same time, so their order is not fixed.
    let of = |node: &str| -> Vec<&str> {
        let of_node = events.iter().filter(|event| event["node"] == node);
        of_node.map(|event| event["kind"].as_str().unwrap()).collect()
    };
    assert_eq!(
        of(&b),
        [
            "started",
            "package_received",
            "package_activated",
            "rank_started",
            "rank_failed",
            "rank_started",
            "rank_ended",
        ],
        "{told:#}"
    );
    assert_eq!(
        of("server"),
        ["started", "group_formed", "group_lost", "group_formed", "stopped"],
        "{told:#}"
    );
    let the = |node: &str, kind: &str, nth: usize| {
        let mut found =
            events.iter().filter(|event| event["node"] == node && event["kind"] == kind);
        found.nth(nth).unwrap()
    };
    let failed = the(&b, "rank_failed", 0);
    assert_eq!(failed["fields"]["pid"], victim);
    assert!(failed["text"].as_str().unwrap().contains("signal: 9"), "{failed}");
    assert_eq!(failed["fault"], true);
    let lost = the("server", "group_lost", 0);
    assert_eq!((&lost["fields"]["rank"], &lost["fields"]["epoch"]), (&1.into(), &1.into()));
    let again = the("server", "group_formed", 1);
    assert_eq!(again["fields"]["epoch"], 2);
    assert!(again["fields"]["recovered_after_s"].as_f64().unwrap() > 0.0, "{again}");
    assert!(the(&b, "rank_started", 1)["time"].as_str() < again["time"].as_str());
    check_ways_to_ask(&scene);
    let status = scene.json("status", &[]);
    let fault = &status["members"][1]["facts"]["last_fault"];
    assert_eq!(fault["kind"], "rank_failed", "{status}");
}

#[test]
fn a_node_that_was_killed_says_so_when_it_comes_back() {
    let folder = tempdir().unwrap();
    let store = folder.path().join("store");
    let events = |node: &Running| -> Vec<(String, bool)> {
        let output = succeed(&["cluster", "events", &node.address(), "--json"]);
        let told: Value = serde_json::from_str(&output).unwrap();
        let events = told["events"].as_array().unwrap().iter();
        let own = events.filter(|event| event["node"] == node.address().as_str());
        let kind = |event: &Value| {
            (event["kind"].as_str().unwrap().to_owned(), event["fault"].as_bool().unwrap())
        };
        own.map(kind).collect()
    };
    let node = Running::node(&store, None);
    assert_eq!(node.terminate(), Some(0));
    let node = Running::node(&store, None);
    node.kill();
    let node = Running::node(&store, None);
    let of = |kind: &str, fault| (kind.to_owned(), fault);
    let expected =
        [of("started", false), of("stopped", false), of("started", false), of("started", true)];
    assert_eq!(events(&node), expected);
}

#[test]
fn health_is_a_line_and_an_exit_code() {
    let scene = Scene::new();
    let server = scene.serve();
    let nodes = scene.addresses();
    let health = |nodes: &[String], options: &[&str]| {
        let output = scene.view("health", nodes, options);
        let line = text(&output.stdout);
        assert_eq!(line.lines().count(), 1, "{output:?}");
        (output.status.code().unwrap(), line)
    };
    let url = server.url();
    let of_server = ["--server", url.as_str()];
    let (code, line) = health(&nodes, &of_server);
    assert_eq!((code, line.trim()), (0, "well (2 nodes, server ready)"));
    assert_eq!(health(&nodes, &[]).0, 0);
    let one_down = [&nodes[..], &["127.0.0.1:1".to_owned()]].concat();
    let (code, line) = health(&one_down, &of_server);
    assert_eq!(code, 1);
    assert!(
        line.starts_with("degraded (3 nodes, server ready): 127.0.0.1:1: not reached"),
        "{line}"
    );
    let (code, line) = health(&["127.0.0.1:1".to_owned()], &[]);
    assert!(code == 2 && line.starts_with("down (1 nodes): "), "{line}");
    assert_eq!(server.terminate(), Some(0));
    let (code, line) = health(&nodes, &of_server);
    assert!(code == 2 && line.starts_with("down (2 nodes, server not reached): "), "{line}");
    let json = scene.view("health", &nodes, &["--json"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        (&json["health"], &json["exit_code"], &json["reached"]),
        (&"well".into(), &0.into(), &2.into())
    );
}

#[test]
fn the_network_is_told_by_pairs_tokens_and_ranks() {
    let scene = Scene::new();
    let server = scene.serve();
    let stats = |options: &[&str]| {
        let url = server.url();
        let args = ["cluster", "stats", "--network", "--server", &url];
        run(&[&args[..], options].concat())
    };
    wait_until("ranks have told of their steps", || {
        ask(&server.url(), "John 3:16");
        let (_, text) = get(&server.url().replace("/v1", "/stats"));
        let stats: Value = serde_json::from_str(&text).unwrap();
        stats["nodes"][0]["tokens"].is_u64() && stats["nodes"][1]["steps"].is_u64()
    });
    let output = stats(&["--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let network = &found["network"];
    assert_eq!(network["links"][0]["ranks"], serde_json::json!([0, 1]), "{found}");
    assert!(network["links"][0]["latency_us"].as_f64().unwrap() > 0.0, "{found}");
    for (rank, node) in network["ranks"].as_array().unwrap().iter().zip(scene.addresses()) {
        assert_eq!(rank["node"], node.as_str(), "{found}");
        // Two all-reduces a layer at least.
        assert!(rank["collectives_per_step"].as_f64().unwrap() >= 2.0, "{found}");
        let times = ["step_ms", "own_ms"].map(|key| rank[key].as_f64().unwrap());
        assert!(times[0] >= times[1], "{found}");
    }
    assert!(network["bytes_per_token"].as_f64().unwrap() > 100.0, "{found}");
    assert!(network["imbalance"].as_f64().unwrap() >= 1.0, "{found}");
    let shown = text(&stats(&[]).stdout);
    assert!(shown.contains("per generated token") && shown.contains("bytes/step"), "{shown}");
}

/// What Prometheus demands of a text: a family's lines together, every sample a name, labels and a number.
fn check_exposition(text: &str) -> Vec<(String, String, f64)> {
    let mut samples = Vec::new();
    let (mut typed, mut seen) = (HashSet::new(), HashSet::new());
    let mut family = String::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let words: Vec<&str> = comment.splitn(3, ' ').collect();
            if words[0] == "TYPE" {
                assert!(typed.insert(words[1].to_owned()), "a family stands there twice: {line}");
                words[1].clone_into(&mut family);
            }
            continue;
        }
        let (name, rest) = line.split_once('{').unwrap_or_else(|| panic!("no labels: {line}"));
        let (labels, value) = rest.rsplit_once("} ").unwrap();
        assert!(name.starts_with(&family), "{line} is not of {family}");
        let value: f64 = value.parse().unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(seen.insert(format!("{name}{labels}")), "twice: {line}");
        samples.push((name.to_owned(), labels.to_owned(), value));
    }
    assert!(text.ends_with("# EOF\n"));
    samples
}

#[test]
fn metrics_of_the_whole_cluster_parse() {
    let scene = Scene::new();
    let server = scene.serve();
    wait_until("ranks have told of their memory", || {
        ask(&server.url(), "John 3:16");
        let (_, text) = get(&server.url().replace("/v1", "/metrics"));
        text.contains("shardpack_rank_step_seconds{") && text.contains("rank=\"1\"")
    });
    let nodes = [scene.addresses(), vec!["127.0.0.1:1".to_owned()]].concat();
    let output = scene.view("metrics", &nodes, &["--server", &server.url()]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let samples = check_exposition(&text(&output.stdout));
    let value = |name: &str, parts: &[&str]| {
        let mut found = samples.iter().filter(|(sample, labels, _)| {
            sample == name && parts.iter().all(|part| labels.contains(part))
        });
        let found = found.next().unwrap_or_else(|| panic!("no {name} {parts:?}"));
        found.2
    };
    for (node, up) in nodes.iter().zip([1.0, 1.0, 0.0]) {
        assert_eq!(value("shardpack_node_up", &[&format!("node=\"{node}\"")]), up);
    }
    let second = format!("node=\"{}\"", nodes[1]);
    assert_eq!(value("shardpack_node_ranks", &[&second]), 1.0);
    assert!(value("shardpack_node_disk_free_bytes", &[&second]) > 0.0);
    assert!(value("shardpack_rank_step_seconds", &["rank=\"1\"", &second]) > 0.0);
    let front = server.url();
    let front = front.trim_start_matches("http://").trim_end_matches("/v1");
    let front = format!("node=\"{front}\"");
    assert_eq!(value("shardpack_front_up", &[&front]), 1.0);
    assert!(value("shardpack_generation_tokens_total", &[&front]) > 0.0);
    // The log of the server stands in the folder of a cluster that is none yet.
    assert!(scene.cluster().join("events.jsonl").exists());
    assert!(!scene.cluster().join("cluster.json").exists());
}
