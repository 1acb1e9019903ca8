//! What rank 0 broadcasts for each step.
//!
//! | bytes | field |
//! |---|---|
//! | 8 | number of the step in its epoch, from 1 |
//! | 2, then 8 each | sequences that ended: request |
//! | 2, then 20 each | sequences that begin: request, temperature (f32), seed |
//! | 2, then 15 + 4 per token each | work: request (8), position (4), whether a token is sampled (1), tokens (2, then 4 each) |
//!
//! All numbers little-endian. Followers parse it as foreign bytes.

use super::request::{RequestId, Sampling};

/// Most sequences of a group: far more than any machine runs at once.
pub(super) const MAX_SEQUENCES: usize = 2048;

/// Most prompt tokens of one step; bounds the activations that a plan can ask for.
pub(super) const MAX_PREFILL_TOKENS: usize = 1 << 14;

/// Entries of each list. Sequences that ended may be as many as those that replaced them.
const MAX_ENTRIES: usize = 2 * MAX_SEQUENCES;

/// Tokens of one step: a prompt's part, and one for each sequence that is decoding.
const MAX_TOKENS: usize = MAX_PREFILL_TOKENS + MAX_SEQUENCES;

/// What all ranks do in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) step: u64,
    pub(super) end: Vec<RequestId>,
    pub(super) begin: Vec<Begin>,
    pub(super) work: Vec<Work>,
}

/// A sequence that begins.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Begin {
    pub(super) id: RequestId,
    pub(super) sampling: Sampling,
}

/// The next tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) id: RequestId,
    /// Position of the first token.
    pub(super) position: u32,
    pub(super) tokens: Vec<u32>,
    /// Whether the token after them is sampled.
    pub(super) sample: bool,
}

/// Bytes that are no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PlanError {
    #[error("a plan that ends early")]
    Short,
    #[error("a plan with bytes after its end")]
    Long,
    #[error("a plan beyond its limits")]
    Limit,
    #[error("a plan with a field out of range")]
    Field,
}

impl Plan {
    /// Whether the plan changes nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.end.is_empty() && self.begin.is_empty() && self.work.is_empty()
    }

    /// # Panics
    /// When the plan exceeds the limits that [`Plan::parse`] checks.
    pub(super) fn encode(&self) -> Vec<u8> {
        let tokens: usize = self.work.iter().map(|work| work.tokens.len()).sum();
        assert!(tokens <= MAX_TOKENS, "{tokens} tokens in a plan");
        let mut bytes = self.step.to_le_bytes().to_vec();
        put_count(&mut bytes, self.end.len(), MAX_ENTRIES);
        for id in &self.end {
            bytes.extend(id.0.to_le_bytes());
        }
        put_count(&mut bytes, self.begin.len(), MAX_ENTRIES);
        for begin in &self.begin {
            bytes.extend(begin.id.0.to_le_bytes());
            bytes.extend(begin.sampling.temperature.to_le_bytes());
            bytes.extend(begin.sampling.seed.to_le_bytes());
        }
        put_count(&mut bytes, self.work.len(), MAX_ENTRIES);
        for work in &self.work {
            bytes.extend(work.id.0.to_le_bytes());
            bytes.extend(work.position.to_le_bytes());
            bytes.push(u8::from(work.sample));
            put_count(&mut bytes, work.tokens.len(), usize::from(u16::MAX));
            bytes.extend(work.tokens.iter().flat_map(|token| token.to_le_bytes()));
        }
        bytes
    }

    /// Every value returned is within the limits; whether it fits the sequences is the runner's
    /// to check.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut rest = Reader(bytes);
        let step = rest.u64()?;
        let end = rest.list(|rest| rest.u64().map(RequestId))?;
        let begin = rest.list(|rest| {
            let id = RequestId(rest.u64()?);
            let temperature = f32::from_bits(rest.u32()?);
            let sampling = Sampling { temperature, seed: rest.u64()?, ..Sampling::GREEDY };
            let valid = temperature.is_finite() && temperature >= 0.0;
            valid.then_some(Begin { id, sampling }).ok_or(PlanError::Field)
        })?;
        let mut tokens_left = MAX_TOKENS;
        let work = rest.list(|rest| {
            let (id, position) = (RequestId(rest.u64()?), rest.u32()?);
            let sample = match rest.take::<1>()? {
                [0] => false,
                [1] => true,
                _ => return Err(PlanError::Field),
            };
            let count = rest.count()?;
            tokens_left = tokens_left.checked_sub(count).ok_or(PlanError::Limit)?;
            let tokens = (0..count).map(|_| rest.u32()).collect::<Result<Vec<_>, _>>()?;
            if tokens.is_empty() {
                return Err(PlanError::Field);
            }
            Ok(Work { id, position, tokens, sample })
        })?;
        if rest.0.is_empty() { Ok(Self { step, end, begin, work }) } else { Err(PlanError::Long) }
    }
}

fn put_count(bytes: &mut Vec<u8>, count: usize, limit: usize) {
    assert!(count <= limit, "{count} entries in a list of a plan");
    bytes.extend((count as u16).to_le_bytes());
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], PlanError> {
        let (bytes, rest) = self.0.split_first_chunk::<N>().ok_or(PlanError::Short)?;
        self.0 = rest;
        Ok(*bytes)
    }

    fn u32(&mut self) -> Result<u32, PlanError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, PlanError> {
        self.take().map(u64::from_le_bytes)
    }

    fn count(&mut self) -> Result<usize, PlanError> {
        self.take().map(u16::from_le_bytes).map(usize::from)
    }

    fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<T, PlanError>,
    ) -> Result<Vec<T>, PlanError> {
        let count = self.count()?;
        if count > MAX_ENTRIES {
            return Err(PlanError::Limit);
        }
        (0..count).map(|_| item(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let work = |id, position, tokens: &[u32], sample| Work {
            id: RequestId(id),
            position,
            tokens: tokens.to_vec(),
            sample,
        };
        Plan {
            step: 7,
            end: vec![RequestId(1), RequestId(u64::MAX)],
            begin: vec![Begin {
                id: RequestId(3),
                sampling: Sampling { temperature: 0.7, seed: 9, ..Sampling::GREEDY },
            }],
            work: vec![work(3, 0, &[5, 6, 7], false), work(2, 40, &[511], true)],
        }
    }

    #[test]
    fn a_plan_survives_its_bytes() {
        for plan in [plan(), Plan::default()] {
            assert_eq!(Plan::parse(&plan.encode()), Ok(plan));
        }
    }

    #[test]
    fn every_other_length_is_refused() {
        let bytes = plan().encode();
        for len in 0..bytes.len() {
            assert_eq!(Plan::parse(&bytes[..len]), Err(PlanError::Short), "{len} bytes");
        }
        let mut longer = bytes;
        longer.push(0);
        assert_eq!(Plan::parse(&longer), Err(PlanError::Long));
    }

    #[test]
    fn impossible_fields_are_refused() {
        let with = |change: fn(&mut Plan)| {
            let mut plan = plan();
            change(&mut plan);
            Plan::parse(&plan.encode())
        };
        let nan = with(|plan| plan.begin[0].sampling.temperature = f32::NAN);
        assert_eq!(nan, Err(PlanError::Field));
        let negative = with(|plan| plan.begin[0].sampling.temperature = -1.0);
        assert_eq!(negative, Err(PlanError::Field));
        assert_eq!(with(|plan| plan.work[0].tokens.clear()), Err(PlanError::Field));
        // 0xffff entries are announced.
        let mut bytes = plan().encode();
        bytes[8..10].fill(0xff);
        assert_eq!(Plan::parse(&bytes), Err(PlanError::Limit));
    }
}
