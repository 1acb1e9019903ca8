//! Log probabilities of a prompt's tokens. Logits are vocabulary-parallel: every rank brings the
//! log-sum-exp and the most likely tokens of its shard, and the rank that holds the token its logit.
//!
//! | bytes | field |
//! |---|---|
//! | 12 | highest logit (f32), sum of exponentials relative to it (f64) |
//! | 4 | the token's logit; NaN where another rank holds it |
//! | 2, then 8 each | most likely tokens: token, logit |

use std::ops::Range;

use shardpack_engine_api::TokenLogprobs;

use super::{
    candidates::{LogSum, top},
    foreign,
    select::report,
};
use crate::backend::{Ranks, StepError};

/// A token whose log probability is wanted, and how many of the most likely tokens with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct WantedToken {
    pub(in crate::engine) token: u32,
    pub(in crate::engine) top: u32,
}

/// One rank's part of the log probability of one token.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::engine) struct ShardScore {
    sum: LogSum,
    /// NaN where another rank holds the token.
    logit: f32,
    top: Vec<(u32, f32)>,
}

impl ShardScore {
    /// By the row of logits of the tokens from `first` on.
    pub(in crate::engine) fn of(wanted: WantedToken, raw: &[f32], first: u32) -> Self {
        let place = wanted.token.checked_sub(first);
        let logit = place.and_then(|place| raw.get(place as usize)).copied().unwrap_or(f32::NAN);
        let top = top(raw, wanted.top as usize);
        Self {
            sum: LogSum::of(raw.iter().copied()),
            logit,
            top: top.into_iter().map(|(place, logit)| (first + place, logit)).collect(),
        }
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.sum.maximum.to_le_bytes());
        bytes.extend(self.sum.sum.to_le_bytes());
        bytes.extend(self.logit.to_le_bytes());
        bytes.extend((self.top.len() as u16).to_le_bytes());
        for (token, logit) in &self.top {
            bytes.extend(token.to_le_bytes());
            bytes.extend(logit.to_le_bytes());
        }
    }

    /// A part from a rank that holds the tokens of `range`; `None` for bytes that are none.
    fn parse(wanted: WantedToken, range: &Range<usize>, bytes: &mut &[u8]) -> Option<Self> {
        fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
            let (taken, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(*taken)
        }
        let float = |bytes: &mut &[u8]| take(bytes).map(f32::from_le_bytes);
        let maximum = float(bytes)?;
        let sum = LogSum { maximum, sum: f64::from_le_bytes(take(bytes)?) };
        let logit = float(bytes)?;
        let count = u16::from_le_bytes(take(bytes)?);
        let token = |bytes: &mut &[u8]| {
            let token = u32::from_le_bytes(take(bytes)?);
            range.contains(&(token as usize)).then_some(token)
        };
        if u32::from(count) > wanted.top {
            return None;
        }
        let top = (0..count).map(|_| Some((token(bytes)?, float(bytes)?)));
        Some(Self { sum, logit, top: top.collect::<Option<_>>()? })
    }
}

/// Log probabilities from every rank's part of each token; one all-gather where logits are sharded.
pub(in crate::engine) fn score(
    mine: &[ShardScore],
    wanted: &[WantedToken],
    ranges: Option<&[Range<usize>]>,
    ranks: &Ranks<'_>,
) -> Result<Vec<TokenLogprobs>, StepError> {
    assert_eq!(mine.len(), wanted.len(), "a part of every token");
    let Some(ranges) = ranges else {
        return Ok(mine.iter().zip(wanted).map(|(part, it)| joined(*it, &[part])).collect());
    };
    let mut bytes = Vec::new();
    for part in mine {
        part.encode(&mut bytes);
    }
    let all = ranks.group.all_gather(&bytes, ranks.deadline())?;
    if all.len() != ranges.len() {
        return Err(foreign(all.len(), "scores of every rank"));
    }
    let mut parts: Vec<Vec<ShardScore>> = Vec::with_capacity(all.len());
    for (rank, (mut bytes, range)) in all.iter().map(Vec::as_slice).zip(ranges).enumerate() {
        let of_rank = wanted.iter().map(|it| ShardScore::parse(*it, range, &mut bytes));
        let of_rank = of_rank.collect::<Option<Vec<_>>>();
        parts.push(of_rank.ok_or_else(|| foreign(rank, "a score of every token"))?);
        if !bytes.is_empty() {
            return Err(foreign(rank, "nothing after the scores"));
        }
    }
    let of_token = |(index, it): (usize, &WantedToken)| {
        let parts: Vec<&ShardScore> = parts.iter().map(|of_rank| &of_rank[index]).collect();
        joined(*it, &parts)
    };
    Ok(wanted.iter().enumerate().map(of_token).collect())
}

fn joined(wanted: WantedToken, parts: &[&ShardScore]) -> TokenLogprobs {
    let sums: Vec<LogSum> = parts.iter().map(|part| part.sum).collect();
    let top = parts.iter().flat_map(|part| part.top.iter().copied()).collect();
    let logit = parts.iter().map(|part| part.logit).find(|logit| !logit.is_nan());
    report(&sums, top, wanted.top as usize, logit.unwrap_or(f32::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits() -> Vec<f32> {
        (0..100).map(|token| ((token * 37) as f32 * 0.61).sin() * 9.0).collect()
    }

    #[test]
    fn shards_give_what_the_whole_row_gives() {
        let row = logits();
        for token in [0, 31, 32, 99] {
            let wanted = WantedToken { token, top: 5 };
            let whole = joined(wanted, &[&ShardScore::of(wanted, &row, 0)]);
            let shards = [0..32, 32..32, 32..100];
            let parts = shards.map(|range: Range<usize>| {
                let part = ShardScore::of(wanted, &row[range.clone()], range.start as u32);
                let mut bytes = Vec::new();
                part.encode(&mut bytes);
                let parsed = ShardScore::parse(wanted, &range, &mut bytes.as_slice()).unwrap();
                assert_eq!((&parsed.sum, &parsed.top), (&part.sum, &part.top));
                assert_eq!(parsed.logit.to_bits(), part.logit.to_bits());
                parsed
            });
            let joined = joined(wanted, &parts.each_ref());
            assert!((joined.logprob - whole.logprob).abs() < 1e-6, "{joined:?} {whole:?}");
            let tokens = |it: &TokenLogprobs| it.top.iter().map(|it| it.0).collect::<Vec<_>>();
            assert_eq!(tokens(&joined), tokens(&whole));
            let exact: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
            let exact = f64::from(row[token as usize]) - exact.ln();
            assert!((f64::from(whole.logprob) - exact).abs() < 1e-5, "{whole:?} {exact}");
        }
    }

    #[test]
    fn bytes_that_are_no_score_are_refused() {
        let wanted = WantedToken { token: 40, top: 2 };
        let mut bytes = Vec::new();
        ShardScore::of(wanted, &logits(), 0).encode(&mut bytes);
        let parse = |wanted, range, mut bytes: &[u8]| ShardScore::parse(wanted, &range, &mut bytes);
        assert!(parse(wanted, 0..100, &bytes).is_some());
        for len in 0..bytes.len() {
            assert_eq!(parse(wanted, 0..100, &bytes[..len]), None, "{len} bytes");
        }
        assert_eq!(parse(wanted, 0..3, &bytes), None, "tokens of another rank");
        assert_eq!(parse(WantedToken { top: 1, ..wanted }, 0..100, &bytes), None, "too many");
    }
}
