//! Known partitions, and properties of all of them.

use proptest::prelude::*;

use super::*;

fn sizes(parts: &[UnitRange]) -> Vec<u64> {
    parts.iter().map(|[start, end]| end - start).collect()
}

#[test]
fn known_partitions() {
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

#[test]
fn known_weighted_partitions() {
    let parts = |size, weights: &[u64], align| sizes(&split_weighted(size, weights, align, &[]));
    // Llama 70B's FFN on two nodes of 512 and two of 256 GB: 448 groups, 149.3 to the large.
    assert_eq!(parts(28672, &[512, 512, 256, 256], 64), [9600, 9600, 4736, 4736]);
    assert_eq!(parts(8, &[2, 1, 1], 1), [4, 2, 2]);
    assert_eq!(parts(6, &[0, 5, 0], 2), [0, 6, 0]);
    assert_eq!(parts(0, &[1, 2], 4), [0, 0]);
    // The short last step goes where it makes the largest part smallest.
    assert_eq!(parts(10, &[1, 1], 4), [4, 6]);
    assert_eq!(parts(3, &[1, 1, 1], 4), [0, 0, 3]);
    // Steps of 512 cost 1.4 % here, and none is to be had for 200 units.
    let preferred = |size, weights: &[u64]| sizes(&split_weighted(size, weights, 64, &[512]));
    assert_eq!(preferred(28672, &[512, 512, 256, 256]), [9728, 9728, 4608, 4608]);
    assert_eq!(preferred(192, &[2, 1]), [128, 64]);
}

#[test]
fn a_preferred_step_never_breaks_a_limit() {
    // 1024 and 512 would be within 3 % of even, but the first rank has room for 1020 only.
    let split = |limits: &[u64]| sizes(&split_weighted(1536, limits, 4, &[512]));
    assert_eq!(split(&[1030, 516]), [1024, 512]);
    assert_eq!(split(&[1020, 516]), [1020, 516]);
}

#[test]
fn known_levels() {
    assert_eq!(level(400, &[512, 512, 256, 256]), Some(vec![100; 4]));
    assert_eq!(level(1300, &[512, 512, 256, 256]), Some(vec![394, 394, 256, 256]));
    assert_eq!(level(1536, &[512, 512, 256, 256]), Some(vec![512, 512, 256, 256]));
    assert_eq!(level(1537, &[512, 512, 256, 256]), None);
    assert_eq!(level(0, &[]), Some(vec![]));
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

    #[test]
    fn a_weighted_split_covers_everything_once_on_boundaries(
        size in sizes_of_axes(), weights in weights(), align in 1_u64..600, preferred in 1_u64..600,
    ) {
        let parts = split_weighted(size, &weights, align, &[preferred]);
        prop_assert_eq!(parts.len(), weights.len());
        prop_assert_eq!((parts[0][0], parts[parts.len() - 1][1]), (0, size));
        for pair in parts.windows(2) {
            prop_assert_eq!(pair[0][1], pair[1][0]);
            prop_assert!(pair[0][1].is_multiple_of(align) || pair[0][1] == size);
        }
        for (part, weight) in sizes(&parts).into_iter().zip(&weights) {
            prop_assert!(*weight > 0 || part == 0);
        }
    }

    #[test]
    fn no_weighted_split_on_these_boundaries_is_more_even(
        size in 0_u64..40, weights in prop::collection::vec(0_u64..12, 1..5), align in 1_u64..9,
    ) {
        prop_assume!(weights.iter().any(|weight| *weight > 0));
        let parts = sizes(&split_weighted(size, &weights, align, &[]));
        let found = worst_ratio(&parts, &weights).expect("no part without a weight");
        let best = every_split(size, align, weights.len())
            .filter_map(|parts| worst_ratio(&parts, &weights))
            .min_by(|a, b| (a.0 * b.1).cmp(&(b.0 * a.1)))
            .unwrap();
        prop_assert!(found.0 * best.1 == best.0 * found.1, "{parts:?}: {found:?}, best {best:?}");
    }

    #[test]
    fn no_part_exceeds_its_limit_when_that_is_possible(
        parts in prop::collection::vec(0_u64..300, 1..9),
        room in prop::collection::vec(0_u64..40, 9),
        align in 1_u64..70,
        preferred in 1_u64..600,
    ) {
        // Some partition fits by construction: limits are its parts and some room.
        let size: u64 = parts.iter().map(|part| part * align).sum();
        let limits: Vec<u64> =
            parts.iter().zip(&room).map(|(part, room)| part * align + room).collect();
        prop_assume!(size > 0);
        let found = sizes(&split_weighted(size, &limits, align, &[preferred]));
        prop_assert!(found.iter().zip(&limits).all(|(part, limit)| part <= limit), "{found:?}");
    }

    #[test]
    fn equal_weights_split_as_none_do(
        steps in 0_u64..5_000, ranks in 1_u32..9, align in 1_u64..600, weight in 1..=u64::MAX,
    ) {
        let weights = vec![weight; ranks as usize];
        prop_assert_eq!(split_weighted(steps * align, &weights, align, &[]), split(steps * align, ranks, align));
    }

    #[test]
    fn a_level_is_exact_within_limits_and_even_below_them(
        limits in prop::collection::vec(0_u64..1_000, 0..9), total in 0_u64..6_000,
    ) {
        let Some(parts) = level(total, &limits) else {
            prop_assert!(limits.iter().sum::<u64>() < total);
            return Ok(());
        };
        prop_assert_eq!(parts.iter().sum::<u64>(), total);
        let top = parts.iter().max().copied().unwrap_or(0);
        for (part, limit) in parts.iter().zip(&limits) {
            prop_assert!(part <= limit);
            // Only a full rank may be more than one unit below the highest.
            prop_assert!(part == limit || part + 1 >= top, "{parts:?}");
        }
    }
}

/// Sizes of real axes, and some at the edge of what is representable.
fn sizes_of_axes() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..100_000, (u64::MAX - 100_000)..=u64::MAX - 40_000]
}

/// Weights of up to eight ranks, not all zero: bytes of memory, small shares, and extremes.
fn weights() -> impl Strategy<Value = Vec<u64>> {
    let weight = prop_oneof![0_u64..10, 1_u64 << 30..1 << 40, Just(u64::MAX)];
    prop::collection::vec(weight, 1..9)
        .prop_filter("a rank with a weight", |weights| weights.iter().any(|weight| *weight > 0))
}

/// The largest part over its weight as a fraction; `None` if a rank of weight 0 has a part.
fn worst_ratio(parts: &[u64], weights: &[u64]) -> Option<(u64, u64)> {
    let mut worst = (0, 1);
    for (part, weight) in parts.iter().zip(weights) {
        match (part, weight) {
            (0, 0) => {}
            (_, 0) => return None,
            (part, weight) if part * worst.1 > worst.0 * weight => worst = (*part, *weight),
            _ => {}
        }
    }
    Some(worst)
}

/// Sizes of the parts of every split of `size` into `ranks` on multiples of `align`.
fn every_split(size: u64, align: u64, ranks: usize) -> impl Iterator<Item = Vec<u64>> {
    let mut splits = vec![vec![0]];
    for rank in 1..=ranks {
        splits = splits
            .into_iter()
            .flat_map(|split: Vec<u64>| {
                let last = split[rank - 1];
                let boundaries: Vec<u64> = (0..=size.div_ceil(align))
                    .map(|step| (step * align).min(size))
                    .filter(|boundary| *boundary >= last && (rank < ranks || *boundary == size))
                    .collect();
                boundaries.into_iter().map(move |boundary| [split.as_slice(), &[boundary]].concat())
            })
            .collect();
    }
    splits.into_iter().map(|split| split.windows(2).map(|pair| pair[1] - pair[0]).collect())
}
