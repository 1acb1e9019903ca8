//! Attention to a window and to compressed KV entries (DeepSeek V4: CSA with an indexer, HCA without).
//!
//! ```text
//! latent = norm(x · Wq_a)                          [tokens, q_rank]
//! q = rope(norm(latent · Wq_b))                    [tokens, heads, head_dim]
//! kv = rope(norm(x · Wkv))                         [tokens, head_dim], key and value of all heads
//! entries = rope(norm(compress(x)))                [entries, head_dim], see `compressor`
//! out = softmax(scale · q · [entries, kv]ᵀ) · [entries, kv]    [tokens, heads, head_dim]
//! y = groups(rope⁻¹(out) · Wo_a) · Wo_b            [tokens, hidden_size]
//! ```
//!
//! A head attends to the tokens of its window one by one and to distant ones through entries: to
//! those that the indexer selects, or to all that a row sees. Every rank with heads computes `kv`, the
//! entries and their indexer whole and to the same bits; groups of heads are sharded.

use shardpack_formats::spec::{self, Mask, NormKind};

use super::{
    LoadError,
    compressor::{Compressor, EntryIndexer},
    load::{LayerInfo, Loader, TensorSlice},
    step::ForwardPass,
};
use crate::backend::{
    AttentionParams, Backend, CompressedEntries, CompressedKvPart, NormParams, Qkv, RotatedPart,
};

/// One rank's part of such attention.
pub(super) struct CompressedAttention<B: Backend> {
    form: spec::CompressedAttention,
    layer: CompressedLayer,
    /// Absent on a rank without heads.
    weights: Option<Weights<B>>,
}

/// What differs from layer to layer.
#[derive(Clone)]
struct CompressedLayer {
    /// Width of a head.
    head_dim: usize,
    /// Factor on `q · k`.
    scale: f32,
    /// Heads of the model.
    heads: u32,
    /// Every head reads the one cached vector.
    q_to_kv: Vec<usize>,
    mask: Mask,
    rope: Option<u32>,
    /// The layer in the caches.
    kv_slot: usize,
}

struct Weights<B: Backend> {
    /// The queries' latent.
    q_latent: NormedMatrix<B>,
    /// Heads, from the latent.
    q: B::Matrix,
    /// Gains of a head's norm, which has none.
    ones: B::Vector,
    /// Key and value of all heads.
    kv: NormedMatrix<B>,
    /// One score more for each head held here.
    sinks: B::Vector,
    distant: DistantTokens<B>,
    /// For each group held here `[group_rank, heads of a group · head_dim]`.
    groups: B::Matrix,
    o: B::Matrix,
}

/// A projection and the gain of its norm.
struct NormedMatrix<B: Backend> {
    matrix: B::Matrix,
    gain: B::Vector,
}

/// How a layer attends to tokens outside its window.
enum DistantTokens<B: Backend> {
    /// Not at all.
    Ignored,
    /// Through entries.
    Compressed {
        compressor: Compressor<B>,
        /// Absent where all entries are attended to (HCA).
        indexer: Option<EntryIndexer<B>>,
        window: usize,
        /// The layer in the caches.
        entry_slot: usize,
    },
}

impl<B: Backend> CompressedAttention<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::CompressedAttention,
    ) -> Result<Self, LoadError> {
        let attention = &loader.spec.attention;
        Ok(Self {
            weights: Weights::load(loader, layer, form)?,
            form: form.clone(),
            layer: CompressedLayer {
                head_dim: attention.head_dim as usize,
                scale: attention.scale.0,
                heads: attention.heads,
                q_to_kv: vec![0; loader.shard.heads.q.len()],
                mask: layer.form.mask,
                rope: layer.form.rope,
                kv_slot: layer.slots.kv,
            },
        })
    }

    /// This rank's partial sum `[tokens, hidden_size]`; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Option<B::Tensor> {
        let weights = self.weights.as_ref()?;
        let (backend, layer) = (pass.backend, &self.layer);
        let rotation = pass.rotation(layer.rope);
        let latent = backend.linear(x, &weights.q_latent.matrix);
        let latent = self.normed(pass, &latent, &weights.q_latent.gain);
        let q = self.normed(pass, &backend.linear(&latent, &weights.q), &weights.ones);
        let q = self.rotated(pass, q, rotation);
        let kv = self.normed(pass, &backend.linear(x, &weights.kv.matrix), &weights.kv.gain);
        let kv = self.rotated(pass, kv, rotation);
        let qkv = Qkv { q: &q, k: &kv, v: &kv };
        let params = AttentionParams {
            layer: layer.kv_slot,
            lengths: &pass.batch.lengths,
            q_to_kv: &layer.q_to_kv,
            head_dim: layer.head_dim,
            scale: layer.scale,
            softcap: None,
            sinks: Some(&weights.sinks),
            mask: layer.mask,
        };
        let out = match &weights.distant {
            DistantTokens::Ignored => backend.attention(qkv, caches, &params),
            DistantTokens::Compressed { compressor, indexer, window, entry_slot } => {
                let new = compressor.compress(pass, CompressedKvPart::Entries, x, caches);
                let top_k = indexer.as_ref().map(|it| it.top_k_entries(pass, &latent, x, caches));
                let entries = CompressedEntries {
                    layer: *entry_slot,
                    new: &new,
                    top_k: top_k.as_ref(),
                    window: *window,
                };
                backend.compressed_attention(entries, qkv, caches, &params)
            }
        };
        // Values are rotated as keys are, so results are rotated back at their own positions.
        let out = self.rotated(pass, out, pass.back_rotation(layer.rope));
        let groups = layer.q_to_kv.len() * self.form.groups as usize / layer.heads as usize;
        let grouped = backend.head_linear(&out, &weights.groups, groups);
        Some(backend.linear(&grouped, &weights.o))
    }

    fn normed(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor, gain: &B::Vector) -> B::Tensor {
        let params = NormParams { kind: NormKind::Rms, eps: self.form.eps.0, gain, bias: None };
        pass.backend.norm(x, &params)
    }

    /// The last part of every head rotated.
    fn rotated(
        &self,
        pass: &ForwardPass<'_, B>,
        x: B::Tensor,
        rotation: Option<&B::Rotation>,
    ) -> B::Tensor {
        let head_dim = self.layer.head_dim;
        let part = RotatedPart { head_dim, offset: head_dim - self.form.rope as usize };
        match rotation {
            Some(rotation) => pass.backend.rotate(x, rotation, part),
            None => x,
        }
    }
}

impl<B: Backend> DistantTokens<B> {
    fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::CompressedAttention,
    ) -> Result<Self, LoadError> {
        // Invariant: every layer has a window (`shard::compressed::check`).
        let (Some(entries), Mask::Sliding(window)) = (layer.form.compressed_kv, layer.form.mask)
        else {
            return Ok(Self::Ignored);
        };
        let module = layer.name("self_attn.compressor");
        let head_dim = loader.spec.attention.head_dim;
        Ok(Self::Compressed {
            compressor: Compressor::load(loader, layer, form, &module, entries, head_dim)?,
            indexer: match form.indexer.as_ref().filter(|_| entries.sparse) {
                Some(index) => Some(EntryIndexer::load(loader, layer, form, entries, index)?),
                None => None,
            },
            window: window as usize,
            entry_slot: layer.slots.entries,
        })
    }
}

impl<B: Backend> Weights<B> {
    /// None on a rank without heads.
    fn load(
        loader: &Loader<'_, B>,
        layer: &LayerInfo<'_>,
        form: &spec::CompressedAttention,
    ) -> Result<Option<Self>, LoadError> {
        let attention = &loader.spec.attention;
        let held = &loader.shard.heads.q;
        let name = |name: &str| layer.name(&format!("self_attn.{name}"));
        let whole = |size: u32| TensorSlice::whole(size as usize);
        let (hidden, head) = (loader.hidden(), whole(attention.head_dim));
        let latent = whole(form.q_rank);
        let normed = |module: &str, norm: &str, width: &TensorSlice| {
            let gain = loader.vector(&name(&format!("{norm}.weight")), width)?;
            let matrix = loader.held_matrix(&name(module), width, &hidden)?;
            Ok::<_, LoadError>(NormedMatrix { matrix, gain })
        };
        // Every rank holds these whole, one without heads too.
        let q_latent = normed("q_a_proj", "q_a_norm", &latent)?;
        let kv = normed("kv_proj", "kv_norm", &head)?;
        let distant = DistantTokens::load(loader, layer, form)?;
        if held.is_empty() {
            return Ok(None);
        }
        let heads = TensorSlice::heads(held, attention.heads, attention.head_dim);
        let each = (attention.heads / form.groups) as usize;
        let groups = held.start / each..held.end / each;
        let given = TensorSlice::heads(&groups, form.groups, form.group_rank);
        let groups = TensorSlice { held: groups, full: form.groups as usize };
        let within = TensorSlice::whole(each * head.full);
        let per_head = TensorSlice::heads(held, attention.heads, 1);
        Ok(Some(Self {
            q_latent,
            q: loader.held_matrix(&name("q_b_proj"), &heads, &latent)?,
            ones: loader.backend.ones(head.full),
            kv,
            sinks: loader.vector(&name("sinks"), &per_head)?,
            distant,
            groups: loader.stack(&name("o_a_proj"), &groups, &whole(form.group_rank), &within)?,
            o: loader.held_matrix(&name("o_b_proj"), &hidden, &given)?,
        }))
    }
}
