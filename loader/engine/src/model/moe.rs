//! Mixtures of experts: every token goes to the few experts that a [`Router`] selects.
//!
//! ```text
//! y = Σ_e weight[e] · down_e(act(gate_e · x) ⊙ up_e · x) + shared(x)      [tokens, hidden_size]
//! ```
//!
//! Experts are sharded inside, or each rank holds some of them whole (expert parallelism); either way
//! a rank has a partial sum of the layer's one all-reduce. With a latent, experts read and give
//! vectors of another width.

use shardpack_formats::{
    hex::HexF32,
    spec::{self, Activation, ClampedSwiglu, SharedExpert},
};

use super::{
    LoadError, Shard,
    dense_ffn::Glu,
    ffn::FfnOutput,
    load::{LayerInfo, Loader, TensorSlice},
    norm::Norm,
    router::Router,
    step::ForwardPass,
};
use crate::backend::{Backend, ExpertParams, StepError};

/// One rank's part of a mixture of experts.
pub(super) struct Moe<B: Backend> {
    router: Router<B>,
    /// Absent on a rank that holds nothing of any expert.
    experts: Option<Experts<B>>,
    /// Absent where there is none, or nothing of it here.
    shared: Option<Shared<B>>,
    /// Where experts read vectors of another width.
    latent: Option<Latent<B>>,
    /// Norm of the all-reduced result.
    post: Option<Norm<B>>,
}

/// What the router and the experts read, `[tokens, hidden_size]`.
pub(super) struct MoeInput<'a, T> {
    pub(super) router: &'a T,
    pub(super) experts: &'a T,
}

struct Experts<B: Backend> {
    /// Absent where the activation has no gate.
    gate: Option<B::Matrix>,
    up: B::Matrix,
    down: B::Matrix,
    gate_bias: Option<B::Vector>,
    up_bias: Option<B::Vector>,
    /// Held by one rank for each expert.
    down_bias: Option<B::Vector>,
    form: ExpertForm,
}

/// What experts compute.
struct ExpertForm {
    activation: Activation,
    clamped: Option<ClampedSwiglu>,
    limit: Option<f32>,
    weighs_inputs: bool,
    /// The first zero-computation expert, on the rank that adds it.
    zero_experts: Option<usize>,
}

/// An expert that every token goes to.
struct Shared<B: Backend> {
    up: SharedUp<B>,
    down: B::Matrix,
    scale: Option<HexF32>,
    /// One output: how much the shared expert counts.
    gate: Option<B::Matrix>,
}

/// From the residual stream to the inner columns of the shared expert.
enum SharedUp<B: Backend> {
    Plain { up: B::Matrix, activation: Activation },
    Gated { gate: B::Matrix, up: B::Matrix, glu: Glu },
}

/// The projections to the vectors that experts read, and back: whole on every rank, since the
/// experts' inner columns are what is sharded.
struct Latent<B: Backend> {
    down: B::Matrix,
    up: B::Matrix,
}

impl<B: Backend> Moe<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        moe: &spec::Moe,
    ) -> Result<Self, LoadError> {
        let block = layer.name(&moe.names.block);
        Ok(Self {
            router: Router::load(loader, layer, moe, &block)?,
            experts: Experts::load(loader, layer, moe, &format!("{block}.{}", moe.names.experts))?,
            shared: match &moe.shared {
                Some(shared) => Shared::load(loader, layer, moe, shared, &block)?,
                None => None,
            },
            latent: Latent::load(loader, moe, &block)?,
            post: match &moe.after {
                Some(module) => Some(Norm::load(loader, &layer.name(module), &loader.hidden())?),
                None => None,
            },
        })
    }

    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        input: &MoeInput<'_, B::Tensor>,
    ) -> Result<FfnOutput<B::Tensor>, StepError> {
        let part = self.partial(pass, input);
        Ok(match &self.post {
            Some(norm) => FfnOutput::Reduced(norm.apply(pass.backend, &pass.all_reduce(part)?)),
            None => FfnOutput::Partial(part),
        })
    }

    /// This rank's partial sum; none where it has nothing to add.
    pub(super) fn partial(
        &self,
        pass: &ForwardPass<'_, B>,
        input: &MoeInput<'_, B::Tensor>,
    ) -> Option<B::Tensor> {
        let (backend, x) = (pass.backend, input.experts);
        let routed = self.experts.as_ref().map(|experts| {
            let routes = self.router.route(pass, input.router);
            let Some(latent) = &self.latent else { return experts.apply(pass, x, &routes) };
            let within = backend.linear(x, &latent.down);
            // Linear and without bias, so a partial sum of latents gives a partial sum of results.
            backend.linear(&experts.apply(pass, &within, &routes), &latent.up)
        });
        let shared = self.shared.as_ref().map(|shared| shared.forward(backend, x));
        pass.join(routed, shared)
    }
}

/// Whether a rank that holds something of experts adds the results of zero-computation experts: the
/// one that has the first column of the first expert does.
const fn adds_zero_experts(shard: &Shard, moe: &spec::Moe) -> bool {
    moe.zero_experts > 0 && shard.experts.start == 0 && shard.moe_ffn.start == 0
}

impl<B: Backend> Latent<B> {
    fn load(
        loader: &Loader<'_, B>,
        moe: &spec::Moe,
        block: &str,
    ) -> Result<Option<Self>, LoadError> {
        let Some(width) = moe.latent else { return Ok(None) };
        let (width, hidden) = (TensorSlice::whole(width as usize), loader.hidden());
        let down = loader.matrix(&format!("{block}.fc1_latent_proj"), &width, &hidden)?;
        let up = loader.matrix(&format!("{block}.fc2_latent_proj"), &hidden, &width)?;
        Ok(down.zip(up).map(|(down, up)| Self { down, up }))
    }
}

impl<B: Backend> Experts<B> {
    fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        moe: &spec::Moe,
        module: &str,
    ) -> Result<Option<Self>, LoadError> {
        let shard = &loader.shard;
        let count = TensorSlice { held: shard.experts.clone(), full: moe.experts as usize };
        let inner = TensorSlice { held: shard.moe_ffn.clone(), full: moe.size as usize };
        let hidden = TensorSlice::whole(moe.latent.unwrap_or(loader.spec.hidden_size) as usize);
        if count.held.is_empty() || inner.held.is_empty() {
            return Ok(None);
        }
        let stack = |name: &str, outputs: &TensorSlice, inputs: &TensorSlice| {
            loader.stack(&format!("{module}.{name}"), &count, outputs, inputs)
        };
        let bias = |name: &str, outputs: &TensorSlice| {
            let name = format!("{module}.{name}.bias");
            moe.bias.then(|| loader.stacked_vector(&name, &count, outputs)).transpose()
        };
        // Each expert's output bias is added once: by its own rank, or by the first one.
        let adds_bias = count.is_sharded() || shard.is_leader;
        Ok(Some(Self {
            gate: moe
                .activation
                .is_gated()
                .then(|| stack("gate_proj", &inner, &hidden))
                .transpose()?,
            up: stack("up_proj", &inner, &hidden)?,
            down: stack("down_proj", &hidden, &inner)?,
            gate_bias: bias("gate_proj", &inner)?,
            up_bias: bias("up_proj", &inner)?,
            down_bias: if adds_bias { bias("down_proj", &hidden)? } else { None },
            form: ExpertForm {
                activation: moe.activation,
                clamped: moe.clamped,
                limit: layer.form.clamp.map(|limit| limit.0),
                weighs_inputs: moe.weighs_inputs,
                zero_experts: adds_zero_experts(shard, moe).then_some(moe.experts as usize),
            },
        }))
    }

    /// The weighted sum of each row's experts, of what is held here.
    fn apply(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor, routes: &B::Routes) -> B::Tensor {
        let params = ExpertParams {
            held: pass.shard.experts.clone(),
            size: pass.shard.moe_ffn.len(),
            gate: self.gate.as_ref(),
            up: &self.up,
            down: &self.down,
            gate_bias: self.gate_bias.as_ref(),
            up_bias: self.up_bias.as_ref(),
            down_bias: self.down_bias.as_ref(),
            activation: self.form.activation,
            clamped: self.form.clamped,
            limit: self.form.limit,
            weighs_inputs: self.form.weighs_inputs,
            zero_experts: self.form.zero_experts,
        };
        pass.backend.experts(x, routes, &params)
    }
}

impl<B: Backend> Shared<B> {
    fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        moe: &spec::Moe,
        shared: &SharedExpert,
        block: &str,
    ) -> Result<Option<Self>, LoadError> {
        let module = format!("{block}.{}", moe.names.shared);
        let inner =
            TensorSlice { held: loader.shard.shared_ffn.clone(), full: shared.size as usize };
        let hidden = loader.hidden();
        let column = |name: &str| loader.matrix(&format!("{module}.{name}"), &inner, &hidden);
        let down = loader.matrix(&format!("{module}.down_proj"), &hidden, &inner)?;
        let gate = shared.gated.then(|| {
            let name = format!("{block}.{}", moe.names.shared_gate);
            loader.plain_matrix(&name, &TensorSlice::whole(1), &hidden)
        });
        let gate = gate.transpose()?;
        let activation = moe.activation;
        let inner_gate = if activation.is_gated() { column("gate_proj")? } else { None };
        let (Some(up), Some(down)) = (column("up_proj")?, down) else { return Ok(None) };
        let limited = |limit| ClampedSwiglu { alpha: HexF32(1.0), limit, plain: true };
        let clamped = shared.limit.map(limited).or(loader.spec.ffn.clamped);
        let glu = Glu::new(activation, clamped, layer.form.dense_clamp);
        let up = match inner_gate {
            Some(gate) => SharedUp::Gated { gate, up, glu },
            None => SharedUp::Plain { up, activation },
        };
        Ok(Some(Self { up, down, scale: shared.scale, gate }))
    }

    fn forward(&self, backend: &B, x: &B::Tensor) -> B::Tensor {
        let inner = match &self.up {
            SharedUp::Plain { up, activation } => {
                backend.activate(*activation, None, backend.linear(x, up))
            }
            SharedUp::Gated { gate, up, glu } => {
                let gate = backend.linear(x, gate);
                glu.apply(backend, gate, backend.linear(x, up))
            }
        };
        let out = backend.linear(&inner, &self.down);
        let out = match self.scale {
            Some(scale) => backend.scale(out, scale.0),
            None => out,
        };
        match &self.gate {
            Some(matrix) => backend.sigmoid_gate(out, &backend.linear(x, matrix)),
            None => out,
        }
    }
}
