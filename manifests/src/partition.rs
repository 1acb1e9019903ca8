//! Partitions an axis over ranks: arithmetic on units alone, no bytes.

#[cfg(test)]
mod tests;
mod weighted;

use crate::layout::UnitRange;
pub use weighted::{level, split_weighted};

/// A partition may be this much (in percent) worse than perfectly even when that puts boundaries
/// where kernels like them.
const TOLERATED_IMBALANCE_PERCENT: u64 = 3;

/// The most even split of `size` units into `ranks` consecutive ranges whose boundaries are
/// multiples of `align`. Earlier ranks get the larger parts; later ones may be empty.
///
/// # Panics
/// When `ranks` or `align` is zero.
#[must_use]
pub fn split(size: u64, ranks: u32, align: u64) -> Vec<UnitRange> {
    assert!(ranks > 0 && align > 0, "a split has ranks and a step");
    let (blocks, ranks) = (size.div_ceil(align), u64::from(ranks));
    let (each, extra) = (blocks / ranks, blocks % ranks);
    let boundary = |rank: u64| ((rank * each + rank.min(extra)) * align).min(size);
    (0..ranks).map(|rank| [boundary(rank), boundary(rank + 1)]).collect()
}

/// Like [`split`] with the required `align`, but on multiples of the first of `preferred` that
/// keeps the imbalance (largest part over mean) below 3 %.
#[must_use]
pub fn split_preferring(size: u64, ranks: u32, align: u64, preferred: &[u64]) -> Vec<UnitRange> {
    let acceptable = |step: &u64| {
        let parts = split(size, ranks, *step);
        let largest = parts.iter().map(|[start, end]| end - start).max().unwrap_or(0);
        largest * u64::from(ranks) * 100 < size * (100 + TOLERATED_IMBALANCE_PERCENT)
    };
    let step = preferred.iter().map(|step| lcm(*step, align)).find(acceptable).unwrap_or(align);
    split(size, ranks, step)
}

/// Units of `unit` elements each that together fill whole groups of `group` elements.
#[must_use]
pub fn units_per_group(unit: u64, group: u64) -> u64 {
    group / gcd(unit, group)
}

/// Least common multiple; of 0 and anything, the other.
#[must_use]
pub fn lcm(a: u64, b: u64) -> u64 {
    if a == 0 || b == 0 { a.max(b) } else { a / gcd(a, b) * b }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
