//! `/stats` of a running server: memory, step time and all-reduce time of every rank.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::tempdir;

use crate::{
    running::{HANG, Running, ask, get},
    sets::kjv_for_two,
};

#[test]
fn every_rank_reports_memory_step_time_and_all_reduce_time() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let server = Running::serve(&set, &[]);
    let stats = server.url().replace("/v1", "/stats");
    let deadline = Instant::now() + HANG;
    loop {
        ask(&server.url(), "John 3:16");
        let (status, text) = get(&stats);
        assert_eq!(status, 200, "{text}");
        let found: Value = serde_json::from_str(&text).unwrap();
        let nodes = found["nodes"].as_array().unwrap();
        let tells = |node: &Value, key: &str| node[key].as_f64().is_some_and(|value| value > 0.0);
        let has_memory = |node| !cfg!(target_os = "linux") || tells(node, "memory_bytes");
        let tells_all =
            |node| has_memory(node) && tells(node, "step_ms") && tells(node, "allreduce_ms");
        if nodes.len() == 2 && nodes.iter().all(tells_all) {
            let slower = |node: &Value| node["step_ms"].as_f64() > node["allreduce_ms"].as_f64();
            assert!(nodes.iter().all(slower), "sums are a part of their step: {found}");
            break;
        }
        assert!(Instant::now() < deadline, "never told: {found}");
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.terminate(), Some(0));
}
