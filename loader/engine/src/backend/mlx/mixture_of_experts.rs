//! Mixtures of experts within the graph: nothing is read before the step's end.

use shardpack_formats::spec::{
    ClampedSwiglu, ExpertGroups, GroupScore, Renormalise, Router, Scores,
};
use shardpack_mlx::{Array, Binary, Element, Reduce, Unary};

use super::{
    Matrix, Mlx, Tensor,
    dense::{silu, silu_like},
};
use crate::backend::{ExpertParams, MixtureOfExperts, RouterVectors};

impl MixtureOfExperts for Mlx {
    type Routes = Routes;

    fn route(
        &self,
        logits: Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Array>,
    ) -> Routes {
        route(&logits, router, top_k as usize, vectors)
    }

    fn hash_route(&self, logits: Tensor, router: &Router, experts: &[u32], top_k: u32) -> Routes {
        hash_route(&logits, router, experts, top_k as usize)
    }

    fn experts(
        &self,
        x: &Tensor,
        routes: &Routes,
        params: &ExpertParams<'_, Matrix, Array>,
    ) -> Tensor {
        experts(x, routes, params)
    }
}

/// The experts of each row `[rows, top_k]` and their weights `[rows, top_k]`.
#[derive(Debug)]
pub struct Routes {
    experts: Array,
    weights: Array,
}

/// Chooses experts by logits `[rows, experts]`. Equal scores are decided as MLX sorts them.
fn route(
    logits: &Tensor,
    router: &Router,
    top_k: usize,
    RouterVectors { correction, scales }: RouterVectors<'_, Array>,
) -> Routes {
    if router.scores == Scores::SparseMixer {
        return sparse_mixer(logits, router, top_k);
    }
    let scores = scores(logits, router);
    let choice = match correction {
        Some(correction) => scores.binary(Binary::Add, correction),
        None => scores.clone(),
    };
    let choice = match &router.groups {
        Some(groups) => within_groups(&choice, logits.rows, logits.width, groups),
        None => choice,
    };
    let experts = best(&choice, top_k);
    let mut weights = weigh(&scores, &experts, router);
    if let Some(scales) = scales {
        weights = weights.binary(Binary::Multiply, &scales.take(&experts, 0));
    }
    Routes { experts, weights }
}

/// Hash routing: weighs the experts of a table, `top_k` for each row.
fn hash_route(logits: &Tensor, router: &Router, taken: &[u32], top_k: usize) -> Routes {
    // Numbers of experts are whole and below 2^24, which floats hold.
    let taken: Vec<f32> = taken.iter().map(|expert| *expert as f32).collect();
    let experts = logits.array.library().floats(&taken, &[logits.rows, top_k]);
    let experts = experts.cast(Element::U32);
    let weights = weigh(&scores(logits, router), &experts, router);
    Routes { experts, weights }
}

fn scores(logits: &Tensor, router: &Router) -> Array {
    match router.scores {
        Scores::Softmax => logits.array.softmax(-1),
        Scores::SoftmaxOfTopK | Scores::SigmoidOfTopK | Scores::SparseMixer => logits.array.clone(),
        Scores::Sigmoid => logits.array.unary(Unary::Sigmoid),
        Scores::SqrtSoftplus => {
            logits.array.with_constant(Binary::LogAddExp, 0.0).unary(Unary::Sqrt)
        }
    }
}

/// The weights of the experts that were taken.
fn weigh(scores: &Array, experts: &Array, router: &Router) -> Array {
    let mut weights = scores.take_along(experts, 1);
    if router.scores == Scores::SoftmaxOfTopK {
        weights = weights.softmax(-1);
    }
    if router.scores == Scores::SigmoidOfTopK {
        weights = weights.unary(Unary::Sigmoid);
    }
    if let Some(Renormalise { added, least }) = &router.renormalise {
        let sum = weights.reduce(Reduce::Sum, 1).with_constant(Binary::Add, added.0);
        weights = weights.binary(Binary::Divide, &sum.with_constant(Binary::Maximum, least.0));
    }
    weights.with_constant(Binary::Multiply, router.scale.0)
}

/// [`Scores::SparseMixer`]: one expert after the other.
fn sparse_mixer(logits: &Tensor, router: &Router, top_k: usize) -> Routes {
    let jitter = router.jitter.map_or(0.0, |jitter| jitter.0);
    let (logits, library) = (&logits.array, logits.array.library());
    let nothing = library.full(f32::NEG_INFINITY, Element::F32, &[]);
    let experts = best(logits, top_k);
    let mut left = logits.clone();
    let weights: Vec<Array> = (0..top_k)
        .map(|place| {
            let expert = experts.slice(1, place, place + 1);
            let top = left.reduce(Reduce::Max, 1);
            let size = logits.unary(Unary::Abs).binary(Binary::Maximum, &top);
            let distance = top.binary(Binary::Subtract, logits).binary(Binary::Divide, &size);
            let far = distance.with_constant(Binary::Greater, 2.0 * jitter);
            let weight = far.choose(&nothing, &left).softmax(-1).take_along(&expert, 1);
            let gone = library.full(f32::NEG_INFINITY, Element::F32, &expert.shape());
            left = left.put_along(&expert, &gone, 1);
            weight
        })
        .collect();
    let weights = library.concat(&weights.iter().collect::<Vec<_>>(), 1);
    Routes { experts, weights: weights.with_constant(Binary::Multiply, router.scale.0) }
}

/// The `count` largest of each row, best first.
fn best(x: &Array, count: usize) -> Array {
    x.unary(Unary::Negative).argsort(-1).slice(1, 0, count).cast(Element::U32)
}

/// Scores, with those outside the best groups out of reach.
fn within_groups(choice: &Array, rows: usize, experts: usize, groups: &ExpertGroups) -> Array {
    let (count, kept) = (groups.count as usize, groups.kept as usize);
    let grouped = choice.reshape(&[rows, count, experts / count]);
    let taken = match groups.by {
        GroupScore::Best => 1,
        GroupScore::BestTwo => 2,
    };
    let order = grouped.unary(Unary::Negative).argsort(-1).slice(2, 0, taken).cast(Element::U32);
    let values = grouped.take_along(&order, 2).reduce(Reduce::Sum, 2).reshape(&[rows, count]);
    // A group stays if fewer than `kept` groups are better.
    let place = best(&values, count).argsort(-1).cast(Element::F32);
    let stays = place.with_constant(Binary::Less, kept as f32).reshape(&[rows, count, 1]);
    let outside = choice.library().full(f32::NEG_INFINITY, Element::F32, &[]);
    stays.choose(&grouped, &outside).reshape(&[rows, experts])
}

/// `Σ weight · expert(x)` over each row's experts that are held here, and over zero-computation
/// experts.
fn experts(x: &Tensor, routes: &Routes, params: &ExpertParams<'_, Matrix, Array>) -> Tensor {
    let (count, top_k) = (params.held.len(), routes.experts.shape()[1]);
    let Routes { experts: local, weights } = held_here(routes, params, count);
    let mut input = x.array.reshape(&[x.rows, 1, 1, x.width]);
    let mut weights = weights.reshape(&[x.rows, top_k, 1]);
    if params.weighs_inputs {
        let factors = weights.reshape(&[x.rows, top_k, 1, 1]);
        input = input.binary(Binary::Multiply, &factors);
        // Experts of other ranks still count nothing.
        weights = weights.with_constant(Binary::Greater, 0.0).cast(Element::F32);
    }
    let project = |x: &Array, matrix: &Matrix, bias: Option<&Array>| {
        let y = matrix.gathered(x, &local, count);
        let width = matrix.outputs() / count;
        match bias {
            Some(bias) => {
                let each = bias.reshape(&[count, width]).take(&local, 0);
                y.binary(Binary::Add, &each.reshape(&[x_rows(&y), top_k, 1, width]))
            }
            None => y,
        }
    };
    let up = project(&input, params.up, params.up_bias);
    let gate = params.gate.map(|gate| project(&input, gate, params.gate_bias));
    let inner = match (gate, params.clamped, params.limit) {
        (None, ..) => silu_like(params.activation, &up),
        (Some(gate), Some(clamped), _) => clamped_swiglu(&gate, &up, clamped),
        (Some(gate), None, Some(limit)) => limited_swiglu(&gate, &up, limit),
        (Some(gate), None, None) => {
            silu_like(params.activation, &gate).binary(Binary::Multiply, &up)
        }
    };
    let out = project(&inner, params.down, params.down_bias);
    let hidden = params.down.outputs() / count;
    let out = out.reshape(&[x.rows, top_k, hidden]);
    let sum = out.binary(Binary::Multiply, &weights).reduce(Reduce::Sum, 1);
    let mut array = sum.reshape(&[x.rows, hidden]);
    if let Some(first) = params.zero_experts {
        array = array.binary(Binary::Add, &zero_experts(x, routes, first));
    }
    Tensor { rows: x.rows, width: hidden, array }
}

/// Each row's own vector by the weights of its experts from `first` on, all at once.
fn zero_experts(x: &Tensor, routes: &Routes, first: usize) -> Array {
    let experts = routes.experts.cast(Element::F32);
    let gives = experts.with_constant(Binary::GreaterEqual, first as f32);
    let nothing = routes.weights.library().full(0.0, Element::F32, &[]);
    let weight = gives.choose(&routes.weights, &nothing).reduce(Reduce::Sum, 1);
    x.array.binary(Binary::Multiply, &weight.reshape(&[x.rows, 1]))
}

fn x_rows(x: &Array) -> usize {
    x.shape()[0]
}

/// The routes with experts counted among those of this rank; experts of other ranks have no weight.
fn held_here(routes: &Routes, params: &ExpertParams<'_, Matrix, Array>, count: usize) -> Routes {
    let shifted = routes.experts.cast(Element::F32);
    let shifted = shifted.with_constant(Binary::Subtract, params.held.start as f32);
    let above = shifted.with_constant(Binary::GreaterEqual, 0.0);
    let below = shifted.with_constant(Binary::Less, count as f32);
    let here = above.binary(Binary::And, &below);
    let nothing = routes.weights.library().full(0.0, Element::F32, &[]);
    let local = here.choose(&shifted, &nothing).cast(Element::U32);
    Routes { experts: local, weights: here.choose(&routes.weights, &nothing) }
}

/// `min(silu(gate), limit) · clamp(up, −limit, limit)`.
pub(super) fn limited_swiglu(gate: &Array, up: &Array, limit: f32) -> Array {
    let gate = silu(gate).with_constant(Binary::Minimum, limit);
    let up = up.with_constant(Binary::Minimum, limit).with_constant(Binary::Maximum, -limit);
    gate.binary(Binary::Multiply, &up)
}

pub(super) fn clamped_swiglu(gate: &Array, up: &Array, clamped: ClampedSwiglu) -> Array {
    let (alpha, limit) = (clamped.alpha.0, clamped.limit.0);
    let gate = gate.with_constant(Binary::Minimum, limit);
    let up = up.with_constant(Binary::Minimum, limit).with_constant(Binary::Maximum, -limit);
    let open = gate.with_constant(Binary::Multiply, alpha).unary(Unary::Sigmoid);
    let glu = gate.binary(Binary::Multiply, &open);
    let up = if clamped.plain { up } else { up.with_constant(Binary::Add, 1.0) };
    glu.binary(Binary::Multiply, &up)
}
