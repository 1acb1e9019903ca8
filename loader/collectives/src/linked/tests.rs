//! Every path gives the same bits, every failure an error.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use shardpack_identity::{
    Authority, Channel, Credentials, ExpectedPeer, HandshakeDeadline, Role, Service, Validity,
};

use super::{exchange::Exchange, *};
use crate::{
    frame::{Header, Notice},
    link::{LinkEnd, LinkError, TcpLink},
    sum::Element,
};

mod algorithms;

/// Longer than any test may take. Who gives up then says so in its error, so any other error has another cause.
const LONG: Duration = Duration::from_mins(10);

/// A value whose sums depend on their order.
fn value(rank: u32, index: usize) -> f32 {
    let mixed = (u64::from(rank) << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let scale = [1.0, 1e-4, 1e4, 3e7][(mixed >> 13) as usize % 4];
    ((mixed >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
}

fn values(rank: u32, len: usize) -> Vec<f32> {
    (0..len).map(|index| value(rank, index)).collect()
}

/// The sum that every way must give: rank 0 first, one after the other.
fn sequential_sum(ranks: u32, len: usize) -> Vec<u32> {
    let add = |index| (1..ranks).fold(value(0, index), |sum, rank| sum + value(rank, index));
    (0..len).map(|index| add(index).to_bits()).collect()
}

/// A link that lets other threads run before each step, a different number of times each.
struct Jitter {
    link: MemoryLink,
    state: Mutex<u64>,
}

impl Jitter {
    fn boxed(link: MemoryLink, seed: u64) -> Box<dyn Link> {
        Box::new(Self { link, state: Mutex::new(seed | 1) })
    }

    fn wait(&self) {
        let mut state = self.state.lock().unwrap();
        *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let turns = *state >> 58;
        drop(state);
        (0..turns).for_each(|_| thread::yield_now());
    }
}

impl Link for Jitter {
    fn send_now(&self, frame: &[u8]) -> Result<usize, LinkError> {
        self.wait();
        // Every other frame takes the way of frames that do not fit.
        if self.state.lock().unwrap().count_ones().is_multiple_of(2) {
            return Ok(0);
        }
        self.link.send_now(frame)
    }
    fn send_rest(&self, rest: &[u8], deadline: Deadline) -> Result<(), LinkError> {
        self.wait();
        self.link.send_rest(rest, deadline)
    }
    fn receive_header(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<Header, LinkError> {
        self.wait();
        self.link.receive_header(frame, deadline)
    }
    fn receive_payload(
        &self,
        header: &Header,
        frame: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        self.link.receive_payload(header, frame, deadline)
    }
    fn watch(&self) -> LinkEnd {
        self.link.watch()
    }
    fn abort(&self, frame: &[u8]) {
        self.link.abort(frame);
    }
    fn close(&self) {
        self.link.close();
    }
}

/// A link that takes its time to tell that it is over.
struct SlowAbort(MemoryLink);

impl Link for SlowAbort {
    fn send_now(&self, frame: &[u8]) -> Result<usize, LinkError> {
        self.0.send_now(frame)
    }
    fn send_rest(&self, rest: &[u8], deadline: Deadline) -> Result<(), LinkError> {
        self.0.send_rest(rest, deadline)
    }
    fn receive_header(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<Header, LinkError> {
        self.0.receive_header(frame, deadline)
    }
    fn receive_payload(
        &self,
        header: &Header,
        frame: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        self.0.receive_payload(header, frame, deadline)
    }
    fn watch(&self) -> LinkEnd {
        self.0.watch()
    }
    fn abort(&self, frame: &[u8]) {
        // The delay under test, not a wait for something.
        thread::sleep(Duration::from_millis(50));
        self.0.abort(frame);
    }
    fn close(&self) {
        self.0.close();
    }
}

type Ends = (Box<dyn Link>, Box<dyn Link>);

fn groups(size: u32, mut pair: impl FnMut() -> Ends) -> Vec<LinkedGroup> {
    let mut links: Vec<Vec<Option<Box<dyn Link>>>> = Vec::new();
    for _ in 0..size {
        let mut to_lower = Vec::new();
        for row in &mut links {
            let (low, high) = pair();
            row.push(Some(low));
            to_lower.push(Some(high));
        }
        to_lower.push(None);
        links.push(to_lower);
    }
    (0..size).zip(links).map(|(rank, links)| LinkedGroup::new(rank, 7, links).unwrap()).collect()
}

fn jittery(size: u32, seed: u64) -> Vec<LinkedGroup> {
    let mut seed = seed;
    groups(size, || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let (low, high) = MemoryLink::pair();
        (Jitter::boxed(low, seed), Jitter::boxed(high, !seed))
    })
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let high = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0, high)
}

fn over_tcp(size: u32) -> Vec<LinkedGroup> {
    groups(size, || {
        let ((low, high), (low_control, high_control)) = (sockets(), sockets());
        let low = TcpLink::new(low, low_control).unwrap();
        (Box::new(low), Box::new(TcpLink::new(high, high_control).unwrap()))
    })
}

/// Both ends of a connection inside TLS.
fn channels(members: &[Credentials; 2]) -> (Channel, Channel) {
    let (low, high) = sockets();
    let ([of_low, of_high], deadline) = (members, || HandshakeDeadline::after(LONG));
    thread::scope(|scope| {
        let services = [Service::Rank];
        let low =
            scope.spawn(move || Channel::answer(low, of_low, &services, &[Role::Node], deadline()));
        let expected = ExpectedPeer { role: Role::Node, key: Some(of_low.key()) };
        let high = Channel::call(high, of_high, Service::Rank, expected, deadline());
        (low.join().unwrap().unwrap(), high.unwrap())
    })
}

fn members() -> [Credentials; 2] {
    let authority = Authority::generate("c").unwrap();
    [0, 1].map(|_| authority.issue(Role::Node, Validity::from_now()).unwrap())
}

fn over_tls(size: u32) -> Vec<LinkedGroup> {
    let members = members();
    groups(size, || {
        let [(low, high), (low_control, high_control)] = [0, 1].map(|_| channels(&members));
        let low = TcpLink::new(low, low_control).unwrap();
        (Box::new(low), Box::new(TcpLink::new(high, high_control).unwrap()))
    })
}

fn over_memory(size: u32) -> Vec<LinkedGroup> {
    LinkedGroup::in_memory(size, 7).unwrap()
}

/// Runs `work` on every rank at the same time; results in rank order.
fn on_all<T: Send>(groups: &[LinkedGroup], work: impl Fn(&LinkedGroup) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let ranks: Vec<_> = groups.iter().map(|group| scope.spawn(move || work(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn check_sums(groups: &[LinkedGroup], lens: &[usize]) {
    let sums = on_all(groups, |group| {
        let sum = |&len: &usize| {
            let mut values = values(group.rank(), len);
            group.all_reduce_sum(&mut values, Deadline::after(LONG)).unwrap();
            values.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        lens.iter().map(sum).collect::<Vec<_>>()
    });
    for (rank, sums) in sums.iter().enumerate() {
        for (sum, len) in sums.iter().zip(lens) {
            let size = groups[0].size();
            assert!(*sum == sequential_sum(size, *len), "rank {rank} of {size}, {len} values");
        }
    }
}

/// Lengths around every border: parts, the direct way's limit, pieces.
const LENS: [usize; 12] = [0, 1, 2, 3, 7, 8, 9, 4096, 16_383, 16_384, 16_385, 70_001];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn sums_have_the_bits_of_a_sequential_sum_whatever_the_timing(
        size in 1_u32..=8,
        seed in any::<u64>(),
        lens in proptest::sample::subsequence(LENS.to_vec(), 1..=5),
    ) {
        check_sums(&jittery(size, seed), &lens);
    }
}

#[test]
fn sums_over_tcp_have_the_bits_of_a_sequential_sum() {
    for size in 1..=8 {
        check_sums(&over_tcp(size), &[16_385, 1, 0, 4096, 3]);
    }
    for size in [2, 5] {
        check_sums(&over_tls(size), &LENS);
    }
}

#[test]
fn vectors_longer_than_a_piece_are_summed_whole() {
    for size in [2, 3] {
        check_sums(&over_memory(size), &[PIECE_LEN + 3]);
        check_sums(&over_tcp(size), &[2 * PIECE_LEN + 1]);
        check_sums(&over_tls(size), &[2 * PIECE_LEN + 1]);
    }
}

fn check_bytes(groups: &[LinkedGroup]) {
    let size = groups[0].size();
    let mine = |rank: u32| vec![rank as u8; (rank as usize * 1000) % 3001];
    on_all(groups, |group| {
        let deadline = Deadline::after(LONG);
        let gathered = group.all_gather(&mine(group.rank()), deadline).unwrap();
        assert_eq!(gathered, (0..size).map(mine).collect::<Vec<_>>());
        for root in 0..size {
            let mut bytes = if group.rank() == root { mine(root) } else { b"old".to_vec() };
            group.broadcast(root, &mut bytes, deadline).unwrap();
            assert_eq!(bytes, mine(root));
        }
        let large = vec![group.rank() as u8; 5 << 20];
        let gathered = group.all_gather(&large, deadline).unwrap();
        assert!(gathered.iter().zip(0..).all(|(bytes, rank)| *bytes == vec![rank; 5 << 20]));
        group.barrier(deadline).unwrap();
    });
}

#[test]
fn gathers_and_broadcasts_carry_any_length() {
    for size in [1, 2, 3, 4] {
        check_bytes(&over_memory(size));
        check_bytes(&over_tcp(size));
        check_bytes(&over_tls(size));
    }
}

/// Two parts that sum by themselves, with passes from the first to the second (whose last rank is
/// given what the first's first one has, where the parts are of unequal size) and calls of all
/// ranks in between.
fn check_parts(groups: &[LinkedGroup], first: u32) {
    let size = groups[0].size();
    let expected = |part: &Range<u32>, len: usize| -> Vec<u32> {
        let sum = |index| {
            let rest = part.clone().skip(1);
            rest.fold(value(part.start, index), |sum, rank| sum + value(rank, index)).to_bits()
        };
        (0..len).map(sum).collect()
    };
    on_all(groups, |group| {
        let (rank, deadline) = (group.rank(), Deadline::after(LONG));
        let part = if rank < first { 0..first } else { first..size };
        for len in [5, 0, 20_000, 1, 70_001] {
            // The parts need not have equally many sums.
            for _ in 0..=part.start {
                let mut values = values(rank, len);
                group.sum_among(part.clone(), &mut values, deadline).unwrap();
                let bits: Vec<_> = values.iter().map(|value| value.to_bits()).collect();
                assert!(bits == expected(&part, len), "rank {rank} of {size}, {len} values");
            }
            group.keep_alive().unwrap();
            for to in first..size {
                let from = (to - first) % first;
                let bytes = vec![from as u8; len * 4];
                if rank == from {
                    group.send(to, &bytes, deadline).unwrap();
                }
                if rank == to {
                    let mut found = b"old".to_vec();
                    group.receive(from, &mut found, deadline).unwrap();
                    assert!(found == bytes, "{from} to {to}");
                }
            }
            let gathered = group.all_gather(&[rank as u8], deadline).unwrap();
            assert!(gathered.concat().into_iter().eq(0..size as u8));
        }
    });
}

#[test]
fn parts_sum_by_themselves_and_pass_values_on() {
    for (size, first) in [(2, 1), (3, 1), (4, 2), (5, 2)] {
        check_parts(&over_memory(size), first);
        check_parts(&jittery(size, u64::from(size)), first);
        check_parts(&over_tcp(size), first);
        check_parts(&over_tls(size), first);
    }
}

#[test]
fn nothing_is_sent_to_a_rank_that_does_not_take_it() {
    for groups in [over_memory(2), over_tcp(2), over_tls(2)] {
        let soon = Deadline::after(Duration::from_millis(50));
        let error = groups[0].send(1, &[1; 64], soon).unwrap_err();
        assert!(matches!(error, GroupError::Timeout { rank: 1, .. }), "{error}");
    }
}

#[test]
fn keep_alives_extend_the_wait() {
    let (mine, theirs) = MemoryLink::pair();
    let group = LinkedGroup::new(0, 7, vec![None, Some(Box::new(mine))]).unwrap();
    let word = sum_frame(|it| (it.op, it.payload_bytes) = (Op::Alive, 0));
    for _ in 0..3 {
        theirs.send_now(&word).unwrap();
    }
    theirs.send_now(&sum_frame(|_| ())).unwrap();
    group.all_reduce_sum(&mut [1.0; 4], Deadline::after(LONG)).unwrap();
    // Each keep-alive extends the wait, up to a limit.
    let long_ago = Instant::now().checked_sub(Duration::from_secs(100)).unwrap();
    let wait = |seconds| Deadline::at(long_ago + Duration::from_secs(seconds));
    let exchange = |seconds| {
        let mut exchange = Exchange::of_pair(Op::Pass, 0, wait(seconds));
        exchange.start = long_ago;
        exchange
    };
    assert!(exchange(2000).extended().left() > Duration::from_secs(1900));
    assert!(exchange(2).extended().left().is_zero(), "100 s are more than 45 times 2 s");
}

#[test]
fn a_keep_alive_that_does_not_fit_leaves_no_half_frame_inside_tls() {
    let members = members();
    let [(low, high), (low_control, high_control)] = [0, 1].map(|_| channels(&members));
    let low = TcpLink::new(low, low_control).unwrap();
    let high = TcpLink::new(high, high_control).unwrap();
    let word = sum_frame(|it| (it.op, it.payload_bytes) = (Op::Alive, 0));
    let mut sent = 0;
    while low.send_now(&word).unwrap() == word.len() {
        sent += 1;
    }
    // The last keep-alive is dropped; the frame after it arrives whole.
    let last = sum_frame(|it| it.payload_bytes = 3_000_000);
    thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let (mut frame, mut words) = (Vec::new(), 0);
            loop {
                let header = high.receive_header(&mut frame, Deadline::after(LONG)).unwrap();
                high.receive_payload(&header, &mut frame, Deadline::after(LONG)).unwrap();
                match header.op {
                    Op::Alive => words += 1,
                    _ => return (words, frame),
                }
            }
        });
        let now = low.send_now(&last).unwrap();
        low.send_rest(&last[now..], Deadline::after(LONG)).unwrap();
        let (words, frame) = reading.join().unwrap();
        // It may have been encrypted before it was dropped.
        assert!(words == sent || words == sent + 1, "{words} keep-alives of {sent}");
        assert!(frame == last);
    });
}

#[test]
fn a_root_may_run_ahead_of_slow_readers() {
    let groups = over_memory(2);
    on_all(&groups, |group| {
        for round in 0..100_u8 {
            let mut bytes = vec![round];
            group.broadcast(0, &mut bytes, Deadline::after(LONG)).unwrap();
            assert_eq!(bytes, [round]);
        }
    });
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    let groups = over_tcp(3);
    let arrived = std::sync::atomic::AtomicU32::new(0);
    on_all(&groups, |group| {
        for round in 1..=50 {
            arrived.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            group.barrier(Deadline::after(LONG)).unwrap();
            assert!(arrived.load(std::sync::atomic::Ordering::SeqCst) >= round * 3);
        }
    });
}

/// One rank leaves while the others wait in a sum; rank 1 does not even take part.
fn check_loss(mut groups: Vec<LinkedGroup>) {
    let lost = groups.pop().unwrap();
    let rank = lost.rank();
    thread::scope(|scope| {
        let waiting: Vec<_> = [0, 2]
            .map(|index: usize| {
                let group = &groups[index];
                scope.spawn(move || {
                    group.all_reduce_sum(&mut values(0, 100_000), Deadline::after(LONG))
                })
            })
            .into_iter()
            .collect();
        // The first frames say that both have begun.
        let mut frame = Vec::new();
        for from in [0, 2] {
            let link = lost.fate.links[from].as_deref().unwrap();
            link.receive_header(&mut frame, Deadline::after(LONG)).unwrap();
        }
        drop(lost);
        for result in waiting.into_iter().map(|rank| rank.join().unwrap()) {
            let Err(GroupError::Lost { rank: found, .. }) = result else {
                panic!("a loss, not {result:?}")
            };
            assert_eq!(found, rank);
        }
    });
    // What the others have sent of their sum is there, so that it can be nothing else.
    let late = groups[1].all_reduce_sum(&mut values(0, 100_000), Deadline::after(LONG));
    assert!(matches!(late, Err(GroupError::Lost { rank: found, .. }) if found == rank), "{late:?}");
}

#[test]
fn a_lost_rank_is_noticed_at_once_by_all() {
    check_loss(over_memory(4));
    check_loss(over_tcp(4));
    check_loss(over_tls(4));
}

#[test]
fn a_group_that_is_dropped_after_a_loss_has_told_whose_it_was() {
    let ((mine, lost), (slow, other)) = (MemoryLink::pair(), MemoryLink::pair());
    let links: Vec<Option<Box<dyn Link>>> =
        vec![None, Some(Box::new(mine)), Some(Box::new(SlowAbort(slow)))];
    let group = LinkedGroup::new(0, 7, links).unwrap();
    drop(lost);
    group.barrier(Deadline::after(LONG)).unwrap_err();
    drop(group);
    let LinkEnd::Notice { notice, .. } = other.watch() else { panic!("closed without a word") };
    assert_eq!(notice.blamed, Some(1));
}

fn check_abort(groups: &[LinkedGroup]) {
    thread::scope(|scope| {
        let waiting: Vec<_> = groups[..2]
            .iter()
            .map(|group| scope.spawn(move || group.barrier(Deadline::after(LONG))))
            .collect();
        groups[2].abort("enough");
        for result in waiting.into_iter().map(|rank| rank.join().unwrap()) {
            assert_eq!(result, Err(GroupError::Aborted("enough".to_owned())));
        }
    });
    // It wakes its own waiters too, and stays.
    assert_eq!(
        groups[2].all_reduce_sum(&mut [1.0], Deadline::after(LONG)),
        Err(GroupError::Aborted("enough".to_owned()))
    );
}

#[test]
fn an_abort_reaches_all_ranks() {
    check_abort(&over_memory(3));
    check_abort(&over_tcp(3));
    check_abort(&over_tls(3));
}

fn check_local_abort(groups: &[LinkedGroup]) {
    thread::scope(|scope| {
        let waiting = scope.spawn(|| groups[0].barrier(Deadline::after(LONG)));
        // Its frame says that rank 0 has begun.
        let link = groups[1].fate.links[0].as_deref().unwrap();
        link.receive_header(&mut Vec::new(), Deadline::after(LONG)).unwrap();
        groups[0].abort("stop");
        assert_eq!(waiting.join().unwrap(), Err(GroupError::Aborted("stop".to_owned())));
    });
}

#[test]
fn an_abort_wakes_the_threads_that_wait_here() {
    check_local_abort(&over_memory(2));
    check_local_abort(&over_tcp(2));
    check_local_abort(&over_tls(2));
}

fn check_silence(groups: &[LinkedGroup]) {
    let timeout = Duration::from_millis(50);
    let result = groups[0].barrier(Deadline::after(timeout));
    let Err(GroupError::Timeout { rank: 1, waited }) = result else {
        panic!("a timeout, not {result:?}")
    };
    assert!(waited >= timeout);
    let blamed = loop {
        match groups[1].fate.cause() {
            Some(cause) => break cause,
            None => thread::yield_now(),
        }
    };
    let expected =
        "the group was aborted: rank 0 reported this rank as lost: it did not answer within";
    assert!(blamed.to_string().starts_with(expected), "{blamed}");
}

#[test]
fn silence_ends_at_the_deadline() {
    check_silence(&over_memory(2));
    check_silence(&over_tcp(2));
    check_silence(&over_tls(2));
}

/// What rank 0 (epoch 7) makes of `frame` from rank 1 in its first call, a sum of 4 values.
fn check_foreign(frame: &[u8], expected: &str) {
    let (mine, theirs) = MemoryLink::pair();
    let group = LinkedGroup::new(0, 7, vec![None, Some(Box::new(mine))]).unwrap();
    theirs.send_now(frame).unwrap();
    let error = group.all_reduce_sum(&mut [1.0; 4], Deadline::after(LONG)).unwrap_err();
    assert_eq!(error.to_string(), expected);
}

fn sum_frame(change: impl FnOnce(&mut Header)) -> Vec<u8> {
    let op = Op::SumDirect;
    let scope = Scope::All;
    let mut header = Header { op, scope, from: 1, payload_bytes: 16, epoch: 7, sequence: 0 };
    change(&mut header);
    let mut frame = header.encode().to_vec();
    frame.resize(HEADER_BYTES + header.payload_bytes as usize, 0);
    frame
}

#[test]
fn frames_of_another_step_are_refused() {
    let check = |change: fn(&mut Header), found: &str| {
        let expected = "rank 1 is out of step: expected all-reduce (direct) 0 of epoch 7 from rank 1, \
                        16 bytes, found ";
        check_foreign(&sum_frame(change), &format!("{expected}{found}"));
    };
    check(|it| it.op = Op::Barrier, "barrier 0 of epoch 7 from rank 1, 16 bytes");
    check(|it| it.sequence = 1, "all-reduce (direct) 1 of epoch 7 from rank 1, 16 bytes");
    check(|it| it.payload_bytes = 20, "all-reduce (direct) 0 of epoch 7 from rank 1, 20 bytes");
    check(|it| it.payload_bytes = 0, "all-reduce (direct) 0 of epoch 7 from rank 1, 0 bytes");
    check(|it| it.from = 2, "all-reduce (direct) 0 of epoch 7 from rank 2, 16 bytes");
    let part = "all-reduce (direct) 0 within a subgroup of epoch 7 from rank 1, 16 bytes";
    check(|it| it.scope = Scope::Subgroup, part);
    // A keep-alive with a payload.
    check(|it| it.op = Op::Alive, "keep-alive 0 of epoch 7 from rank 1, 16 bytes");
    check(|it| it.epoch = 8, "all-reduce (direct) 0 of epoch 8 from rank 1, 16 bytes");
}

#[test]
fn bytes_that_are_no_frame_are_refused() {
    let expected =
        "rank 1 is out of step: expected all-reduce (direct) 0 of epoch 7 from rank 1, found ";
    let garbage = format!("{expected}not a frame (it begins with [47, 45, 54, 20])");
    check_foreign(b"GET / HTTP/1.1\r\nHost: shardpack\r\n\r\n", &garbage);
    check_foreign(b"SPCF", "rank 1 is gone: a frame was truncated");
    let mut short = sum_frame(|_| ());
    short.pop();
    check_foreign(&short, "rank 1 is gone: a frame was truncated");
}

#[test]
fn frames_of_an_older_epoch_are_dropped() {
    let (mine, theirs) = MemoryLink::pair();
    let group = LinkedGroup::new(0, 7, vec![None, Some(Box::new(mine))]).unwrap();
    theirs.send_now(&sum_frame(|it| (it.epoch, it.payload_bytes) = (6, 99))).unwrap();
    let mut frame = sum_frame(|_| ());
    f32::store(&mut frame[HEADER_BYTES..], &[1.0, 2.0, 3.0, 4.0]);
    theirs.send_now(&frame).unwrap();
    let mut values = [1.0; 4];
    group.all_reduce_sum(&mut values, Deadline::after(LONG)).unwrap();
    assert_eq!(values.map(f32::to_bits), [2.0, 3.0, 4.0, 5.0].map(f32::to_bits));
}

/// Rank 0 of a pair over TCP, and the other end's two sockets.
fn rank_0_and_raw_sockets() -> (LinkedGroup, TcpStream, TcpStream) {
    let ((data, raw), (control, raw_control)) = (sockets(), sockets());
    let link = TcpLink::new(data, control).unwrap();
    let group = LinkedGroup::new(0, 7, vec![None, Some(Box::new(link))]).unwrap();
    (group, raw, raw_control)
}

#[test]
fn a_socket_that_closes_within_a_frame_is_a_loss() {
    for sent in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 15] {
        let (group, mut raw, control) = rank_0_and_raw_sockets();
        raw.write_all(&sum_frame(|_| ())[..sent]).unwrap();
        drop((raw, control));
        let error = group.all_reduce_sum(&mut [1.0; 4], Deadline::after(LONG)).unwrap_err();
        assert!(matches!(error, GroupError::Lost { rank: 1, .. }), "{error}");
    }
}

#[test]
fn a_promised_size_claims_no_memory() {
    let (group, mut raw, control) = rank_0_and_raw_sockets();
    let mut header = sum_frame(|it| it.op = Op::Gather);
    header.truncate(HEADER_BYTES);
    header[12..16].copy_from_slice(&crate::frame::MAX_PAYLOAD_BYTES.to_le_bytes());
    raw.write_all(&header).unwrap();
    let error = group.all_gather(&[], Deadline::after(Duration::from_millis(50))).unwrap_err();
    assert!(matches!(error, GroupError::Timeout { rank: 1, .. }), "{error}");
    let claimed = group.scratch.lock().unwrap().incoming[1].capacity();
    assert!(claimed <= 4 << 20, "{claimed} bytes");
    drop((raw, control));
}

#[test]
fn a_notice_on_the_control_connection_ends_a_call() {
    let (group, raw, mut control) = rank_0_and_raw_sockets();
    let told =
        |epoch, reason: &str| Notice { blamed: Some(5), reason: reason.to_owned() }.frame(1, epoch);
    control.write_all(&told(6, "long ago")).unwrap();
    control.write_all(&told(7, "it is on fire")).unwrap();
    let error = group.barrier(Deadline::after(LONG)).unwrap_err();
    assert_eq!(error, GroupError::Lost { rank: 5, reason: "it is on fire".to_owned() });
    drop(raw);
}

#[test]
fn garbage_on_the_control_connection_ends_the_group() {
    let (group, raw, mut control) = rank_0_and_raw_sockets();
    control.write_all(&[0x55; 64]).unwrap();
    let error = group.barrier(Deadline::after(LONG)).unwrap_err();
    let expected = "rank 1 is gone: not a frame (it begins with [55, 55, 55, 55])";
    assert_eq!(error.to_string(), expected);
    drop(raw);
}

/// Processor time of this thread in clock ticks (100 a second).
#[cfg(target_os = "linux")]
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
}

#[cfg(target_os = "linux")]
#[test]
fn a_waiting_rank_uses_no_processor() {
    for groups in [over_memory(2), over_tcp(2), over_tls(2)] {
        let before = ticks();
        let timeout = Duration::from_millis(500);
        groups[0].barrier(Deadline::after(timeout)).unwrap_err();
        // 50 ticks passed; a rank that spins uses most of them.
        assert!(ticks() - before <= 5, "{} ticks", ticks() - before);
    }
}
