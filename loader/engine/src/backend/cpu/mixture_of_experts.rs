//! Experts: rows are gathered by expert, so that each expert's weights are read once and only for
//! the rows that go to it.
//!
//! Every row's terms are added in the order of the experts, so its bits do not depend on which
//! other rows there are.

use shardpack_formats::spec::{Activation, ClampedSwiglu, Router};
use shardpack_kernels::{elementwise, matmul};

use super::{Cpu, InputObserver, Routes, Tensor, route};
use crate::backend::{ExpertParams, MixtureOfExperts, RouterVectors, StoredMatrix};

impl MixtureOfExperts for Cpu {
    type Routes = Routes;

    fn route(
        &self,
        logits: Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Vec<f32>>,
    ) -> Routes {
        route::route(&logits.values, logits.width, router, top_k as usize, vectors)
    }

    fn hash_route(&self, logits: Tensor, router: &Router, experts: &[u32], top_k: u32) -> Routes {
        route::hash_route(&logits.values, logits.width, router, experts, top_k as usize)
    }

    fn experts(
        &self,
        x: &Tensor,
        routes: &Routes,
        params: &ExpertParams<'_, StoredMatrix, Vec<f32>>,
    ) -> Tensor {
        experts(x, routes, params, self.observer.as_deref())
    }
}

/// A row that goes to an expert.
struct RoutedRow {
    row: usize,
    weight: f32,
}

/// `Σ weight · expert(x)` over each row's experts that are held here, and over zero-computation
/// experts.
fn experts(
    x: &Tensor,
    routes: &Routes,
    params: &ExpertParams<'_, StoredMatrix, Vec<f32>>,
    observer: Option<&dyn InputObserver>,
) -> Tensor {
    let count = params.held.len();
    let mut routed: Vec<Vec<RoutedRow>> = (0..count).map(|_| Vec::new()).collect();
    for (index, (expert, weight)) in routes.experts.iter().zip(&routes.weights).enumerate() {
        let expert = *expert as usize;
        if params.held.contains(&expert) {
            let routed_row = RoutedRow { row: index / routes.top_k, weight: *weight };
            routed[expert - params.held.start].push(routed_row);
        }
    }
    let hidden = params.down.outputs / count;
    let mut out = Tensor::zeros(x.rows(), hidden);
    for (expert, routed) in routed.iter().enumerate().filter(|(_, routed)| !routed.is_empty()) {
        let part = one_expert(x, routed, expert, params, observer);
        for (routed_row, part) in routed.iter().zip(part.chunks_exact(hidden)) {
            let out = &mut out.values[routed_row.row * hidden..][..hidden];
            let factor = if params.weighs_inputs { 1.0 } else { routed_row.weight };
            for (out, part) in out.iter_mut().zip(part) {
                *out += factor * part;
            }
        }
    }
    if let Some(first) = params.zero_experts {
        add_zero_experts(&mut out, x, routes, first);
    }
    out
}

/// Adds to each row its own vector by the weights of its experts from `first` on, all at once.
fn add_zero_experts(out: &mut Tensor, x: &Tensor, routes: &Routes, first: usize) {
    let width = x.width;
    let chosen = routes.experts.chunks_exact(routes.top_k);
    for (row, (experts, weights)) in
        chosen.zip(routes.weights.chunks_exact(routes.top_k)).enumerate()
    {
        let each = experts.iter().zip(weights);
        let weight: f32 =
            each.filter(|(expert, _)| **expert as usize >= first).map(|(_, weight)| weight).sum();
        let own = row * width..(row + 1) * width;
        for (out, x) in out.values[own.clone()].iter_mut().zip(&x.values[own]) {
            *out += weight * x;
        }
    }
}

fn one_expert(
    x: &Tensor,
    routed: &[RoutedRow],
    expert: usize,
    params: &ExpertParams<'_, StoredMatrix, Vec<f32>>,
    observer: Option<&dyn InputObserver>,
) -> Vec<f32> {
    let count = params.held.len();
    let rows = routed.iter().flat_map(|routed_row| {
        let factor = if params.weighs_inputs { routed_row.weight } else { 1.0 };
        x.values[routed_row.row * x.width..][..x.width].iter().map(move |value| value * factor)
    });
    let gathered: Vec<f32> = rows.collect();
    let project = |x: &[f32], matrix: &StoredMatrix, bias: Option<&Vec<f32>>| {
        if let Some(observer) = observer {
            observer.observe(matrix, expert, count, x);
        }
        let outputs = matrix.outputs / count;
        let mut out = vec![0.0; routed.len() * outputs];
        matmul(x, &matrix.rows(expert * outputs..(expert + 1) * outputs), &mut out);
        if let Some(bias) = bias {
            elementwise::add_bias(&mut out, &bias[expert * outputs..][..outputs]);
        }
        out
    };
    let mut up = project(&gathered, params.up, params.up_bias);
    let Some(gate) = params.gate else {
        match params.activation {
            Activation::ReluSquared => elementwise::relu_squared(&mut up),
            Activation::GeluTanh => elementwise::gelu_tanh(&mut up),
            Activation::Gelu => elementwise::gelu(&mut up),
            _ => elementwise::silu(&mut up),
        }
        return project(&up, params.down, params.down_bias);
    };
    let mut gate = project(&gathered, gate, params.gate_bias);
    match (params.clamped, params.limit, params.activation) {
        (Some(clamped), ..) => clamped_swiglu(&mut gate, &up, clamped),
        (None, Some(limit), _) => limited_swiglu(&mut gate, &up, limit),
        (None, None, Activation::GeluTanhGlu) => elementwise::gelu_tanh_glu(&mut gate, &up),
        (None, None, Activation::GeluGlu) => elementwise::gelu_glu(&mut gate, &up),
        (None, None, _) => elementwise::silu_glu(&mut gate, &up),
    }
    project(&gate, params.down, params.down_bias)
}

/// `gate = min(silu(gate), limit) · clamp(up, −limit, limit)`.
pub(super) fn limited_swiglu(gate: &mut [f32], up: &[f32], limit: f32) {
    elementwise::silu(gate);
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = gate.min(limit) * up.clamp(-limit, limit);
    }
}

pub(super) fn clamped_swiglu(gate: &mut [f32], up: &[f32], clamped: ClampedSwiglu) {
    let (alpha, limit) = (clamped.alpha.0, clamped.limit.0);
    let added = if clamped.plain { 0.0 } else { 1.0 };
    for (gate, up) in gate.iter_mut().zip(up) {
        let capped = gate.min(limit);
        *gate = (up.clamp(-limit, limit) + added) * capped * super::route::sigmoid(alpha * capped);
    }
}
