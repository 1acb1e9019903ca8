//! Second moments: how inputs of a matrix go together, summed over the vectors that it reads.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use crate::{
    attention::Vectors,
    lanes::LANES,
    outer::{self, Tiled},
    pool::Pool,
    team::{self, Current},
};

/// Vectors whose products are one chain of fused operations before they are added to what there is: short
/// chains lose less, and so many numbers of a tile's columns stay in the L1 cache.
const CHAIN: usize = 256;

/// Vectors that are put in order at once: the L3 cache holds so many while all pairs of inputs pass.
const MOST_VECTORS: usize = 2 * CHAIN;

/// Rows of moments of a task: their factors stay in the L2 cache while all columns pass.
const ROWS_PER_TASK: usize = 48;

static MEMORY: Pool<f32> = Pool::new();

/// Adds `Σ x xᵀ` over vectors of `inputs` numbers to the lower half, diagonal included, of `sums`:
/// `[inputs / block, block, block]`, the moments of each `block` inputs with each other. What stands above the
/// diagonal changes too and means nothing.
///
/// The order of summation depends on the number of vectors alone: some hundreds of them in turn.
pub fn add_second_moments(x: &[f32], inputs: usize, block: usize, sums: &mut [f32]) {
    assert!(block > 0 && inputs.is_multiple_of(block), "{inputs} inputs in blocks of {block}");
    assert!(x.len().is_multiple_of(inputs), "vectors of {inputs} inputs");
    assert_eq!(sums.len(), inputs * block, "sums of {inputs} inputs in blocks of {block}");
    let on = team::current();
    for x in x.chunks(MOST_VECTORS * inputs) {
        for (number, sums) in sums.chunks_exact_mut(block * block).enumerate() {
            add_block(&on, (x, inputs), number * block, block, sums);
        }
    }
}

fn add_block(
    on: &Current,
    (x, inputs): (&[f32], usize),
    first: usize,
    block: usize,
    sums: &mut [f32],
) {
    let [tile, vectors] = outer::tile(on.platform);
    let (wide, count) = (vectors * LANES, x.len() / inputs);
    // The same numbers twice, as rows of tiles and as their columns.
    let by_width = |width: usize| {
        let mut out = MEMORY.take(block.div_ceil(width) * count * width);
        team::chunks(on, &mut out, count * width, |index, out| {
            let held = first + index * width..first + block.min((index + 1) * width);
            for (x, out) in x.chunks_exact(inputs).zip(out.chunks_exact_mut(width)) {
                let (some, none) = out.split_at_mut(held.len());
                some.copy_from_slice(&x[held.clone()]);
                none.fill(0.0);
            }
        });
        out
    };
    let (rows, columns) = (by_width(tile), by_width(wide));
    let tiles = ROWS_PER_TASK.div_ceil(tile);
    team::chunks(on, sums, tiles * tile * block, |index, sums| {
        let rows = &rows[index * tiles * tile * count..];
        let first = index * tiles * tile;
        outer::run(on.platform, Strip { rows, columns: &columns, count, first, block, sums });
    });
}

/// Some rows of moments.
struct Strip<'a, 'b> {
    /// From the strip's first tile on: for each tile and vector the numbers of the tile's rows.
    rows: &'a [f32],
    /// The same of the columns.
    columns: &'a [f32],
    /// Vectors.
    count: usize,
    first: usize,
    block: usize,
    sums: &'b mut [f32],
}

impl Tiled for Strip<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors, const R: usize, const C: usize>(self) {
        let Self { rows, columns, count, first, block, sums } = self;
        let last = first + sums.len() / block - 1;
        let columns = columns.chunks_exact(count * C * LANES).enumerate();
        for (number, columns) in columns.take(last / (C * LANES) + 1) {
            let column = number * C * LANES;
            let chains = columns.chunks(CHAIN * C * LANES).enumerate();
            for (chain, columns) in chains {
                for (tile, sums) in sums.chunks_mut(R * block).enumerate() {
                    if first + (tile + 1) * R <= column {
                        continue;
                    }
                    let rows = &rows[(tile * count + chain * CHAIN) * R..];
                    let rows = &rows[..columns.len() / (C * LANES) * R];
                    let none = outer::none::<V, R, C>();
                    let found = outer::add_products::<V, R, C>(rows, columns, none);
                    add_to_rows::<V, R, C>(&found, &mut sums[column..], block);
                }
            }
        }
    }
}

/// Adds a tile's sums to rows of `block` numbers, of which the first begins here; as many as there are.
#[inline(always)]
fn add_to_rows<V: Vectors, const R: usize, const C: usize>(
    found: &outer::Sums<V, R, C>,
    sums: &mut [f32],
    block: usize,
) {
    for (found, sums) in found.iter().zip(sums.chunks_mut(block)) {
        for (found, sums) in found.iter().zip(sums.chunks_mut(LANES)) {
            if let Some(sums) = sums.first_chunk_mut::<LANES>() {
                V::store(V::add(V::load(sums), *found), sums);
                continue;
            }
            let mut rest = [0.0; LANES];
            V::store(*found, &mut rest);
            for (sum, found) in sums.iter_mut().zip(rest) {
                *sum += found;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use shardpack_quantize::Platform;

    use super::*;
    use crate::{Activations, Team, TeamOptions};

    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|it| (it as f32 * 0.731).sin() * (it as f32 * 0.0317).cos()).collect()
    }

    fn lower_half(sums: &[f32], block: usize) -> Vec<f32> {
        let rows = sums.chunks_exact(block).enumerate();
        rows.flat_map(|(row, sums)| sums[..=row % block].to_vec()).collect()
    }

    #[test]
    fn moments_are_sums_of_products_in_one_order() {
        for (inputs, block, count) in [(96, 96, 5), (50, 25, 300), (200, 100, 1100), (7, 7, 1)] {
            let x = numbers(count * inputs);
            let mut expected = vec![0.25; inputs * block];
            for chain in x.chunks(CHAIN * inputs) {
                for (at, sum) in expected.iter_mut().enumerate() {
                    let (a, b) = (at / block, at / (block * block) * block + at % block);
                    let products = chain.chunks_exact(inputs);
                    *sum += products.fold(0.0_f32, |sum, x| x[a].mul_add(x[b], sum));
                }
            }
            for platform in Platform::available() {
                for threads in [1, 3] {
                    let options = TeamOptions { threads, platform, activations: Activations::F32 };
                    let mut sums = vec![0.25; inputs * block];
                    Team::new(&options)
                        .unwrap()
                        .run(|| add_second_moments(&x, inputs, block, &mut sums));
                    let shape = format!("{platform}: {count} of {inputs} in {block}");
                    assert_eq!(lower_half(&sums, block), lower_half(&expected, block), "{shape}");
                }
            }
        }
    }
}
