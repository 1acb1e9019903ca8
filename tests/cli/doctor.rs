//! `doctor`: what it finds on this machine and on nodes, and how it says what it cannot find.
#![expect(clippy::print_stdout, reason = "what was measured is worth a line")]

use std::{fs, path::Path, process::Output};

use serde_json::Value;
use shardpack_mlx::runtime;
use tempfile::tempdir;

use crate::{
    harness::{path, shardpack, succeed, text},
    running::Running,
    sets::kjv_for_two,
    skip::mlx_runtime,
};

/// Runs `doctor` with engines in a folder of the test's own.
fn doctor(engines: &Path, options: &[&str]) -> Output {
    shardpack().arg("doctor").args(options).env("SHARDPACK_ENGINES", engines).output().unwrap()
}

fn reports(output: &Output) -> Value {
    let said = text(&output.stdout);
    serde_json::from_str::<Value>(&said)
        .unwrap_or_else(|error| panic!("{error}: {said}{}", text(&output.stderr)))["reports"]
        .clone()
}

/// State and detail of a check.
fn check(report: &Value, name: &str) -> (String, String) {
    let checks = report["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no {name:?} in {report}"));
    let field = |name: &str| found[name].as_str().unwrap().to_owned();
    (field("state"), field("detail"))
}

#[test]
fn a_machine_without_mlx_passes_and_reports_the_check_as_skipped() {
    let folder = tempdir().unwrap();
    let output = doctor(folder.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = &reports(&output)[0];
    let (state, detail) = check(report, "machine");
    assert!(state == "passed" && detail.contains(std::env::consts::ARCH), "{detail}");
    let (state, detail) = check(report, "sensors");
    let tells = detail.contains(if state == "passed" { "°C" } else { "without root" });
    assert!(tells || detail.ends_with(" W"), "{state}: {detail}");
    let (state, detail) = check(report, "MLX runtime");
    assert!(state == "skipped" && detail.contains("engine install mlx"), "{detail}");
}

#[test]
fn a_damaged_runtime_fails_the_check_and_the_command() {
    let folder = tempdir().unwrap();
    let damaged = folder.path().join(runtime::FOLDER);
    fs::create_dir(&damaged).unwrap();
    fs::write(damaged.join("runtime.json"), "{").unwrap();
    let output = doctor(folder.path(), &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let (state, detail) = check(&reports(&output)[0], "MLX runtime");
    assert!(state == "failed" && detail.contains("engine install mlx"), "{detail}");
}

#[test]
fn the_self_test_computes_reads_and_sends() {
    let folder = tempdir().unwrap();
    let page = folder.path().join("report.md");
    let mut command = shardpack();
    command.args(["doctor", "--self-test", "--json", "--report", path(&page)]);
    // What is pasted names no home folder.
    command.env("SHARDPACK_ENGINES", folder.path()).env("HOME", folder.path());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = &reports(&output)[0];
    for name in [
        "read speed, cached",
        "cpu kernels",
        "all-reduce between two processes, cpu, own",
        "tokens per second, cpu, ranks: 1",
        "tokens per second, cpu, ranks: 2",
    ] {
        let (state, detail) = check(report, name);
        assert_eq!(state, "passed", "{name}: {detail}");
    }
    let (_, detail) = check(report, "cpu kernels");
    assert!(detail.starts_with("portable"), "{detail}");
    for name in ["MLX against cpu", "all-reduce within MLX's graph", "fast sync", "JACCL"] {
        let (state, detail) = check(report, name);
        assert!(state == "skipped" && detail.contains("shardpack "), "{name}: {detail}");
    }
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("| cpu kernels | ok | portable"), "{page}");
    let (_, pasted) = page.split_once("## Paste this into a bug report").unwrap();
    assert!(pasted.contains("| cpu kernels | ok | portable"), "{pasted}");
    assert!(!pasted.contains(path(folder.path())), "{pasted}");
}

#[test]
fn the_self_test_compares_mlx_with_cpu() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    let output = doctor(runtime.parent().unwrap(), &["--self-test", "--json"]);
    let report = &reports(&output)[0];
    assert_eq!(output.status.code(), Some(0), "{report:#}");
    for name in [
        "MLX runtime",
        "MLX device",
        "MLX against cpu, 4 bits",
        "MLX against cpu, 8 bits",
        "MLX against cpu, 16 bits",
        "all-reduce between two processes, mlx, own",
        "all-reduce between two processes, mlx, ring",
        "tokens per second, mlx, ranks: 2",
        "read bandwidth of memory, mlx",
        "soak of all-reduces, events",
        "how long the GPU may wait, 2 s",
    ] {
        let (state, detail) = check(report, name);
        assert_eq!(state, "passed", "{name}: {detail}");
        println!("{name}: {detail}");
    }
    let checks = report["checks"].as_array().unwrap();
    let kernels = checks.iter().filter(|it| it["name"].as_str().unwrap().starts_with("kernel "));
    let mut count = 0;
    for kernel in kernels {
        assert!(kernel["expected"].as_str().unwrap().starts_with("at most 1: "), "{kernel}");
        println!("{}: {}", kernel["name"], kernel["detail"]);
        count += 1;
    }
    assert!(count >= 9, "{report:#}");
    // What only a Mac's GPU has says so.
    for (name, why) in [
        ("wiring memory for the GPU", "processor"),
        ("memory that MLX takes without copies", "always copies"),
        ("fast sync", "--fast-sync has no effect"),
    ] {
        let (state, detail) = check(report, name);
        assert!(
            state == "skipped" && detail.contains(why) || cfg!(target_os = "macos"),
            "{detail}"
        );
    }
}

#[test]
fn doctor_asks_every_node_of_a_set() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let node = |rank| Running::node(&folder.path().join(format!("store-{rank}")), None);
    let nodes = [node(0), node(1)];
    let addresses = nodes.each_ref().map(Running::address).join(",");
    succeed(&["push", path(&set), "--to", &addresses]);
    let ask = |more: &[&str]| {
        let options = [path(&set), "--nodes", &addresses, "--json"];
        doctor(folder.path(), &[&options, more].concat())
    };
    let output = ask(&["--self-test"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let found = reports(&output);
    for (index, node) in nodes.iter().enumerate() {
        assert_eq!(found[index]["of"], format!("node {}", node.address()));
        assert_eq!(check(&found[index], "machine").0, "passed");
        assert_eq!(check(&found[index], "cpu kernels").0, "passed");
    }
    // The set is served under its folder's name, not its model's.
    let (state, detail) = check(&found[2], "tokens per second");
    assert!(state == "passed" && detail.contains("tokens per second after"), "{detail}");
    let [first, second] = nodes;
    second.kill();
    let output = ask(&[]);
    assert_eq!(output.status.code(), Some(1));
    let found = reports(&output);
    assert_eq!(check(&found[0], "machine").0, "passed", "the other node is still asked");
    let (state, detail) = check(&found[1], "node");
    assert!(state == "failed" && detail.contains("could not connect"), "{detail}");
    drop(first);
}

#[test]
fn the_cluster_s_doctor_asks_nodes_and_their_server() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let nodes = ["a", "b"].map(|store| Running::node(&folder.path().join(store), None));
    let [a, b] = nodes.each_ref().map(Running::address);
    let unheld = shardpack().args(["cluster", "doctor", &a, &b]).output().unwrap();
    assert!(text(&unheld.stderr).contains("push a set to it first"), "{}", text(&unheld.stderr));
    succeed(&["push", path(&set), "--to", &[a.as_str(), &b].join(",")]);
    let server = Running::serve(&set, &["--nodes", &[a.as_str(), &b].join(",")]);
    let asked = ["cluster", "doctor", &a, &b, "--server", &server.url(), "--json"];
    let output = shardpack().args(asked).output().unwrap();
    // Two nodes of one machine have no cable.
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let json: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    assert_eq!(json["nodes"][1]["name"], b.as_str());
    assert_eq!(json["nodes"][0]["facts"]["system"], "linux");
    assert!(json["causes"][0]["problem"].as_str().unwrap().contains("no cable between"), "{json}");
    let measured = &json["measured"][0];
    assert_eq!(
        (&measured["nodes"], &measured["link"]["transport"]),
        (&serde_json::json!([0, 1]), &"tcp".into())
    );
    assert!(measured["link"]["latency_us"].as_f64().unwrap() > 0.0, "{measured}");
    let shown = text(&shardpack().args(["cluster", "doctor", &a, &b]).output().unwrap().stdout);
    assert!(shown.contains("no cable [1]") && shown.contains("[1] no cable"), "{shown}");
    let wire = succeed(&["cluster", "wire", &a, &b]);
    assert!(
        wire.contains("Nothing has been changed") && wire.contains("no cable was found"),
        "{wire}"
    );
}
