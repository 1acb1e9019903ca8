//! Tiles of sums that stay in registers while numbers of both sides pass, as outer products: a vector holds
//! sums of neighbouring columns, and each number of a row is multiplied with whole vectors. Far fewer numbers
//! are read for each product than where a vector runs along the sum, and nothing is added across a vector.
//!
//! Each element's sum is a chain of fused operations in the order in which its factors stand, whatever the
//! size of the tile: so all platforms have the same bits.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use std::marker::PhantomData;

use shardpack_quantize::Platform;

use crate::{
    attention::{Plain, Vectors},
    lanes::LANES,
    platform::Task,
};

/// Vectors of sums: rows of a tile by vectors of its columns.
pub(crate) type Sums<V, const R: usize, const C: usize> = [[<V as Vectors>::Floats; C]; R];

/// Work with tiles of `R` rows by `C` vectors.
pub(crate) trait Tiled {
    type Output;

    fn run<V: Vectors, const R: usize, const C: usize>(self) -> Self::Output;
}

/// Rows of a platform's tiles, and vectors of columns: sums take three quarters of the registers or more,
/// and the rest hold the factors.
pub(crate) const fn tile(platform: Platform) -> [usize; 2] {
    match platform {
        Platform::Avx512 => [12, 2],
        Platform::Avx2 | Platform::Neon => [6, 1],
        Platform::Portable => [4, 1],
    }
}

/// Runs work with a platform's instructions and its tiles.
pub(crate) fn run<T: Tiled>(platform: Platform, work: T) -> T::Output {
    match platform {
        #[cfg(target_arch = "x86_64")]
        Platform::Avx512 => within::<_, crate::avx512::Sixteen, 12, 2>(platform, work),
        #[cfg(target_arch = "x86_64")]
        Platform::Avx2 => within::<_, crate::avx2::Sixteen, 6, 1>(platform, work),
        #[cfg(target_arch = "aarch64")]
        Platform::Neon => within::<_, crate::neon::Sixteen, 6, 1>(platform, work),
        _ => within::<_, Plain, 4, 1>(platform, work),
    }
}

fn within<T: Tiled, V: Vectors, const R: usize, const C: usize>(
    platform: Platform,
    work: T,
) -> T::Output {
    assert!(tile(platform) == [R, C] && platform.is_available(), "tiles of {platform}");
    V::run(WithTiles::<T, V, R, C>(work, PhantomData))
}

struct WithTiles<T, V, const R: usize, const C: usize>(T, PhantomData<V>);

impl<T: Tiled, V: Vectors, const R: usize, const C: usize> Task for WithTiles<T, V, R, C> {
    type Output = T::Output;

    #[inline(always)]
    fn run(self) -> T::Output {
        self.0.run::<V, R, C>()
    }
}

/// No sums yet.
#[inline(always)]
pub(crate) fn none<V: Vectors, const R: usize, const C: usize>() -> Sums<V, R, C> {
    [[V::splat(0.0); C]; R]
}

/// Adds the products of `R` numbers and `C` vectors at a time, one time after the other.
#[inline(always)]
pub(crate) fn add_products<V: Vectors, const R: usize, const C: usize>(
    rows: &[f32],
    columns: &[f32],
    mut sums: Sums<V, R, C>,
) -> Sums<V, R, C> {
    let rows = rows.as_chunks::<R>().0;
    let columns = columns.as_chunks::<LANES>().0.as_chunks::<C>().0;
    for (rows, columns) in rows.iter().zip(columns) {
        let mut vectors = [V::splat(0.0); C];
        for (vector, column) in vectors.iter_mut().zip(columns) {
            *vector = V::load(column);
        }
        for (sums, row) in sums.iter_mut().zip(rows) {
            let factor = V::splat(*row);
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = V::fma(vector, factor, *sum);
            }
        }
    }
    sums
}

/// Adds stored sums.
#[inline(always)]
pub(crate) fn add<V: Vectors, const R: usize, const C: usize>(
    sums: &mut Sums<V, R, C>,
    from: &[[f32; LANES]],
) {
    for (sums, from) in sums.iter_mut().zip(from.as_chunks::<C>().0) {
        for (sum, from) in sums.iter_mut().zip(from) {
            *sum = V::add(*sum, V::load(from));
        }
    }
}

/// Stores sums.
#[inline(always)]
pub(crate) fn store<V: Vectors, const R: usize, const C: usize>(
    sums: &Sums<V, R, C>,
    to: &mut [[f32; LANES]],
) {
    for (sums, to) in sums.iter().zip(to.as_chunks_mut::<C>().0) {
        for (sum, to) in sums.iter().zip(to) {
            V::store(*sum, to);
        }
    }
}

/// Reads sums that were stored.
#[inline(always)]
pub(crate) fn load<V: Vectors, const R: usize, const C: usize>(
    from: &[[f32; LANES]],
) -> Sums<V, R, C> {
    let mut sums = none::<V, R, C>();
    for (sums, from) in sums.iter_mut().zip(from.as_chunks::<C>().0) {
        for (sum, from) in sums.iter_mut().zip(from) {
            *sum = V::load(from);
        }
    }
    sums
}
