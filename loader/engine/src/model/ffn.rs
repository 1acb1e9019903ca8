//! Dense feed-forward parts.

use shardpack_formats::{
    hex::HexF32,
    spec::{Activation, Layer},
};

use super::{
    LoadError, Projection,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{Backend, Xielu};

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
    /// Numbers of the activation, where it has some.
    xielu: Option<Xielu>,
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
        let xielu = match ffn.activation {
            Activation::Xielu => Some(xielu(loader, &format!("{prefix}.act_fn"))?),
            _ => None,
        };
        let weights = up.zip(down).map(|(up, down)| Weights { gate, up, down, xielu });
        Ok(Self { weights, down_bias })
    }

    /// This rank's summand; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        layer: &Layer,
        x: &B::Tensor,
    ) -> Option<B::Tensor> {
        let part = self.weights.as_ref().map(|weights| {
            let backend = step.backend;
            let (gate, up) = match &weights.gate {
                Some(gate) => {
                    let [gate, up] = Projection::apply_all(backend, x, [gate, &weights.up]);
                    (Some(gate), up)
                }
                None => (None, weights.up.apply(backend, x)),
            };
            let form = &step.spec.ffn;
            let scaled = |x, factor: Option<HexF32>| match factor {
                Some(factor) => backend.scale(x, factor.0),
                None => x,
            };
            let gate = gate.map(|gate| scaled(gate, form.gate_scale));
            let inner = match (gate, layer.dense_clamp, form.clamped, &weights.xielu) {
                (.., Some(numbers)) => backend.xielu(up, numbers),
                (Some(gate), _, Some(clamped), _) => backend.clamped_swiglu(gate, up, clamped),
                (Some(gate), Some(limit), ..) => backend.clamped_glu(gate, up, limit.0),
                (gate, ..) => backend.activate(form.activation, gate, up),
            };
            scaled(backend.linear(&inner, &weights.down), form.out_scale)
        });
        step.with_bias(part, self.down_bias.as_ref())
    }
}

/// The numbers of a layer's `xIELU`, as it is computed with them.
fn xielu<B: Backend>(loader: &Loader<'_, B>, module: &str) -> Result<Xielu, LoadError> {
    let number = |name: &str| loader.number(&format!("{module}.{name}"));
    let softplus = |x: f32| x.max(0.0) + libm::log1pf(libm::expf(-x.abs()));
    let beta = number("beta")?;
    Ok(Xielu {
        above: softplus(number("alpha_p")?),
        below: beta + softplus(number("alpha_n")?),
        beta,
        eps: number("eps")?,
    })
}
