//! What goes wrong on the way.

use super::{super::fabric::Fault, *};

/// Rank 0's broadcasts, of which one meets a fault; the first error of rank 1.
fn broken_by(fault: Fault, len: usize) -> GroupError {
    let fabric = Fabric::default();
    let groups = form(&machines(&fabric, 2, 1), 7);
    on_all(&groups, |group| group.barrier(Deadline::after(LONG)).unwrap());
    fabric.fault(3, fault);
    let errors = on_all(&groups, |group| {
        let mut rounds = 0..20;
        rounds.find_map(|round: u8| {
            let mut bytes = vec![round; len];
            group.broadcast(0, &mut bytes, Deadline::after(LONG)).err()
        })
    });
    let error = errors[1].clone().unwrap();
    let GroupError::Link { rank: 0, .. } = error else {
        panic!("{fault:?}: {error}");
    };
    error
}

fn check_broken(fault: Fault, expected: &str) {
    for len in [10, 3000, 2_000_000] {
        let error = broken_by(fault, len).to_string();
        assert!(error.contains(expected), "{fault:?} with {len} bytes: {error}");
    }
}

#[test]
fn a_lost_message_is_found_by_the_next_one() {
    check_broken(Fault::Lose, "lost on the way");
}

#[test]
fn a_damaged_message_is_found_by_its_checksum() {
    check_broken(Fault::Damage(20), "damaged on the way");
    check_broken(Fault::Damage(85), "damaged on the way");
}

#[test]
fn a_doubled_message_is_found_by_its_number() {
    check_broken(Fault::Double, "came twice");
}

#[test]
fn a_message_of_other_frames_fails_the_queue() {
    check_broken(Fault::Lengthen, "status 1");
}

#[test]
fn the_last_message_of_all_is_missed_at_the_deadline() {
    let fabric = Fabric::default();
    let groups = form(&machines(&fabric, 2, 1), 7);
    fabric.fault(0, Fault::Lose);
    let ends = on_all(&groups, |group| {
        let timeout = if group.rank() == 0 { LONG } else { Duration::from_millis(300) };
        let end = group.broadcast(0, &mut vec![1], Deadline::after(timeout));
        end.map_err(|error| error.to_string())
    });
    assert_eq!(ends[0], Ok(()));
    assert!(ends[1].as_ref().unwrap_err().starts_with("rank 0 did not answer within "));
}

#[test]
fn a_message_that_is_late_is_waited_for() {
    let fabric = Fabric::default();
    let groups = form(&machines(&fabric, 2, 2), 7);
    for after in [0, 2, 5, 9] {
        // On one of two cables: the messages of the other one overtake it.
        fabric.fault(after, Fault::Delay(Duration::from_millis(50)));
        check_everything(&groups, &[10, 500_000]);
    }
}

#[test]
fn a_rank_that_receives_late_is_waited_for_until_the_deadline() {
    let fabric = Fabric::default();
    let groups = form(&machines(&fabric, 2, 1), 7);
    let rounds = 60;
    let broadcasts = |group: &LinkedGroup, timeout| {
        (0..rounds).find_map(|round: u8| {
            let mut bytes = vec![round; 5000];
            let end = group.broadcast(0, &mut bytes, Deadline::after(timeout)).err();
            assert!(end.is_some() || bytes == vec![round; 5000]);
            end
        })
    };
    let ends = on_all(&groups, |group| {
        if group.rank() == 1 {
            // The lateness under test: the messages of the first rounds wait, the others for credit.
            thread::sleep(Duration::from_millis(300));
        }
        broadcasts(group, LONG)
    });
    assert_eq!(ends, [None, None]);
    // Rank 1 receives nothing before rank 0 has given up.
    let end = broadcasts(&groups[0], Duration::from_millis(100)).unwrap();
    assert!(matches!(end, GroupError::Timeout { rank: 1, .. }), "{end}");
    assert_eq!(fabric.waited(), 0, "nothing is sent that has no RECV");
}

#[test]
fn a_rank_that_leaves_wakes_who_waits_for_it() {
    let fabric = Fabric::default();
    let mut groups = form(&machines(&fabric, 3, 1), 7);
    let last = groups.pop().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || drop(last));
        for error in on_all(&groups, |group| group.barrier(Deadline::after(LONG)).unwrap_err()) {
            assert!(matches!(error, GroupError::Lost { rank: 2, .. }), "{error}");
        }
    });
}

#[test]
fn an_abort_reaches_ranks_that_send_and_that_receive() {
    let fabric = Fabric::default();
    let groups = form(&machines(&fabric, 3, 1), 7);
    let errors = on_all(&groups, |group| match group.rank() {
        // More than the lanes hold: it waits for credit.
        0 => {
            let bytes = vec![1; 20 << 20];
            let _ = group.broadcast(0, &mut bytes.clone(), Deadline::after(LONG));
            group.barrier(Deadline::after(LONG)).unwrap_err()
        }
        1 => group.barrier(Deadline::after(LONG)).unwrap_err(),
        _ => {
            group.abort("enough");
            GroupError::Aborted("enough".to_owned())
        }
    });
    // Rank 1 may see rank 0's broadcast where it expects a barrier before it is told.
    assert_eq!(errors[2], GroupError::Aborted("enough".to_owned()));
    for error in &errors[..2] {
        let is_told = matches!(error, GroupError::Aborted(_));
        assert!(is_told || matches!(error, GroupError::OutOfStep { .. }), "{error}");
    }
}

#[test]
fn a_cable_that_goes_dead_without_a_word_is_missed_at_the_deadline() {
    let fabric = Fabric::default();
    let groups = form(&machines(&fabric, 2, 1), 7);
    fabric.cut("r0to1n0");
    let soon = Duration::from_millis(300);
    let errors =
        on_all(&groups, |group| group.barrier(Deadline::after(soon)).unwrap_err().to_string());
    assert!(errors.iter().any(|error| error.contains("did not answer within ")), "{errors:?}");
}
