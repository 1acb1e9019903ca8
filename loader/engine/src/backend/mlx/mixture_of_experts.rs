//! Mixtures of experts within the graph: nothing is read before the step's end.
//!
//! A prompt's rows are brought into the order of their experts, so that each expert's weights are
//! read once, by a matrix kernel; a decode step reads what each row needs.

use shardpack_formats::spec::{ExpertGroups, GroupScore, Renormalise, Router, Scores};
use shardpack_mlx::{Array, Binary, Element, Library, Reduce, Unary};

use super::{
    Matrix, Mlx, Tensor, Vector,
    fused::{FusedFunction, key},
};
use crate::backend::{ExpertParams, MixtureOfExperts, RouterVectors};

impl MixtureOfExperts for Mlx {
    type Routes = Routes;

    fn route(
        &self,
        logits: Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Vector>,
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
        params: &ExpertParams<'_, Matrix, Vector>,
    ) -> Tensor {
        experts(x, routes, params)
    }
}

/// The experts of each row `[rows, top_k]`, in any order, and their weights `[rows, top_k]` in f32.
#[derive(Debug)]
pub struct Routes {
    experts: Array,
    weights: Array,
    /// Experts among which the router decides.
    choices: usize,
}

/// Chooses experts by logits `[rows, experts]`. Equal scores are decided as MLX sorts them.
fn route(
    logits: &Tensor,
    router: &Router,
    top_k: usize,
    RouterVectors { correction, scales }: RouterVectors<'_, Vector>,
) -> Routes {
    let choices = logits.width;
    let logits = logits.exact();
    if router.scores == Scores::SparseMixer {
        return sparse_mixer(&logits, router, top_k);
    }
    let Scored { scores, choice } = scored(&logits, router, correction.map(|it| &**it));
    let choice = match &router.groups {
        Some(groups) => within_groups(&choice, groups),
        None => choice,
    };
    let experts = largest(&choice, top_k);
    let mut weights = weigh(&scores, &experts, router);
    if let Some(scales) = scales {
        weights = weights.binary(Binary::Multiply, &scales.take(&experts, 0));
    }
    Routes { experts, weights, choices }
}

/// Hash routing: weighs the experts of a table, `top_k` for each row.
fn hash_route(logits: &Tensor, router: &Router, taken: &[u32], top_k: usize) -> Routes {
    let experts = logits.array.library().indices(taken, &[logits.rows, top_k]);
    let Scored { scores, .. } = scored(&logits.exact(), router, None);
    let weights = weigh(&scores, &experts, router);
    Routes { experts, weights, choices: logits.width }
}

/// Each expert's score, and the value by which it is chosen.
struct Scored {
    scores: Array,
    choice: Array,
}

fn scored(logits: &Array, router: &Router, correction: Option<&Array>) -> Scored {
    let scores = match router.scores {
        Scores::Softmax => logits.softmax(-1),
        Scores::SoftmaxOfTopK | Scores::SigmoidOfTopK | Scores::SparseMixer => logits.clone(),
        Scores::Sigmoid | Scores::SqrtSoftplus => {
            return scored_at_once(logits, router.scores, correction);
        }
    };
    let choice = match correction {
        Some(correction) => scores.binary(Binary::Add, correction),
        None => scores.clone(),
    };
    Scored { scores, choice }
}

/// Scores that depend on their own logit alone.
fn scored_at_once(logits: &Array, scores: Scores, correction: Option<&Array>) -> Scored {
    let of = |x: &Array| match scores {
        Scores::Sigmoid => x.unary(Unary::Sigmoid),
        _ => x.with_constant(Binary::LogAddExp, 0.0).unary(Unary::Sqrt),
    };
    let library = logits.library();
    let Some(correction) = correction else {
        let key = key("scores", [scores as u32, 0]);
        let made = library.fused(key, 1, &[logits], &|x| vec![of(&x[0])]);
        return Scored { scores: made[0].clone(), choice: made[0].clone() };
    };
    let made = library.fused(key("scores", [scores as u32, 1]), 2, &[logits, correction], &|x| {
        let scores = of(&x[0]);
        let choice = scores.binary(Binary::Add, &x[1]);
        vec![scores, choice]
    });
    Scored { scores: made[0].clone(), choice: made[1].clone() }
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
    let scale = router.scale.0;
    let Some(Renormalise { added, least }) = &router.renormalise else {
        let is_one = scale == 1.0;
        return if is_one { weights } else { weights.with_constant(Binary::Multiply, scale) };
    };
    let sum = weights.reduce(Reduce::Sum, 1);
    let parameters = [added.0.to_bits(), least.0.to_bits(), scale.to_bits()];
    let library = weights.library();
    let made = library.fused(key("renormalise", parameters), 1, &[&weights, &sum], &|x| {
        let sum = x[1].with_constant(Binary::Add, added.0);
        let part = x[0].binary(Binary::Divide, &sum.with_constant(Binary::Maximum, least.0));
        vec![part.with_constant(Binary::Multiply, scale)]
    });
    made[0].clone()
}

/// [`Scores::SparseMixer`]: one expert after the other.
fn sparse_mixer(logits: &Array, router: &Router, top_k: usize) -> Routes {
    let jitter = router.jitter.map_or(0.0, |jitter| jitter.0);
    let (library, choices) = (logits.library(), logits.shape()[1]);
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
    Routes { experts, weights: weights.with_constant(Binary::Multiply, router.scale.0), choices }
}

/// The `count` largest of each row, best first.
fn best(x: &Array, count: usize) -> Array {
    x.unary(Unary::Negative).argsort(-1).slice(1, 0, count)
}

/// The `count` largest of the last axis of `x`, in any order.
fn largest(x: &Array, count: usize) -> Array {
    let (last, len) = (x.shape().len() - 1, *x.shape().last().expect("an axis"));
    if count >= len {
        return x.argsort(-1);
    }
    x.argpartition(len - count, -1).slice(last, len - count, len)
}

/// Scores, with those outside the best groups out of reach.
fn within_groups(choice: &Array, groups: &ExpertGroups) -> Array {
    let [rows, experts] = choice.shape()[..] else { unreachable!("scores have two axes") };
    let (count, kept) = (groups.count as usize, groups.kept as usize);
    if kept >= count {
        return choice.clone();
    }
    let each = experts / count;
    let grouped = choice.reshape(&[rows, count, each]);
    let values = match groups.by {
        GroupScore::BestTwo if each > 2 => {
            grouped.partition(each - 1, -1).slice(2, each - 2, each).reduce(Reduce::Sum, 2)
        }
        GroupScore::BestTwo => grouped.reduce(Reduce::Sum, 2),
        GroupScore::Best => grouped.reduce(Reduce::Max, 2),
    };
    // [rows, count - kept, 1]: the groups that are left out.
    let left_out = values.argpartition(count - kept, 1).slice(1, 0, count - kept);
    let nothing = choice.library().full(f32::NEG_INFINITY, choice.element(), &[]);
    grouped.put_along(&left_out, &nothing, 1).reshape(&[rows, experts])
}

/// Rows times experts from which on rows are sorted by their experts, as mlx-lm does it.
const SORTED_FROM: usize = 64;

/// The rows of a step, as experts read them.
struct Dispatched {
    /// `[rows, 1, 1, width]`, or `[rows · top_k, 1, width]` in the order of their experts.
    x: Array,
    /// The expert of each product, counted among those held here: `[rows, top_k]` or
    /// `[rows · top_k]`.
    experts: Array,
    /// Where the products of the first rows are, `[rows · top_k]`; none where nothing was moved.
    places: Option<Array>,
}

impl Dispatched {
    fn new(x: Array, experts: Array, top_k: usize) -> Self {
        let [rows, width] = [x.shape()[0], x.shape()[3]];
        let products = rows * top_k;
        if rows == 1 || products < SORTED_FROM {
            return Self { x, experts, places: None };
        }
        let flat = experts.reshape(&[products]);
        let order = flat.argsort(-1);
        let places = Some(order.argsort(-1));
        let x = if x.shape()[1] == 1 {
            let rows_of = order.with_constant(Binary::FloorDivide, top_k as f32);
            x.reshape(&[rows, 1, width]).take(&rows_of, 0)
        } else {
            x.reshape(&[products, 1, width]).take(&order, 0)
        };
        Self { x, experts: flat.take(&order, 0), places }
    }

    /// `y` of the products in the order of rows, `[rows, top_k, width]`.
    fn collected(&self, y: &Array, rows: usize, top_k: usize) -> Array {
        let width = *y.shape().last().expect("an axis");
        match &self.places {
            None => y.reshape(&[rows, top_k, width]),
            Some(places) => {
                let y = y.reshape(&[rows * top_k, width]).take(places, 0);
                y.reshape(&[rows, top_k, width])
            }
        }
    }

    /// The products with a stack of `count` experts, and their bias `[count · width]`.
    fn product(&self, x: &Array, matrix: &Matrix, bias: Option<&Vector>, count: usize) -> Array {
        let y = matrix.gathered(x, &self.experts, count, self.places.is_some());
        let Some(bias) = bias else { return y };
        let each = bias.beside(&y).reshape(&[count, matrix.outputs() / count]);
        y.binary(Binary::Add, &each.take(&self.experts, 0).reshape(&y.shape()))
    }
}

/// `Σ weight · expert(x)` over each row's experts that are held here, and over zero-computation
/// experts.
fn experts(x: &Tensor, routes: &Routes, params: &ExpertParams<'_, Matrix, Vector>) -> Tensor {
    let (count, top_k) = (params.held.len(), routes.experts.shape()[1]);
    let Local { experts: local, weights } = held_here(routes, params, count);
    let element = x.array.element();
    let mut input = x.array.reshape(&[x.rows, 1, 1, x.width]);
    let mut weights = weights.cast(element).reshape(&[x.rows, 1, top_k]);
    if params.weighs_inputs {
        let factors = weights.reshape(&[x.rows, top_k, 1, 1]);
        input = input.binary(Binary::Multiply, &factors);
        // Experts of other ranks still count nothing.
        weights = weights.with_constant(Binary::Greater, 0.0).cast(element);
    }
    let rows = Dispatched::new(input, local, top_k);
    let up = rows.product(&rows.x, params.up, params.up_bias, count);
    let gate = params.gate.map(|gate| rows.product(&rows.x, gate, params.gate_bias, count));
    let inner = match (gate, params.clamped, params.limit) {
        (None, ..) => FusedFunction::Activation(params.activation).apply([&up]),
        (Some(gate), Some(clamped), _) => FusedFunction::ClampedGlu(clamped).apply([&gate, &up]),
        (Some(gate), None, Some(limit)) => FusedFunction::LimitedGlu(limit).apply([&gate, &up]),
        (Some(gate), None, None) => FusedFunction::Glu(params.activation).apply([&gate, &up]),
    };
    let out = rows.product(&inner, params.down, params.down_bias, count);
    let out = rows.collected(&out, x.rows, top_k);
    let hidden = params.down.outputs() / count;
    // A product, not a sum of products: summed in f32 and rounded once.
    let mut array = weights.matmul(&out).reshape(&[x.rows, hidden]);
    if let Some(first) = params.zero_experts {
        array = array.binary(Binary::Add, &zero_experts(x, routes, first));
    }
    Tensor { rows: x.rows, width: hidden, array }
}

/// Each row's own vector by the weights of its experts from `first` on, all at once.
fn zero_experts(x: &Tensor, routes: &Routes, first: usize) -> Array {
    let gives = routes.experts.with_constant(Binary::GreaterEqual, first as f32);
    let nothing = routes.weights.library().full(0.0, Element::F32, &[]);
    let weight = gives.choose(&routes.weights, &nothing).reduce(Reduce::Sum, 1);
    let weight = weight.cast(x.array.element()).reshape(&[x.rows, 1]);
    x.array.binary(Binary::Multiply, &weight)
}

/// Routes with experts counted among those of this rank.
struct Local {
    experts: Array,
    weights: Array,
}

/// The routes on this rank; experts of other ranks have no weight.
fn held_here(routes: &Routes, params: &ExpertParams<'_, Matrix, Vector>, count: usize) -> Local {
    let Routes { experts, weights, choices } = routes;
    if params.held == (0..*choices) {
        return Local { experts: experts.clone(), weights: weights.clone() };
    }
    let (start, end) = (params.held.start as f32, params.held.end as f32);
    let library: Library = experts.library();
    let key = key("held here", [params.held.start as u32, count as u32]);
    let made = library.fused(key, 2, &[experts, weights], &|x| {
        let above = x[0].with_constant(Binary::GreaterEqual, start);
        let here = above.binary(Binary::And, &x[0].with_constant(Binary::Less, end));
        let [none, nothing] = [Element::U32, Element::F32].map(|it| library.full(0.0, it, &[]));
        let local = x[0].with_constant(Binary::Subtract, start);
        vec![here.choose(&local, &none), here.choose(&x[1], &nothing)]
    });
    Local { experts: made[0].clone(), weights: made[1].clone() }
}
