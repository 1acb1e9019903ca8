//! The compressor of compressed KV attention (DeepSeek V4), and the indexer among its entries.
//!
//! ```text
//! c = x · Wc, z = x · Wz                              [tokens, columns]
//! entry = Σ_t softmax_t(z[t] + position_bias[t]) ⊙ c[t]    over the entry's tokens, [width]
//! ```
//!
//! An entry covers `ratio` consecutive tokens; with an indexer also as many before them, for which the
//! first half of the columns counts. It is normalised and rotated at the position of its first token.

use shardpack_formats::spec::{self, NormKind};

use super::{
    LoadError,
    load::{LayerInfo, Loader, TensorSlice},
    step::{EntryKind, ForwardPass},
};
use crate::backend::{
    Backend, CompressedKvPart, CompressorInputs, CompressorParams, IndexerInputs, IndexerParams,
    NormParams, RotatedPart,
};

/// What makes the entries of one layer, or their index keys.
pub(super) struct Compressor<B: Backend> {
    c: B::Matrix,
    z: B::Matrix,
    /// `[ratio, columns]`.
    position_bias: B::Vector,
    gain: B::Vector,
    eps: f32,
    /// The last part of an entry is rotated.
    rotated: RotatedPart,
    kind: Option<EntryKind>,
    /// The layer in the caches.
    entry_slot: usize,
}

/// What selects the entries that each row attends to.
pub(super) struct EntryIndexer<B: Backend> {
    form: spec::Indexer,
    rope: Option<u32>,
    /// Makes the entries' index keys.
    keys: Compressor<B>,
    /// Index queries, from the queries' latent.
    q: B::Matrix,
    /// The weight of each index query, from the hidden vector.
    weights: B::Matrix,
}

impl<B: Backend> Compressor<B> {
    /// The compressor of this module to entries of this width.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::CompressedAttention,
        module: &str,
        entries: spec::CompressedKv,
        width: u32,
    ) -> Result<Self, LoadError> {
        let whole = |size: u32| TensorSlice::whole(size as usize);
        let columns = whole(width * if entries.sparse { 2 } else { 1 });
        let matrix = |name: &str| {
            loader.held_matrix(&format!("{module}.{name}"), &columns, &loader.hidden())
        };
        let bias = format!("{module}.position_bias");
        Ok(Self {
            c: matrix("kv_proj")?,
            z: matrix("gate_proj")?,
            position_bias: loader.stacked_vector(
                &bias,
                &whole(entries.compression_ratio),
                &columns,
            )?,
            gain: loader.vector(&format!("{module}.kv_norm.weight"), &whole(width))?,
            eps: form.eps.0,
            rotated: RotatedPart { head_dim: width as usize, offset: (width - form.rope) as usize },
            kind: EntryKind::of(layer.form),
            entry_slot: layer.slots.entries,
        })
    }

    /// The entries that are complete with this step, `[entries, width]`.
    pub(super) fn compress(
        &self,
        pass: &ForwardPass<'_, B>,
        part: CompressedKvPart,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::Tensor {
        let backend = pass.backend;
        let [c, z] = backend.linears(x, [&self.c, &self.z]);
        let params = CompressorParams {
            layer: self.entry_slot,
            part,
            lengths: &pass.batch.lengths,
            drafts: &pass.batch.drafts,
            bias: &self.position_bias,
        };
        let inputs = CompressorInputs { values: &c, gates: &z };
        let entries = backend.compress(inputs, caches, &params);
        let Some(rotation) = self.kind.and_then(|kind| pass.entry_rotation(kind)) else {
            // No row completes an entry.
            return entries;
        };
        let norm = NormParams { kind: NormKind::Rms, eps: self.eps, gain: &self.gain, bias: None };
        backend.rotate(backend.norm(&entries, &norm), rotation, self.rotated)
    }
}

impl<B: Backend> EntryIndexer<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::CompressedAttention,
        entries: spec::CompressedKv,
        index: &spec::Indexer,
    ) -> Result<Self, LoadError> {
        let whole = |size: u32| TensorSlice::whole(size as usize);
        let module = layer.name("self_attn.compressor.indexer");
        let queries = whole(index.heads * index.width);
        let weights = format!("{module}.scorer.weights_proj");
        Ok(Self {
            keys: Compressor::load(loader, layer, form, &module, entries, index.width)?,
            q: loader.held_matrix(&format!("{module}.q_b_proj"), &queries, &whole(form.q_rank))?,
            weights: loader.plain_matrix(&weights, &whole(index.heads), &loader.hidden())?,
            rope: layer.form.rope,
            form: index.clone(),
        })
    }

    /// The entries that each row attends to, by its latent and its hidden vector.
    pub(super) fn top_k_entries(
        &self,
        pass: &ForwardPass<'_, B>,
        latent: &B::Tensor,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::TopK {
        let backend = pass.backend;
        let k = self.keys.compress(pass, CompressedKvPart::Keys, x, caches);
        let q = backend.linear(latent, &self.q);
        let q = match pass.rotation(self.rope) {
            Some(rotation) => backend.rotate(q, rotation, self.keys.rotated),
            None => q,
        };
        let weights = backend.linear(x, &self.weights);
        let params = IndexerParams {
            layer: self.keys.entry_slot,
            lengths: &pass.batch.lengths,
            heads: self.form.heads as usize,
            width: self.form.width as usize,
            top_k: self.form.top_k as usize,
        };
        backend.top_k_entries(IndexerInputs { q: &q, k: &k, weights: &weights }, caches, &params)
    }
}
