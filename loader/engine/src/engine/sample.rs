//! From logits to a token: the same on every rank and machine.
//!
//! Each rank looks at its own part of the vocabulary and brings what the choice can depend on: a
//! few candidates, and sums of exponentials where probabilities are asked for. One gather later
//! every rank makes the same choice. Only filters that keep more tokens than the candidates need
//! a second gather, of the whole rows.
//!
//! Noise is a function of seed, index and token (Gumbel's: the highest noisy logit is a sample of
//! the softmax), so neither company nor the number of ranks plays a part in it.
//!
//! Reading order: [`Chooser`] (a sequence's wishes and history), [`Part`] (what a rank brings),
//! `choose`, `draw` (noise).

mod candidates;
mod gumbel;
mod sampler;
mod select;

use std::ops::Range;

use rayon::prelude::*;
use shardpack_collectives::GroupError;

use candidates::Part;
pub(super) use sampler::{Chooser, Wishes};
use select::{Choice, choose};

use crate::backend::{Ranks, StepError};
use shardpack_engine_api::{TokenLogprobs, TokenMask};

/// Logits of a step's sampled sequences.
pub(super) struct Logits<'a> {
    /// `[rows, width of the part]`.
    pub(super) values: &'a [f32],
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
    pub(super) chooser: &'a Chooser,
    /// Tokens before the one that is chosen.
    pub(super) index: u32,
    /// The last of them, as far as they are drafts, which the chooser has not seen.
    pub(super) ahead: &'a [u32],
    /// What may come; everything where there is none.
    pub(super) mask: Option<&'a TokenMask>,
}

/// A chosen token; none where the model computed no numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chosen {
    pub(super) token: Option<u32>,
    pub(super) logprobs: Option<TokenLogprobs>,
}

/// Chooses a token for each row, with at most two gathers.
pub(super) fn sample(
    logits: &Logits<'_>,
    rows: &[Row<'_>],
    ranks: &Ranks<'_>,
) -> Result<Vec<Chosen>, StepError> {
    let width = logits.range.len();
    assert_eq!(logits.values.len(), rows.len() * width, "logits of every row");
    let row_of = |index: usize| &logits.values[index * width..(index + 1) * width];
    let mine: Vec<Part> = rows
        .par_iter()
        .enumerate()
        .map(|(index, row)| Part::of(row, row_of(index), logits.range.start as u32))
        .collect();
    let parts = match logits.ranges {
        None => mine.into_iter().map(|part| vec![part]).collect(),
        Some(ranges) => gather_parts(&mine, rows, ranges, ranks)?,
    };
    let choices: Vec<Choice> =
        rows.iter().zip(&parts).map(|(row, parts)| choose(row, parts)).collect();
    let wide: Vec<usize> =
        (0..rows.len()).filter(|index| matches!(choices[*index], Choice::NeedsRow)).collect();
    let mut whole = match logits.ranges {
        Some(ranges) if !wide.is_empty() => gather_rows(&wide, row_of, ranges, ranks)?,
        _ => wide.iter().map(|index| row_of(*index).to_vec()).collect(),
    }
    .into_iter();
    let chosen = choices.into_iter().zip(rows).map(|(choice, row)| match choice {
        Choice::Chosen(chosen) => chosen,
        Choice::NeedsRow => {
            let values = whole.next().expect("a row for each that needs one");
            assert_eq!(values.len(), logits.vocab_size, "a whole row");
            match choose(row, &[Part::whole(row, &values)]) {
                Choice::Chosen(chosen) => chosen,
                Choice::NeedsRow => unreachable!("a whole row is all there is"),
            }
        }
    });
    Ok(chosen.collect())
}

/// Every rank's parts of each row.
fn gather_parts(
    mine: &[Part],
    rows: &[Row<'_>],
    ranges: &[Range<usize>],
    ranks: &Ranks<'_>,
) -> Result<Vec<Vec<Part>>, StepError> {
    let mut bytes = Vec::new();
    for (part, row) in mine.iter().zip(rows) {
        part.encode(row, &mut bytes);
    }
    let all = ranks.group.all_gather(&bytes, ranks.deadline())?;
    let mut parts: Vec<Vec<Part>> = rows.iter().map(|_| Vec::new()).collect();
    for (rank, (mut bytes, range)) in all.iter().map(Vec::as_slice).zip(ranges).enumerate() {
        for (row, parts) in rows.iter().zip(&mut parts) {
            let part = Part::parse(row, range, &mut bytes);
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
