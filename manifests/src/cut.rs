//! Where an axis is cut: arithmetic on units alone, no bytes.

use crate::layout::UnitRange;

/// A cut may be this much (in percent) worse than perfectly even when that puts boundaries where
/// kernels like them.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes(parts: &[UnitRange]) -> Vec<u64> {
        parts.iter().map(|[start, end]| end - start).collect()
    }

    #[test]
    fn known_cuts() {
        // Six heads of 32 with groups of 64: two heads fill a group, so two ranks hold 4 and 2.
        assert_eq!(units_per_group(32, 64), 2);
        assert_eq!(sizes(&split(6, 2, 2)), [4, 2]);
        assert_eq!(sizes(&split(6, 4, 2)), [2, 2, 2, 0]);
        assert_eq!(sizes(&split(6, 2, 1)), [3, 3]);
        // An FFN of 320 is five groups of 64.
        assert_eq!(sizes(&split(320, 3, 64)), [128, 128, 64]);
        // Qwen2.5-72B on four nodes: 462 groups.
        assert_eq!(sizes(&split(29568, 4, 64)), [116 * 64, 116 * 64, 115 * 64, 115 * 64]);
        assert_eq!(sizes(&split(0, 2, 4)), [0, 0]);
    }

    #[test]
    fn kernel_boundaries_are_taken_only_while_they_are_cheap() {
        // 29568 on three nodes: even 9856; multiples of 512 would be 10240 (3.9 % over).
        assert_eq!(sizes(&split_preferring(29568, 3, 64, &[512])), [9856; 3]);
        // Llama 70B's 28672 on three nodes: 9557.3 even, 9728 on multiples of 512 (1.8 % over).
        assert_eq!(sizes(&split_preferring(28672, 3, 64, &[512])), [9728, 9728, 9216]);
        assert_eq!(sizes(&split_preferring(768, 2, 64, &[512])), [384, 384]);
    }

    proptest! {
        #[test]
        fn a_split_covers_everything_once_on_boundaries(size in 0_u64..100_000, ranks in 1_u32..9, align in 1_u64..600, preferred in 1_u64..600) {
            for parts in [split(size, ranks, align), split_preferring(size, ranks, align, &[preferred])] {
                prop_assert_eq!(parts.len(), ranks as usize);
                prop_assert_eq!(parts[0][0], 0);
                prop_assert_eq!(parts[ranks as usize - 1][1], size);
                for pair in parts.windows(2) {
                    prop_assert_eq!(pair[0][1], pair[1][0]);
                    prop_assert!(pair[0][1].is_multiple_of(align) || pair[0][1] == size);
                }
            }
        }

        #[test]
        fn no_split_on_these_boundaries_is_more_even(size in 1_u64..5_000, ranks in 1_u32..9, align in 1_u64..70) {
            let largest = sizes(&split(size, ranks, align)).into_iter().max().unwrap();
            // Some rank must hold at least its share of whole blocks.
            let share = size.div_ceil(align).div_ceil(u64::from(ranks)) * align;
            prop_assert!(largest <= share);
        }
    }
}
