//! How the places for requests are shared among models: each has its part by weight, what nobody
//! uses is lent, and a model never waits for another to end as long as it is within its part.

/// What one model claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    /// At least 1.
    pub(super) weight: u32,
    /// Places that its requests hold.
    pub(super) used: u32,
}

/// The places that are kept for a model of `weight` among `total` weights.
pub(super) fn part(places: u32, weight: u32, total: u64) -> u32 {
    let part = u64::from(places) * u64::from(weight) / total.max(1);
    // No more than `places`, which is 32 bits.
    u32::try_from(part).unwrap_or(places).max(1)
}

/// Whether the model at `index` may take `count` more of `places`.
pub(super) fn may_take(places: u32, claims: &[Claim], index: usize, count: u32) -> bool {
    let total: u64 = claims.iter().map(|claim| u64::from(claim.weight)).sum();
    let used: u64 = claims.iter().map(|claim| u64::from(claim.used)).sum();
    let own = claims[index];
    let wanted = u64::from(own.used) + u64::from(count);
    if used + u64::from(count) > u64::from(places) {
        return false;
    }
    if wanted <= u64::from(part(places, own.weight, total)) {
        return true;
    }
    let others = claims.iter().enumerate().filter(|(other, _)| *other != index);
    let kept =
        others.map(|(_, claim)| part(places, claim.weight, total).saturating_sub(claim.used));
    used + u64::from(count) + kept.map(u64::from).sum::<u64>() <= u64::from(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn most(places: u32, weights: &[(u32, u32)]) -> u32 {
        let mut claims: Vec<Claim> =
            weights.iter().map(|&(weight, used)| Claim { weight, used }).collect();
        let before = claims[0].used;
        while may_take(places, &claims, 0, 1) {
            claims[0].used += 1;
        }
        claims[0].used - before
    }

    #[test]
    fn each_model_has_its_part_and_the_rest_is_lent() {
        let check = |places: u32, weights: &[(u32, u32)], expected: u32| {
            assert_eq!(most(places, weights), expected, "{places} {weights:?}");
        };
        // Alone it may have all.
        check(8, &[(1, 0)], 8);
        check(1, &[(1, 0)], 1);
        // The part of an idle model is kept for it.
        check(8, &[(1, 0), (1, 0)], 4);
        check(8, &[(3, 0), (1, 0)], 6);
        check(8, &[(1, 0), (3, 0)], 2);
        // What rounding leaves is lent.
        check(8, &[(1, 0), (1, 0), (1, 0)], 4);
        // What another one borrowed is missing.
        check(8, &[(1, 0), (1, 6)], 2);
        check(8, &[(1, 0), (1, 8)], 0);
        // More models than places: first come, first served.
        check(2, &[(1, 0), (1, 0), (1, 0)], 1);
    }
}
