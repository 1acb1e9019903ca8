//! Groups of real processes that lose ranks and form again.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
        mpsc::{self, Sender},
    },
    time::Duration,
};

use shardpack_engine_api::{EngineHandle, EngineState, FinishReason};

use super::{
    fake::{Answer, DEVICE_FAILURE, End, IMPATIENT, LONG, NEVER, eventually, patient, request},
    processes::{signal, spawn, supervise_nodes},
};
use crate::{
    Node, RankProcess, RecoveryOptions, Restart, RestartError, ServeError, Supervisor,
    SupervisorOptions, Survivors,
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
        resume_timeout: NEVER,
        survivors,
        ..RecoveryOptions::default()
    };
    SupervisorOptions { recovery, ..patient() }
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

    /// Some ranks are killed while requests run, one of which is submitted afterwards: the end of their processes is
    /// noticed, and all go on in the next group as if nothing had been.
    fn check_killed(&mut self, lost: &[u32]) {
        let submit = |first| (Answer::submit(&self.handle, request(first, u32::MAX)), first);
        let mut answers = vec![submit(100), submit(5000)];
        for (answer, last) in &mut answers {
            *last += 1;
            assert_eq!(answer.next_token(), *last);
        }
        for rank in lost {
            assert!(signal(self.processes[*rank as usize], "-KILL"));
        }
        self.check_goes_on(answers);
    }

    /// The group forms again, in which these requests and another one go on after their last token.
    fn check_goes_on(&mut self, mut answers: Vec<(Answer, u32)>) {
        let submit = |first| (Answer::submit(&self.handle, request(first, u32::MAX)), first);
        // No step has a deadline, but for one that a stopped rank keeps waiting.
        eventually("the loss is noticed", || self.handle.status().state != EngineState::Ready);
        let EngineState::Recovering(text) = self.handle.status().state else { panic!() };
        answers.push(submit(9000));
        self.supervisor.wait_until_ready(LONG).unwrap();
        assert_eq!(self.handle.status().state, EngineState::Ready, "after {text}");
        let until = self.started.lock().unwrap().len();
        assert!(until > 0, "a rank was started");
        for (answer, last) in answers {
            // All that the first group can have given, and what the next one adds.
            let mut known = last;
            for _ in 0..=answer.pending() {
                known += 1;
                assert_eq!(answer.next_token(), known);
            }
            self.handle.cancel(answer.id);
            let (rest, end) = answer.finish();
            assert_eq!(rest, (known + 1..).take(rest.len()).collect::<Vec<_>>());
            assert_eq!(end, End::Finished(FinishReason::Cancelled));
        }
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
        group.check_killed(lost);
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
    assert!(message.ends_with("3 times without a token of this request"), "{message}");
    group.supervisor.wait_until_ready(LONG).unwrap();
    assert_eq!(group.started(), [1, 1, 1], "rank 0 keeps its process");
    assert!(!signal(failed, "-0"), "the failed process is left");
    let (tokens, end) = Answer::submit(&group.handle, request(7, 2)).finish();
    assert_eq!((tokens, end), (vec![8, 9], End::Finished(FinishReason::Length)));
    group.stop();
}

#[test]
fn a_stopped_rank_is_replaced() {
    let mut group = Group::start(2, Survivors::Stay);
    let stopped = group.processes[1];
    assert!(signal(stopped, "-STOP"));
    let waits = Answer::submit(&group.handle, request(IMPATIENT - 1, u32::MAX));
    group.check_goes_on(vec![(waits, IMPATIENT - 1)]);
    assert_eq!(group.started(), [1]);
    assert!(!signal(stopped, "-0"), "the stopped process is left");
    group.stop();
}

#[test]
fn collectives_without_deadlines_restart_every_rank() {
    let mut group = Group::start(3, Survivors::Restart);
    let before = group.processes.clone();
    group.check_killed(&[1]);
    let mut started = group.started();
    started.sort_unstable();
    assert_eq!(started, [0, 1, 2]);
    assert!(!before.into_iter().any(|process| signal(process, "-0")));
    group.stop();
}

/// A group of two that has lost rank 1 while a request ran, and whose rank 1 is started again when it is told to.
struct Waiting {
    supervisor: Supervisor,
    handle: EngineHandle,
    running: Answer,
    go: Sender<()>,
}

impl Waiting {
    fn start(resume_timeout: Duration) -> Self {
        let (ranks, started) = (2, Started::default());
        let (go, wait) = mpsc::channel::<()>();
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
        let mut options = options(Survivors::Stay);
        options.recovery.resume_timeout = resume_timeout;
        let (supervisor, handle, processes) = supervise_nodes(nodes, options);
        let running = Answer::submit(&handle, request(1, u32::MAX));
        running.next_token();
        assert!(signal(processes[1], "-KILL"));
        Self { supervisor, handle, running, go }
    }
}

#[test]
fn requests_wait_until_the_group_is_back() {
    let Waiting { supervisor, handle, running, go } = Waiting::start(NEVER);
    let is_recovering = || matches!(handle.status().state, EngineState::Recovering(_));
    eventually("the loss is noticed", is_recovering);
    let EngineState::Recovering(text) = handle.status().state else { panic!() };
    assert!(text.starts_with("rank 1 (node-1): "), "{text}");
    assert!(text.contains("started again (attempt 1 of 3)"), "{text}");
    assert!(supervisor.failure().is_none());
    let waiting = Answer::submit(&handle, request(1, 1));
    let cancelled = Answer::submit(&handle, request(1, 1));
    handle.cancel(cancelled.id);
    assert_eq!(cancelled.finish().1, End::Finished(FinishReason::Cancelled));
    assert_eq!(handle.status().active_requests, 2);
    go.send(()).unwrap();
    assert_eq!(waiting.finish(), (vec![2], End::Finished(FinishReason::Length)));
    handle.cancel(running.id);
    assert_eq!(running.finish().1, End::Finished(FinishReason::Cancelled));
}

#[test]
fn requests_do_not_wait_for_ever_for_the_group() {
    let Waiting { supervisor, handle, running, go } = Waiting::start(Duration::from_secs(1));
    let message = "a lost rank was not replaced within 1 s".to_owned();
    assert_eq!(running.finish().1, End::Failed { message, retryable: true });
    let (_, end) = Answer::submit(&handle, request(1, 1)).finish();
    let message = "a lost rank is being replaced".to_owned();
    assert_eq!(end, End::Failed { message, retryable: true });
    assert!(matches!(handle.status().state, EngineState::Starting(_)));
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
        Err(RestartError::Failed("no route to host".to_owned()))
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

#[test]
fn a_node_that_is_away_is_waited_for() {
    let (ranks, started) = (2, Started::default());
    let (tries, again) = (Arc::new(AtomicU32::new(0)), restart(1, 2, &started));
    let counted = Arc::clone(&tries);
    // More attempts than a rank has that does not start.
    let late: Restart = Arc::new(move |recovery| match counted.fetch_add(1, Ordering::SeqCst) {
        0..8 => Err(RestartError::Unreachable("no route to host".to_owned())),
        _ => again(recovery),
    });
    let nodes = vec![
        Node { restart: Some(restart(0, ranks, &started)), ..spawn(0, ranks) },
        Node { restart: Some(late), ..spawn(1, ranks) },
    ];
    let mut options = options(Survivors::Stay);
    options.recovery.longest_absence_pause = Duration::from_millis(100);
    let (supervisor, handle, processes) = supervise_nodes(nodes, options);
    let running = Answer::submit(&handle, request(1, u32::MAX));
    running.next_token();
    assert!(signal(processes[1], "-KILL"));
    let mut known = 2;
    while tries.load(Ordering::SeqCst) < 9 || handle.status().state != EngineState::Ready {
        known += 1;
        assert_eq!(running.next_token(), known);
    }
    handle.cancel(running.id);
    assert_eq!(running.finish().1, End::Finished(FinishReason::Cancelled));
    supervisor.stop();
}

#[test]
fn a_rank_that_another_server_has_is_not_fought_for() {
    let taken: Restart =
        Arc::new(|_| Err(RestartError::Taken("this rank is served by process 7".to_owned())));
    let node = |rank| Node { restart: Some(Arc::clone(&taken)), ..spawn(rank, 2) };
    let (supervisor, _, processes) =
        supervise_nodes((0..2).map(node).collect(), options(Survivors::Stay));
    assert!(signal(processes[0], "-KILL"));
    eventually("the group is given up", || supervisor.failure().is_some());
    let expected =
        "rank 0 (node-0): another server has it: this rank is served by process 7".to_owned();
    assert_eq!(supervisor.failure().unwrap().to_string(), expected);
}
