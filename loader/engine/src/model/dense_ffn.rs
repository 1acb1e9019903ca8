//! Dense feed-forward networks: `down(act(gate · x) ⊙ (up · x))`, or `down(act(up · x))` without a
//! gate.
//!
//! Shapes: `x` `[tokens, hidden_size]`, inner `[tokens, intermediate_size]`. The inner columns are
//! sharded over ranks: `gate` and `up` by their outputs, `down` by its inputs.

use shardpack_formats::{
    hex::HexF32,
    spec::{Activation, ClampedSwiglu, Ffn},
};

use super::{
    LoadError, Projection,
    load::{LayerInfo, Loader, TensorSlice},
    step::ForwardPass,
};
use crate::backend::{Backend, Xielu};

/// One rank's part of a dense feed-forward network.
pub(super) struct DenseFfn<B: Backend> {
    /// Absent on a rank without inner columns.
    weights: Option<Weights<B>>,
    down_bias: Option<B::Vector>,
    gate_scale: Option<HexF32>,
    out_scale: Option<HexF32>,
}

struct Weights<B: Backend> {
    up: Up<B>,
    down: B::Matrix,
}

/// From the residual stream to the inner columns.
enum Up<B: Backend> {
    /// `act(up)`.
    Plain { up: Projection<B>, activation: Activation },
    /// xIELU (Apertus), an activation with learned parameters.
    Xielu { up: Projection<B>, params: Xielu },
    /// `act(gate) ⊙ up`.
    Gated { gate: Projection<B>, up: Projection<B>, glu: Glu },
}

/// How a gate and a value become one.
#[derive(Clone, Copy)]
pub(super) enum Glu {
    /// By the activation.
    Activation(Activation),
    /// `min(silu(gate), limit) · clamp(up, −limit, limit)`.
    Limited(HexF32),
    /// See [`ClampedSwiglu`].
    Clamped(ClampedSwiglu),
}

impl Glu {
    /// `[tokens, inner]` of both.
    pub(super) fn apply<B: Backend>(
        self,
        backend: &B,
        gate: B::Tensor,
        up: B::Tensor,
    ) -> B::Tensor {
        match self {
            Self::Activation(activation) => backend.activate(activation, Some(gate), up),
            Self::Limited(limit) => backend.clamped_glu(gate, up, limit.0),
            Self::Clamped(clamped) => backend.clamped_swiglu(gate, up, clamped),
        }
    }

    /// What stands in place of the activation, if anything does.
    pub(super) fn new(
        activation: Activation,
        clamped: Option<ClampedSwiglu>,
        limit: Option<HexF32>,
    ) -> Self {
        match (clamped, limit) {
            (Some(clamped), _) => Self::Clamped(clamped),
            (None, Some(limit)) => Self::Limited(limit),
            (None, None) => Self::Activation(activation),
        }
    }
}

impl<B: Backend> DenseFfn<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &LayerInfo<'_>) -> Result<Self, LoadError> {
        let (ffn, prefix) = (&loader.spec.ffn, layer.name("mlp"));
        let inner = TensorSlice { held: loader.shard.ffn.clone(), full: ffn.size as usize };
        let column = |name: &str| loader.column(&format!("{prefix}.{name}"), &inner, ffn.bias);
        let [up, down] = ffn.names();
        let down_module = format!("{prefix}.{down}");
        let down_bias = loader.bias_once(&down_module, ffn.bias)?;
        let up = Up::load(loader, ffn, layer, &column, up)?;
        let down = loader.matrix(&down_module, &loader.hidden(), &inner)?;
        Ok(Self {
            weights: up.zip(down).map(|(up, down)| Weights { up, down }),
            down_bias,
            gate_scale: ffn.gate_scale,
            out_scale: ffn.out_scale,
        })
    }

    /// This rank's partial sum `[tokens, hidden_size]`; none where it has nothing to add.
    pub(super) fn forward(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor) -> Option<B::Tensor> {
        let backend = pass.backend;
        let scaled = |x, factor: Option<HexF32>| match factor {
            Some(factor) => backend.scale(x, factor.0),
            None => x,
        };
        let part = self.weights.as_ref().map(|weights| {
            let inner = match &weights.up {
                Up::Plain { up, activation } => {
                    backend.activate(*activation, None, up.apply(backend, x))
                }
                Up::Xielu { up, params } => backend.xielu(up.apply(backend, x), params),
                Up::Gated { gate, up, glu } => {
                    let [gate, up] = Projection::apply_all(backend, x, [gate, up]);
                    glu.apply(backend, scaled(gate, self.gate_scale), up)
                }
            };
            scaled(backend.linear(&inner, &weights.down), self.out_scale)
        });
        pass.with_bias(part, self.down_bias.as_ref())
    }
}

/// Loads a projection that is sharded by its outputs.
type Column<'a, B> = dyn Fn(&str) -> Result<Option<Projection<B>>, LoadError> + 'a;

impl<B: Backend> Up<B> {
    /// None on a rank without inner columns.
    fn load(
        loader: &Loader<'_, B>,
        ffn: &Ffn,
        layer: &LayerInfo<'_>,
        column: &Column<'_, B>,
        up: &str,
    ) -> Result<Option<Self>, LoadError> {
        let activation = ffn.activation;
        let gate = if activation.is_gated() { column("gate_proj")? } else { None };
        let up = column(up)?;
        if activation == Activation::Xielu {
            let params = xielu(loader, &layer.name("mlp.act_fn"))?;
            return Ok(up.map(|up| Self::Xielu { up, params }));
        }
        let glu = Glu::new(activation, ffn.clamped, layer.form.dense_clamp);
        Ok(up.map(|up| match gate {
            Some(gate) => Self::Gated { gate, up, glu },
            None => Self::Plain { up, activation },
        }))
    }
}

/// The parameters of a layer's `xIELU`, as it is computed with them.
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
