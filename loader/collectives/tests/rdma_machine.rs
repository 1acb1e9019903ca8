//! Groups over real verbs, in the virtual machine of `tests/rdma_vm.sh`: what `tests/rdma.sh` runs. Ranks
//! of even number use the device `rxe_a`, the others `rxe_b`. Tests pull the cable between both and make
//! it lose packets, so they run one after the other.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests fail loudly and print measurements"
)]

#[path = "../../../tests/harness/skip.rs"]
#[expect(dead_code, reason = "these tests need no MLX")]
mod skip;

#[path = "rdma_machine/ranks.rs"]
mod ranks;

use std::{
    env, fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use half::bf16;
use ranks::{Formed, Process, form_all, on_all};
use shardpack_collectives::{Deadline, Group, GroupError, LinkedGroup};

/// Longer than any call may take in there.
const LONG: Duration = Duration::from_mins(1);

/// The deadline of a step that may fail, some hundred times what it takes.
const STEP: Duration = Duration::from_millis(500);

/// The same where processes take part, which other work of the machine may keep from a processor: who is
/// late by its fault must not be blamed. Their own steps take longer.
const PROCESS_STEP: Duration = Duration::from_millis(1500);

fn is_machine() -> bool {
    let found = env::var_os("SHARDPACK_IN_RDMA_VM").is_some();
    if !found {
        skip::skip("rdma", "not in the virtual machine of tests/rdma_vm.sh");
    }
    found
}

fn run(program: &str, arguments: &str) {
    let done = Command::new(program).args(arguments.split(' ')).status().unwrap();
    assert!(done.success(), "{program} {arguments}: {done}");
}

/// A value whose sums depend on their order.
fn value(rank: u32, index: usize) -> f32 {
    let mixed = (u64::from(rank) << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let scale = [1.0, 1e-4, 1e4, 3e7][(mixed >> 13) as usize % 4];
    ((mixed >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
}

fn values(rank: u32, len: usize) -> Vec<f32> {
    (0..len).map(|index| value(rank, index)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The sum of all ranks, as bits.
fn sum(group: &dyn Group, len: usize, timeout: Duration) -> Result<Vec<u32>, GroupError> {
    let mut values = values(group.rank(), len);
    group.all_reduce_sum(&mut values, Deadline::after(timeout))?;
    Ok(bits(&values))
}

/// The sum of groups in memory, as bits.
fn sum_in_memory(size: u32, len: usize) -> Vec<u32> {
    let groups = LinkedGroup::in_memory(size, 0).unwrap();
    on_all(&groups, |group| sum(group, len, LONG).unwrap()).remove(0)
}

/// Sizes in bytes of a thousand rounds: every one from 4 bytes to 4 MiB, and the larger the fewer, since
/// an emulated device moves some 30 MB a second.
fn rounds() -> Vec<usize> {
    let mut sizes = Vec::new();
    for (bytes, count) in [
        (4, 400),
        (1 << 10, 300),
        (4 << 10, 180),
        (16 << 10, 90),
        (64 << 10, 24),
        (256 << 10, 4),
        (1 << 20, 1),
        (4 << 20, 1),
    ] {
        sizes.extend([bytes].repeat(count));
    }
    assert_eq!(sizes.len(), 1000);
    sizes
}

/// One collective of `bytes` bytes; what this rank has then.
type Collective = fn(&LinkedGroup, usize) -> Vec<u8>;

const COLLECTIVES: [(&str, Collective); 6] = [
    ("all-reduce", |group, bytes| {
        let mut values = values(group.rank(), bytes / 4);
        group.all_reduce_sum(&mut values, Deadline::after(LONG)).unwrap();
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }),
    ("all-reduce in bf16", |group, bytes| {
        let mut values: Vec<_> =
            (0..bytes / 2).map(|it| bf16::from_f32(value(group.rank(), it))).collect();
        group.sum_bf16_among(0..group.size(), &mut values, Deadline::after(LONG)).unwrap();
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }),
    ("all-gather", |group, bytes| {
        // Of all ranks together, so that no collective moves more than the others.
        let mine = vec![group.rank() as u8 + 1; bytes / group.size() as usize];
        group.all_gather(&mine, Deadline::after(LONG)).unwrap().concat()
    }),
    ("broadcast", |group, bytes| {
        let root = bytes as u32 / 4 % group.size();
        let mut found = if group.rank() == root { vec![7; bytes] } else { Vec::new() };
        group.broadcast(root, &mut found, Deadline::after(LONG)).unwrap();
        found
    }),
    ("barrier", |group, _| {
        group.barrier(Deadline::after(LONG)).unwrap();
        Vec::new()
    }),
    ("send and receive", |group, bytes| {
        let (last, mut found) = (group.size() - 1, Vec::new());
        if group.rank() == 0 {
            group.send(last, &vec![9; bytes], Deadline::after(LONG)).unwrap();
        } else if group.rank() == last {
            group.receive(0, &mut found, Deadline::after(LONG)).unwrap();
        }
        found
    }),
];

#[test]
fn a_thousand_rounds_of_every_collective_have_the_bits_of_memory() {
    if !is_machine() {
        return;
    }
    let rounds = rounds();
    for size in 2..=4 {
        let Formed { groups, over_rdma } = form_all(size, 1);
        assert_eq!(over_rdma, size * (size - 1), "every link is over RDMA");
        let memory = LinkedGroup::in_memory(size, 0).unwrap();
        for (name, collective) in COLLECTIVES {
            let start = Instant::now();
            let mut distinct = rounds.clone();
            distinct.dedup();
            let work = |group: &LinkedGroup| -> Vec<Vec<u8>> {
                distinct.iter().map(|bytes| collective(group, *bytes)).collect()
            };
            let expected = on_all(&memory, work);
            on_all(&groups, |group| {
                let expected = &expected[group.rank() as usize];
                for bytes in &rounds {
                    let index = distinct.iter().position(|it| it == bytes).unwrap();
                    let found = collective(group, *bytes);
                    assert!(found == expected[index], "{name} of {bytes} bytes, {size} ranks");
                }
            });
            println!("{size} ranks, {name}: {:.1} s", start.elapsed().as_secs_f64());
        }
    }
}

fn blames(error: &GroupError, peer: u32) -> bool {
    match error {
        GroupError::Timeout { rank, .. }
        | GroupError::Lost { rank, .. }
        | GroupError::Link { rank, .. }
        | GroupError::OutOfStep { rank, .. } => *rank == peer,
        // This rank is the one that the other blames: a lost message is the fault of neither.
        GroupError::Aborted(reason) => reason.contains(&format!("rank {peer} reported this rank")),
    }
}

#[test]
fn lost_packets_end_a_step_by_its_deadline_and_the_next_epoch_is_right() {
    if !is_machine() {
        return;
    }
    let expected = sum_in_memory(2, 1024);
    let (mut epoch, mut failed) = (1, 0);
    let mut formed = form_all(2, epoch);
    assert_eq!(formed.over_rdma, 2);
    run("tc", "qdisc add dev veth_a root netem loss 1%");
    for round in 0..200 {
        let found = on_all(&formed.groups, |group| sum(group, 1024, STEP));
        if found.iter().all(Result::is_ok) {
            assert!(found.into_iter().all(|found| found.unwrap() == expected), "round {round}");
            continue;
        }
        failed += 1;
        for (found, peer) in found.iter().zip([1, 0]) {
            match found {
                Ok(found) => assert!(*found == expected, "round {round}"),
                Err(error) => assert!(blames(error, peer), "round {round}: {error}"),
            }
        }
        // The first message may be lost too; such a group is over TCP, and steps go on.
        epoch += 1;
        formed = form_all(2, epoch);
        let found = on_all(&formed.groups, |group| sum(group, 1024, STEP));
        if let [Ok(one), Ok(other)] = &found[..] {
            assert!(*one == expected && *other == expected, "round {round}, after forming");
        }
        if formed.over_rdma == 0 || found.iter().any(Result::is_err) {
            epoch += 1;
            formed = form_all(2, epoch);
        }
    }
    run("tc", "qdisc del dev veth_a root");
    println!("{failed} of 200 steps failed, {epoch} epochs");
    assert!(failed > 0, "nothing was lost");
}

/// Ticks of a hundredth of a second that a process has used.
fn ticks(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    // proc(5): utime and stime are the fields 14 and 15, and the name is the second.
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Processes of the ranks 1 and 2 beside rank 0 here; `stop` ends rank 2 in the middle of steps.
fn check_lost_process(stop: impl Fn(&mut Process)) {
    let mut processes = [1, 2].map(|rank| Process::start(rank, 3));
    let expected = sum_in_memory(3, 4096);
    for epoch in 1..=2 {
        let group = ranks::form_with(&mut processes, epoch);
        if epoch == 1 {
            let before = [0, 1].map(|index| ticks(processes[index].id()));
            thread::sleep(Duration::from_secs(5));
            for (before, process) in before.into_iter().zip(&processes) {
                let used = ticks(process.id()) - before;
                println!("an idle rank used {used} hundredths of a second in 5 s");
                assert!(used < 5, "{used} hundredths of a second in 5 s");
            }
        }
        for process in &mut processes {
            process.tell("steps");
        }
        for _ in 0..20 {
            assert!(sum(&group, 4096, LONG).unwrap() == expected, "epoch {epoch}");
        }
        if epoch == 2 {
            break;
        }
        stop(&mut processes[1]);
        let start = Instant::now();
        let error = (0..1000).find_map(|_| sum(&group, 4096, PROCESS_STEP).err());
        let error = error.expect("a step without rank 2 fails");
        println!("after {:?}: {error}", start.elapsed());
        assert!(blames(&error, 2), "{error}");
        let seen = processes[0].read_line();
        assert!(seen.contains("rank 2"), "rank 1 saw {seen:?}");
        drop(group);
        processes[1] = Process::start(2, 3);
    }
}

#[test]
fn a_killed_process_is_noticed_and_replaced() {
    if is_machine() {
        check_lost_process(Process::kill);
    }
}

#[test]
fn a_stopped_process_is_noticed_and_replaced() {
    if is_machine() {
        check_lost_process(|process| run("kill", &format!("-STOP {}", process.id())));
    }
}

/// Rounds that are measured.
const ROUNDS: usize = 300;

#[test]
fn an_all_reduce_is_measured_beside_the_links_ping_pong() {
    if !is_machine() {
        return;
    }
    let groups = form_all(2, 1).groups;
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let reduced = on_all(&groups, |group| {
        let mut values = vec![1e-9; 4096];
        let times = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            group.all_reduce_sum(&mut values, Deadline::after(LONG)).unwrap();
            start.elapsed()
        });
        median(times.collect())
    })[0];
    // Both directions at once against one after the other, which a round trip is.
    let passed = ranks::ping_pong(16 << 10, ROUNDS);
    let round_trip = median(passed);
    println!("16 KiB: all-reduce {reduced:?}, round trip of the link {round_trip:?}");
}

#[test]
fn tcp_takes_over_where_the_cable_is_pulled() {
    // Last: the machine has no cable after this. `tests/rdma.sh` runs it by its name.
    if !is_machine() || env::var_os("SHARDPACK_PULL_CABLE").is_none() {
        return;
    }
    let expected = sum_in_memory(2, 4096);
    let formed = form_all(2, 1);
    assert_eq!(formed.over_rdma, 2);
    run("ip", "link set veth_a down");
    let start = Instant::now();
    for (found, peer) in on_all(&formed.groups, |group| sum(group, 4096, STEP)).iter().zip([1, 0]) {
        let error = found.as_ref().expect_err("nothing passes a cable that is pulled");
        println!("after {:?}: {error}", start.elapsed());
        assert!(blames(error, peer), "{error}");
    }
    let Formed { groups, over_rdma } = form_all(2, 2);
    assert_eq!(over_rdma, 0, "a link without a cable");
    for found in on_all(&groups, |group| sum(group, 4096, LONG)) {
        assert!(found.unwrap() == expected);
    }
}

/// One rank in a process of its own, as told on its input.
#[test]
#[ignore = "a process of the tests above"]
fn rank_in_a_process() {
    ranks::obey();
}
