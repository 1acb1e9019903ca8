//! Mixtures of experts: every token goes to the few experts that a router chooses.
//!
//! The router is held whole by every rank, and reads the same bits on each: the choice is the
//! same everywhere without a word between ranks. Experts are cut inside, or each rank holds some
//! of them whole; either way a rank's summand is summed with those of attention's kind.

use shardpack_formats::{
    hex::HexF32,
    spec::{ClampedSwiglu, Layer, Moe as MoeSpec, SharedExpert},
};

use super::{
    LoadError, Projection, Shard,
    load::{Loader, Part},
    norm::Norm,
    step::Step,
};
use crate::backend::{Backend, ExpertStep, NormStep, RouterVectors};

/// One rank's part of a mixture of experts.
pub(super) struct Moe<B: Backend> {
    router: Projection<B>,
    /// For each token the experts that it goes to; absent where the router chooses.
    by_token: Option<Vec<u32>>,
    correction: Option<B::Vector>,
    /// Gains of the norm of what the router reads, if that is not what experts read, and a factor.
    input: Option<(B::Vector, f32)>,
    /// A factor for each expert's weight.
    scales: Option<B::Vector>,
    /// Absent on a rank that holds nothing of any expert.
    experts: Option<Experts<B>>,
    /// Absent where there is none, or nothing of it here.
    shared: Option<Shared<B>>,
    /// To the vectors that experts read, and back.
    latent: Option<[B::Matrix; 2]>,
    /// Of what comes out of the block.
    after: Option<Norm<B>>,
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
}

struct Shared<B: Backend> {
    /// Absent where the activation has no gate.
    gate: Option<B::Matrix>,
    up: B::Matrix,
    down: B::Matrix,
    /// One output: how much the shared expert counts.
    counts: Option<B::Matrix>,
}

impl<B: Backend> Moe<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        (moe, by_token): (&MoeSpec, bool),
        layer: &str,
    ) -> Result<Self, LoadError> {
        let names = &moe.names;
        let block = format!("{layer}.{}", names.block);
        let count = Part::whole(moe.choices() as usize);
        let router = format!("{block}.{}", names.router);
        let bias = |name: String| loader.vector(&name, &count);
        let matrix = loader.plain_matrix(&router, &count, &loader.hidden())?;
        Ok(Self {
            router: Projection {
                matrix,
                bias: moe.router.bias.then(|| bias(format!("{router}.bias"))).transpose()?,
            },
            by_token: by_token
                .then(|| experts_by_token(loader, moe, &format!("{router}.tid2eid")))
                .transpose()?,
            correction: (moe.router.correction && !by_token)
                .then(|| bias(format!("{block}.{}", names.correction)))
                .transpose()?,
            input: match &moe.router.input {
                Some(input) => {
                    let gain = format!("{block}.{}", input.gain);
                    Some((loader.vector(&gain, &loader.hidden())?, input.scale.0))
                }
                None => None,
            },
            scales: match &moe.router.expert_scales {
                Some(name) => Some(bias(format!("{block}.{name}"))?),
                None => None,
            },
            experts: Experts::load(loader, moe, &format!("{block}.{}", names.experts))?,
            shared: match &moe.shared {
                Some(shared) => Shared::load(loader, moe, shared, &block)?,
                None => None,
            },
            latent: latent(loader, moe, &block)?,
            after: match &moe.after {
                Some(module) => {
                    Some(Norm::load(loader, &format!("{layer}.{module}"), &loader.hidden())?)
                }
                None => None,
            },
        })
    }

    /// What all ranks' summands together become.
    pub(super) fn after(&self, step: &Step<'_, B>, sum: B::Tensor) -> B::Tensor {
        match &self.after {
            Some(norm) => norm.apply(step.backend, &step.spec.norm, &sum),
            None => sum,
        }
    }

    /// Which experts the rows go to, by what the router reads of `x`.
    fn route(&self, step: &Step<'_, B>, moe: &MoeSpec, x: &B::Tensor) -> B::Routes {
        let backend = step.backend;
        let logits = match &self.input {
            None => self.router.apply(backend, x),
            Some((gain, factor)) => {
                let norm = &step.spec.norm;
                let norm = NormStep { kind: norm.kind, eps: norm.eps.0, gain, bias: None };
                let read = backend.scale(backend.norm(x, &norm), *factor);
                self.router.apply(backend, &read)
            }
        };
        let logits = match moe.router.softcap {
            Some(cap) => backend.softcap(logits, cap.0),
            None => logits,
        };
        if let Some(table) = &self.by_token {
            let top_k = moe.top_k as usize;
            let of = |token: &u32| &table[*token as usize * top_k..][..top_k];
            let taken: Vec<u32> = step.batch.tokens.iter().flat_map(of).copied().collect();
            return backend.route_to(logits, &moe.router, &taken, moe.top_k);
        }
        let correction = self.correction.as_ref();
        let vectors = RouterVectors { correction, scales: self.scales.as_ref() };
        backend.route(logits, &moe.router, moe.top_k, vectors)
    }

    /// This rank's summand of what experts make of `x`, chosen by `read`; none where it has nothing
    /// to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        (moe, layer): (&MoeSpec, &Layer),
        [read, x]: [&B::Tensor; 2],
    ) -> Option<B::Tensor> {
        let backend = step.backend;
        let routed = self.experts.as_ref().map(|experts| {
            let routes = self.route(step, moe, read);
            let within = self.latent.as_ref().map(|[to, _]| backend.linear(x, to));
            let at = ExpertStep {
                held: step.shard.experts.clone(),
                size: step.shard.moe_ffn.len(),
                gate: experts.gate.as_ref(),
                up: &experts.up,
                down: &experts.down,
                gate_bias: experts.gate_bias.as_ref(),
                up_bias: experts.up_bias.as_ref(),
                down_bias: experts.down_bias.as_ref(),
                activation: moe.activation,
                clamped: moe.clamped,
                limit: layer.clamp.map(|limit| limit.0),
                weighs_inputs: moe.weighs_inputs,
                identities: adds_identities(step.shard, moe).then_some(moe.experts as usize),
            };
            let out = backend.experts(within.as_ref().unwrap_or(x), &routes, &at);
            // Of a part of the sum a part of the result: there is no bias.
            match &self.latent {
                Some([_, back]) => backend.linear(&out, back),
                None => out,
            }
        });
        let shared = self.shared.as_ref().map(|shared| shared.forward(step, (moe, layer), x));
        match (routed, shared) {
            (Some(routed), Some(shared)) => Some(backend.add(routed, &shared)),
            (routed, shared) => routed.or(shared),
        }
    }
}

/// Whether a rank that holds something of experts adds what those without weights give: the one that
/// has the first column of the first expert does.
const fn adds_identities(shard: &Shard, moe: &MoeSpec) -> bool {
    moe.identities > 0 && shard.experts.start == 0 && shard.moe_ffn.start == 0
}

/// The experts that each token goes to, `[vocab_size, top_k]`.
fn experts_by_token<B: Backend>(
    loader: &Loader<'_, B>,
    moe: &MoeSpec,
    name: &str,
) -> Result<Vec<u32>, LoadError> {
    let sizes = [loader.spec.vocab_size, moe.top_k].map(|size| Part::whole(size as usize));
    let numbers = loader.float_numbers(name, &[&sizes[0], &sizes[1]])?;
    let expert = |number: &f32| {
        let is_one = number.fract() == 0.0 && (0.0..moe.experts as f32).contains(number);
        is_one.then_some(*number as u32)
    };
    let all: Option<Vec<u32>> = numbers.iter().map(expert).collect();
    all.ok_or_else(|| {
        let expected = format!("experts from 0 to {}", moe.experts - 1);
        loader.wrong(name, expected, "another number".to_owned())
    })
}

/// The projections to the vectors that experts read, and back: whole on every rank, since the
/// experts' inner columns are what is cut.
fn latent<B: Backend>(
    loader: &Loader<'_, B>,
    moe: &MoeSpec,
    block: &str,
) -> Result<Option<[B::Matrix; 2]>, LoadError> {
    let Some(width) = moe.latent else { return Ok(None) };
    let (width, hidden) = (Part::whole(width as usize), loader.hidden());
    let to = loader.matrix(&format!("{block}.fc1_latent_proj"), &width, &hidden)?;
    let back = loader.matrix(&format!("{block}.fc2_latent_proj"), &hidden, &width)?;
    Ok(to.zip(back).map(|(to, back)| [to, back]))
}

impl<B: Backend> Experts<B> {
    fn load(
        loader: &Loader<'_, B>,
        moe: &MoeSpec,
        module: &str,
    ) -> Result<Option<Self>, LoadError> {
        let shard = &loader.shard;
        let count = Part { held: shard.experts.clone(), full: moe.experts as usize };
        let inner = Part { held: shard.moe_ffn.clone(), full: moe.size as usize };
        let hidden = Part::whole(moe.latent.unwrap_or(loader.spec.hidden_size) as usize);
        if count.held.is_empty() || inner.held.is_empty() {
            return Ok(None);
        }
        let stack = |name: &str, outputs: &Part, inputs: &Part| {
            loader.stack(&format!("{module}.{name}"), &count, outputs, inputs)
        };
        let bias = |name: &str, outputs: &Part| {
            let name = format!("{module}.{name}.bias");
            moe.bias.then(|| loader.stacked_vector(&name, &count, outputs)).transpose()
        };
        // Each expert's output bias is added once: by its own rank, or by the first one.
        let adds_bias = count.is_cut() || shard.is_leader;
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
        }))
    }
}

impl<B: Backend> Shared<B> {
    fn load(
        loader: &Loader<'_, B>,
        moe: &MoeSpec,
        shared: &SharedExpert,
        block: &str,
    ) -> Result<Option<Self>, LoadError> {
        let module = format!("{block}.{}", moe.names.shared);
        let inner = Part { held: loader.shard.shared_ffn.clone(), full: shared.size as usize };
        let hidden = loader.hidden();
        let column = |name: &str| loader.matrix(&format!("{module}.{name}"), &inner, &hidden);
        let down = loader.matrix(&format!("{module}.down_proj"), &hidden, &inner)?;
        let counts = shared.gated.then(|| {
            let name = format!("{block}.{}", moe.names.shared_gate);
            loader.plain_matrix(&name, &Part::whole(1), &hidden)
        });
        let counts = counts.transpose()?;
        let gate = if moe.activation.is_gated() { column("gate_proj")? } else { None };
        let (Some(up), Some(down)) = (column("up_proj")?, down) else { return Ok(None) };
        Ok(Some(Self { gate, up, down, counts }))
    }

    fn forward(
        &self,
        step: &Step<'_, B>,
        (moe, layer): (&MoeSpec, &Layer),
        x: &B::Tensor,
    ) -> B::Tensor {
        let backend = step.backend;
        let gate = self.gate.as_ref().map(|gate| backend.linear(x, gate));
        let up = backend.linear(x, &self.up);
        let limit = moe.shared.as_ref().and_then(|shared| shared.limit);
        let limited = |limit| ClampedSwiglu { alpha: HexF32(1.0), limit, plain: true };
        let clamped = limit.map(limited).or(step.spec.ffn.clamped);
        let inner = match (gate, layer.dense_clamp, clamped) {
            (Some(gate), _, Some(clamped)) => backend.clamped_swiglu(gate, up, clamped),
            (Some(gate), Some(limit), _) => backend.clamped_glu(gate, up, limit.0),
            (gate, ..) => backend.activate(moe.activation, gate, up),
        };
        let out = backend.linear(&inner, &self.down);
        let scale = moe.shared.as_ref().and_then(|shared| shared.scale);
        let out = match scale {
            Some(scale) => backend.scale(out, scale.0),
            None => out,
        };
        match &self.counts {
            Some(matrix) => backend.sigmoid_gate(out, &backend.linear(x, matrix)),
            None => out,
        }
    }
}
