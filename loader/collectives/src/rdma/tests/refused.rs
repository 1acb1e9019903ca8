//! Rendezvous that come to nothing, or to less: the channels carry a link over TCP then.

use super::*;
use crate::TcpLink;

/// Both ends' reasons; the channels are tried as links over TCP.
fn declined(cables: [Cables<'_>; 2]) -> [String; 2] {
    declined_over([sockets(), sockets()], cables)
}

fn declined_over(channels: [(Channel, Channel); 2], cables: [Cables<'_>; 2]) -> [String; 2] {
    let mut reasons = Vec::new();
    let links = rendezvous_over(channels, (0, 1), 7, cables).map(|end| match end.unwrap() {
        Connected::Declined { reason, data, control } => {
            reasons.push(reason);
            Box::new(TcpLink::new(data, control).unwrap()) as Box<dyn Link>
        }
        Connected::Rdma(_) => panic!("a link came about"),
    });
    check_everything(&two(links), &[1, 30_000]);
    reasons.try_into().unwrap()
}

fn check_declined(cables: [Cables<'_>; 2], expected: &[&str]) {
    for (side, reason) in declined(cables).into_iter().enumerate() {
        let pair = ["rank 0 and rank 1", "rank 1 and rank 0"][side];
        for expected in expected.iter().chain([&pair]) {
            assert!(reason.contains(expected), "{expected:?} is missing in {reason:?}");
        }
    }
}

fn pair(fabric: &Fabric) -> [Devices; 2] {
    machines(fabric, 2, 1).try_into().map_err(|_| "two machines").unwrap()
}

#[test]
fn a_side_without_devices_declines() {
    let fabric = Fabric::default();
    let [low, high] = pair(&fabric);
    let without = || Cables::Without("it has no verbs library".to_owned());
    check_declined([Cables::Found(&low), without()], &["rank 1: it has no verbs library"]);
    check_declined([without(), Cables::Found(&high)], &["rank 0: it has no verbs library"]);
    check_declined([without(), without()], &["rank 0: it has", "; rank 1: it has"]);
    let none = fabric.devices(&[]);
    let expected = ["rank 0: it has no RDMA device", "rdma_ctl enable"];
    check_declined([Cables::Found(&none), Cables::Found(&high)], &expected);
    assert_eq!(fabric.queue_pairs(), 0);
    assert_eq!(high.0[0].in_use(), (0, 0, 0), "nothing was made for a peer that has nothing");
}

#[test]
fn the_same_inside_tls() {
    let fabric = Fabric::default();
    let [low, high] = pair(&fabric);
    let without = Cables::Without("none".to_owned());
    let reasons = declined_over(channels(), [Cables::Found(&low), without]);
    assert!(reasons[0].ends_with("rank 1: none"), "{}", reasons[0]);
    let cables = [Cables::Found(&low), Cables::Found(&high)];
    let ends = rendezvous_over(channels(), (0, 1), 7, cables).map(linked);
    let groups = two(ends.map(|link| Box::new(link) as Box<dyn Link>));
    check_everything(&groups, &[1, 30_000]);
    groups[1].abort("enough");
    let told = groups[0].barrier(Deadline::after(LONG)).unwrap_err();
    assert_eq!(told, GroupError::Aborted("enough".to_owned()));
}

#[test]
fn ports_without_a_cable_or_an_address_are_named_with_the_remedy() {
    let fabric = Fabric::default();
    let [low, high] = pair(&fabric);
    let cables = || [Cables::Found(&low), Cables::Found(&high)];
    fabric.set_active("r1to0n0", false);
    check_declined(cables(), &["rank 1: connect the cable of r1to0n0"]);
    fabric.set_active("r1to0n0", true);
    fabric.set_address("r1to0n0", None);
    check_declined(cables(), &["rank 1: give the cable an IPv4", "sudo ifconfig r1to0n0 inet 10."]);
    let report = &high.ports()[0];
    assert_eq!((report.is_active, report.mtu_bytes, report.usable), (true, 4096, None));
    assert_eq!(report.gbit_per_s, Some(80.0));
    assert!(report.remedy.as_ref().unwrap().contains("sudo ifconfig"));
    fabric.set_address("r1to0n0", Some(Ipv4Addr::new(10, 99, 0, 2)));
    check_declined(cables(), &["no cable has both ends in one subnet", "ifconfig"]);
    assert_eq!(fabric.queue_pairs(), 0);
}

#[test]
fn an_address_that_comes_late_is_waited_for() {
    let fabric = Fabric::default();
    let [low, high] = pair(&fabric);
    fabric.set_late_address("r1to0n0", Ipv4Addr::new(10, 0, 16, 2));
    let links = rendezvous((0, 1), 7, [Cables::Found(&low), Cables::Found(&high)]).map(linked);
    assert_eq!(links[1].cables(), ["r1to0n0"]);
}

#[test]
fn single_cables_with_addresses_that_they_gave_themselves_pair_up() {
    let fabric = Fabric::default();
    let [low, high] = pair(&fabric);
    fabric.set_address("r0to1n0", Some(Ipv4Addr::new(169, 254, 3, 4)));
    fabric.set_address("r1to0n0", Some(Ipv4Addr::new(169, 254, 200, 9)));
    let links = rendezvous((0, 1), 7, [Cables::Found(&low), Cables::Found(&high)]).map(linked);
    assert_eq!(links[1].cables(), ["r1to0n0"]);
}

#[test]
fn a_device_without_a_free_queue_pair_declines() {
    let fabric = Fabric::default();
    let [low, high] = pair(&fabric);
    fabric.occupy("r1to0n0", 9);
    let expected = ["rank 1: r1to0n0: ibv_create_qp failed", "busy"];
    check_declined([Cables::Found(&low), Cables::Found(&high)], &expected);
    assert_eq!(fabric.queue_pairs(), 0);
    for devices in [&low, &high] {
        assert_eq!(devices.0[0].in_use(), (1, 0, 0));
    }
}

#[test]
fn a_cable_that_carries_nothing_is_left_out() {
    let fabric = Fabric::default();
    let [low, high]: [Devices; 2] = machines(&fabric, 2, 2).try_into().ok().unwrap();
    fabric.cut("r0to1n0");
    let cables = || [Cables::Found(&low), Cables::Found(&high)];
    let links = rendezvous((0, 1), 7, cables()).map(linked);
    assert_eq!(links[0].cables(), ["r0to1n1"]);
    assert_eq!(links[1].cables(), ["r1to0n1"]);
    drop(links);
    fabric.cut("r1to0n1");
    check_declined(cables(), &["r0to1n0: no message came through the cable to r1to0n0"]);
    assert_eq!(fabric.queue_pairs(), 0);
}

#[test]
fn a_peer_that_does_not_answer_is_an_error_at_the_deadline() {
    let ((data, _kept), (control, _)) = (sockets(), sockets());
    let pair = Pair { rank: 0, peer: 3, epoch: 1 };
    let soon = Deadline::after(Duration::from_millis(100));
    let cables = Cables::Without("none".to_owned());
    let shape = Shape::for_vectors(VECTOR_BYTES);
    let Err(error) = connect(pair, &shape, &cables, (data, control), soon) else {
        panic!("nobody answered");
    };
    assert!(error.to_string().starts_with("rank 3 did not answer"), "{error}");
}
