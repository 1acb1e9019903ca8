//! Attention to the tokens of a window one by one and to far ones in entries.
//!
//! Every rank with heads computes the one vector of each token, the entries and what chooses them,
//! whole and to the same bits; groups of heads are cut.

use shardpack_formats::spec::{
    Compressed as CompressedSpec, Entries, Index as IndexSpec, Mask, NormKind,
};

use super::{
    LoadError,
    load::{Loader, Part},
    step::Step,
};
use crate::backend::{
    AttentionStep, Backend, EntryPart, IndexInputs, IndexStep, NormStep, PoolStep, Qkv,
};

/// One rank's part of such attention.
pub(super) struct Compressed<B: Backend> {
    /// Absent on a rank without heads.
    weights: Option<Weights<B>>,
    /// Every head reads the one cached vector.
    q_to_kv: Vec<usize>,
}

struct Weights<B: Backend> {
    /// The queries' latent and its gain.
    q_latent: (B::Matrix, B::Vector),
    /// Heads, from the latent.
    q: B::Matrix,
    /// Gains of a head's norm, which has none.
    ones: B::Vector,
    /// Key and value of all heads, and its gain.
    kv: (B::Matrix, B::Vector),
    /// One score more for each head held here.
    sinks: B::Vector,
    /// Absent in a layer that attends to its window alone.
    entries: Option<Pool<B>>,
    /// Absent where all entries are attended to.
    index: Option<Index<B>>,
    /// For each group held here `[group_rank, heads of a group · head_dim]`.
    groups: B::Matrix,
    o: B::Matrix,
}

/// What entries, or keys that choose them, are made by.
struct Pool<B: Backend> {
    c: B::Matrix,
    z: B::Matrix,
    /// `[every, columns]`.
    bias: B::Vector,
    gain: B::Vector,
}

/// What chooses entries.
struct Index<B: Backend> {
    keys: Pool<B>,
    /// Short queries, from the queries' latent.
    q: B::Matrix,
    /// How much each short query counts, from the hidden vector.
    weights: B::Matrix,
}

impl<B: Backend> Compressed<B> {
    pub(super) fn load(
        loader: &Loader<'_, B>,
        (layer, spec): (usize, &CompressedSpec),
        prefix: &str,
    ) -> Result<Self, LoadError> {
        let attention = &loader.spec.attention;
        let (held, full) = (&loader.shard.heads.q, attention.heads as usize);
        let q_to_kv = vec![0; held.len()];
        let name = |name: &str| format!("{prefix}.{name}");
        let whole = |size: u32| Part::whole(size as usize);
        let (hidden, head) = (loader.hidden(), whole(attention.head_dim));
        let latent = whole(spec.q_rank);
        let normed = |module: &str, norm: &str, width: &Part| {
            let gain = loader.vector(&name(&format!("{norm}.weight")), width)?;
            Ok::<_, LoadError>((loader.held_matrix(&name(module), width, &hidden)?, gain))
        };
        // What every rank has whole, one without heads too.
        let q_latent = normed("q_a_proj", "q_a_norm", &latent)?;
        let kv = normed("kv_proj", "kv_norm", &head)?;
        let entries = Pool::of_layer(loader, (layer, prefix))?;
        let index = Index::of_layer(loader, (layer, prefix), spec)?;
        if held.is_empty() {
            return Ok(Self { weights: None, q_to_kv });
        }
        let heads = Part::heads(held, attention.heads, attention.head_dim);
        let each = full / spec.groups as usize;
        let groups = held.start / each..held.end / each;
        let given = Part::heads(&groups, spec.groups, spec.group_rank);
        let groups = Part { held: groups, full: spec.groups as usize };
        let within = Part::whole(each * head.full);
        let weights = Weights {
            q_latent,
            q: loader.held_matrix(&name("q_b_proj"), &heads, &latent)?,
            ones: loader.backend.ones(head.full),
            kv,
            sinks: loader.vector(&name("sinks"), &Part { held: held.clone(), full })?,
            entries,
            index,
            groups: loader.stack(&name("o_a_proj"), &groups, &whole(spec.group_rank), &within)?,
            o: loader.held_matrix(&name("o_b_proj"), &hidden, &given)?,
        };
        Ok(Self { weights: Some(weights), q_to_kv })
    }

    /// This rank's summand; none where it has nothing to add.
    pub(super) fn forward(
        &self,
        step: &Step<'_, B>,
        (index, spec): (usize, &CompressedSpec),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Option<B::Tensor> {
        let weights = self.weights.as_ref()?;
        let at = AttentionStep {
            layer: step.cached(index),
            lengths: &step.batch.lengths,
            q_to_kv: &self.q_to_kv,
            head_dim: step.spec.attention.head_dim as usize,
            scale: step.spec.attention.scale.0,
            softcap: None,
            sinks: Some(&weights.sinks),
            mask: step.spec.layers[index].mask,
        };
        Some(weights.forward(step, (index, spec), x, caches, &at))
    }
}

impl<B: Backend> Pool<B> {
    /// What a layer's entries are made by, if it has some.
    fn of_layer(
        loader: &Loader<'_, B>,
        (layer, prefix): (usize, &str),
    ) -> Result<Option<Self>, LoadError> {
        let width = loader.spec.attention.head_dim;
        let Some(entries) = loader.spec.layers[layer].entries else { return Ok(None) };
        Self::load(loader, &format!("{prefix}.compressor"), (entries, width)).map(Some)
    }

    fn load(
        loader: &Loader<'_, B>,
        module: &str,
        (entries, width): (Entries, u32),
    ) -> Result<Self, LoadError> {
        let whole = |size: u32| Part::whole(size as usize);
        let columns = whole(width * if entries.chosen { 2 } else { 1 });
        let matrix = |name: &str| {
            loader.held_matrix(&format!("{module}.{name}"), &columns, &loader.hidden())
        };
        let bias = format!("{module}.position_bias");
        Ok(Self {
            c: matrix("kv_proj")?,
            z: matrix("gate_proj")?,
            bias: loader.stacked_vector(&bias, &whole(entries.every), &columns)?,
            gain: loader.vector(&format!("{module}.kv_norm.weight"), &whole(width))?,
        })
    }

    /// The entries that are complete with this step, normalised and rotated.
    fn entries(
        &self,
        step: &Step<'_, B>,
        (layer, spec): (usize, &CompressedSpec),
        (part, width): (EntryPart, usize),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> B::Tensor {
        let backend = step.backend;
        let [c, z] = backend.linears(x, [&self.c, &self.z]);
        let at = PoolStep {
            layer: step.entries(layer),
            part,
            lengths: &step.batch.lengths,
            drafts: &step.batch.drafts,
            bias: &self.bias,
        };
        let pooled = backend.pool([&c, &z], caches, &at);
        let Some(rotation) = step.entry_rotation(&step.spec.layers[layer]) else {
            // No row is the last one of an entry.
            return pooled;
        };
        let (entries, rotation) = (normed(step, spec, &pooled, &self.gain), Some(rotation));
        rotated(step, entries, rotation, (width, spec.rope as usize))
    }
}

fn normed<B: Backend>(
    step: &Step<'_, B>,
    spec: &CompressedSpec,
    x: &B::Tensor,
    gain: &B::Vector,
) -> B::Tensor {
    let norm = NormStep { kind: NormKind::Rms, eps: spec.eps.0, gain, bias: None };
    step.backend.norm(x, &norm)
}

/// The last part of every head rotated.
fn rotated<B: Backend>(
    step: &Step<'_, B>,
    x: B::Tensor,
    rotation: Option<&B::Rotation>,
    (width, turned): (usize, usize),
) -> B::Tensor {
    match rotation {
        Some(rotation) => step.backend.rotate(x, rotation, (width, width - turned)),
        None => x,
    }
}

impl<B: Backend> Weights<B> {
    fn forward(
        &self,
        step: &Step<'_, B>,
        (layer, spec): (usize, &CompressedSpec),
        x: &B::Tensor,
        caches: &mut [&mut B::Cache],
        at: &AttentionStep<'_, B::Vector>,
    ) -> B::Tensor {
        let backend = step.backend;
        let form = &step.spec.layers[layer];
        let (width, turned) = (at.head_dim, spec.rope as usize);
        let heads = at.q_to_kv.len();
        let (down, gain) = &self.q_latent;
        let latent = normed(step, spec, &backend.linear(x, down), gain);
        let q = normed(step, spec, &backend.linear(&latent, &self.q), &self.ones);
        let q = rotated(step, q, step.rotation(form), (width, turned));
        let (matrix, gain) = &self.kv;
        let kv = normed(step, spec, &backend.linear(x, matrix), gain);
        let kv = rotated(step, kv, step.rotation(form), (width, turned));
        let qkv = Qkv { q: &q, k: &kv, v: &kv };
        let out = match &self.entries {
            None => backend.attention(qkv, caches, at),
            Some(pool) => {
                let part = (EntryPart::Entries, width);
                let entries = pool.entries(step, (layer, spec), part, x, caches);
                let chosen = self.index.as_ref().zip(spec.index.as_ref()).map(|(index, form)| {
                    index.choose(step, (layer, spec, form), [&latent, x], caches)
                });
                let window = match at.mask {
                    Mask::Sliding(window) => window as usize,
                    _ => unreachable!("checked when a model is loaded"),
                };
                let beside = (step.entries(layer), &entries, chosen.as_ref());
                backend.attention_beside(beside, qkv, caches, (at, window))
            }
        };
        // Values are rotated as keys are, so results are rotated back at their own positions.
        let out = rotated(step, out, step.back_rotation(form), (width, turned));
        let groups = heads * spec.groups as usize / step.spec.attention.heads as usize;
        backend.linear(&backend.head_linear(&out, &self.groups, groups), &self.o)
    }
}

impl<B: Backend> Index<B> {
    /// What chooses a layer's entries, if anything does.
    fn of_layer(
        loader: &Loader<'_, B>,
        (layer, prefix): (usize, &str),
        spec: &CompressedSpec,
    ) -> Result<Option<Self>, LoadError> {
        let entries = loader.spec.layers[layer].entries.filter(|entries| entries.chosen);
        let (Some(entries), Some(index)) = (entries, &spec.index) else { return Ok(None) };
        let whole = |size: u32| Part::whole(size as usize);
        let module = format!("{prefix}.compressor.indexer");
        let queries = whole(index.heads * index.width);
        let weights = format!("{module}.scorer.weights_proj");
        Ok(Some(Self {
            keys: Pool::load(loader, &module, (entries, index.width))?,
            q: loader.held_matrix(&format!("{module}.q_b_proj"), &queries, &whole(spec.q_rank))?,
            weights: loader.plain_matrix(&weights, &whole(index.heads), &loader.hidden())?,
        }))
    }

    /// The entries that each row attends to, by its latent and its hidden vector.
    fn choose(
        &self,
        step: &Step<'_, B>,
        (layer, spec, index): (usize, &CompressedSpec, &IndexSpec),
        [latent, x]: [&B::Tensor; 2],
        caches: &mut [&mut B::Cache],
    ) -> B::Chosen {
        let backend = step.backend;
        let [width, heads] = [index.width, index.heads].map(|size| size as usize);
        let part = (EntryPart::Keys, width);
        let k = self.keys.entries(step, (layer, spec), part, x, caches);
        let rotation = step.rotation(&step.spec.layers[layer]);
        let q = backend.linear(latent, &self.q);
        let q = rotated(step, q, rotation, (width, spec.rope as usize));
        let weights = backend.linear(x, &self.weights);
        let at = IndexStep {
            layer: step.entries(layer),
            lengths: &step.batch.lengths,
            heads,
            width,
            top_k: index.top_k as usize,
        };
        backend.choose_entries(IndexInputs { q: &q, k: &k, weights: &weights }, caches, &at)
    }
}
