//! Which algorithm an all-reduce uses, from what the links can do.
//!
//! A message of `n` bytes takes `a + n / b`: `a` is the link's latency, `b` its bandwidth (Hockney,
//! "The communication challenge for MPP", 1994). An all-reduce of `n` bytes among `N` ranks then takes
//!
//! | algorithm | time |
//! |---|---|
//! | direct | `a + (N-1) n / b` |
//! | reduce-scatter and all-gather | `2 a + 2 (N-1)/N n / b` |
//! | chain of neighbours, `s` segments of `n/s` bytes | `(s + 2N - 3) (a + (n/s) / b)` |
//!
//! (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
//! 2005, section 4, without the arithmetic, which is the same for all; a rank's messages leave one
//! after the other.) `a` and `b` are those of the slowest link in use: between any two members, or
//! for the chain between neighbours. So the direct way wins up to `n = a b N / ((N-1) (N-2))`.
//!
//! The chain is for cabling where only neighbours have a cable: where that is said ([`Topology::Ring`]), and
//! where links between neighbours are [`MUCH_FASTER`] than the slowest one.
//!
//! Every rank computes the same numbers from the same table in integers, so all choose alike.

use std::ops::Range;

use super::{
    DIRECT_MAX_BYTES,
    chain::{SEGMENT_LEN, ticks},
};
use crate::sum::PARTIAL_BYTES;

/// Links between neighbours that are so many times as fast as the slowest link make a chain, whatever is
/// said of the cabling: they are cables, and the others are not.
const MUCH_FASTER: u64 = 4;

/// How the machines of a group are cabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topology {
    /// A cable between every two, or a switch.
    Mesh,
    /// A cable from each rank to the next, and from the last to the first. Other pairs exchange only
    /// small messages.
    Ring,
}

/// What the link between two ranks can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpeed {
    /// Half the time that an empty message and its answer take, in nanoseconds.
    pub latency_ns: u64,
    /// Bandwidth of a large message beyond that, in bytes per second.
    pub bytes_per_s: u64,
}

impl LinkSpeed {
    pub(super) const ENCODED_BYTES: usize = 16;

    /// Both numbers, little-endian.
    pub(super) fn encode(self) -> [u8; Self::ENCODED_BYTES] {
        let numbers = u128::from(self.bytes_per_s) << 64 | u128::from(self.latency_ns);
        numbers.to_le_bytes()
    }

    pub(super) fn parse(bytes: [u8; Self::ENCODED_BYTES]) -> Self {
        let numbers = u128::from_le_bytes(bytes);
        // No link is without bandwidth, whatever a rank says.
        Self { latency_ns: numbers as u64, bytes_per_s: ((numbers >> 64) as u64).max(1) }
    }

    /// Time of a message in nanoseconds.
    fn time_ns(self, bytes: u128) -> u128 {
        u128::from(self.latency_ns) + bytes * 1_000_000_000 / u128::from(self.bytes_per_s)
    }

    fn slower(self, other: Self) -> Self {
        Self {
            latency_ns: self.latency_ns.max(other.latency_ns),
            bytes_per_s: self.bytes_per_s.min(other.bytes_per_s),
        }
    }
}

/// What every link of a group can do, the same table on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkSpeeds {
    /// By lower rank, then by higher one.
    pub(super) rows: Vec<Vec<LinkSpeed>>,
}

impl LinkSpeeds {
    /// The link between two ranks; none between a rank and itself, or one that is not of the group.
    #[must_use]
    pub fn between(&self, one: u32, other: u32) -> Option<LinkSpeed> {
        let (low, high) = (one.min(other), one.max(other));
        let row = self.rows.get(low as usize)?;
        row.get((high as usize).checked_sub(low as usize + 1)?).copied()
    }

    /// The slowest link between any of `pairs`.
    fn slowest(&self, pairs: impl Iterator<Item = (u32, u32)>) -> Option<LinkSpeed> {
        pairs.filter_map(|(one, other)| self.between(one, other)).reduce(LinkSpeed::slower)
    }
}

/// A way to do an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Direct,
    ScatterGather,
    Chain,
}

/// What is to be summed.
#[derive(Clone, Copy)]
pub(super) struct Vector {
    pub(super) len: usize,
    pub(super) element_bytes: usize,
}

/// The fastest way to sum `vector` among `members` that the cables allow.
pub(super) fn choose(
    topology: Topology,
    speeds: Option<&LinkSpeeds>,
    members: &Range<u32>,
    vector: Vector,
) -> Algorithm {
    // Between two ranks every algorithm sends the same bytes, and the direct one has one hop.
    if members.len() <= 2 {
        return Algorithm::Direct;
    }
    let (bytes, count) = ((vector.len * vector.element_bytes) as u128, members.len() as u128);
    let large = match topology {
        Topology::Mesh => Algorithm::ScatterGather,
        Topology::Ring => Algorithm::Chain,
    };
    let pairs = members.clone().flat_map(|low| (low + 1..members.end).map(move |it| (low, it)));
    let Some(link) = speeds.and_then(|speeds| speeds.slowest(pairs)) else {
        let is_small = bytes <= DIRECT_MAX_BYTES as u128;
        return if is_small { Algorithm::Direct } else { large };
    };
    let neighbours = members.clone().zip(members.clone().skip(1));
    let cable = speeds.and_then(|speeds| speeds.slowest(neighbours)).unwrap_or(link);
    let has_fast_neighbours = cable.bytes_per_s / MUCH_FASTER >= link.bytes_per_s
        || cable.latency_ns <= link.latency_ns / MUCH_FASTER;
    let direct_ns = link.time_ns(bytes * (count - 1));
    let (large, large_ns) = if topology == Topology::Ring || has_fast_neighbours {
        let segments = vector.len.div_ceil(SEGMENT_LEN);
        let segment = (vector.len.min(SEGMENT_LEN) * PARTIAL_BYTES) as u128;
        (Algorithm::Chain, ticks(members.len(), segments) as u128 * cable.time_ns(segment))
    } else {
        (Algorithm::ScatterGather, 2 * link.time_ns(bytes * (count - 1) / count))
    };
    if direct_ns <= large_ns { Algorithm::Direct } else { large }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(size: u32, speed: impl Fn(u32, u32) -> (u64, u64)) -> LinkSpeeds {
        let link = |low, high| {
            let (latency_ns, bytes_per_s) = speed(low, high);
            LinkSpeed { latency_ns, bytes_per_s }
        };
        let row = |low| (low + 1..size).map(|high| link(low, high)).collect();
        LinkSpeeds { rows: (0..size).map(row).collect() }
    }

    /// The largest vector of f32 that goes directly, in elements.
    fn direct_len(topology: Topology, speeds: &LinkSpeeds, members: Range<u32>) -> usize {
        let is_direct = |len: usize| {
            let vector = Vector { len, element_bytes: 4 };
            choose(topology, Some(speeds), &members, vector) == Algorithm::Direct
        };
        let (mut low, mut high) = (0, 1 << 28);
        assert!(is_direct(low) && !is_direct(high));
        while high - low > 1 {
            let middle = low.midpoint(high);
            *(if is_direct(middle) { &mut low } else { &mut high }) = middle;
        }
        low
    }

    #[test]
    fn the_direct_way_wins_up_to_what_the_formula_says() {
        // 10 µs at 2 GB/s, N = 4: a b N / ((N-1)(N-2)) = 20000 * 4 / 6 bytes.
        let four = speeds(4, |_, _| (10_000, 2_000_000_000));
        let bytes = direct_len(Topology::Mesh, &four, 0..4) * 4;
        assert!(bytes.abs_diff(20_000 * 4 / 6) <= 8, "{bytes}");
        // Ten times the bandwidth moves the limit by as much.
        let fast = speeds(4, |_, _| (10_000, 20_000_000_000));
        let bytes = direct_len(Topology::Mesh, &fast, 0..4) * 4;
        assert!(bytes.abs_diff(200_000 * 4 / 6) <= 80, "{bytes}");
    }

    #[test]
    fn a_ring_of_cables_within_a_slow_network_is_found_without_being_told() {
        // Neighbours over cables of 10 µs and 5 GB/s, the others over a network of 300 µs.
        let ring = speeds(4, |low, high| {
            if high - low == 1 { (10_000, 5_000_000_000) } else { (300_000, 1_000_000_000) }
        });
        for len in [4096, 1 << 20] {
            let vector = Vector { len, element_bytes: 4 };
            assert_eq!(choose(Topology::Mesh, Some(&ring), &(0..4), vector), Algorithm::Chain);
        }
        // Of three neighbours two have no cable: there is nothing to gain.
        let apart =
            speeds(
                4,
                |low, _| {
                    if low == 0 { (10_000, 5_000_000_000) } else { (300_000, 1_000_000_000) }
                },
            );
        let vector = Vector { len: 1 << 20, element_bytes: 4 };
        let choice = choose(Topology::Mesh, Some(&apart), &(0..4), vector);
        assert_eq!(choice, Algorithm::ScatterGather);
    }

    #[test]
    fn the_slowest_link_of_the_members_counts_and_no_other() {
        let slow_last =
            speeds(
                5,
                |_, high| {
                    if high == 4 { (900_000, 1_000_000_000) } else { (10_000, 1_000_000_000) }
                },
            );
        let within = direct_len(Topology::Mesh, &slow_last, 0..4);
        assert_eq!(
            within,
            direct_len(Topology::Mesh, &speeds(4, |_, _| (10_000, 1_000_000_000)), 0..4)
        );
        assert!(direct_len(Topology::Mesh, &slow_last, 0..5) > 10 * within);
    }

    #[test]
    fn a_ring_sends_large_vectors_to_neighbours_only() {
        // Neighbours have a cable, the others a slow network.
        let ring = speeds(4, |low, high| {
            if high - low == 1 { (10_000, 5_000_000_000) } else { (40_000, 100_000_000) }
        });
        let choice =
            |len| choose(Topology::Ring, Some(&ring), &(0..4), Vector { len, element_bytes: 4 });
        assert_eq!([1, 1 << 20].map(choice), [Algorithm::Direct, Algorithm::Chain]);
        // Up to here the chain's ticks cost more than the slow network.
        let len = direct_len(Topology::Ring, &ring, 0..4);
        assert!((100..10_000).contains(&len), "{len}");
    }

    #[test]
    fn two_ranks_always_exchange_directly_and_unmeasured_ones_up_to_the_limit() {
        let choice = |topology, members: Range<u32>, bytes: usize| {
            choose(topology, None, &members, Vector { len: bytes / 2, element_bytes: 2 })
        };
        for (topology, large) in
            [(Topology::Mesh, Algorithm::ScatterGather), (Topology::Ring, Algorithm::Chain)]
        {
            assert_eq!(choice(topology, 3..5, 1 << 30), Algorithm::Direct);
            assert_eq!(choice(topology, 0..3, DIRECT_MAX_BYTES), Algorithm::Direct);
            assert_eq!(choice(topology, 0..3, DIRECT_MAX_BYTES + 2), large);
        }
    }

    #[test]
    fn a_speed_is_read_as_it_was_written() {
        let speed = LinkSpeed { latency_ns: 7, bytes_per_s: u64::MAX };
        assert_eq!(LinkSpeed::parse(speed.encode()), speed);
        assert_eq!(LinkSpeed::parse([0; 16]), LinkSpeed { latency_ns: 0, bytes_per_s: 1 });
    }
}
