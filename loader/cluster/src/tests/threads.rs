//! Groups of threads.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use shardpack_collectives::Deadline;
use shardpack_engine::engine::{HEARTBEAT, HEARTBEAT_TIMEOUT, RankEngine};
use shardpack_engine_api::{EngineHandle, EngineState, Event, FinishReason, RequestId, TokenId};

use super::fake::{
    Answer, End, FakeEngine, HANG, LONG, PANIC, eventually, handle, identity, load, patient,
    patient_rank, request,
};
use crate::{
    Announcement, Identity, LinkChoice, LoadError, Node, Progress, RankError, RankOptions,
    ServeError, Supervisor, SupervisorOptions, Token,
    message::{FromRank, GroupPlan, Hello, PROTOCOL, ToRank},
    rank::MEASURED,
    run_rank,
    wire::{self, MAX_MESSAGE_BYTES, Sender},
};

type Rank = (Announcement, JoinHandle<Result<(), RankError>>);

fn start_rank_with<L>(identity: Identity, load: L) -> Rank
where
    L: FnOnce(&mut dyn FnMut(Progress)) -> Result<Box<dyn RankEngine>, LoadError> + Send + 'static,
{
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, token) = (listener.local_addr().unwrap(), Token::generate().unwrap());
    let announcement = Announcement { address, token: token.clone(), key: None };
    let rank = move || run_rank(listener, token, identity, patient_rank(), load);
    (announcement, thread::spawn(rank))
}

fn start_rank(identity: Identity) -> Rank {
    start_rank_with(identity, load)
}

fn node((index, announcement): (usize, &Announcement)) -> Node {
    let name = ["a", "b", "c", "d"][index].to_owned();
    Node {
        name,
        announcement: announcement.clone(),
        credentials: None,
        process: None,
        restart: None,
        weights: None,
        repair: None,
    }
}

fn supervise(ranks: &[Rank]) -> (Supervisor, EngineHandle) {
    supervise_with(ranks, patient())
}

fn supervise_with(ranks: &[Rank], options: SupervisorOptions) -> (Supervisor, EngineHandle) {
    let (handle, commands) = handle(ranks.len() as u32);
    let nodes = ranks.iter().map(|(announcement, _)| announcement).enumerate().map(node);
    let supervisor = Supervisor::start(nodes.collect(), handle.clone(), commands, options).unwrap();
    (supervisor, handle)
}

fn check_serving(size: u32) {
    // The nodes' order is not the ranks'.
    let ranks: Vec<Rank> = (0..size).rev().map(|rank| start_rank(identity(rank, size))).collect();
    let (supervisor, handle) = supervise(&ranks);
    supervisor.wait_until_ready(LONG).unwrap();
    assert_eq!(handle.status().state, EngineState::Ready);

    let (short, endless) = (request(100, 50), request(5000, u32::MAX));
    let endless = Answer::submit(&handle, endless);
    let short = Answer::submit(&handle, short);
    assert_eq!(endless.next_token(), 5001);
    let expected: Vec<u32> = (101..=150).collect();
    assert_eq!(short.finish(), (expected, End::Finished(FinishReason::Length)));
    assert_eq!(handle.status().active_requests, 1);
    handle.cancel(endless.id);
    let (tokens, end) = endless.finish();
    assert_eq!(end, End::Finished(FinishReason::Cancelled));
    assert!(tokens.iter().zip(5002..).all(|(token, expected)| *token == expected));
    eventually("no request is active", || handle.status().active_requests == 0);

    supervisor.stop();
    for (_, rank) in ranks {
        rank.join().unwrap().unwrap();
    }
}

#[test]
fn one_to_four_ranks_serve_and_end_cleanly() {
    (1..=4).for_each(check_serving);
}

#[test]
fn an_idle_group_lives_on_heartbeats_alone() {
    let heartbeats = Arc::<AtomicU32>::default();
    let heard = Arc::clone(&heartbeats);
    let follower =
        start_rank_with(identity(1, 2), |_| Ok(Box::new(FakeEngine::with_heartbeats(heard))));
    let ranks = [start_rank(identity(0, 2)), follower];
    let (supervisor, handle) = supervise(&ranks);
    supervisor.wait_until_ready(LONG).unwrap();
    // A follower that waits as long as it does hears several of them, so a late one is no loss.
    const { assert!(3 * HEARTBEAT.as_millis() < HEARTBEAT_TIMEOUT.as_millis()) };
    eventually("it hears heartbeats", || heartbeats.load(Ordering::SeqCst) >= 3);
    let (tokens, _) = Answer::submit(&handle, request(1, 2)).finish();
    assert_eq!(tokens, [2, 3]);
}

#[test]
fn a_device_that_hangs_in_a_step_is_noticed_by_what_steps_took_before() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, token) = (listener.local_addr().unwrap(), Token::generate().unwrap());
    let announcement = Announcement { address, token: token.clone(), key: None };
    let step_timeout = Duration::from_millis(100);
    let options = RankOptions { step_timeout, ..patient_rank() };
    let rank = thread::spawn(move || run_rank(listener, token, identity(0, 1), options, load));
    // Nobody waits for its end.
    let options = SupervisorOptions { stop_timeout: Duration::ZERO, ..patient() };
    let (supervisor, handle) = supervise_with(&[(announcement, rank)], options);
    supervisor.wait_until_ready(LONG).unwrap();
    // As many steps as are measured before one can be overdue, so that none of these is.
    let (tokens, _) = Answer::submit(&handle, request(1, MEASURED)).finish();
    assert_eq!(tokens.len(), MEASURED as usize);
    let (tokens, end) = Answer::submit(&handle, request(HANG - 1, 5)).finish();
    assert_eq!(tokens, [0_u32; 0]);
    let End::Failed { message, .. } = end else { panic!("{end:?}") };
    assert!(
        message.contains("a step has taken ") && message.contains(" and is not over"),
        "{message}"
    );
}

fn check_refused(identities: [Identity; 2], expected: &str) {
    let ranks = identities.map(start_rank);
    let (supervisor, handle) = supervise(&ranks);
    assert_eq!(supervisor.wait_until_ready(LONG).unwrap_err().to_string(), expected);
    assert_eq!(handle.status().state, EngineState::Failed(expected.to_owned()));
    let (_, end) = Answer::submit(&handle, request(1, 1)).finish();
    assert_eq!(end, End::Failed { message: expected.to_owned(), retryable: true });
    supervisor.stop();
    for (_, rank) in ranks {
        rank.join().unwrap().unwrap();
    }
}

#[test]
fn packages_that_do_not_belong_together_are_refused() {
    let zero = || identity(0, 2);
    check_refused([zero(), zero()], "a and b both hold rank 0 of 2");
    check_refused(
        [zero(), identity(1, 3)],
        "b holds rank 1 of 3, the others are of a 2-node set of the model",
    );
    let other = Identity { layout_id: "x".repeat(64), ..identity(1, 2) };
    check_refused([zero(), other], "b has layout xxxxxxxxxxxx, the others have 000000000000");
    let other = Identity { model_id: "y".repeat(64), ..identity(1, 2) };
    check_refused([zero(), other], "b has model yyyyyyyyyyyy, the others have mmmmmmmmmmmm");
}

#[test]
fn a_wrong_token_is_refused() {
    let (announcement, _rank) = start_rank(identity(0, 1));
    let (handle, commands) = handle(1);
    let wrong = Announcement { token: Token::generate().unwrap(), ..announcement.clone() };
    let supervisor =
        Supervisor::start(vec![node((0, &wrong))], handle, commands, patient()).unwrap();
    let error = supervisor.wait_until_ready(LONG).unwrap_err().to_string();
    assert_eq!(error, "a cannot be reached: it refused: the token is wrong");
    // The rank still waits for its front.
    Front::connect(&announcement);
}

#[test]
fn garbage_on_a_new_connection_disturbs_no_rank() {
    let ranks = [start_rank(identity(0, 2)), start_rank(identity(1, 2))];
    let mut strangers = Vec::new();
    for (announcement, _) in &ranks {
        let knock = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(announcement.address).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        };
        let mut refused = [
            knock(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
            knock(&[0xff; 100]),
            knock(b"\x02\0\0\0{}"),
            knock(&wire::encode(&ToRank::Shutdown).unwrap()),
        ];
        for stream in &mut refused {
            stream.set_read_timeout(Some(LONG)).unwrap();
            // Closed, politely or not, without an answer.
            assert!(!matches!(stream.read(&mut [0; 16]), Ok(1..)));
        }
        strangers.extend([knock(b""), knock(b"\x10\0\0\0{\"con")]);
    }
    let (supervisor, handle) = supervise(&ranks);
    supervisor.wait_until_ready(LONG).unwrap();
    assert_eq!(Answer::submit(&handle, request(1, 1)).finish().0, [2]);
}

#[test]
fn progress_is_shown_and_a_failed_load_is_told() {
    let (go, wait) = mpsc::channel::<()>();
    let fail = move |report: &mut dyn FnMut(Progress)| {
        let doing = "reading weights".to_owned();
        report(Progress { doing, done_bytes: 1, total_bytes: 4 });
        wait.recv().unwrap();
        let source = std::io::Error::other("bit rot");
        Err(LoadError::from(RankError::System(source)))
    };
    let ranks = [start_rank_with(identity(0, 2), fail), start_rank(identity(1, 2))];
    let (supervisor, handle) = supervise(&ranks);
    let expected = EngineState::Starting("a: reading weights, 25 %".to_owned());
    eventually("progress is shown", || handle.status().state == expected);
    let (_, end) = Answer::submit(&handle, request(1, 1)).finish();
    let message = "the model is still loading".to_owned();
    assert_eq!(end, End::Failed { message, retryable: true });
    go.send(()).unwrap();
    let error = supervisor.wait_until_ready(LONG).unwrap_err().to_string();
    let expected = "rank 0 (a): the package cannot be loaded: the system gave no thread or socket: \
                    bit rot";
    assert_eq!(error, expected);
}

#[test]
fn a_panicking_engine_is_a_lost_rank() {
    let ranks = [start_rank(identity(0, 2)), start_rank(identity(1, 2))];
    let (supervisor, handle) = supervise(&ranks);
    supervisor.wait_until_ready(LONG).unwrap();
    // No step has a deadline.
    let (_, end) = Answer::submit(&handle, request(PANIC - 1, 1)).finish();
    let End::Failed { message, retryable: true } = end else { panic!("a failure, not {end:?}") };
    assert!(message.starts_with("rank 1 (b): "), "{message}");
    let Some(ServeError::Lost { rank: Some(1), .. }) = supervisor.failure() else {
        panic!("rank 1, not {:?}", supervisor.failure())
    };
    supervisor.stop();
    let [(_, zero), (_, one)] = ranks;
    zero.join().unwrap().unwrap();
    assert!(matches!(one.join().unwrap(), Err(RankError::Panicked)));
}

#[test]
fn a_rank_ends_with_its_front() {
    let (announcement, rank) = start_rank(identity(0, 1));
    drop(Front::connect(&announcement));
    assert!(matches!(rank.join().unwrap(), Err(RankError::FrontGone(_))));
    // While loading, too.
    let (_go, wait) = mpsc::channel::<()>();
    let (announcement, rank) = start_rank_with(identity(0, 1), move |_| {
        wait.recv()?;
        Ok(Box::new(FakeEngine::default()))
    });
    drop(Front::connect(&announcement));
    assert!(matches!(rank.join().unwrap(), Err(RankError::FrontGone(_))));
}

#[test]
fn a_rank_whose_front_says_nothing_ends() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (address, token) = (listener.local_addr().unwrap(), Token::generate().unwrap());
    let announcement = Announcement { address, token: token.clone(), key: None };
    // The first heartbeat is too late.
    let options = RankOptions { front_silence: Duration::from_millis(1), ..patient_rank() };
    let rank = thread::spawn(move || run_rank(listener, token, identity(0, 1), options, load));
    // Its connection stays, as of a machine that has lost its power.
    let front = Front::connect(&announcement);
    assert!(matches!(rank.join().unwrap(), Err(RankError::FrontSilent { .. })));
    drop(front);
}

#[test]
fn a_rank_without_a_front_gives_up() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let front_timeout = Duration::from_millis(20);
    let options = RankOptions { front_timeout, ..patient_rank() };
    let token = Token::generate().unwrap();
    let result = run_rank(listener, token, identity(0, 1), options, load);
    assert!(matches!(result, Err(RankError::NoFront { .. })));
}

/// A front by hand.
struct Front {
    stream: TcpStream,
    sender: Sender,
}

impl Front {
    /// Connects with a range of versions; the connection is not read yet.
    fn open(to: &Announcement, [protocol, highest]: [u32; 2]) -> Self {
        let highest = Some(highest);
        let stream = TcpStream::connect(to.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let sender = Sender::new(stream.try_clone().unwrap()).unwrap();
        sender.send(&Hello::Control { token: to.token.clone(), protocol, highest }).unwrap();
        Self { stream, sender }
    }

    fn connect(to: &Announcement) -> Self {
        let mut front = Self::open(to, [PROTOCOL, PROTOCOL]);
        let first = front.hear(|message| Some(format!("{message:?}")));
        assert!(first.starts_with("Identity("), "{first}");
        front
    }

    /// The first message of which `wanted` makes something.
    fn hear<T>(&mut self, wanted: impl Fn(FromRank) -> Option<T>) -> T {
        let deadline = Deadline::after(LONG);
        while !deadline.left().is_zero() {
            let message = wire::read(&mut self.stream, MAX_MESSAGE_BYTES).unwrap();
            if let Some(found) = wanted(message) {
                return found;
            }
        }
        panic!("the message did not come")
    }

    fn refusal(mut self) -> String {
        self.hear(|message| match message {
            FromRank::Refused(reason) => Some(reason),
            other => panic!("a refusal, not {other:?}"),
        })
    }
}

#[test]
fn another_protocol_and_a_second_front_are_refused() {
    let (announcement, _rank) = start_rank(identity(0, 1));
    for (range, older) in [([8, 99], "the rank's node"), ([1, 6], "the server")] {
        let [lowest, highest] = range;
        let expected = format!(
            "this rank speaks rank protocol 7 to {PROTOCOL}, the server {lowest} to {highest}: upgrade \
             {older}"
        );
        assert_eq!(Front::open(&announcement, range).refusal(), expected);
    }
    // A later server that speaks this version too is served in it.
    let mut later = Front::open(&announcement, [PROTOCOL, PROTOCOL + 1]);
    let first = later.hear(|message| Some(format!("{message:?}")));
    assert!(first.starts_with("Identity("), "{first}");
    let second = Front::open(&announcement, [PROTOCOL, PROTOCOL]);
    assert_eq!(second.refusal(), "this rank has a front already");
}

fn plan(epoch: u64, peers: &[Announcement]) -> GroupPlan {
    GroupPlan { epoch, peers: peers.to_vec(), links: LinkChoice::Auto }
}

fn form(fronts: &mut [Front], peers: &[Announcement], epoch: u64) {
    for front in &*fronts {
        front.sender.send(&ToRank::Form(plan(epoch, peers))).unwrap();
    }
    for front in fronts {
        front.hear(|message| match message {
            FromRank::Formed { epoch: formed, .. } => (formed == epoch).then_some(()),
            FromRank::GroupLost { epoch: lost, reason, .. } if lost == epoch => {
                panic!("{reason}")
            }
            _ => None,
        });
    }
}

fn first_token(leader: &mut Front, id: u64, prompt: u32) -> u32 {
    let (id, request) = (RequestId(id), Box::new(request(prompt, u32::MAX)));
    leader.sender.send(&ToRank::Submit { id, request }).unwrap();
    leader.hear(|message| match message {
        FromRank::Event(Event::Token { request, token: TokenId(token), .. }) if request == id => {
            Some(token)
        }
        _ => None,
    })
}

#[test]
fn ranks_form_again_with_the_next_epoch_and_forget_old_requests() {
    let ranks: Vec<Rank> = (0..3).map(|rank| start_rank(identity(rank, 3))).collect();
    let peers: Vec<Announcement> = ranks.iter().map(|(peer, _)| peer.clone()).collect();
    let mut fronts: Vec<Front> = peers.iter().map(Front::connect).collect();
    form(&mut fronts, &peers, 1);
    assert_eq!(first_token(&mut fronts[0], 1, 100), 101);
    form(&mut fronts, &peers, 2);
    assert_eq!(first_token(&mut fronts[0], 2, 200), 201);
    // `Formed` is a fence, and the engine was reset before it.
    fronts[0].hear(|message| match message {
        FromRank::Event(event) => {
            assert_eq!(event.request(), RequestId(2));
            matches!(event, Event::Token { token: TokenId(400), .. }).then_some(())
        }
        _ => None,
    });
    for front in &fronts {
        front.sender.send(&ToRank::Shutdown).unwrap();
    }
    for (_, rank) in ranks {
        rank.join().unwrap().unwrap();
    }
}

#[test]
fn a_rank_that_is_named_wrongly_is_not_taken_in() {
    let ranks: Vec<Rank> =
        [0, 1, 1].into_iter().map(|rank| start_rank(identity(rank, 3))).collect();
    let peers: Vec<Announcement> = ranks.iter().map(|(peer, _)| peer.clone()).collect();
    let mut fronts: Vec<Front> = peers.iter().map(Front::connect).collect();
    for front in &fronts {
        front.sender.send(&ToRank::Form(plan(1, &peers))).unwrap();
    }
    // Rank 0 sees rank 1 come twice, and tells it. No deadline passes.
    let (told, tells) = mpsc::channel();
    for mut front in fronts.drain(1..) {
        let told = told.clone();
        thread::spawn(move || {
            let reason = front.hear(|message| match message {
                FromRank::GroupLost { epoch: 1, reason, .. } => Some(reason),
                FromRank::Formed { .. } => Some("formed".to_owned()),
                _ => None,
            });
            let _ = told.send(reason);
        });
    }
    let reason = tells.recv_timeout(LONG).unwrap();
    assert!(reason.contains("rank 1 is already connected"), "{reason}");
}
