//! Mixtures of experts: every token goes to the few experts that a router chooses.
//!
//! The router is held whole by every rank, and reads the same bits on each: the choice is the
//! same everywhere without a word between ranks. Experts are cut inside, or each rank holds some
//! of them whole; either way a rank's summand is summed with those of attention's kind.

use shardpack_formats::spec::{Moe as MoeSpec, SharedExpert};

use super::{
    LoadError, Projection,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{Backend, ExpertStep};

/// One rank's part of a mixture of experts.
pub(super) struct Moe<B: Backend> {
    router: Projection<B>,
    correction: Option<B::Vector>,
    /// Absent on a rank that holds nothing of any expert.
    experts: Option<Experts<B>>,
    /// Absent where there is none, or nothing of it here.
    shared: Option<Shared<B>>,
}

struct Experts<B: Backend> {
    gate: B::Matrix,
    up: B::Matrix,
    down: B::Matrix,
    gate_bias: Option<B::Vector>,
    up_bias: Option<B::Vector>,
    /// Held by one rank for each expert.
    down_bias: Option<B::Vector>,
}

struct Shared<B: Backend> {
    gate: B::Matrix,
    up: B::Matrix,
    down: B::Matrix,
    /// One output: how much the shared expert counts.
    counts: Option<B::Matrix>,
}

impl<B: Backend> Moe<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        moe: &MoeSpec,
        layer: &str,
    ) -> Result<Self, LoadError> {
        let names = &moe.names;
        let block = format!("{layer}.{}", names.block);
        let count = Part::whole(moe.experts as usize);
        let router = format!("{block}.{}", names.router);
        let bias = |name: String| loader.vector(&name, &count);
        let matrix = loader.plain_matrix(&router, &count, &loader.hidden())?;
        Ok(Self {
            router: Projection {
                matrix,
                bias: moe.router.bias.then(|| bias(format!("{router}.bias"))).transpose()?,
            },
            correction: moe
                .router
                .correction
                .then(|| bias(format!("{block}.{}", names.correction)))
                .transpose()?,
            experts: Experts::load(loader, moe, &format!("{block}.{}", names.experts))?,
            shared: match &moe.shared {
                Some(shared) => Shared::load(loader, moe, shared, &block)?,
                None => None,
            },
        })
    }

    /// This rank's summand; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        moe: &MoeSpec,
        x: &B::Tensor,
    ) -> Option<B::Tensor> {
        let backend = step.backend;
        let routed = self.experts.as_ref().map(|experts| {
            let logits = self.router.apply(backend, x);
            let routes = backend.route(logits, &moe.router, moe.top_k, self.correction.as_ref());
            let at = ExpertStep {
                held: step.shard.experts.clone(),
                size: step.shard.moe_ffn.len(),
                gate: &experts.gate,
                up: &experts.up,
                down: &experts.down,
                gate_bias: experts.gate_bias.as_ref(),
                up_bias: experts.up_bias.as_ref(),
                down_bias: experts.down_bias.as_ref(),
                activation: moe.activation,
                clamped: moe.clamped,
            };
            backend.experts(x, &routes, &at)
        });
        let shared = self.shared.as_ref().map(|shared| shared.forward(step, moe, x));
        match (routed, shared) {
            (Some(routed), Some(shared)) => Some(backend.add(routed, &shared)),
            (routed, shared) => routed.or(shared),
        }
    }
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
        let hidden = loader.hidden();
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
            gate: stack("gate_proj", &inner, &hidden)?,
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
        let (Some(gate), Some(up), Some(down)) = (column("gate_proj")?, column("up_proj")?, down)
        else {
            return Ok(None);
        };
        Ok(Some(Self { gate, up, down, counts }))
    }

    fn forward(&self, step: &Step<'_, B>, moe: &MoeSpec, x: &B::Tensor) -> B::Tensor {
        let backend = step.backend;
        let gate = backend.linear(x, &self.gate);
        let up = backend.linear(x, &self.up);
        let inner = backend.activate(moe.activation, Some(gate), up);
        let out = backend.linear(&inner, &self.down);
        match &self.counts {
            Some(matrix) => backend.sigmoid_gate(out, &backend.linear(x, matrix)),
            None => out,
        }
    }
}
