//! Routing. Every rank computes this for itself from the same bits, so it must be the same arithmetic
//! everywhere: one order of operations, `libm`'s functions, ties to the earlier expert.

use shardpack_formats::spec::{ExpertGroups, GroupScore, Renormalise, Router, Scores};
use shardpack_kernels::exp::{exp, softplus};

use crate::backend::RouterVectors;

/// Which experts the rows of a step go to, and how much each counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// Experts of one row.
    pub top_k: usize,
    /// `[rows, top_k]`, each row's best first.
    pub experts: Vec<u32>,
    /// `[rows, top_k]`.
    pub weights: Vec<f32>,
}

/// Routes of rows of logits, `experts` each.
pub(super) fn route(
    logits: &[f32],
    experts: usize,
    router: &Router,
    top_k: usize,
    RouterVectors { correction, scales }: RouterVectors<'_, Vec<f32>>,
) -> Routes {
    assert!(top_k > 0 && top_k <= experts, "checked when a model is loaded");
    let rows = logits.len() / experts;
    let mut routes = Routes {
        top_k,
        experts: Vec::with_capacity(rows * top_k),
        weights: Vec::with_capacity(rows * top_k),
    };
    for logits in logits.chunks_exact(experts) {
        if router.scores == Scores::SparseMixer {
            let jitter = router.jitter.map_or(0.0, |jitter| jitter.0);
            for Route { expert, weight } in sparse_mixer(logits, jitter, top_k) {
                routes.experts.push(expert as u32);
                routes.weights.push(weight * router.scale.0);
            }
            continue;
        }
        let scores = scores(logits, router.scores);
        let mut ranked = scores.clone();
        if let Some(correction) = correction {
            ranked.iter_mut().zip(correction).for_each(|(score, add)| *score += add);
        }
        if let Some(groups) = &router.groups {
            keep_groups(&mut ranked, groups);
        }
        let taken = best(&ranked, top_k);
        let weights: Vec<f32> = taken.iter().map(|expert| scores[*expert]).collect();
        let mut weights = weigh(weights, router);
        if let Some(scales) = scales {
            weights.iter_mut().zip(&taken).for_each(|(weight, expert)| *weight *= scales[*expert]);
        }
        routes.weights.extend(weights);
        routes.experts.extend(taken.iter().map(|expert| *expert as u32));
    }
    routes
}

/// Hash routing: routes of rows of logits to the experts of a table, `top_k` for each row.
pub(super) fn hash_route(
    logits: &[f32],
    experts: usize,
    router: &Router,
    taken: &[u32],
    top_k: usize,
) -> Routes {
    let mut weights = Vec::with_capacity(taken.len());
    for (logits, taken) in logits.chunks_exact(experts).zip(taken.chunks_exact(top_k)) {
        let scores = scores(logits, router.scores);
        let each = taken.iter().map(|expert| scores[*expert as usize]).collect();
        weights.extend(weigh(each, router));
    }
    Routes { top_k, experts: taken.to_vec(), weights }
}

fn scores(logits: &[f32], kind: Scores) -> Vec<f32> {
    match kind {
        Scores::Softmax => softmax(logits),
        Scores::SoftmaxOfTopK | Scores::SigmoidOfTopK | Scores::SparseMixer => logits.to_vec(),
        Scores::Sigmoid => logits.iter().map(|logit| sigmoid(*logit)).collect(),
        Scores::SqrtSoftplus => logits.iter().map(|logit| softplus(*logit).sqrt()).collect(),
    }
}

/// One expert of a row.
struct Route {
    expert: usize,
    weight: f32,
}

/// Experts and weights by [`Scores::SparseMixer`].
fn sparse_mixer(logits: &[f32], jitter: f32, top_k: usize) -> Vec<Route> {
    let taken = best(logits, top_k);
    let weigh = |(place, expert): (usize, &usize)| {
        let top = logits[*expert];
        let counts = |(other, logit): (usize, &f32)| {
            let far = (top - logit) / logit.abs().max(top) > 2.0 * jitter;
            (!far && !taken[..place].contains(&other)).then(|| exp(logit - top))
        };
        let sum: f32 = logits.iter().enumerate().filter_map(counts).sum();
        Route { expert: *expert, weight: 1.0 / sum }
    };
    taken.iter().enumerate().map(weigh).collect()
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

fn softmax(values: &[f32]) -> Vec<f32> {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut out: Vec<f32> = values.iter().map(|value| exp(value - largest)).collect();
    let sum: f32 = out.iter().sum();
    for value in &mut out {
        *value /= sum;
    }
    out
}

/// Rules out the experts of all groups but the best.
fn keep_groups(ranked: &mut [f32], groups: &ExpertGroups) {
    let size = ranked.len() / groups.count as usize;
    let score = |group: &[f32]| {
        let mut two = [f32::NEG_INFINITY; 2];
        for value in group {
            if *value > two[0] {
                two = [*value, two[0]];
            } else if *value > two[1] {
                two[1] = *value;
            }
        }
        match groups.by {
            GroupScore::Best => two[0],
            GroupScore::BestTwo => two[0] + two[1],
        }
    };
    let scores: Vec<f32> = ranked.chunks_exact(size).map(score).collect();
    let kept = best(&scores, groups.kept as usize);
    for (group, values) in ranked.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&group) {
            values.fill(f32::NEG_INFINITY);
        }
    }
}

/// Indices of the largest values, the largest first, the earlier of equal ones first.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // The sort is stable; a NaN, which only broken weights give, has a place all the same.
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order
}

fn weigh(mut weights: Vec<f32>, router: &Router) -> Vec<f32> {
    if router.scores == Scores::SoftmaxOfTopK {
        weights = softmax(&weights);
    }
    if router.scores == Scores::SigmoidOfTopK {
        for weight in &mut weights {
            *weight = sigmoid(*weight);
        }
    }
    if let Some(Renormalise { added, least }) = router.renormalise {
        let sum = (weights.iter().sum::<f32>() + added.0).max(least.0);
        for weight in &mut weights {
            *weight /= sum;
        }
    }
    for weight in &mut weights {
        *weight *= router.scale.0;
    }
    weights
}

#[cfg(test)]
mod tests {
    use shardpack_formats::hex::HexF32;

    use super::*;

    fn router(scores: Scores) -> Router {
        Router {
            scores,
            softcap: None,
            jitter: None,
            bias: false,
            correction: false,
            groups: None,
            renormalise: None,
            scale: HexF32(1.0),
            input: None,
            expert_scales: None,
        }
    }

    fn check(router: &Router, logits: &[f32], correction: Option<&[f32]>, expected: &[(u32, f32)]) {
        let correction = correction.map(<[f32]>::to_vec);
        let vectors = RouterVectors { correction: correction.as_ref(), scales: None };
        let routes = route(logits, logits.len(), router, expected.len(), vectors);
        let experts: Vec<u32> = expected.iter().map(|(expert, _)| *expert).collect();
        assert_eq!(routes.experts, experts);
        for (found, (_, wanted)) in routes.weights.iter().zip(expected) {
            assert!((found - wanted).abs() < 1e-6, "{:?} {expected:?}", routes.weights);
        }
    }

    #[test]
    fn every_router_of_the_catalogue_weighs_as_it_should() {
        let ln = |x: f32| x.ln();
        let odds = [ln(1.0), ln(4.0), ln(2.0), ln(3.0)];
        check(&router(Scores::Softmax), &odds, None, &[(1, 0.4), (3, 0.3)]);
        let sum = Renormalise { added: HexF32(0.0), least: HexF32(0.0) };
        let renormalised = Router { renormalise: Some(sum), ..router(Scores::Softmax) };
        check(&renormalised, &odds, None, &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        check(&router(Scores::SoftmaxOfTopK), &odds, None, &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        let scaled = Router { scale: HexF32(2.5), ..router(Scores::Sigmoid) };
        check(&scaled, &[0.0, 0.0, -1.0], None, &[(0, 1.25), (1, 1.25)]);
        // A correction decides, and does not weigh.
        let corrected = Router { correction: true, ..router(Scores::Sigmoid) };
        check(&corrected, &[0.0, 0.0, 0.0], Some(&[0.0, -1.0, 1.0]), &[(2, 0.5), (0, 0.5)]);
        // The best among those near it, then the next among those near it; the last is far from both.
        let mixer = Router { jitter: Some(HexF32(0.25)), ..router(Scores::SparseMixer) };
        let logits = [2.0, 1.5, 0.9, -3.0];
        let [first, second] = [1.0 + (-0.5_f32).exp(), 1.0 + (-0.6_f32).exp()];
        check(&mixer, &logits, None, &[(0, 1.0 / first), (1, 1.0 / second)]);
        let root = |x: f32| (1.0 + x.exp()).ln().sqrt();
        let expected = [(1, root(2.0)), (2, root(0.5))];
        check(&router(Scores::SqrtSoftplus), &[-1.0, 2.0, 0.5], None, &expected);
        let least = Renormalise { added: HexF32(0.0), least: HexF32(2.0) };
        let least = Router { renormalise: Some(least), ..router(Scores::Softmax) };
        check(&least, &odds, None, &[(1, 0.2)]);
    }

    #[test]
    fn hash_routing_weighs_the_experts_of_the_table() {
        let sum = Renormalise { added: HexF32(0.0), least: HexF32(0.0) };
        let router =
            Router { renormalise: Some(sum), scale: HexF32(2.0), ..router(Scores::Sigmoid) };
        let logits = [0.0, 9.0, 3.0_f32.ln(), 1.0, 9.0, 1.0];
        let routes = hash_route(&logits, 3, &router, &[2, 0, 0, 2], 2);
        assert_eq!(routes.experts, [2, 0, 0, 2]);
        for (found, wanted) in routes.weights.iter().zip([1.2, 0.8, 1.0, 1.0]) {
            assert!((found - wanted).abs() < 1e-6, "{:?}", routes.weights);
        }
    }

    #[test]
    fn groups_are_chosen_by_their_best_or_their_two_best() {
        let grouped = |by| Router {
            groups: Some(ExpertGroups { count: 2, kept: 1, by }),
            ..router(Scores::SoftmaxOfTopK)
        };
        // The first group has the best expert, the second the best two.
        let logits = [5.0, 0.0, 0.0, 4.0, 4.0, 0.0];
        check(&grouped(GroupScore::Best), &logits, None, &[(0, 1.0)]);
        check(&grouped(GroupScore::BestTwo), &logits, None, &[(3, 0.5), (4, 0.5)]);
        // Equal groups and equal experts: the earlier.
        check(&grouped(GroupScore::BestTwo), &[1.0; 6], None, &[(0, 0.5), (1, 0.5)]);
    }
}
