//! The candidates of one rank's vocabulary shard for the next token, and their wire format.
//!
//! | bytes | field |
//! |---|---|
//! | 1 | 1 where there are more candidates than listed |
//! | 2, then 12 each | candidates: token, logit, logit as computed |
//! | 12, if probabilities count | highest scaled logit (f32), sum of exponentials relative to it (f64) |
//! | 12, if they are reported | the same of the logits as computed |
//! | 2, then 8 each, if they are reported | most likely tokens: token, logit as computed |

use std::{cmp::Ordering, collections::BinaryHeap, ops::Range};

use shardpack_kernels::exp::exp;

use super::{Row, gumbel::GumbelNoise, sampler::SamplingMethod};

/// Candidates that filters look at before they ask for the whole row: more than usual filters
/// keep, and little beside a hidden vector.
pub(super) const FILTER_CANDIDATES: usize = 256;

/// A token that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: u32,
    /// With biases and penalties.
    pub(super) logit: f32,
    /// As computed.
    pub(super) raw: f32,
}

impl Candidate {
    /// The more likely first; ties go to the lower token.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.token.cmp(&other.token))
    }
}

/// `ln Σ exp`, in parts that can be added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LogSum {
    pub(super) maximum: f32,
    /// Relative to the maximum.
    pub(super) sum: f64,
}

impl LogSum {
    const NOTHING: Self = Self { maximum: f32::NEG_INFINITY, sum: 0.0 };

    /// Numbers only; eight lanes, since the order of a sum must not be the compiler's choice.
    pub(super) fn of(values: impl Iterator<Item = f32> + Clone) -> Self {
        let maximum = values.clone().fold(f32::NEG_INFINITY, f32::max);
        if maximum.is_infinite() {
            return Self { maximum, ..Self::NOTHING };
        }
        let mut lanes = [0.0_f64; 8];
        for (index, value) in values.enumerate() {
            let weight = exp(value - maximum);
            lanes[index % 8] += if weight.is_nan() { 0.0 } else { f64::from(weight) };
        }
        Self { maximum, sum: lanes.iter().sum() }
    }

    /// The sum over all parts, relative to `base`.
    pub(super) fn total(parts: impl Iterator<Item = Self>, base: f32) -> f64 {
        parts
            .filter(|part| part.sum > 0.0)
            .map(|part| part.sum * libm::exp(f64::from(part.maximum) - f64::from(base)))
            .sum()
    }
}

/// One rank's candidates for one row.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::engine) struct ShardCandidates {
    /// The most likely first; one with the highest noisy logit where only that is asked for.
    pub(super) candidates: Vec<Candidate>,
    /// Whether there are more.
    pub(super) more: bool,
    /// Of scaled logits.
    pub(super) sum: Option<LogSum>,
    pub(super) raw_sum: Option<LogSum>,
    pub(super) raw_top: Vec<(u32, f32)>,
}

impl Row<'_> {
    pub(super) fn temperature(&self) -> f32 {
        self.sampler.params.sampling.temperature
    }

    /// Whether probabilities among all tokens decide: `top_p` counts among `top_k`'s where both
    /// are given.
    fn needs_log_sum(&self) -> bool {
        self.sampler.method() == SamplingMethod::Filtered
            && self.sampler.params.sampling.top_p < 1.0
    }

    fn candidate_count(&self) -> usize {
        match self.sampler.method() {
            SamplingMethod::Greedy | SamplingMethod::Gumbel => 1,
            SamplingMethod::Filtered => match self.sampler.params.sampling.top_k as usize {
                0 => FILTER_CANDIDATES,
                top_k => top_k.min(FILTER_CANDIDATES),
            },
        }
    }
}

impl ShardCandidates {
    /// The candidates among the tokens from `first` on.
    pub(super) fn of(row: &Row<'_>, raw: &[f32], first: u32) -> Self {
        Self::with(row, raw, first, row.candidate_count())
    }

    /// A whole row, with everything that may be chosen.
    pub(super) fn whole(row: &Row<'_>, raw: &[f32]) -> Self {
        Self::with(row, raw, 0, raw.len())
    }

    fn with(row: &Row<'_>, raw: &[f32], first: u32, count: usize) -> Self {
        let logits = row.adjusted(raw, first);
        let numbers = logits.iter().filter(|logit| !logit.is_nan()).count();
        let temperature = row.temperature();
        let scaled = || logits.iter().map(|logit| logit / temperature);
        let mut listed = top(&logits, count);
        if row.sampler.method() == SamplingMethod::Gumbel
            && let Some(&(token, logit)) = listed.first()
            && logit.is_finite()
        {
            let noise = GumbelNoise::new(row.sampler.params.sampling.seed, row.index);
            let start = (first + token, logit / temperature);
            let token = noise.best(scaled(), start, first) - first;
            listed = vec![(token, logits[token as usize])];
        }
        let candidate = |(index, logit): (u32, f32)| Candidate {
            token: first + index,
            // Zeros of either sign are the same.
            logit: logit + 0.0,
            raw: raw[index as usize],
        };
        let reported = row.sampler.params.logprobs;
        Self {
            more: numbers > listed.len(),
            candidates: listed.into_iter().map(candidate).collect(),
            sum: row.needs_log_sum().then(|| LogSum::of(scaled())),
            raw_sum: reported.map(|_| LogSum::of(raw.iter().copied())),
            raw_top: reported.map_or(Vec::new(), |count| {
                let top = top(raw, count as usize);
                top.into_iter().map(|(index, logit)| (first + index, logit)).collect()
            }),
        }
    }

    pub(super) fn encode(&self, row: &Row<'_>, bytes: &mut Vec<u8>) {
        let sum = |bytes: &mut Vec<u8>, sum: Option<LogSum>| {
            if let Some(LogSum { maximum, sum }) = sum {
                bytes.extend(maximum.to_le_bytes());
                bytes.extend(sum.to_le_bytes());
            }
        };
        assert_eq!(self.sum.is_some(), row.needs_log_sum(), "a sum where it counts");
        bytes.push(u8::from(self.more));
        bytes.extend((self.candidates.len() as u16).to_le_bytes());
        for Candidate { token, logit, raw } in &self.candidates {
            bytes.extend(token.to_le_bytes());
            bytes.extend(logit.to_le_bytes());
            bytes.extend(raw.to_le_bytes());
        }
        sum(bytes, self.sum);
        sum(bytes, self.raw_sum);
        if self.raw_sum.is_some() {
            bytes.extend((self.raw_top.len() as u16).to_le_bytes());
            for (token, logit) in &self.raw_top {
                bytes.extend(token.to_le_bytes());
                bytes.extend(logit.to_le_bytes());
            }
        }
    }

    /// A part from a rank that holds the tokens of `range`; `None` for bytes that are none. What
    /// is left of `bytes` follows it.
    pub(super) fn parse(row: &Row<'_>, range: &Range<usize>, bytes: &mut &[u8]) -> Option<Self> {
        fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
            let (taken, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(*taken)
        }
        fn sum(bytes: &mut &[u8]) -> Option<LogSum> {
            let maximum = f32::from_le_bytes(take(bytes)?);
            let sum = f64::from_le_bytes(take(bytes)?);
            Some(LogSum { maximum, sum })
        }
        let token = |bytes: &mut &[u8]| {
            let token = u32::from_le_bytes(take(bytes)?);
            range.contains(&(token as usize)).then_some(token)
        };
        let float = |bytes: &mut &[u8]| Some(f32::from_le_bytes(take(bytes)?));
        let more = take::<1>(bytes)? != [0];
        let count = usize::from(u16::from_le_bytes(take(bytes)?));
        if count > row.candidate_count() {
            return None;
        }
        let number = |bytes: &mut &[u8]| float(bytes).filter(|logit| !logit.is_nan());
        let candidate = |bytes: &mut &[u8]| {
            Some(Candidate { token: token(bytes)?, logit: number(bytes)?, raw: float(bytes)? })
        };
        let candidates = (0..count).map(|_| candidate(bytes)).collect::<Option<Vec<_>>>()?;
        let scaled = if row.needs_log_sum() { Some(sum(bytes)?) } else { None };
        let (mut raw_sum, mut raw_top) = (None, Vec::new());
        if let Some(most) = row.sampler.params.logprobs {
            raw_sum = Some(sum(bytes)?);
            let count = u16::from_le_bytes(take(bytes)?);
            if u32::from(count) > most {
                return None;
            }
            raw_top =
                (0..count).map(|_| Some((token(bytes)?, float(bytes)?))).collect::<Option<_>>()?;
        }
        Some(Self { candidates, more, sum: scaled, raw_sum, raw_top })
    }
}

/// The `count` highest numbers with their places, the highest first; ties go to the lower place.
pub(super) fn top(values: &[f32], count: usize) -> Vec<(u32, f32)> {
    /// The heap's greatest is the least likely one.
    struct Entry(Candidate);
    impl PartialEq for Entry {
        fn eq(&self, other: &Self) -> bool {
            self.cmp(other) == Ordering::Equal
        }
    }
    impl Eq for Entry {}
    impl PartialOrd for Entry {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }
    impl Ord for Entry {
        fn cmp(&self, other: &Self) -> Ordering {
            self.0.order(&other.0)
        }
    }
    let entry = |(place, value): (usize, &f32)| {
        // Zeros of either sign are the same.
        Entry(Candidate { token: place as u32, logit: value + 0.0, raw: *value })
    };
    if count == 0 {
        return Vec::new();
    }
    let mut heap = BinaryHeap::with_capacity(count.min(values.len()) + 1);
    for (place, value) in values.iter().enumerate().filter(|(_, value)| !value.is_nan()) {
        if heap.len() < count {
            heap.push(entry((place, value)));
        } else if let Some(mut last) = heap.peek_mut()
            && *value > last.0.logit
        {
            *last = entry((place, value));
        }
    }
    heap.into_sorted_vec().into_iter().map(|Entry(found)| (found.token, found.raw)).collect()
}
