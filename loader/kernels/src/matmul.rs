//! Matrix multiplication (GEMV and GEMM) of activations with a weight matrix.
//!
//! Quantized weights take 8-bit activations where the team says so, all others f32. Either way the
//! result is batch-invariant: a row gives the same bits in every batch.

use std::{marker::PhantomData, ops::Range};

use shardpack_quantize::Platform;

use crate::{
    matrix::Matrix,
    platform::Task,
    portable,
    quantized::{ActivationLayout, Packed, Quantized},
    repack::Packing,
    team::{self, Activations, Columns, Current},
    tiles::{self, Panels, Products, Shape},
};

mod exact;
mod many;
mod two_planes;

pub use two_planes::matmul_in_two_planes;

/// Bytes of weights that a thread fetches before they are asked for: half of a small L2 cache.
const FETCHED_BYTES: usize = 256 << 10;

/// Weight rows of a task are a multiple of this: whole lines of results, and whole tiles.
const ROWS_PER_UNIT: usize = 32;

/// Rows of activations up to which weights are read row by row rather than in tiles: until then
/// transposing a tile costs more than it saves.
const MOST_UNTILED_ROWS: usize = 8;

/// The same where weights are interleaved.
const MOST_UNTILED_ROWS_INTERLEAVED: usize = 12;

/// Rows of activations up to which weights are not transposed to tiles.
fn most_untiled_rows(platform: Platform, packing: Packing) -> usize {
    match (platform, packing) {
        (_, Packing::Stored) => MOST_UNTILED_ROWS,
        (Platform::Avx512, _) => usize::MAX,
        _ => MOST_UNTILED_ROWS_INTERLEAVED,
    }
}

/// `out[r, o] = Σ_i x[r, i] · matrix[o, i]`: `x` is `[rows, in]`, `out` `[rows, out]`.
pub fn matmul(x: &[f32], matrix: &Matrix<'_>, out: &mut [f32]) {
    matmuls(x, &[*matrix], &mut [out]);
}

/// [`matmul`] with several matrices of the same inputs, which are shared out among the threads
/// together; `x` is rounded once for all that are alike.
pub fn matmuls(x: &[f32], matrices: &[Matrix<'_>], outs: &mut [&mut [f32]]) {
    matmuls_before(x, matrices, outs, None);
}

/// [`matmuls`], after which `next` is read: threads that wait meanwhile fetch its first bytes.
pub fn matmuls_before(
    x: &[f32],
    matrices: &[Matrix<'_>],
    outs: &mut [&mut [f32]],
    next: Option<&Beginning>,
) {
    assert_eq!(matrices.len(), outs.len(), "results of each matrix");
    let Some(inputs) = matrices.first().map(Matrix::cols) else { return };
    let rows = x.len().checked_div(inputs).unwrap_or(0);
    assert_eq!(x.len(), rows * inputs, "activations of {inputs} inputs");
    let on = team::current();
    let is_exact = |it: &Matrix<'_>| on.activations != Activations::Int8 || it.packed().is_none();
    if rows > many::MOST_ROWS && matrices.iter().any(is_exact) {
        return some_rows_at_a_time(x, matrices, outs, next);
    }
    // All in tasks of one size, so that shares of as many tasks are as large.
    let units = matrices.iter().map(|matrix| matrix.rows().div_ceil(ROWS_PER_UNIT)).sum();
    let columns = on.units_per_task(units, ROWS_PER_UNIT * inputs * rows) * ROWS_PER_UNIT;
    let (mut rounded, mut jobs): (Vec<Rounded>, Vec<Job<'_>>) = (Vec::new(), Vec::new());
    let (mut parts, mut sizes): (Vec<&mut [f32]>, Vec<_>) = (Vec::new(), Vec::new());
    for (matrix, out) in matrices.iter().zip(outs) {
        let outputs = matrix.rows();
        assert_eq!(matrix.cols(), inputs, "inputs of all matrices");
        if inputs == 0 || outputs == 0 {
            out.fill(0.0);
            continue;
        }
        assert_eq!(out.len(), rows * outputs, "results of {rows} rows");
        if rows == 0 {
            continue;
        }
        sizes.push([outputs, columns]);
        parts.push(&mut **out);
        jobs.push(match matrix.packed() {
            Some(weights) if on.activations == Activations::Int8 => {
                let alike = rounded.iter().position(|rounded| rounded.fits(&weights));
                let number = alike.unwrap_or_else(|| {
                    rounded.push(Rounded::new(&on, x, &weights));
                    rounded.len() - 1
                });
                Job::Int8(weights, number)
            }
            _ => Job::Exact(matrix),
        });
    }
    let is_ordered = rows >= many::MANY_ROWS && jobs.iter().any(|job| matches!(job, Job::Exact(_)));
    let ordered = is_ordered.then(|| many::Rows::new(&on, x, inputs));
    if let Some(next) = next {
        on.announce(&next.runs);
    }
    team::columns_of_all(&on, &mut parts, &sizes, |number, out| match &jobs[number] {
        Job::Int8(weights, number) => int8(on.platform, weights, &rounded[*number], out),
        Job::Exact(matrix) => match &ordered {
            Some(x) => many::products(on.platform, x, matrix, out),
            None => exact::products(on.platform, x, matrix, out),
        },
    });
}

/// [`matmuls_before`] of so many rows at a time as the caches hold.
fn some_rows_at_a_time(
    x: &[f32],
    matrices: &[Matrix<'_>],
    outs: &mut [&mut [f32]],
    next: Option<&Beginning>,
) {
    let mut parts: Vec<_> = matrices
        .iter()
        .zip(outs)
        .map(|(matrix, out)| out.chunks_mut((many::MOST_ROWS * matrix.rows()).max(1)))
        .collect();
    let mut x = x.chunks(many::MOST_ROWS * matrices[0].cols()).peekable();
    while let Some(rows) = x.next() {
        let mut outs: Vec<_> = parts.iter_mut().map(|it| it.next().unwrap_or_default()).collect();
        matmuls_before(rows, matrices, &mut outs, next.filter(|_| x.peek().is_none()));
    }
}

/// Where each thread of the team begins to read some matrices of the same inputs.
#[derive(Clone, Debug)]
pub struct Beginning {
    /// Addresses, of which nothing is read: the matrices may be gone.
    runs: Vec<Vec<Range<usize>>>,
}

impl Beginning {
    /// The beginnings of products with these matrices, on the team within whose run this is.
    #[must_use]
    pub fn new(matrices: &[Matrix<'_>]) -> Self {
        let threads = team::current().threads;
        let rows: usize = matrices.iter().map(Matrix::rows).sum();
        let of_thread = |thread: usize| {
            let (mut first, mut left) = (rows * thread / threads, FETCHED_BYTES);
            let mut runs = Vec::new();
            for matrix in matrices {
                let skipped = first.min(matrix.rows());
                first -= skipped;
                let of_matrix = matrix.beginning(skipped, left);
                left -= of_matrix[0].len().min(left);
                runs.extend(of_matrix.into_iter().filter(|run| !run.is_empty()));
            }
            runs
        };
        // The caller is busy between products.
        Self { runs: (1..threads).map(of_thread).collect() }
    }
}

/// The multiplication with one matrix.
enum Job<'a> {
    /// With the activations of this number in 8 bits.
    Int8(Packed<'a>, usize),
    Exact(&'a Matrix<'a>),
}

/// Activations in 8 bits as kernels take them.
struct Rounded {
    /// Bits of the weights, and inputs of a span.
    form: [usize; 2],
    packing: Packing,
    values: Values,
}

enum Values {
    Rows(Quantized),
    Tiles(Panels),
}

impl Rounded {
    fn new(on: &Current, x: &[f32], weights: &Packed<'_>) -> Self {
        let rows = x.len() / weights.cols();
        let interleaved = weights.packing != Packing::Stored;
        let tiles = rows > most_untiled_rows(on.platform, weights.packing);
        let layout = if interleaved && !tiles {
            ActivationLayout::Interleaved
        } else {
            ActivationLayout::Spans
        };
        let x = Quantized::new(on, x, weights, layout);
        let values = if tiles {
            Values::Tiles(match on.platform {
                #[cfg(target_arch = "x86_64")]
                Platform::Avx2 | Platform::Avx512 => {
                    tiles::panels::<crate::avx2::Tiles>(on, &x, weights)
                }
                #[cfg(target_arch = "aarch64")]
                Platform::Neon => tiles::panels::<crate::neon::Tiles>(on, &x, weights),
                _ => tiles::panels::<portable::Tiles>(on, &x, weights),
            })
        } else {
            Values::Rows(x)
        };
        Self { form: [weights.bits, weights.span], packing: weights.packing, values }
    }

    /// Whether they were rounded for such weights; all have the same inputs.
    fn fits(&self, weights: &Packed<'_>) -> bool {
        self.form == [weights.bits, weights.span] && self.packing == weights.packing
    }
}

/// Products of activations rounded to 8 bits with the weight rows of `out`'s columns.
fn int8(platform: Platform, weights: &Packed<'_>, x: &Rounded, mut out: Columns<'_>) {
    match (&x.values, platform) {
        #[cfg(target_arch = "x86_64")]
        (Values::Tiles(x), Platform::Avx2 | Platform::Avx512) => {
            crate::avx2::run(tiled::<crate::avx2::Tiles>(weights, x, &mut out));
        }
        #[cfg(target_arch = "aarch64")]
        (Values::Tiles(x), Platform::Neon) => {
            crate::neon::run(tiled::<crate::neon::Tiles>(weights, x, &mut out));
        }
        (Values::Tiles(x), _) => tiled::<portable::Tiles>(weights, x, &mut out).run(),
        #[cfg(target_arch = "x86_64")]
        (Values::Rows(x), Platform::Avx512) if weights.packing == Packing::Interleaved => {
            crate::avx512::rows(weights, x, &mut out);
        }
        #[cfg(target_arch = "x86_64")]
        (Values::Rows(x), Platform::Avx2) if weights.packing == Packing::Planes => {
            crate::avx2::packed_gemm(weights, x, &mut out);
        }
        (Values::Rows(_), _) if weights.packing != Packing::Stored => {
            unreachable!("weights that {platform} has no products with")
        }
        #[cfg(target_arch = "x86_64")]
        (Values::Rows(x), Platform::Avx2 | Platform::Avx512) => {
            crate::avx2::rows(weights, x, &mut out);
        }
        #[cfg(target_arch = "aarch64")]
        (Values::Rows(x), Platform::Neon) => crate::neon::rows(weights, x, &mut out),
        (Values::Rows(x), _) => portable::rows(weights, x, &mut out),
    }
}

/// Products of a platform's tiles, to be run with that platform's instructions.
const fn tiled<'a, 'b, S: Shape>(
    weights: &'a Packed<'a>,
    x: &'a Panels,
    out: &'a mut Columns<'b>,
) -> Products<'a, 'b, S> {
    Products { weights, x, out, shape: PhantomData }
}

#[cfg(test)]
mod tests;
