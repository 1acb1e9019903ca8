//! Groups of real processes.

use std::{
    env,
    net::TcpListener,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use shardpack_engine_api::{EngineHandle, EngineState};

use super::fake::{
    Answer, End, IMPATIENT, LONG, handle, identity, load, patient, patient_rank, request,
};
use crate::{
    Announcement, LogSink, Node, RankProcess, ServeError, SpawnError, Supervisor,
    SupervisorOptions, Token, run_rank,
};

/// Says to a process of this test program that it is a rank, and which: `1/3`.
const RANK_VARIABLE: &str = "SHARDPACK_TEST_RANK";

/// Whether this process is a rank of another process's test, in which case it has served as one.
#[expect(clippy::print_stdout, reason = "a rank announces itself on standard output")]
fn was_rank() -> bool {
    let Ok(which) = env::var(RANK_VARIABLE) else { return false };
    let (rank, ranks) = which.split_once('/').unwrap();
    let identity = identity(rank.parse().unwrap(), ranks.parse().unwrap());
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, token) = (listener.local_addr().unwrap(), Token::generate().unwrap());
    let announcement = Announcement { address, token: token.clone(), key: None };
    println!("\n{}", announcement.line());
    run_rank(listener, token, identity, patient_rank(), load).unwrap();
    true
}

fn silent() -> LogSink {
    Arc::new(|_, _| ())
}

/// Starts a rank in a process of its own: this test program again, with one test that begins with
/// [`was_rank`].
pub(super) fn spawn(rank: u32, ranks: u32) -> Node {
    let name = format!("node-{rank}");
    let (_, module) = module_path!().split_once("::").unwrap();
    let test = format!("{module}::a_dropped_process_is_killed");
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", &test, "--nocapture"]).env(RANK_VARIABLE, format!("{rank}/{ranks}"));
    let (process, announcement) = RankProcess::spawn(&name, command, LONG, silent()).unwrap();
    Node {
        name,
        announcement,
        credentials: None,
        process: Some(process),
        restart: None,
        weights: None,
        repair: None,
    }
}

pub(super) fn signal(process: u32, signal: &str) -> bool {
    let mut command = Command::new("kill");
    command.args([signal, &process.to_string()]).stderr(Stdio::null());
    command.status().unwrap().success()
}

fn supervise(ranks: u32, options: SupervisorOptions) -> (Supervisor, EngineHandle, Vec<u32>) {
    let nodes = (0..ranks).map(|rank| spawn(rank, ranks)).collect();
    supervise_nodes(nodes, options)
}

pub(super) fn supervise_nodes(
    nodes: Vec<Node>,
    options: SupervisorOptions,
) -> (Supervisor, EngineHandle, Vec<u32>) {
    let processes = nodes.iter().map(|node| node.process.as_ref().unwrap().id()).collect();
    let (handle, commands) = handle(nodes.len() as u32);
    let supervisor = Supervisor::start(nodes, handle.clone(), commands, options).unwrap();
    supervisor.wait_until_ready(LONG).unwrap();
    (supervisor, handle, processes)
}

/// These requests fail for this rank's sake and for one of these reasons, and so does the group.
fn check_lost(
    (supervisor, handle, processes): (Supervisor, EngineHandle, Vec<u32>),
    answers: [Answer; 2],
    rank: u32,
    why: &[&str],
) {
    for answer in answers {
        let (_, end) = answer.finish();
        let End::Failed { message, retryable: true } = end else { panic!("not {end:?}") };
        assert!(message.starts_with(&format!("rank {rank} (node-{rank}): ")), "{message}");
        assert!(why.iter().any(|why| message.contains(why)), "{message}");
    }
    let failure = supervisor.failure();
    let Some(ServeError::Lost { rank: Some(found), node: Some(_), .. }) = failure else {
        panic!("a lost rank, not {failure:?}")
    };
    assert_eq!(found, rank);
    assert!(matches!(handle.status().state, EngineState::Failed(_)));
    assert_eq!(handle.status().active_requests, 0);
    let (_, end) = Answer::submit(&handle, request(1, 1)).finish();
    assert!(matches!(end, End::Failed { retryable: true, .. }));
    supervisor.stop();
    for process in processes {
        assert!(!signal(process, "-0"), "process {process} is left");
    }
}

#[test]
fn a_killed_rank_fails_every_request_at_once() {
    for rank in [0, 1, 2] {
        // No step and no rank has a deadline: it is the end of the process that is noticed, and one that is dead is
        // not waited for.
        let (supervisor, handle, processes) = supervise(3, patient());
        let answers = [100, 5000].map(|first| Answer::submit(&handle, request(first, u32::MAX)));
        for (answer, first) in answers.iter().zip([101, 5001]) {
            assert_eq!(answer.next_token(), first);
        }
        assert!(signal(processes[rank as usize], "-KILL"));
        // A peer may see its connection close before the process has ended.
        let why = ["signal: 9", "connection"];
        check_lost((supervisor, handle, processes), answers, rank, &why);
    }
}

#[test]
fn a_stopped_rank_is_noticed_and_named() {
    // A stopped rank misses its step's deadline and its heartbeats; the load of the machine decides which the
    // supervisor notices first. A stopped process ignores the request to end.
    let stop_timeout = Duration::from_millis(50);
    let (supervisor, handle, processes) =
        supervise(2, SupervisorOptions { stop_timeout, ..patient() });
    assert!(signal(processes[1], "-STOP"));
    let answers =
        [IMPATIENT - 1, 100].map(|first| Answer::submit(&handle, request(first, u32::MAX)));
    let why = ["it did not answer within", "no heartbeat for"];
    check_lost((supervisor, handle, processes), answers, 1, &why);
}

/// Processor time of a process in clock ticks (100 a second).
#[cfg(target_os = "linux")]
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}

#[test]
fn processes_serve_idle_without_a_processor_and_leave_nothing() {
    let (supervisor, handle, processes) = supervise(2, patient());
    let (tokens, _) = Answer::submit(&handle, request(1, 200)).finish();
    assert_eq!(tokens, (2..=201).collect::<Vec<_>>());
    #[cfg(target_os = "linux")]
    {
        let used = || processes.iter().map(|process| ticks(*process)).sum::<u64>();
        let before = used();
        // Only time can show that none is used. It is the processes' own, so nobody else's work counts; a heartbeat a
        // second is theirs, however late this thread wakes up.
        let begun = std::time::Instant::now();
        std::thread::sleep(Duration::from_secs(1));
        let used = used() - before;
        assert!(used <= 5 + begun.elapsed().as_secs(), "{used} of 200 ticks");
    }
    // They end when they are told to: nobody is killed before its time is up.
    supervisor.stop();
    for process in processes {
        assert!(!signal(process, "-0"), "process {process} is left");
    }
    let sink = Box::new(|_| ());
    handle.submit(request(1, 1), sink).unwrap_err();
}

fn check_spawn(mut command: Command, timeout: Duration, expected: &str) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&lines);
    let log = move |name: &str, line: &str| kept.lock().unwrap().push(format!("{name}: {line}"));
    command.env_remove(RANK_VARIABLE);
    let error = RankProcess::spawn("node-7", command, timeout, Arc::new(log)).unwrap_err();
    assert_eq!(error.to_string(), expected);
    if matches!(error, SpawnError::Ended { .. }) {
        assert_eq!(*lines.lock().unwrap(), ["node-7: out of luck", "node-7: and of memory"]);
    }
}

#[test]
fn a_process_that_does_not_announce_itself_is_named() {
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    };
    check_spawn(
        shell("echo out of luck >&2; echo and of memory >&2; exit 3"),
        LONG,
        "node-7 ended before it was ready (exit status: 3)\n  out of luck\n  and of memory",
    );
    check_spawn(
        shell("exec sleep 1000"),
        Duration::from_millis(50),
        "node-7 did not announce its address within 0 s",
    );
    let missing = Command::new("/does/not/exist");
    check_spawn(missing, LONG, "node-7 cannot be started");
}

#[test]
fn a_dropped_process_is_killed() {
    if was_rank() {
        return;
    }
    let node = spawn(0, 1);
    let process = node.process.as_ref().unwrap().id();
    assert!(signal(process, "-0"));
    drop(node);
    assert!(!signal(process, "-0"), "process {process} is left");
}
