//! Partitions for ranks of unequal size.

use super::{TOLERATED_IMBALANCE_PERCENT, lcm};
use crate::layout::UnitRange;

/// The most even split of `size` units in proportion to `weights`, one per rank: consecutive
/// ranges whose boundaries are multiples of `align`, with the smallest possible maximum of part
/// over weight. If the weights are limits in units and any such split keeps to them, this one
/// does. A rank of weight 0 gets nothing; with equal weights and a `size` of whole steps the
/// result is that of [`super::split`].
///
/// The first of `preferred` is taken as the step instead that keeps the largest part over weight
/// within 3 % of perfect evenness and puts no part above its weight that need not be.
///
/// Steps are handed out one by one, each to the rank that it raises least (as seats are under
/// D'Hondt's method, which minimises exactly this maximum); the first rank wins a tie. Every rank
/// first gets what it is due at the ideal ratio, so that fewer steps than ranks are left. The
/// last step may be a short one: as it belongs to the last rank that gets anything, each rank is
/// tried in that place.
///
/// # Panics
/// When there are no ranks, `align` or a preferred step is zero, or all weights are.
#[must_use]
pub fn split_weighted(size: u64, weights: &[u64], align: u64, preferred: &[u64]) -> Vec<UnitRange> {
    assert!(align > 0 && weights.iter().any(|weight| *weight > 0), "a split has a step and ranks");
    let finest = on_steps(size, weights, align);
    let fits = |parts: &[u64]| parts.iter().zip(weights).all(|(part, weight)| part <= weight);
    let total: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let acceptable = |parts: &Vec<u64>| {
        let even = parts.iter().zip(weights).all(|(part, weight)| {
            // part / weight < 1.03 · size / total, with room for every factor.
            let part = u128::from(*part).saturating_mul(total).saturating_mul(100);
            let ideal = u128::from(*weight) * u128::from(size);
            part == 0 || part < ideal.saturating_mul(u128::from(100 + TOLERATED_IMBALANCE_PERCENT))
        });
        even && (fits(parts) || !fits(&finest))
    };
    let coarse = preferred.iter().map(|step| on_steps(size, weights, lcm(*step, align)));
    let parts = coarse.into_iter().find(acceptable).unwrap_or(finest);
    let mut start = 0;
    let range = parts.into_iter().map(|part| {
        let range = [start, start + part];
        start += part;
        range
    });
    range.collect()
}

/// The most even division of `total` that gives no rank more than its limit, in the order of
/// `limits`; `None` if all limits together are too small.
///
/// Water finds its level: all ranks get the same, but those whose limit is lower get their limit
/// and the others share the rest. Handed to [`split_weighted`] as weights, the result shards every
/// axis as a node's memory allows while the largest part, which sets the speed of a step, stays
/// as small as it can be.
#[must_use]
pub fn level(total: u64, limits: &[u64]) -> Option<Vec<u64>> {
    let mut order: Vec<usize> = (0..limits.len()).collect();
    order.sort_by_key(|rank| limits[*rank]);
    let mut parts = vec![0; limits.len()];
    let mut left = total;
    for (done, rank) in order.into_iter().enumerate() {
        let waiting = (limits.len() - done) as u64;
        // Rounded up, so that nothing is left for a last rank that is full.
        parts[rank] = limits[rank].min(left.div_ceil(waiting));
        left -= parts[rank];
    }
    (left == 0).then_some(parts)
}

/// Parts on multiples of `step`, in rank order, with the smallest maximum of part over weight.
fn on_steps(size: u64, weights: &[u64], step: u64) -> Vec<u64> {
    let best = (0..weights.len())
        .filter(|last| weights[*last] > 0)
        .map(|last| ending_at(size, &weights[..=last], step))
        // Later ends come first among equals: they leave fewer ranks empty.
        .rev()
        .min_by(|a, b| {
            let (a, b) = (largest(a, weights), largest(b, weights));
            compare(a, b)
        });
    let mut parts = best.expect("a weight is above zero");
    parts.resize(weights.len(), 0);
    parts
}

/// As [`on_steps`], when the last of these ranks holds the short step (or nothing at all).
fn ending_at(size: u64, weights: &[u64], step: u64) -> Vec<u64> {
    let (last, steps) = (weights.len() - 1, size.div_ceil(step));
    let short = u128::from(steps) * u128::from(step) - u128::from(size);
    // Units of `count` steps of a rank.
    let units = |rank: usize, count: u64| {
        let whole = u128::from(count) * u128::from(step);
        if rank == last && count > 0 { whole - short } else { whole }
    };
    let total: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let mut counts: Vec<u64> = (0..weights.len())
        .map(|rank| {
            let due = u128::from(weights[rank]) * u128::from(size) / total;
            let due = if rank == last && due > 0 { due + short } else { due };
            (due / u128::from(step)) as u64
        })
        .collect();
    for _ in counts.iter().sum::<u64>()..steps {
        let next = (0..weights.len()).filter(|rank| weights[*rank] > 0).min_by(|a, b| {
            let after = |rank: usize| (units(rank, counts[rank] + 1), weights[rank]);
            compare(after(*a), after(*b))
        });
        counts[next.expect("the last weight is above zero")] += 1;
    }
    if counts[last] == 0 {
        // The short step then lies with an earlier rank, which another end stands for; this one
        // is no better than that.
        return one_for_the_last(&counts, size, step);
    }
    counts.iter().enumerate().map(|(rank, count)| units(rank, *count) as u64).collect()
}

/// Parts when the last rank gets nothing: the last one that has steps holds the short one.
fn one_for_the_last(counts: &[u64], size: u64, step: u64) -> Vec<u64> {
    let mut left = size;
    let take = |count: &u64| {
        let part = count.saturating_mul(step).min(left);
        left -= part;
        part
    };
    counts.iter().map(take).collect()
}

/// The part with the largest ratio to its weight, as a fraction.
fn largest(parts: &[u64], weights: &[u64]) -> (u128, u64) {
    let fractions = parts.iter().zip(weights).filter(|(_, weight)| **weight > 0);
    let fractions = fractions.map(|(part, weight)| (u128::from(*part), *weight));
    fractions.max_by(|a, b| compare(*a, *b)).unwrap_or((0, 1))
}

/// Compares two fractions. Only parts and weights that both fill 64 bits saturate, which no
/// memory is measured in.
fn compare((a, a_weight): (u128, u64), (b, b_weight): (u128, u64)) -> std::cmp::Ordering {
    a.saturating_mul(b_weight.into()).cmp(&b.saturating_mul(a_weight.into()))
}
