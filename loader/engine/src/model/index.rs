//! What chooses the keys that a latent's queries attend to. Every rank with heads has all of it and
//! comes to the same choice, so nothing is exchanged.

use shardpack_formats::spec::{Index as IndexSpec, Mla, NormKind};

use super::{
    LoadError,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{Backend, IndexInputs, IndexStep, NormStep};

/// The index of one layer.
pub(super) struct Index<B: Backend> {
    /// Short queries, from the queries' latent.
    q: B::Matrix,
    /// The key, from the hidden vector, its gain and bias.
    k: B::Matrix,
    k_norm: [B::Vector; 2],
    /// How much each short query counts, from the hidden vector.
    weights: B::Matrix,
}

impl<B: Backend> Index<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        (mla, index): (&Mla, &IndexSpec),
        prefix: &str,
    ) -> Result<Self, LoadError> {
        let whole = |size: u32| Part::whole(size as usize);
        let [heads, width] = [index.heads, index.width].map(|size| size as usize);
        let name = |name: &str| format!("{prefix}.indexer.{name}");
        let matrix = |module: &str, outputs: &Part, inputs: &Part| {
            let matrix = loader.matrix(&name(module), outputs, inputs)?;
            Ok::<_, LoadError>(matrix.expect("sizes are checked, and nothing of it is cut"))
        };
        let latent = whole(mla.q_rank.unwrap_or(0));
        let hidden = loader.hidden();
        Ok(Self {
            q: matrix("wq_b", &Part::whole(heads * width), &latent)?,
            k: matrix("wk", &whole(index.width), &hidden)?,
            k_norm: [
                loader.vector(&name("k_norm.weight"), &whole(index.width))?,
                loader.vector(&name("k_norm.bias"), &whole(index.width))?,
            ],
            weights: loader.plain_matrix(&name("weights_proj"), &whole(index.heads), &hidden)?,
        })
    }

    /// The keys that each row attends to in a layer, by its latent and its hidden vector.
    pub(super) fn choose(
        &self,
        step: &Step<'_, B>,
        (layer, mla, index): (usize, &Mla, &IndexSpec),
        [latent, x]: [&B::Tensor; 2],
        caches: &mut [&mut B::Cache],
    ) -> B::Chosen {
        let backend = step.backend;
        let [width, turned] = [index.width, mla.rope].map(|size| size as usize);
        let [gain, bias] = &self.k_norm;
        let norm = NormStep { kind: NormKind::Layer, eps: index.eps.0, gain, bias: Some(bias) };
        let k = backend.norm(&backend.linear(x, &self.k), &norm);
        let q = backend.linear(latent, &self.q);
        let [q, k] = match step.index_rotation(layer) {
            Some(rotation) => {
                let first = if index.rotated_last { width - turned } else { 0 };
                [q, k].map(|x| backend.rotate(x, rotation, (width, first)))
            }
            None => [q, k],
        };
        let weights = backend.linear(x, &self.weights);
        let at = IndexStep {
            layer: step.indexed(layer),
            lengths: &step.batch.lengths,
            heads: index.heads as usize,
            width,
            top_k: index.top_k as usize,
        };
        backend.choose_keys(IndexInputs { q: &q, k: &k, weights: &weights }, caches, &at)
    }
}
