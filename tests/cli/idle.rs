//! What a formed group costs while nobody asks it anything, in `SHARDPACK_IDLE` seconds.
#![cfg(target_os = "linux")]

use std::{fs, thread, time::Duration};

use crate::{
    cluster::{Scene, TLS},
    running::{Running, ask},
    sets::kjv_for_two,
};

/// Most processor time of a process, in hundredths of one core.
const MOST_PERCENT: f64 = 1.0;

/// Processor time of a process, in clock ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The name may hold anything; what follows it does not.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}

#[test]
#[expect(clippy::print_stdout, reason = "the figures are worth their lines")]
fn a_formed_and_idle_group_costs_next_to_nothing() {
    let scene = Scene::new();
    let set = kjv_for_two(&scene.store("set"));
    let nodes = scene.pair(&TLS);
    scene.push(&set);
    let server = Running::serve(&set, &[&["--nodes", "a,b"], &scene.choice()[..]].concat());
    assert_eq!(ask(&server.url(), "John 11:35"), "Jesus wept.");
    let ranks = nodes.iter().flat_map(Running::children).map(|pid| ("rank", pid));
    let nodes = nodes.iter().map(|node| ("node", node.id()));
    let watched: Vec<_> = ranks.chain(nodes).chain([("server", server.id())]).collect();
    assert_eq!(watched.len(), 5);
    // Shares of a processor are for a machine that has nothing else to do; how a rank waits is proved where it waits.
    let Ok(seconds) = std::env::var("SHARDPACK_IDLE") else { return };
    let seconds: u64 = seconds.parse().unwrap();
    // What follows an answer is over by then.
    thread::sleep(Duration::from_secs(2));
    let before: Vec<u64> = watched.iter().map(|(_, pid)| ticks(*pid)).collect();
    thread::sleep(Duration::from_secs(seconds));
    for ((name, pid), before) in watched.iter().zip(before) {
        let percent = (ticks(*pid) - before) as f64 / seconds as f64;
        println!("{name}: {percent:.2} % of a core over {seconds} s");
        assert!(percent <= MOST_PERCENT, "{name}: {percent} %");
    }
}
