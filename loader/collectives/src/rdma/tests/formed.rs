//! Groups that work.

use proptest::prelude::*;

use super::*;
use crate::frame::{HEADER_BYTES, Header, Op, Scope};

/// 4 bytes to 4 MiB: borders of slots and messages, and of what goes directly.
const LENS: [usize; 9] = [1, 1468, 1469, 1500, 7_000, 16_384, 16_385, 70_001, 1 << 20];

#[test]
fn every_collective_has_the_bytes_of_memory() {
    for (size, cables) in [(2, 1), (2, 2), (3, 1), (4, 1)] {
        let fabric = Fabric::default();
        let machines = machines(&fabric, size, cables);
        check_everything(&form(&machines, 7), &LENS);
        assert_eq!(fabric.waited(), 0, "every SEND found a RECV");
    }
}

#[test]
fn a_root_may_run_ahead_and_its_credits_come_back() {
    let fabric = Fabric::default();
    let groups = form(&machines(&fabric, 2, 1), 7);
    for len in [8, 100_000] {
        on_all(&groups, |group| {
            for round in 0..300_u32 {
                let mut bytes = vec![round as u8; len];
                group.broadcast(0, &mut bytes, Deadline::after(LONG)).unwrap();
                assert!(bytes == vec![round as u8; len]);
            }
        });
    }
    assert_eq!(fabric.waited(), 0, "every SEND found a RECV");
}

#[test]
fn both_cables_carry_large_messages_and_one_small_ones() {
    let fabric = Fabric::default();
    let machines = machines(&fabric, 2, 2);
    let cables = [Cables::Found(&machines[0]), Cables::Found(&machines[1])];
    let links = rendezvous((0, 1), 1, cables).map(linked);
    assert_eq!(links[0].cables(), ["r0to1n0", "r0to1n1"]);
    assert_eq!(links[1].cables(), ["r1to0n0", "r1to0n1"]);
    // A small lane on the first, and a large one on each.
    assert_eq!(fabric.queue_pairs(), 6);
}

#[test]
fn forming_again_leaves_nothing_behind() {
    let fabric = Fabric::default();
    let machines = machines(&fabric, 3, 1);
    for epoch in 0..50 {
        let groups = form(&machines, epoch);
        check_everything(&groups, &[100]);
        drop(groups);
        for device in machines.iter().flat_map(|devices| devices.0.iter()) {
            // One region, which is kept; no queue pair, and nothing lent.
            assert_eq!(device.in_use(), (1, 0, 0), "{} after epoch {epoch}", device.name());
        }
        assert_eq!(fabric.queue_pairs(), 0);
    }
}

fn frame(number: usize, payload_bytes: usize) -> Vec<u8> {
    let header = Header {
        op: Op::Pass,
        scope: Scope::Subgroup,
        from: 0,
        payload_bytes: payload_bytes as u32,
        epoch: 1,
        sequence: number as u64,
    };
    let mut frame = header.encode().to_vec();
    frame.extend((0..payload_bytes).map(|index| (index * 31 + number) as u8));
    frame
}

fn send_all(link: &RdmaLink, sizes: &[usize]) {
    for (number, size) in sizes.iter().enumerate() {
        let frame = frame(number, *size);
        let sent = link.send_now(&frame).unwrap();
        link.send_rest(&frame[sent..], Deadline::after(LONG)).unwrap();
    }
}

fn check_received(link: &RdmaLink, sizes: &[usize]) {
    let mut found = Vec::new();
    for (number, size) in sizes.iter().enumerate() {
        let header = link.receive_header(&mut found, Deadline::after(LONG)).unwrap();
        link.receive_payload(&header, &mut found, Deadline::after(LONG)).unwrap();
        assert_eq!(found.len(), HEADER_BYTES + size);
        assert!(found == frame(number, *size), "frame {number} of {size} bytes");
    }
}

/// Sizes around the borders of small slots, of what takes several of them, and of large ones.
fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let (small, large) = (2 * 4096 - 80 - HEADER_BYTES, 64 * 4096 - 80 - HEADER_BYTES);
    let borders = [0, 1, small, small + 1, 4 * small, 4 * small + 200, large, large + 1, 3 * large];
    proptest::collection::vec(proptest::sample::select(borders.to_vec()), 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn streams_both_ways_arrive_whole_whatever_their_frames(
        cables in 1..=4_u8,
        there in sizes(),
        back in sizes(),
    ) {
        let fabric = Fabric::default();
        let machines = machines(&fabric, 2, cables);
        let cables = [Cables::Found(&machines[0]), Cables::Found(&machines[1])];
        let [low, high] = rendezvous((0, 1), 1, cables).map(linked);
        thread::scope(|scope| {
            scope.spawn(|| send_all(&low, &there));
            scope.spawn(|| send_all(&high, &back));
            scope.spawn(|| check_received(&low, &back));
            check_received(&high, &there);
        });
        prop_assert_eq!(fabric.waited(), 0, "every SEND found a RECV");
    }
}
