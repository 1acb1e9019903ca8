//! From logits to a token: the same on every rank and machine.
//!
//! Logits are vocabulary-parallel. Each rank brings the top candidates of its shard, and a
//! log-sum-exp where probabilities are needed. After one all-gather every rank samples the same
//! token. Only filters that keep more tokens than the candidates need a second all-gather, of the
//! whole rows.
//!
//! Sampling uses the Gumbel-max trick: the highest noisy logit is a sample of the softmax. The noise
//! is a function of seed, token index and token id, so the result depends neither on the batch nor
//! on the number of ranks.
//!
//! Reading order: [`Sampler`] (a sequence's parameters and token counts), [`ShardCandidates`] (what a
//! rank brings), `select`, `gumbel` (noise), `prompt` (log probabilities of tokens that are given).

mod candidates;
mod chosen;
mod gumbel;
mod prompt;
mod sampler;
mod select;

use std::ops::Range;

use rayon::prelude::*;
use shardpack_collectives::GroupError;

pub(super) use candidates::ShardCandidates;
pub(super) use chosen::RowScore;
#[cfg(test)]
pub(super) use gumbel::mix;
pub(super) use prompt::{ShardScore, WantedToken, score};
pub(super) use sampler::{Sampler, SamplingParams};
use select::{Selection, select};

use crate::backend::{Ranks, StepError};
use shardpack_engine_api::{TokenLogprobs, TokenMask};

/// Logits of a step's sampled sequences.
pub(super) struct Logits<'a> {
    /// `[rows, width of the part]`, of the rows without `chosen`.
    pub(super) values: &'a [f32],
    /// By row the candidates, where the backend found them; empty where it found none.
    pub(super) chosen: Vec<Option<ShardCandidates>>,
    /// The tokens that this rank's columns stand for.
    pub(super) range: Range<usize>,
    /// Every rank's tokens; none where each rank has all logits.
    pub(super) ranges: Option<&'a [Range<usize>]>,
    /// Tokens of the vocabulary.
    pub(super) vocab_size: usize,
}

/// One row of logits and whose it is.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) sampler: &'a Sampler,
    /// Tokens before the one that is chosen.
    pub(super) index: u32,
    /// The last of them, as far as they are drafts, which the sampler has not seen.
    pub(super) drafts: &'a [u32],
    /// The token mask; `None` allows every token.
    pub(super) mask: Option<&'a TokenMask>,
}

/// A sampled token; none where all logits are NaN.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SampledToken {
    pub(super) token: Option<u32>,
    pub(super) logprobs: Option<TokenLogprobs>,
}

/// Samples a token for each row, with at most two all-gathers.
pub(super) fn sample(
    logits: &Logits<'_>,
    rows: &[Row<'_>],
    ranks: &Ranks<'_>,
) -> Result<Vec<SampledToken>, StepError> {
    let width = logits.range.len();
    let is_read = |index: &usize| logits.chosen.get(*index).is_none_or(Option::is_none);
    let read: Vec<usize> = (0..rows.len()).filter(is_read).collect();
    assert_eq!(logits.values.len(), read.len() * width, "logits of every row");
    let row_of = |index: usize| {
        let place = read.partition_point(|row| *row < index);
        &logits.values[place * width..(place + 1) * width]
    };
    let mine: Vec<ShardCandidates> = rows
        .par_iter()
        .enumerate()
        .map(|(index, row)| match logits.chosen.get(index) {
            Some(Some(chosen)) => chosen.clone(),
            _ => ShardCandidates::of(row, row_of(index), logits.range.start as u32),
        })
        .collect();
    let parts = match logits.ranges {
        None => mine.into_iter().map(|part| vec![part]).collect(),
        Some(ranges) => gather_candidates(&mine, rows, ranges, ranks)?,
    };
    let choices: Vec<Selection> =
        rows.iter().zip(&parts).map(|(row, parts)| select(row, parts)).collect();
    let wide: Vec<usize> = (0..rows.len())
        .filter(|index| matches!(choices[*index], Selection::NeedsFullRow))
        .collect();
    let mut whole = match logits.ranges {
        Some(ranges) if !wide.is_empty() => gather_rows(&wide, row_of, ranges, ranks)?,
        _ => wide.iter().map(|index| row_of(*index).to_vec()).collect(),
    }
    .into_iter();
    let chosen = choices.into_iter().zip(rows).map(|(choice, row)| match choice {
        Selection::Token(chosen) => chosen,
        Selection::NeedsFullRow => {
            let values = whole.next().expect("a row for each that needs one");
            assert_eq!(values.len(), logits.vocab_size, "a whole row");
            match select(row, &[ShardCandidates::whole(row, &values)]) {
                Selection::Token(chosen) => chosen,
                Selection::NeedsFullRow => unreachable!("a whole row is all there is"),
            }
        }
    });
    Ok(chosen.collect())
}

/// Every rank's candidates of each row.
fn gather_candidates(
    mine: &[ShardCandidates],
    rows: &[Row<'_>],
    ranges: &[Range<usize>],
    ranks: &Ranks<'_>,
) -> Result<Vec<Vec<ShardCandidates>>, StepError> {
    let mut bytes = Vec::new();
    for (part, row) in mine.iter().zip(rows) {
        part.encode(row, &mut bytes);
    }
    let all = ranks.group.all_gather(&bytes, ranks.deadline())?;
    let mut parts: Vec<Vec<ShardCandidates>> = rows.iter().map(|_| Vec::new()).collect();
    for (rank, (mut bytes, range)) in all.iter().map(Vec::as_slice).zip(ranges).enumerate() {
        for (row, parts) in rows.iter().zip(&mut parts) {
            let part = ShardCandidates::parse(row, range, &mut bytes);
            parts.push(part.ok_or_else(|| foreign(rank, "candidates of every row"))?);
        }
        if !bytes.is_empty() {
            return Err(foreign(rank, "nothing after the candidates"));
        }
    }
    if all.len() != ranges.len() {
        return Err(foreign(all.len(), "candidates of every rank"));
    }
    Ok(parts)
}

/// The given rows, whole.
fn gather_rows<'a>(
    wide: &[usize],
    row_of: impl Fn(usize) -> &'a [f32],
    ranges: &[Range<usize>],
    ranks: &Ranks<'_>,
) -> Result<Vec<Vec<f32>>, StepError> {
    let mine: Vec<u8> = wide
        .iter()
        .flat_map(|index| row_of(*index))
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let all = ranks.group.all_gather(&mine, ranks.deadline())?;
    let mut rows = vec![Vec::new(); wide.len()];
    for (rank, (bytes, range)) in all.iter().zip(ranges).enumerate() {
        if bytes.len() != wide.len() * range.len() * size_of::<f32>() {
            return Err(foreign(rank, "its columns of the rows asked for"));
        }
        for (row, part) in rows.iter_mut().zip(bytes.chunks(range.len().max(1) * size_of::<f32>()))
        {
            row.extend(part.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
    }
    Ok(rows)
}

fn foreign(rank: usize, expected: &str) -> StepError {
    let (rank, expected) = (rank as u32, expected.to_owned());
    StepError::Group(GroupError::OutOfStep { rank, expected, found: "other bytes".to_owned() })
}

#[cfg(test)]
mod tests;
