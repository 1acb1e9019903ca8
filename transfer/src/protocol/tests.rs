//! Whole pushes over queues in memory: cut, reordered and damaged.

use std::{collections::VecDeque, fs, io::Cursor, sync::LazyLock};

use proptest::prelude::*;
use shardpack_manifests::{
    CHUNK_BYTES, Digest, Manifest, digest::chunk_count, verify::read_document,
};

use super::*;
use crate::package_set::{SetPlan, write_set};

mod streams;

/// A package in memory.
struct Source {
    manifest: Manifest,
    files: Vec<Vec<u8>>,
    offer: Offer,
}

static SOURCE: LazyLock<Source> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    write_set(directory.path(), &SetPlan::default());
    let read = |name: &str| fs::read(directory.path().join(name)).unwrap();
    let manifest_bytes = read("node-1/manifest.json");
    let manifest = Manifest::parse(&manifest_bytes).unwrap();
    let files = manifest.files.iter().map(|file| read(&format!("node-1/{}", file.name))).collect();
    let offer = Offer {
        intent: Intent::Send,
        manifest: manifest_bytes,
        set: read("set.json"),
        signature: Vec::new(),
    };
    Source { manifest, files, offer }
});

/// What a node keeps between connections.
struct Disk {
    files: Vec<Vec<u8>>,
    held: ChunkMap,
    writes: usize,
    sealed: bool,
}

impl Disk {
    fn new() -> Self {
        let files = SOURCE.manifest.files.iter().map(|file| vec![0; file.size as usize]).collect();
        Self { files, held: ChunkMap::empty(&SOURCE.manifest), writes: 0, sealed: false }
    }

    /// Does what the receiver asks; returns the answer.
    fn perform(&mut self, receiver: &mut Receiver, step: ReceiverAction) -> Message {
        match step {
            ReceiverAction::Reply(message) => message,
            ReceiverAction::Stage(_) => {
                receiver.staged(SharedMap::new(self.held.clone()), 1 << 40, 0)
            }
            ReceiverAction::Store { file, chunk, offset, bytes } => {
                let start = offset as usize;
                self.files[file as usize][start..start + bytes.len()].copy_from_slice(&bytes);
                self.held.insert(file, chunk);
                self.writes += 1;
                receiver.stored(file, chunk)
            }
            ReceiverAction::Seal => {
                assert_eq!(self.files, SOURCE.files, "a node commits what was packaged");
                self.sealed = true;
                receiver.sealed()
            }
            other => panic!("{other:?} was not asked for"),
        }
    }
}

/// What happens to a frame on its way.
enum Delivery {
    Arrives,
    /// The connection ends before it.
    Lost,
}

/// Frames under way from the controller to the node.
type Queue = VecDeque<Vec<u8>>;

/// Runs one connection. `fault` sees the frames under way to the node, numbered from 0, before
/// each delivery of the first of them. Returns the result and the bytes of chunks sent.
fn connect(
    disk: &mut Disk,
    window: usize,
    mut fault: impl FnMut(usize, &mut Queue) -> Delivery,
) -> (Result<(), String>, u64) {
    let mut sender = Sender::new(SOURCE.manifest.clone(), SOURCE.offer.clone(), window);
    let mut receiver = Receiver::new();
    let (mut to_node, mut sent_bytes) = (Queue::new(), 0);
    for number in 0.. {
        loop {
            let message = match sender.next(0) {
                Outgoing::Message(message) => message,
                Outgoing::Chunk { file, chunk, range } => {
                    sent_bytes += range.end - range.start;
                    let bytes = &SOURCE.files[file as usize];
                    let bytes = bytes[range.start as usize..range.end as usize].to_vec();
                    Message::Chunk { file, chunk, bytes }
                }
                Outgoing::Wait => break,
                Outgoing::Rest => panic!("there is no other stream"),
                Outgoing::Done => return (Ok(()), sent_bytes),
            };
            to_node.push_back(encode(&message));
        }
        if let Delivery::Lost = fault(number, &mut to_node) {
            return (Err("the connection was cut".to_owned()), sent_bytes);
        }
        let Some(frame) = to_node.pop_front() else {
            return (Err("nobody speaks".to_owned()), sent_bytes);
        };
        let answer = match decode(&frame) {
            Ok(message) => match receiver.handle(message) {
                Ok(step) => disk.perform(&mut receiver, step),
                Err(failure) => Message::Failed(failure),
            },
            Err(error) => Message::failed(FailureCode::Malformed, error.to_string()),
        };
        if let Err(error) = sender.handle(0, decode(&encode(&answer)).unwrap()) {
            return (Err(error.to_string()), sent_bytes);
        }
    }
    unreachable!("frames are counted without end")
}

fn encode(message: &Message) -> Vec<u8> {
    let mut frame = Vec::new();
    frame::write(&mut frame, message).unwrap();
    frame
}

fn decode(bytes: &[u8]) -> Result<Message, FrameError> {
    frame::read(&mut Cursor::new(bytes), |_| {})
}

fn package_bytes() -> u64 {
    SOURCE.manifest.files.iter().map(|file| file.size).sum()
}

fn package_chunks() -> usize {
    SOURCE.manifest.files.iter().map(|file| chunk_count(file.size) as usize).sum()
}

#[test]
fn whole_push_sends_every_byte_once() {
    for window in [1, 2, 100] {
        let mut disk = Disk::new();
        let (result, sent_bytes) = connect(&mut disk, window, |_, _| Delivery::Arrives);
        assert_eq!(result, Ok(()));
        assert!(disk.sealed);
        assert_eq!((sent_bytes, disk.writes), (package_bytes(), package_chunks()));
    }
}

#[test]
fn push_cut_after_any_frame_goes_on_where_it_was() {
    // Hello, offer, chunks, commit.
    for cut in 0..package_chunks() + 3 {
        let mut disk = Disk::new();
        let (first, sent_first) =
            connect(&mut disk, 2, |n, _| if n == cut { Delivery::Lost } else { Delivery::Arrives });
        assert!(first.is_err(), "cut before frame {cut}");
        let stored = disk.held.held_bytes();
        let (second, sent_again) = connect(&mut disk, 2, |_, _| Delivery::Arrives);
        assert_eq!(second, Ok(()));
        assert_eq!(sent_again, package_bytes() - stored, "only what was missing is sent again");
        assert!(sent_first - stored <= 2 * CHUNK_BYTES, "at most a window is sent in vain");
        assert_eq!(disk.writes, package_chunks(), "no chunk is written twice");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn push_cut_many_times_ends_with_the_same_bytes(
        cuts in prop::collection::vec(0_usize..10, 0..6),
        window in 1_usize..4,
    ) {
        let (mut disk, mut sent_bytes) = (Disk::new(), 0);
        for cut in &cuts {
            let lost = |n, _: &mut Queue| if n == *cut { Delivery::Lost } else { Delivery::Arrives };
            sent_bytes += connect(&mut disk, window, lost).1;
        }
        let (result, sent) = connect(&mut disk, window, |_, _| Delivery::Arrives);
        prop_assert_eq!(result, Ok(()));
        prop_assert!(disk.sealed);
        let in_vain = (cuts.len() * window) as u64 * CHUNK_BYTES;
        prop_assert!(sent_bytes + sent <= package_bytes() + in_vain);
        prop_assert_eq!(disk.writes, package_chunks());
    }

    #[test]
    fn chunks_may_arrive_in_any_order(picks in prop::collection::vec(any::<usize>(), 16)) {
        let mut disk = Disk::new();
        let (result, _) = connect(&mut disk, 8, |number, queue| {
            if let Some(pick) = picks.get(number).filter(|_| !queue.is_empty()) {
                let len = queue.len();
                queue.swap(0, pick % len);
            }
            Delivery::Arrives
        });
        prop_assert_eq!(result, Ok(()));
    }

    #[test]
    fn flipped_bit_never_reaches_the_disk(frame in 2_usize..8, place in any::<usize>()) {
        let mut disk = Disk::new();
        let (result, _) = connect(&mut disk, 1, |number, queue| {
            if let Some(bytes) = queue.front_mut().filter(|_| number == frame) {
                let place = place % bytes.len();
                bytes[place] ^= 1 << (place % 8);
            }
            Delivery::Arrives
        });
        prop_assert!(result.is_err());
        for (file, chunk, _, held) in disk.held.clone().chunks().collect::<Vec<_>>() {
            let range = chunk_range_of(file, chunk);
            let same = disk.files[file as usize][range.clone()] == SOURCE.files[file as usize][range];
            prop_assert!(same || !held, "chunk {} of file {} is held and wrong", chunk, file);
        }
        prop_assert_eq!(connect(&mut disk, 1, |_, _| Delivery::Arrives).0, Ok(()));
    }

    #[test]
    fn any_bytes_decode_or_fail(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes);
    }

    #[test]
    fn any_payload_decodes_or_fails(kind in 0_u8..30, payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut frame = b"SPTF\x01".to_vec();
        frame.extend([kind, 0, 0]);
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(&payload);
        if let Ok(message) = decode(&frame) {
            prop_assert_eq!(decode(&encode(&message)).unwrap(), message);
        }
    }

    #[test]
    fn any_bitmap_parses_or_fails(bytes in prop::collection::vec(any::<u8>(), 0..8)) {
        if let Ok(map) = ChunkMap::parse(&SOURCE.manifest, &bytes) {
            prop_assert_eq!(map.to_bytes(), bytes);
        }
    }
}

fn chunk_range_of(file: u32, chunk: u32) -> std::ops::Range<usize> {
    let size_bytes = SOURCE.manifest.files[file as usize].size;
    let range = shardpack_manifests::digest::chunk_range(size_bytes, u64::from(chunk));
    range.start as usize..range.end as usize
}

fn messages() -> Vec<Message> {
    let key = PackageKey { layout: Digest::of(b"layout"), rank: 3 };
    let place = ChunkPlace { package: key, file: 2, chunk: 5 };
    let json = r#"{"a":1}"#.to_owned();
    vec![
        Message::hello(),
        Message::Offer(SOURCE.offer.clone()),
        Message::Status { free_bytes: 1 << 50, reused_bytes: 7, held: vec![1, 2, 3] },
        Message::Chunk { file: 1, chunk: 2, bytes: vec![9; 100] },
        Message::ChunkStored { file: 1, chunk: u32::MAX },
        Message::ChunkRefused { file: 0, chunk: 0, reason: "é".to_owned() },
        Message::Commit,
        Message::Prepared,
        Message::Activate(key),
        Message::Activated { previous: None },
        Message::Activated { previous: Some(key) },
        Message::Working { done_bytes: 1, total_bytes: 2 },
        Message::List,
        Message::Listing(json.clone()),
        Message::StartRank(StartRank { package: key, parameters: json.clone() }),
        Message::RankStarted(json),
        Message::failed(FailureCode::NoSpace, "full"),
        Message::failed(FailureCode::Other(999), ""),
        Message::Join(Join { package: key, manifest: Digest::of(b"manifest") }),
        Message::Joined,
        Message::Operate(Operation { name: "gc".to_owned(), parameters: "{}".to_owned() }),
        Message::Operated("{}".to_owned()),
        Message::Fetch(place),
        Message::Fetched(vec![7; 100]),
        Message::Put { place, bytes: vec![8; 100] },
        Message::PutDone(PutOutcome::Intact),
        Message::PutDone(PutOutcome::Replaced),
    ]
}

#[test]
fn every_message_round_trips() {
    let mut kinds: Vec<u8> = messages().iter().map(Message::kind).collect();
    for message in messages() {
        assert_eq!(decode(&encode(&message)).unwrap(), message);
    }
    kinds.dedup();
    assert_eq!(kinds, (1..=24).collect::<Vec<u8>>(), "every type is in the list");
}

#[test]
fn every_truncation_is_noticed() {
    for message in messages() {
        let frame = encode(&message);
        assert!(matches!(decode(&[]), Err(FrameError::Closed)));
        for len in (1..frame.len()).rev().take(3_000).chain(1..frame.len().min(64)) {
            assert!(matches!(decode(&frame[..len]), Err(FrameError::Truncated)), "{len} bytes");
        }
    }
}

#[test]
fn frames_from_elsewhere_are_refused_before_their_payload() {
    let check = |change: &dyn Fn(&mut Vec<u8>), expected: &str| {
        let mut frame = encode(&Message::Commit);
        change(&mut frame);
        assert_eq!(decode(&frame).unwrap_err().to_string(), expected);
    };
    check(&|frame| frame[0] = b'X', "not a frame of shardpack's transfer protocol");
    check(&|frame| frame[4] = 2, "frame version 2, this program speaks 1");
    check(&|frame| frame[5] = 77, "message type 77 is unknown");
    check(&|frame| frame[6] = 1, "message type 7: reserved bytes are not zero");
    check(&|frame| frame[11] = 0xff, "4278190080 bytes of message type 7, at most 64 are allowed");
    check(&|frame| frame[8] = 1, "the connection ended inside a frame");
}

#[test]
fn long_text_is_cut_at_a_character() {
    let text = "é".repeat(5_000);
    let Ok(Message::Failed(failure)) = decode(&encode(&Message::failed(FailureCode::Busy, text)))
    else {
        panic!("expected a failure");
    };
    assert_eq!(failure.message.len(), 4096);
}

/// Brings a receiver to the point where chunks come in.
fn receiving(disk: &Disk) -> Receiver {
    let mut receiver = Receiver::new();
    receiver.handle(Message::hello()).unwrap();
    receiver.handle(Message::Offer(SOURCE.offer.clone())).unwrap();
    receiver.staged(SharedMap::new(disk.held.clone()), 0, 0);
    receiver
}

#[test]
fn message_out_of_turn_ends_the_connection() {
    for message in messages().into_iter().filter(|message| message.kind() != 1) {
        let failure = Receiver::new().handle(message).unwrap_err();
        assert_eq!(failure.code, FailureCode::Unexpected);
    }
    let disk = Disk::new();
    for message in messages().into_iter().filter(|message| !matches!(message.kind(), 4 | 7)) {
        assert!(receiving(&disk).handle(message).is_err());
    }
    let failure = receiving(&disk).handle(Message::Commit).unwrap_err();
    assert_eq!(failure.code, FailureCode::Incomplete);
    let strange = Message::Chunk { file: 99, chunk: 0, bytes: Vec::new() };
    assert_eq!(receiving(&disk).handle(strange).unwrap_err().code, FailureCode::Unexpected);
}

#[test]
fn stored_chunk_that_comes_again_is_acknowledged_and_not_written() {
    let mut disk = Disk::new();
    disk.held.insert(0, 0);
    let again = Message::Chunk { file: 0, chunk: 0, bytes: b"anything".to_vec() };
    let step = receiving(&disk).handle(again).unwrap();
    assert!(matches!(step, ReceiverAction::Reply(Message::ChunkStored { file: 0, chunk: 0 })));
}

#[test]
fn other_protocol_is_refused_by_both_sides() {
    let other = || Message::Hello { protocol: SPOKEN.highest + 1, program: "later".to_owned() };
    assert_eq!(Receiver::new().handle(other()).unwrap_err().code, FailureCode::Version);
    let mut sender = Sender::new(SOURCE.manifest.clone(), SOURCE.offer.clone(), 1);
    sender.next(0);
    assert!(matches!(sender.handle(0, other()), Err(SendError::Version(_))));
}

#[test]
fn offer_that_contradicts_itself_is_refused() {
    let check = |change: &dyn Fn(&mut Offer), expected: &str| {
        let mut receiver = Receiver::new();
        receiver.handle(Message::hello()).unwrap();
        let mut offer = SOURCE.offer.clone();
        change(&mut offer);
        let failure = receiver.handle(Message::Offer(offer)).unwrap_err();
        assert_eq!(failure.code, FailureCode::Refused);
        assert!(failure.message.contains(expected), "{}", failure.message);
    };
    let replace = |bytes: &mut Vec<u8>, from: &str, to: &str| {
        *bytes = String::from_utf8(bytes.clone()).unwrap().replace(from, to).into_bytes();
    };
    check(&|offer| offer.manifest.clear(), "manifest.json: not a manifest");
    check(&|offer| replace(&mut offer.manifest, "config.json", "../x"), "a file name");
    check(&|offer| replace(&mut offer.manifest, "\"format\":2", "\"format\":3"), "newer shardpack");
    check(&|offer| replace(&mut offer.manifest, "\"rank\":1", "\"rank\":0"), "another manifest");
    check(&|offer| replace(&mut offer.manifest, "\"unit\":8", "\"unit\":9"), "layout id");
    check(&|offer| offer.set = b"{}".to_vec(), "set.json: not a manifest");
    let other = Digest::of(b"other").to_string();
    let weights = SOURCE.manifest.ids.weights.to_string();
    check(&|offer| replace(&mut offer.set, &weights, &other), "not of this set: weights id");
}

#[test]
fn question_is_answered_without_receiving() {
    let mut receiver = Receiver::new();
    receiver.handle(Message::hello()).unwrap();
    let offer = Offer { intent: Intent::Ask, ..SOURCE.offer.clone() };
    receiver.handle(Message::Offer(offer)).unwrap();
    receiver.staged(SharedMap::new(ChunkMap::empty(&SOURCE.manifest)), 5, 6);
    let chunk = Message::Chunk { file: 0, chunk: 0, bytes: Vec::new() };
    assert_eq!(receiver.handle(chunk).unwrap_err().code, FailureCode::Unexpected);
}

#[test]
fn document_longer_than_its_limit_is_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("long.json");
    fs::write(&path, [b' '; 11]).unwrap();
    assert!(read_document(&path, 10).is_err());
    assert_eq!(read_document(&path, 11).unwrap().len(), 11);
}
