//! Every algorithm has the bits of a sequential sum, and sends the messages that it should.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{chain::SEGMENT_LEN, *};

fn ring(groups: Vec<LinkedGroup>) -> Vec<LinkedGroup> {
    groups.into_iter().map(|group| group.with_topology(Topology::Ring)).collect()
}

/// Lengths around the borders of segments.
const RING_LENS: [usize; 6] =
    [1, 70_001, SEGMENT_LEN, 2 * SEGMENT_LEN + 1, 5 * SEGMENT_LEN - 1, 5 * SEGMENT_LEN];

/// The sums of all ranks in bf16, as bits.
fn bf16_sums(groups: &[LinkedGroup], len: usize) -> Vec<Vec<u16>> {
    on_all(groups, |group| {
        let (rank, size) = (group.rank(), group.size());
        let mut values: Vec<_> = (0..len).map(|it| bf16::from_f32(value(rank, it))).collect();
        group.sum_bf16_among(0..size, &mut values, Deadline::after(LONG)).unwrap();
        values.iter().map(|value| value.to_bits()).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn sums_around_a_ring_have_the_bits_of_a_sequential_sum_whatever_the_timing(
        size in 2_u32..=8,
        seed in any::<u64>(),
        lens in proptest::sample::subsequence(RING_LENS.to_vec(), 1..=3),
    ) {
        check_sums(&ring(jittery(size, seed)), &lens);
    }

    #[test]
    fn bf16_sums_around_a_ring_have_the_bits_of_those_in_a_mesh(
        size in 3_u32..=6,
        seed in any::<u64>(),
        len in 32_769_usize..100_000,
    ) {
        let mesh = bf16_sums(&over_memory(size), len);
        prop_assert_eq!(bf16_sums(&ring(jittery(size, seed)), len), mesh);
    }
}

#[test]
fn sums_around_a_ring_over_tcp_have_the_bits_of_a_sequential_sum() {
    for size in [3, 4, 8] {
        check_sums(&ring(over_tcp(size)), &[70_001, PIECE_LEN + 3, 1]);
    }
    check_sums(&ring(over_tls(4)), &RING_LENS);
}

#[test]
fn subgroups_of_a_ring_are_chains_of_their_own() {
    for (size, first) in [(5, 3), (7, 3)] {
        check_parts(&ring(over_memory(size)), first);
        check_parts(&ring(over_tcp(size)), first);
    }
}

#[test]
fn all_ranks_measure_the_same_and_sum_the_same() {
    let forms: [fn(u32) -> Vec<LinkedGroup>; 3] = [over_memory, over_tcp, over_tls];
    for form in forms {
        for (size, topology) in
            [(1, Topology::Mesh), (2, Topology::Mesh), (4, Topology::Mesh), (4, Topology::Ring)]
        {
            let groups: Vec<_> =
                form(size).into_iter().map(|group| group.with_topology(topology)).collect();
            assert!(groups.iter().all(|group| group.link_speeds().is_none()));
            let tables = on_all(&groups, |group| {
                group.measure(Deadline::after(LONG)).unwrap();
                group.link_speeds().unwrap()
            });
            for table in &tables {
                assert_eq!(*table, tables[0]);
                for one in 0..size {
                    for other in (0..size).filter(|other| *other != one) {
                        let speed = table.between(one, other).unwrap();
                        assert_eq!(Some(speed), table.between(other, one));
                        assert!(speed.latency_ns > 0 && speed.bytes_per_s > 0, "{speed:?}");
                    }
                    assert_eq!(table.between(one, one), None);
                }
                assert_eq!(table.between(0, size), None);
            }
            check_sums(&groups, &LENS);
        }
    }
}

#[test]
fn a_measurement_of_a_silent_rank_ends_at_its_deadline() {
    let groups = over_memory(3);
    let errors = on_all(&groups[..2], |group| {
        group.measure(Deadline::after(Duration::from_secs(1))).unwrap_err()
    });
    // Of the two that wait, the first to give up may tell the other.
    for error in errors {
        assert!(error.to_string().contains("did not answer within"), "{error}");
    }
}

/// Counts frames that begin, and bytes, that one rank sends another.
struct Counted {
    link: Box<dyn Link>,
    sent: Arc<Sent>,
}

#[derive(Default)]
struct Sent {
    frames: AtomicUsize,
    bytes: AtomicUsize,
}

impl Link for Counted {
    fn send_now(&self, frame: &[u8]) -> Result<usize, LinkError> {
        self.sent.frames.fetch_add(1, Ordering::SeqCst);
        self.sent.bytes.fetch_add(frame.len(), Ordering::SeqCst);
        self.link.send_now(frame)
    }
    fn send_rest(&self, rest: &[u8], deadline: Deadline) -> Result<(), LinkError> {
        self.link.send_rest(rest, deadline)
    }
    fn receive_header(&self, frame: &mut Vec<u8>, deadline: Deadline) -> Result<Header, LinkError> {
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

/// Frames and payload bytes from the lower of two ranks to the higher, and back.
type Ways = [(usize, usize); 2];

/// What one all-reduce of `len` elements sends between each two ranks.
fn traffic(
    size: u32,
    topology: Topology,
    len: usize,
    mut pair: impl FnMut() -> Ends,
) -> Vec<((u32, u32), Ways)> {
    let mut counts = Vec::new();
    let groups = groups(size, || {
        let (low, high) = pair();
        let sent = [0, 1].map(|_| Arc::<Sent>::default());
        counts.push(sent.clone());
        let [of_low, of_high] = sent;
        (
            Box::new(Counted { link: low, sent: of_low }) as Box<dyn Link>,
            Box::new(Counted { link: high, sent: of_high }) as Box<dyn Link>,
        )
    });
    let groups: Vec<_> = groups.into_iter().map(|it| it.with_topology(topology)).collect();
    check_sums(&groups, &[len]);
    // In the order in which `groups` asks for links.
    let pairs = (0..size).flat_map(|high| (0..high).map(move |low| (low, high)));
    let count = |sent: &Arc<Sent>| {
        let frames = sent.frames.load(Ordering::SeqCst);
        (frames, sent.bytes.load(Ordering::SeqCst) - frames * HEADER_BYTES)
    };
    pairs.zip(counts.iter().map(|[low, high]| [count(low), count(high)])).collect()
}

fn memory_ends() -> Ends {
    let (low, high) = MemoryLink::pair();
    (Box::new(low), Box::new(high))
}

fn tcp_ends() -> Ends {
    let ((low, high), (low_control, high_control)) = (sockets(), sockets());
    let low = TcpLink::new(low, low_control).unwrap();
    (Box::new(low), Box::new(TcpLink::new(high, high_control).unwrap()))
}

#[test]
fn an_all_reduce_sends_as_many_messages_over_any_link() {
    let large = 8 * SEGMENT_LEN;
    let pairs: [fn() -> Ends; 2] = [memory_ends, tcp_ends];
    for pair in pairs {
        for size in 2..=4 {
            // A decode step's vector: one message each way between every two ranks.
            for topology in [Topology::Mesh, Topology::Ring] {
                for (_, ways) in traffic(size, topology, 4096, pair) {
                    assert_eq!(ways, [(1, 4096 * 4); 2]);
                }
            }
        }
        for (_, ways) in traffic(4, Topology::Mesh, large, pair) {
            assert_eq!(ways, [(2, 2 * large); 2]);
        }
        for ((low, high), ways) in traffic(4, Topology::Ring, large, pair) {
            let cable = if high == low + 1 { (8, large * 4) } else { (0, 0) };
            assert_eq!(ways, [cable; 2], "{low} and {high}");
        }
    }
}
