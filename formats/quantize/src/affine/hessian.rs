//! The factor of a matrix's second moments that error feedback needs: `H = M · D · Mᵀ` with `M` unit
//! upper triangular and `D` diagonal, `H = Σ x xᵀ` over the inputs of a calibration text.
//!
//! If inputs are rounded one after the other and input `k` is moved beforehand by what the errors of
//! the inputs before it ask for, `Σ_{j<k} error_j · M[j, k]`, then the squared error of the outputs is
//! `Σ_k D[k] · residual_k²`, each residual being that of one rounding alone (GPTQ, Frantar et al. 2022, in
//! the form of LDLQ, Chee et al. 2023).
//!
//! Groups are taken by their importance (the sum of their diagonal), the largest first, and so are the
//! inputs within a group: early errors can be made good by many inputs. The order never leaves a group,
//! so what is stored are plain groups.
//!
//! Every sum is f64, its order fixed, without fused operations: the bits depend neither on the
//! platform nor on the number of threads.

use std::ops::Range;

use rayon::prelude::*;

use crate::simd::{Lanes, MAX_LANES, Platform, Task};

/// Columns that are factored at once: the update of what remains reads each of its numbers once for so
/// many columns.
const PANEL: usize = 64;

/// Numbers of a row that are updated at once, in registers.
const TILE: usize = 32;

/// Rows whose tiles are updated together: each number that is read takes part in so many products.
const TOGETHER: usize = 4;

/// Rows of a task, while which pass some tiles of the panel stay in the L2 cache.
const ROWS_PER_TASK: usize = TILE;

/// Neighbouring tiles that are updated in turn, so that what is read of a row is a run of some length.
const TILES_IN_TURN: usize = 4;

/// Rows that are solved for a panel's columns at once, one lane each.
const SOLVED: usize = 16;

/// Damping that is tried one after the other until all pivots are positive, relative to the mean of the
/// diagonal.
const MORE_DAMPING: f64 = 10.0;

/// Most tries; the last adds a thousand times the first damping.
const TRIES: u32 = 4;

/// `M` and `D` of one matrix, or of each block on its diagonal.
#[derive(Debug)]
pub struct Hessian {
    /// Inputs of a block.
    block: usize,
    group: usize,
    blocks: Vec<Factor>,
}

/// The factor of one block, in the order in which inputs are rounded.
#[derive(Debug)]
pub(super) struct Factor {
    /// The group that is taken in each turn.
    pub(super) groups: Vec<usize>,
    /// For each turn the inputs of its group, counted within it.
    pub(super) order: Vec<usize>,
    /// `D`.
    pub(super) pivots: Vec<f32>,
    /// `M`: for each turn the rows of all inputs up to its last, `[(turn + 1) · group, group]`, one turn
    /// after the other.
    panels: Vec<f32>,
    /// `H`, damped: for each turn `[block, group]`.
    moments: Vec<f32>,
    group: usize,
}

impl Factor {
    /// `M` of a turn's columns.
    #[inline]
    pub(super) fn panel(&self, turn: usize) -> &[f32] {
        let square = self.group * self.group;
        &self.panels[turn * (turn + 1) / 2 * square..][..(turn + 1) * square]
    }

    /// `H` of a turn's columns, rows in the order of turns.
    #[inline]
    pub(super) fn moments(&self, turn: usize) -> &[f32] {
        let size = self.order.len() * self.group;
        &self.moments[turn * size..][..size]
    }
}

impl Hessian {
    /// Factors `moments`, `[inputs / block, block, block]` and symmetric, for groups of `group` inputs.
    /// `damping` times the mean of the diagonal is added to it. None if the moments are no moments: not
    /// finite, negative, or all zero.
    ///
    /// # Panics
    /// When lengths do not fit each other.
    #[must_use]
    pub fn new(
        platform: Platform,
        moments: &[f32],
        [block, group]: [usize; 2],
        damping: f64,
    ) -> Option<Self> {
        assert!(block > 0 && block.is_multiple_of(group), "whole groups");
        assert!(moments.len().is_multiple_of(block * block), "whole blocks");
        let blocks = moments
            .chunks_exact(block * block)
            .map(|moments| factor(platform, moments, block, group, damping))
            .collect::<Option<Vec<_>>>()?;
        Some(Self { block, group, blocks })
    }

    /// Inputs of a block.
    #[must_use]
    pub const fn block(&self) -> usize {
        self.block
    }

    /// Inputs of a group.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.group
    }

    /// Inputs of all blocks.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.blocks.len() * self.block
    }

    pub(super) fn factors(&self) -> &[Factor] {
        &self.blocks
    }
}

fn factor(
    platform: Platform,
    moments: &[f32],
    block: usize,
    group: usize,
    damping: f64,
) -> Option<Factor> {
    let diagonal: Vec<f64> = (0..block).map(|k| f64::from(moments[k * (block + 1)])).collect();
    let mean = diagonal.iter().sum::<f64>() / block as f64;
    if !(mean.is_finite() && mean > 0.0) || diagonal.iter().any(|x| *x < 0.0) {
        return None;
    }
    let (groups, order) = turns(&diagonal, group);
    let place = |at: usize| groups[at / group] * group + order[at];
    let mut added = damping.max(1e-6) * mean;
    for _ in 0..TRIES {
        let mut a = vec![0.0_f64; block * block];
        a.par_chunks_exact_mut(block).enumerate().for_each(|(i, row)| {
            let from = &moments[place(i) * block..][..block];
            for (j, to) in row.iter_mut().enumerate().skip(i) {
                *to = f64::from(from[place(j)]);
            }
            row[i] += added;
        });
        if reverse_cholesky(platform, &mut a, block) {
            let pivots = (0..block).map(|k| a[k * (block + 1)].powi(2) as f32).collect();
            let panels = panels(&a, block, group);
            let moments = damped(moments, (block, group), &place, added);
            return Some(Factor { groups, order, pivots, panels, moments, group });
        }
        added *= MORE_DAMPING;
    }
    None
}

/// `H` as [`Factor`] holds it.
fn damped(
    moments: &[f32],
    (block, group): (usize, usize),
    place: &(dyn Fn(usize) -> usize + Sync),
    added: f64,
) -> Vec<f32> {
    let mut out = vec![0.0; block * block];
    out.par_chunks_exact_mut(block * group).enumerate().for_each(|(turn, out)| {
        for (j, out) in out.chunks_exact_mut(group).enumerate() {
            let from = &moments[place(j) * block..][..block];
            for (k, to) in out.iter_mut().enumerate() {
                let moment = f64::from(from[place(turn * group + k)]);
                let damping = if j == turn * group + k { added } else { 0.0 };
                *to = (moment + damping) as f32;
            }
        }
    });
    out
}

/// Groups by the sum of their diagonal, and the inputs of each by theirs, the largest first.
fn turns(diagonal: &[f64], group: usize) -> (Vec<usize>, Vec<usize>) {
    let sums: Vec<f64> = diagonal.chunks_exact(group).map(|of| of.iter().sum()).collect();
    let sorted = |values: &[f64]| {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
        order
    };
    let groups = sorted(&sums);
    let order = groups.iter().flat_map(|at| sorted(&diagonal[at * group..][..group])).collect();
    (groups, order)
}

/// `M` as [`Factor`] holds it, from the triangle `R = M · √D`.
fn panels(r: &[f64], block: usize, group: usize) -> Vec<f32> {
    let turns = block / group;
    let mut panels = Vec::with_capacity(turns * (turns + 1) / 2 * group * group);
    for turn in 0..turns {
        for j in 0..(turn + 1) * group {
            for k in turn * group..(turn + 1) * group {
                let pivot = r[k * (block + 1)];
                panels.push(if j < k { (r[j * block + k] / pivot) as f32 } else { 0.0 });
            }
        }
    }
    panels
}

/// `R` upper triangular with `R · Rᵀ = A`, in place of `A`'s upper triangle. False if a pivot is not
/// positive.
fn reverse_cholesky(platform: Platform, a: &mut [f64], n: usize) -> bool {
    let mut panel = Vec::new();
    let mut end = n;
    while end > 0 {
        let start = end.saturating_sub(PANEL);
        let Some(square) = square(a, n, start..end) else { return false };
        let solve = |rows: &mut [f64]| platform.run(Solve { rows, n, square: &square, start });
        a[..start * n].par_chunks_mut(SOLVED * n).for_each(solve);
        // What remains, by all columns of the panel, whose tiles lie one after the other.
        let size = (end - start) * TILE;
        panel.clear();
        panel.resize(start.div_ceil(TILE) * size, 0.0);
        for j in 0..start {
            let tile = &mut panel[j / TILE * size..][..size];
            for (to, from) in tile.chunks_exact_mut(TILE).zip(&a[j * n + start..j * n + end]) {
                to[j % TILE] = *from;
            }
        }
        let update = |(task, rows): (usize, &mut [f64])| {
            let (first, panel) = (task * ROWS_PER_TASK, &panel[..]);
            platform.run(Update { rows, n, first, columns: start..end, panel });
        };
        a[..start * n].par_chunks_mut(ROWS_PER_TASK * n).enumerate().for_each(update);
        end = start;
    }
    true
}

/// The factor of a panel's square, from which all that stands beyond the panel has been taken: its rows from
/// `range.start` on, each as long as the panel.
fn square(a: &mut [f64], n: usize, range: Range<usize>) -> Option<Vec<f64>> {
    let (start, end) = (range.start, range.end);
    for k in range.rev() {
        let pivot_row: Vec<f64> = a[k * n + k + 1..k * n + end].to_vec();
        let left = |row: &[f64]| {
            let products = row[k + 1..end].iter().zip(&pivot_row);
            products.fold(row[k], |sum, (x, y)| sum - x * y)
        };
        let pivot = left(&a[k * n..(k + 1) * n]);
        if !(pivot.is_finite() && pivot > 0.0) {
            return None;
        }
        let pivot = pivot.sqrt();
        a[k * (n + 1)] = pivot;
        for row in a[start * n..k * n].chunks_exact_mut(n) {
            row[k] = left(row) / pivot;
        }
    }
    Some(a[start * n..end * n].chunks_exact(n).flat_map(|row| &row[start..end]).copied().collect())
}

/// The panel's columns of some rows before it, one lane for each row.
struct Solve<'a> {
    rows: &'a mut [f64],
    n: usize,
    square: &'a [f64],
    start: usize,
}

impl Task for Solve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self, _: V::Proof) {
        let Self { rows, n, square, start } = self;
        let width = square.len().isqrt();
        let mut columns = [[0.0; SOLVED]; PANEL];
        for (lane, row) in rows.chunks_exact(n).enumerate() {
            for (column, x) in columns.iter_mut().zip(&row[start..start + width]) {
                column[lane] = *x;
            }
        }
        for k in (0..width).rev() {
            let pivots = &square[k * width..(k + 1) * width];
            let (before, after) = columns.split_at_mut(k + 1);
            let mut sums = before[k];
            for (column, factor) in after.iter().zip(&pivots[k + 1..]) {
                for (sum, x) in sums.iter_mut().zip(column) {
                    *sum -= x * factor;
                }
            }
            for sum in &mut sums {
                *sum /= pivots[k];
            }
            before[k] = sums;
        }
        for (lane, row) in rows.chunks_exact_mut(n).enumerate() {
            for (column, x) in columns.iter().zip(&mut row[start..start + width]) {
                *x = column[lane];
            }
        }
    }
}

/// `rows -= factors · panel` at and above the diagonal, where the factors are what rows have in `columns`.
struct Update<'a> {
    rows: &'a mut [f64],
    n: usize,
    first: usize,
    columns: Range<usize>,
    /// For each tile and column the numbers of the tile.
    panel: &'a [f64],
}

impl Task for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(mut self, _: V::Proof) {
        // Of few rows a tile stays in few registers too.
        if V::N == MAX_LANES { self.rows::<TOGETHER>() } else { self.rows::<1>() }
    }
}

impl Update<'_> {
    /// All tiles, `R` rows at a time: some neighbouring ones of all rows, then the next.
    #[inline(always)]
    fn rows<const R: usize>(&mut self) {
        const { assert!(ROWS_PER_TASK == TILE, "rows of a task begin with the same tile") };
        let size = self.columns.len() * TILE;
        let last = self.panel.len() / size;
        for first in (self.first / TILE..last).step_by(TILES_IN_TURN) {
            let tiles = first..last.min(first + TILES_IN_TURN);
            for rows in self.rows.chunks_mut(R * self.n) {
                for tile in tiles.clone() {
                    let panel = &self.panel[tile * size..][..size];
                    update_tile::<R>(rows, self.n, tile * TILE, &self.columns, panel);
                }
            }
        }
    }
}

/// A tile of `R` rows, or as many as there are, from column `at` on.
#[inline(always)]
fn update_tile<const R: usize>(
    rows: &mut [f64],
    n: usize,
    at: usize,
    columns: &Range<usize>,
    panel: &[f64],
) {
    let held = TILE.min(columns.start - at);
    let mut sums = [[0.0; TILE]; R];
    let mut factors = [&panel[..columns.len()]; R];
    for (row, (sums, factors)) in rows.chunks_exact(n).zip(sums.iter_mut().zip(&mut factors)) {
        sums[..held].copy_from_slice(&row[at..at + held]);
        *factors = &row[columns.clone()];
    }
    let sums = subtract(sums, factors, panel);
    for (row, sums) in rows.chunks_exact_mut(n).zip(&sums) {
        row[at..at + held].copy_from_slice(&sums[..held]);
    }
}

/// `sums -= factors · panel`. By indices, which the compiler makes vectors of.
#[inline(always)]
fn subtract<const R: usize>(
    mut sums: [[f64; TILE]; R],
    factors: [&[f64]; R],
    panel: &[f64],
) -> [[f64; TILE]; R] {
    let panel = panel.as_chunks::<TILE>().0;
    let factors = factors.map(|it| &it[..panel.len()]);
    for (m, from) in panel.iter().enumerate() {
        for r in 0..R {
            let factor = factors[r][m];
            for k in 0..TILE {
                sums[r][k] -= factor * from[k];
            }
        }
    }
    sums
}
