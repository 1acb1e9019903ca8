//! Many all-reduces in graphs, each with a sum that is known exactly: whether a hand-over between
//! GPU and processor ever gives old or half-written values.

use std::time::Duration;

use anyhow::ensure;
use shardpack_collectives::{Deadline, Group};
use shardpack_mlx::{Binary, Collective, Library};

use crate::engines;

/// All-reduces of one evaluation, about as many as a token of a large model takes.
pub(super) const CHAIN: usize = 64;

/// Floats of each: the hidden state of a small model.
const LEN: usize = 4096;

/// Longest wait for the other rank.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A group's sums within MLX's graph.
struct Sums<'a>(&'a dyn Group);

impl Collective for Sums<'_> {
    fn sum(&mut self, values: &mut [f32]) -> bool {
        self.0.all_reduce_sum(values, Deadline::after(TIMEOUT)).is_ok()
    }

    fn gather(&mut self, _: &[f32], _: &mut [f32]) -> bool {
        false
    }
}

/// What a rank adds in a step: small whole numbers, so that sums in any order are exact.
fn added(rank: u32, step: usize) -> Vec<f32> {
    let mix = |index: usize| {
        let mixed = (index as u64 + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .wrapping_add(u64::from(rank) << 32 | step as u64)
            .wrapping_mul(0xD6E8_FEB8_6659_FD93);
        (mixed >> 40) % 9
    };
    (0..LEN).map(|index| mix(index) as f32 - 4.0).collect()
}

/// Evaluates `evals` graphs of [`CHAIN`] all-reduces each. Every step depends on the one before and
/// on values of all ranks: a sum that is late or torn stays in the result. Returns the sums.
pub(super) fn run(group: &dyn Group, evals: usize) -> anyhow::Result<u64> {
    let library = Library::open(&engines::mlx_folder(None)?, None)?;
    let ranks = group.size();
    let share = 1.0 / ranks as f32;
    ensure!(ranks.is_power_of_two(), "shares of {ranks} ranks are not exact");
    let mine: Vec<_> =
        (0..CHAIN).map(|step| library.floats(&added(group.rank(), step), &[LEN])).collect();
    let mut expected = vec![0.0_f32; LEN];
    for step in 0..CHAIN {
        for rank in 0..ranks {
            for (sum, value) in expected.iter_mut().zip(added(rank, step)) {
                *sum += value;
            }
        }
    }
    let mut sums = Sums(group);
    for eval in 0..evals {
        let found = library.with_collective(&mut sums, || {
            let mut x = library.floats(&vec![0.0; LEN], &[LEN]);
            for mine in &mine {
                let part = x.with_constant(Binary::Multiply, share).binary(Binary::Add, mine);
                x = part.summed_over_ranks(None);
            }
            x.read()
        })?;
        let wrong = found.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits());
        if let Some(index) = wrong {
            let (found, expected) = (found[index], expected[index]);
            anyhow::bail!("evaluation {eval}: element {index} is {found}, not {expected}");
        }
    }
    Ok((evals * CHAIN) as u64)
}
