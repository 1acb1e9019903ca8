//! Groups of real processes that lose ranks and form again.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use shardpack_engine_api::{EngineHandle, EngineState, FinishReason};

use super::{
    fake::{Answer, DEVICE_FAILURE, End, LONG, NOTICED, eventually, request},
    processes::{signal, spawn, supervise_nodes},
};
use crate::{
    Node, RankProcess, RecoveryOptions, Restart, ServeError, Supervisor, SupervisorOptions,
    Survivors,
};

/// Processes that were started after the first, by rank, in order.
type Started = Arc<Mutex<Vec<(u32, u32)>>>;

fn options(survivors: Survivors) -> SupervisorOptions {
    let recovery = RecoveryOptions {
        attempts: 3,
        first_pause: Duration::from_millis(50),
        longest_pause: Duration::from_millis(100),
        // Every group counts as steady, so that each loss of a test has all its attempts.
        steady: Duration::ZERO,
        survivors,
    };
    let stop_timeout = Duration::from_secs(3);
    SupervisorOptions { stop_timeout, recovery, ..SupervisorOptions::default() }
}

fn restart(rank: u32, ranks: u32, started: &Started) -> Restart {
    let started = Arc::clone(started);
    Arc::new(move |_| {
        let node = spawn(rank, ranks);
        let process = node.process.as_ref().map(RankProcess::id).unwrap_or_default();
        started.lock().unwrap().push((rank, process));
        Ok((node.announcement, node.process))
    })
}

struct Group {
    supervisor: Supervisor,
    handle: EngineHandle,
    /// The process of each rank.
    processes: Vec<u32>,
    started: Started,
}

impl Group {
    fn start(ranks: u32, survivors: Survivors) -> Self {
        let started = Started::default();
        let node =
            |rank| Node { restart: Some(restart(rank, ranks, &started)), ..spawn(rank, ranks) };
        let nodes = (0..ranks).map(node).collect();
        let (supervisor, handle, processes) = supervise_nodes(nodes, options(survivors));
        Self { supervisor, handle, processes, started }
    }

    /// Takes note of the processes that were started since.
    fn started(&mut self) -> Vec<u32> {
        let started = std::mem::take(&mut *self.started.lock().unwrap());
        for (rank, process) in &started {
            self.processes[*rank as usize] = *process;
        }
        started.into_iter().map(|(rank, _)| rank).collect()
    }

    /// Some ranks get a signal while two requests run: both fail at once, and another is served
    /// after the group has formed again.
    fn check_loss(&mut self, lost: &[u32], which: &str) {
        let answers =
            [100, 5000].map(|first| Answer::submit(&self.handle, request(first, u32::MAX)));
        for (answer, first) in answers.iter().zip([101, 5001]) {
            assert_eq!(answer.first_token(), first);
        }
        let begun = Instant::now();
        for rank in lost {
            assert!(signal(self.processes[*rank as usize], which));
        }
        for answer in answers {
            let (_, end) = answer.finish();
            let End::Failed { message, retryable: true } = end else { panic!("not {end:?}") };
            let names = |rank: &u32| message.starts_with(&format!("rank {rank} (node-{rank}): "));
            assert!(lost.iter().any(names), "{message}");
        }
        assert!(begun.elapsed() < NOTICED, "{:?}", begun.elapsed());
        self.supervisor.wait_until_ready(LONG).unwrap();
        assert_eq!(self.handle.status().state, EngineState::Ready);
        assert_eq!(self.handle.status().active_requests, 0);
        let (tokens, end) = Answer::submit(&self.handle, request(7, 5)).finish();
        assert_eq!((tokens, end), (vec![8, 9, 10, 11, 12], End::Finished(FinishReason::Length)));
    }

    fn stop(mut self) {
        self.started();
        self.supervisor.stop();
        for process in self.processes {
            assert!(!signal(process, "-0"), "process {process} is left");
        }
    }
}

#[test]
fn a_killed_rank_is_started_again_and_the_others_stay() {
    let mut group = Group::start(3, Survivors::Stay);
    // The leader too, one rank twice, and two at once.
    for lost in [&[1][..], &[0], &[2], &[2], &[0, 1]] {
        group.check_loss(lost, "-KILL");
        let mut started = group.started();
        started.sort_unstable();
        assert_eq!(started, lost);
    }
    group.stop();
}

#[test]
fn a_rank_whose_device_failed_gets_a_new_process() {
    let mut group = Group::start(2, Survivors::Stay);
    let failed = group.processes[1];
    let (_, end) = Answer::submit(&group.handle, request(DEVICE_FAILURE - 1, 1)).finish();
    let End::Failed { message, retryable: true } = end else { panic!("not {end:?}") };
    assert!(message.starts_with("rank 1 (node-1): "), "{message}");
    group.supervisor.wait_until_ready(LONG).unwrap();
    assert_eq!(group.started(), [1], "rank 0 keeps its process");
    assert!(!signal(failed, "-0"), "the failed process is left");
    let (tokens, end) = Answer::submit(&group.handle, request(7, 2)).finish();
    assert_eq!((tokens, end), (vec![8, 9], End::Finished(FinishReason::Length)));
    group.stop();
}

#[test]
fn a_stopped_rank_is_replaced() {
    let mut group = Group::start(2, Survivors::Stay);
    let stopped = group.processes[1];
    group.check_loss(&[1], "-STOP");
    assert_eq!(group.started(), [1]);
    assert!(!signal(stopped, "-0"), "the stopped process is left");
    group.stop();
}

#[test]
fn collectives_without_deadlines_restart_every_rank() {
    let mut group = Group::start(3, Survivors::Restart);
    let before = group.processes.clone();
    group.check_loss(&[1], "-KILL");
    let mut started = group.started();
    started.sort_unstable();
    assert_eq!(started, [0, 1, 2]);
    assert!(!before.into_iter().any(|process| signal(process, "-0")));
    group.stop();
}

#[test]
fn requests_are_refused_until_the_group_is_back() {
    let (ranks, started) = (2, Started::default());
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let again = restart(1, ranks, &started);
    let wait = Mutex::new(wait);
    let slow: Restart = Arc::new(move |recovery| {
        wait.lock().unwrap().recv_timeout(LONG).unwrap();
        again(recovery)
    });
    let nodes = vec![
        Node { restart: Some(restart(0, ranks, &started)), ..spawn(0, ranks) },
        Node { restart: Some(slow), ..spawn(1, ranks) },
    ];
    let (supervisor, handle, processes) = supervise_nodes(nodes, options(Survivors::Stay));
    assert!(signal(processes[1], "-KILL"));
    let is_starting = || matches!(handle.status().state, EngineState::Starting(_));
    eventually("the loss is noticed", is_starting);
    let EngineState::Starting(text) = handle.status().state else { panic!() };
    assert!(text.starts_with("rank 1 (node-1): "), "{text}");
    assert!(text.contains("started again (attempt 1 of 3)"), "{text}");
    assert!(supervisor.failure().is_none());
    let (_, end) = Answer::submit(&handle, request(1, 1)).finish();
    let message = "a lost rank is being replaced".to_owned();
    assert_eq!(end, End::Failed { message, retryable: true });
    go.send(()).unwrap();
    supervisor.wait_until_ready(LONG).unwrap();
    assert_eq!(Answer::submit(&handle, request(1, 1)).finish().0, [2]);
}

#[test]
fn a_rank_that_cannot_be_started_ends_the_group_with_a_clear_error() {
    let tries = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&tries);
    let never: Restart = Arc::new(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        Err("no route to host".to_owned())
    });
    let node = |rank| Node { restart: Some(Arc::clone(&never)), ..spawn(rank, 2) };
    let nodes = (0..2).map(node).collect();
    let (supervisor, handle, processes) = supervise_nodes(nodes, options(Survivors::Stay));
    assert!(signal(processes[1], "-KILL"));
    eventually("the group is given up", || supervisor.failure().is_some());
    let expected = "given up after 3 attempts to form the group again: rank 1 (node-1): it cannot \
                    be started again: no route to host";
    assert_eq!(supervisor.failure().unwrap().to_string(), expected);
    assert!(matches!(supervisor.failure(), Some(ServeError::GivenUp { attempts: 3, .. })));
    assert_eq!(handle.status().state, EngineState::Failed(expected.to_owned()));
    assert_eq!(tries.load(Ordering::SeqCst), 3);
    supervisor.stop();
    assert!(!processes.into_iter().any(|process| signal(process, "-0")));
}
