//! Dense feed-forward parts.

use super::{
    LoadError, Projection,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::Backend;

/// One rank's part of a dense feed-forward part.
pub(super) struct Ffn<B: Backend> {
    /// Absent on a rank without inner columns.
    weights: Option<Weights<B>>,
    down_bias: Option<B::Vector>,
}

struct Weights<B: Backend> {
    /// Absent where the activation has no gate.
    gate: Option<Projection<B>>,
    up: Projection<B>,
    down: B::Matrix,
}

impl<B: Backend> Ffn<B> {
    pub(super) fn load(loader: &Loader<'_, B>, prefix: &str) -> Result<Self, LoadError> {
        let ffn = &loader.spec.ffn;
        let inner = Part { held: loader.shard.ffn.clone(), full: ffn.size as usize };
        let column = |name: &str| loader.column(&format!("{prefix}.{name}"), &inner, ffn.bias);
        let [up, down] = ffn.names();
        let down_module = format!("{prefix}.{down}");
        let down_bias = loader.bias_once(&down_module, ffn.bias)?;
        let gate = if ffn.activation.is_gated() { column("gate_proj")? } else { None };
        let up = column(up)?;
        let down = loader.matrix(&down_module, &loader.hidden(), &inner)?;
        let weights = up.zip(down).map(|(up, down)| Weights { gate, up, down });
        Ok(Self { weights, down_bias })
    }

    /// This rank's summand; none where it has nothing to add.
    pub(super) fn forward(&self, step: &Step<'_, B>, x: &B::Tensor) -> Option<B::Tensor> {
        let part = self.weights.as_ref().map(|weights| {
            let backend = step.backend;
            let (gate, up) = match &weights.gate {
                Some(gate) => {
                    let [gate, up] = Projection::apply_all(backend, x, [gate, &weights.up]);
                    (Some(gate), up)
                }
                None => (None, weights.up.apply(backend, x)),
            };
            let inner = backend.activate(step.spec.ffn.activation, gate, up);
            backend.linear(&inner, &weights.down)
        });
        step.with_bias(part, self.down_bias.as_ref())
    }
}
