//! Pushes over several streams, in any order of events, some of which are lost.

use super::*;

/// One connection: frames to the node, and the node's machine.
struct Line {
    receiver: Receiver,
    to_node: Queue,
    open: bool,
}

impl Line {
    fn new() -> Self {
        Self { receiver: Receiver::new(), to_node: Queue::new(), open: true }
    }
}

/// A push over several streams, and what the node has of it.
struct Spread {
    sender: Sender,
    lines: Vec<Line>,
    disk: Disk,
    held: SharedMap,
    /// Whether the node knows of further streams.
    joins: bool,
    chunks_sent: usize,
}

impl Spread {
    fn new(disk: Disk) -> Self {
        let sender = Sender::new(SOURCE.manifest.clone(), SOURCE.offer.clone(), 2);
        let held = SharedMap::new(disk.held.clone());
        Self { sender, lines: vec![Line::new()], disk, held, joins: true, chunks_sent: 0 }
    }

    /// Has stream 0 offer the package, and so many others begin.
    fn offered(mut self, further: usize) -> Self {
        // Hello and offer; the third frame is a chunk, unless the node has them all.
        while self.chunks_sent == 0 && self.step(0).unwrap() {}
        for _ in 0..further {
            assert_eq!(self.sender.join(), self.lines.len());
            self.lines.push(Line::new());
        }
        self
    }

    /// One frame sent or delivered on a stream: whether anything happened.
    fn step(&mut self, stream: usize) -> Result<bool, SendError> {
        if !self.lines[stream].open {
            return Ok(false);
        }
        let message = match self.sender.next(stream) {
            Outgoing::Message(message) => message,
            Outgoing::Chunk { file, chunk, range } => {
                self.chunks_sent += 1;
                let bytes = &SOURCE.files[file as usize];
                let bytes = bytes[range.start as usize..range.end as usize].to_vec();
                Message::Chunk { file, chunk, bytes }
            }
            Outgoing::Wait => return self.deliver(stream),
            Outgoing::Rest => return Ok(false),
            Outgoing::Done => {
                self.lines[stream].open = false;
                return Ok(true);
            }
        };
        self.lines[stream].to_node.push_back(encode(&message));
        Ok(true)
    }

    fn deliver(&mut self, stream: usize) -> Result<bool, SendError> {
        let line = &mut self.lines[stream];
        let frame = line.to_node.pop_front().expect("who waits has said something");
        let answer = match line.receiver.handle(decode(&frame).unwrap()) {
            Ok(ReceiverAction::Join(_)) if !self.joins => {
                Message::failed(FailureCode::Malformed, "type 17")
            }
            Ok(ReceiverAction::Join(join)) => {
                assert_eq!(join, Join::of(&SOURCE.manifest, &SOURCE.offer.manifest));
                line.receiver.joined(SOURCE.manifest.clone().into(), self.held.clone())
            }
            Ok(ReceiverAction::Stage(_)) => line.receiver.staged(self.held.clone(), 1 << 40, 0),
            Ok(step) => self.disk.perform(&mut line.receiver, step),
            Err(failure) => Message::Failed(failure),
        };
        let heard = self.sender.handle(stream, decode(&encode(&answer)).unwrap());
        match heard {
            Err(error @ (SendError::NotJoined(_) | SendError::ChunkRefused { .. })) => {
                if self.lose(stream) { Ok(true) } else { Err(error) }
            }
            other => other.map(|_| true),
        }
    }

    /// Ends a stream; whether the push goes on.
    fn lose(&mut self, stream: usize) -> bool {
        self.lines[stream].open = false;
        self.sender.lose(stream)
    }

    /// Goes on, with a stream chosen by each pick and then in turns, until nothing happens.
    fn finish(&mut self, picks: &[usize]) {
        for pick in picks {
            self.step(pick % self.lines.len()).unwrap();
        }
        let step_all = |spread: &mut Self| {
            (0..spread.lines.len()).filter(|stream| spread.step(*stream).unwrap()).count()
        };
        while step_all(self) > 0 {}
    }

    fn assert_prepared(&self) {
        assert!(self.disk.sealed, "the package is sealed");
        assert!(self.lines.iter().all(|line| !line.open), "every stream has come to its end");
        assert!(self.held.lock().is_complete());
    }
}

#[test]
fn streams_share_the_chunks_and_one_of_them_commits() {
    for further in [0, 1, 2, 7] {
        let mut spread = Spread::new(Disk::new()).offered(further);
        spread.finish(&[]);
        spread.assert_prepared();
        assert_eq!((spread.chunks_sent, spread.disk.writes), (package_chunks(), package_chunks()));
    }
}

#[test]
fn node_that_knows_no_further_streams_is_served_on_one() {
    let mut spread = Spread::new(Disk::new()).offered(3);
    spread.joins = false;
    spread.finish(&[]);
    spread.assert_prepared();
    assert_eq!(spread.chunks_sent, package_chunks());
}

#[test]
fn damaged_chunk_ends_its_stream_and_goes_over_another() {
    let mut spread = Spread::new(Disk::new()).offered(1);
    while spread.lines[1].to_node.front().is_none_or(|frame| frame.len() < 1000) {
        spread.step(1).unwrap();
    }
    *spread.lines[1].to_node[0].last_mut().unwrap() ^= 1;
    spread.finish(&[]);
    spread.assert_prepared();
    // Without another one it ends the push.
    let mut alone = Spread::new(Disk::new()).offered(0);
    *alone.lines[0].to_node[0].last_mut().unwrap() ^= 1;
    let error = (0..10).find_map(|_| alone.step(0).err()).unwrap();
    assert!(matches!(error, SendError::ChunkRefused { .. }), "{error}");
}

#[test]
fn who_commits_cannot_be_replaced() {
    let mut spread = Spread::new(Disk::new()).offered(1);
    let is_commit = |frame: &Vec<u8>| decode(frame).unwrap() == Message::Commit;
    while !spread.lines[0].to_node.back().is_some_and(is_commit) {
        spread.step(0).unwrap();
    }
    assert!(spread.lose(1), "what has not joined is not missed");
    assert!(!spread.lose(0), "whether the node has heard the commit is unknown");
    // A later push finds everything there and only commits.
    let held = spread.held.lock().clone();
    let mut again = Spread::new(Disk { held, ..spread.disk }).offered(0);
    again.finish(&[]);
    again.assert_prepared();
    assert_eq!(again.chunks_sent, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn streams_lost_at_any_moment_leave_their_chunks_to_the_others(
        picks in prop::collection::vec(0_usize..4, 0..60),
        losses in prop::collection::vec((0_usize..60, 0_usize..4), 0..6),
    ) {
        let mut spread = Spread::new(Disk::new()).offered(3);
        let mut goes_on = true;
        for (moment, pick) in picks.iter().enumerate() {
            for (_, lost) in losses.iter().filter(|(at, _)| *at == moment) {
                goes_on &= !spread.lines[*lost].open || spread.lose(*lost);
            }
            if goes_on {
                spread.step(*pick).unwrap();
            }
        }
        let lost = spread.lines.iter().filter(|line| !line.open).count();
        if goes_on {
            spread.finish(&[]);
            spread.assert_prepared();
            prop_assert!(spread.chunks_sent <= package_chunks() + 2 * 4);
        } else {
            prop_assert!(lost > 0);
            // A later push sends what is missing.
            let held = spread.held.lock().clone();
            let stored = held.chunks().filter(|(.., held)| *held).count();
            let mut again = Spread::new(Disk { held, sealed: false, ..spread.disk }).offered(0);
            again.finish(&[]);
            again.assert_prepared();
            prop_assert_eq!(again.chunks_sent, package_chunks() - stored);
        }
    }
}
