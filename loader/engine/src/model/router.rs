//! The router of a mixture of experts: which experts a token goes to, and their weights.
//!
//! ```text
//! logits = x · Wr + bias                            [tokens, experts]
//! scores = softmax, sigmoid, … of the logits        [tokens, experts]
//! experts = top_k(scores + correction), or those of a table (hash routing)
//! ```
//!
//! Every rank holds the router whole and reads the same bits, so all come to the same selection
//! without an exchange. The scores are the backends' (`cpu/route.rs`, `mlx/experts.rs`).

use shardpack_formats::spec;

use super::{
    LoadError, Projection,
    load::{LayerInfo, Loader, TensorSlice},
    norm,
    step::ForwardPass,
};
use crate::backend::{Backend, RouterVectors};

/// The router of one layer.
pub(super) struct Router<B: Backend> {
    form: spec::Router,
    top_k: u32,
    projection: Projection<B>,
    /// The norm of what the router reads, if that is not what experts read.
    input: Option<RouterInput<B>>,
    selection: Selection<B>,
}

struct RouterInput<B: Backend> {
    gain: B::Vector,
    scale: f32,
}

/// How experts are selected.
enum Selection<B: Backend> {
    /// By their scores.
    TopK {
        /// Added to scores for the selection alone.
        correction: Option<B::Vector>,
        /// A factor on each expert's weight.
        scales: Option<B::Vector>,
    },
    /// Hash routing: for each token of the vocabulary the experts that it goes to,
    /// `[vocab_size, top_k]`.
    Hash(Vec<u32>),
}

impl<B: Backend> Router<B> {
    /// The router within the module `block` of a layer.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        moe: &spec::Moe,
        block: &str,
    ) -> Result<Self, LoadError> {
        let form = &moe.router;
        let experts = TensorSlice::whole(moe.choices() as usize);
        let module = format!("{block}.{}", moe.names.router);
        let vector = |name: String| loader.vector(&name, &experts);
        let matrix = loader.router_matrix(&module, &experts)?;
        let bias = form.bias.then(|| vector(format!("{module}.bias"))).transpose()?;
        let input = match &form.input {
            Some(input) => {
                let gain = loader.vector(&format!("{block}.{}", input.gain), &loader.hidden())?;
                Some(RouterInput { gain, scale: input.scale.0 })
            }
            None => None,
        };
        let scales = match &form.expert_scales {
            Some(name) => Some(vector(format!("{block}.{name}"))?),
            None => None,
        };
        let selection = if layer.form.hash_routing {
            Selection::Hash(hash_table(loader, moe, &format!("{module}.tid2eid"))?)
        } else {
            let correction = format!("{block}.{}", moe.names.correction);
            let correction = form.correction.then(|| vector(correction)).transpose()?;
            Selection::TopK { correction, scales }
        };
        let projection = Projection { matrix, bias };
        Ok(Self { form: form.clone(), top_k: moe.top_k, projection, input, selection })
    }

    /// The experts of every row of `x`.
    pub(super) fn route(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor) -> B::Routes {
        let backend = pass.backend;
        let logits = match &self.input {
            None => self.projection.apply(backend, x),
            Some(input) => {
                let normed = backend.norm(x, &norm::without_gain(pass.spec, &input.gain));
                self.projection.apply(backend, &backend.scale(normed, input.scale))
            }
        };
        let logits = match self.form.softcap {
            Some(cap) => backend.softcap(logits, cap.0),
            None => logits,
        };
        match &self.selection {
            Selection::TopK { correction, scales } => {
                let vectors =
                    RouterVectors { correction: correction.as_ref(), scales: scales.as_ref() };
                backend.route(logits, &self.form, self.top_k, vectors)
            }
            Selection::Hash(table) => {
                let top_k = self.top_k as usize;
                let of = |token: &u32| &table[*token as usize * top_k..][..top_k];
                let experts: Vec<u32> = pass.batch.tokens.iter().flat_map(of).copied().collect();
                backend.hash_route(logits, &self.form, &experts, self.top_k)
            }
        }
    }
}

/// The experts of each token of the vocabulary (`gate.tid2eid`), `[vocab_size, top_k]`.
fn hash_table<B: Backend>(
    loader: &Loader<'_, B>,
    moe: &spec::Moe,
    name: &str,
) -> Result<Vec<u32>, LoadError> {
    let [vocab, top_k] =
        [loader.spec.vocab_size, moe.top_k].map(|size| TensorSlice::whole(size as usize));
    let values = loader.float_values(name, &[&vocab, &top_k])?;
    let expert = |value: &f32| {
        let is_one = value.fract() == 0.0 && (0.0..moe.experts as f32).contains(value);
        is_one.then_some(*value as u32)
    };
    let all: Option<Vec<u32>> = values.iter().map(expert).collect();
    all.ok_or_else(|| {
        let expected = format!("experts from 0 to {}", moe.experts - 1);
        loader.wrong(name, expected, "another number".to_owned())
    })
}
