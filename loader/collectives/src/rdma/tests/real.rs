//! Groups over the devices of this machine. `$SHARDPACK_RDMA_DEVICES` names those to use, separated
//! by commas; rank `r` of a group takes the one of number `r`, round and round.

use std::env;

use super::*;
use crate::skip::skip;

/// The devices' names, or `None` after it has been said why there are none.
#[track_caller]
fn names() -> Option<Vec<String>> {
    if let Ok(names) = env::var("SHARDPACK_RDMA_DEVICES") {
        return Some(names.split(',').map(str::to_owned).collect());
    }
    let reason = match Devices::open() {
        Ok(devices) if devices.ports().iter().any(|port| port.remedy.is_none()) => {
            let usable = devices.ports().into_iter().filter(|port| port.remedy.is_none());
            return Some(usable.map(|port| port.device).collect());
        }
        Ok(devices) if devices.names().is_empty() => "no RDMA device".to_owned(),
        Ok(devices) => format!("no RDMA port is usable: {:?}", devices.ports()),
        Err(error) => error.to_string(),
    };
    skip("rdma", &reason);
    None
}

fn machines_of(names: &[String], size: usize) -> Vec<Devices> {
    let of = |rank: usize| Devices::open_only(&[&names[rank % names.len()]]).unwrap();
    (0..size).map(of).collect()
}

#[test]
fn groups_over_real_devices_have_the_bytes_of_memory() {
    let Some(names) = names() else { return };
    for size in [2, 3, 4] {
        let machines = machines_of(&names, size);
        for devices in &machines {
            assert_eq!(devices.names().len(), 1, "{names:?}");
        }
        check_everything(&form(&machines, 7), &[1, 1468, 1469, 7_000, 16_385, 70_001]);
    }
    let machines = machines_of(&names, 2);
    check_everything(&form(&machines, 8), &[1 << 20]);
}

#[test]
fn real_devices_are_left_as_they_were_after_each_group() {
    let Some(names) = names() else { return };
    let machines = machines_of(&names, 2);
    for epoch in 0..50 {
        check_everything(&form(&machines, epoch), &[100]);
        for devices in &machines {
            assert_eq!(devices.0[0].in_use(), (1, 0, 0), "after epoch {epoch}");
        }
    }
}

#[test]
fn a_rank_that_leaves_real_devices_wakes_who_waits_for_it() {
    let Some(names) = names() else { return };
    let mut groups = form(&machines_of(&names, 3), 7);
    let last = groups.pop().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || drop(last));
        for error in on_all(&groups, |group| group.barrier(Deadline::after(LONG)).unwrap_err()) {
            assert!(matches!(error, GroupError::Lost { rank: 2, .. }), "{error}");
        }
    });
}

#[test]
#[ignore = "needs devices that lose packets: tc qdisc add dev veth_a root netem loss 2%"]
fn losses_on_real_devices_end_the_group_by_the_deadline() {
    let Some(names) = names() else { return };
    let machines = machines_of(&names, 2);
    let mut losses = 0;
    for epoch in 0..10 {
        let [low, high] = [0, 1].map(|rank| Cables::Found(&machines[rank]));
        let ends = rendezvous((0, 1), epoch, [low, high]).map(Result::unwrap);
        let links = ends.map(|end| match end {
            Connected::Rdma(link) => Some(Box::new(link) as Box<dyn Link>),
            // The first message may be lost too.
            Connected::Declined { reason, .. } => {
                assert!(reason.contains("no message came through"), "{reason}");
                None
            }
        });
        let [Some(low), Some(high)] = links else { continue };
        let groups = two([low, high]);
        let soon = Duration::from_millis(500);
        let ends = on_all(&groups, |group| {
            let sum = |_| group.all_reduce_sum(&mut [1.0; 100], Deadline::after(soon)).err();
            (0..100).find_map(sum)
        });
        if let [Some(low), Some(high)] = &ends[..] {
            losses += 1;
            let names = [low, high].map(|error| error.to_string().contains("rank "));
            assert!(names.contains(&true), "{low}; {high}");
        }
    }
    assert!(losses > 0, "nothing was lost");
}
