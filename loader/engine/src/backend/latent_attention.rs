//! Multi-head latent attention (DeepSeek-V2): one latent vector per token serves as key and value of
//! all heads.

use super::{Attention, AttentionParams, DenseOps, HeadOps, NormParams, Qkv, RotatedPart};
use shardpack_formats::spec::NormKind;

/// What latent attention reads of each row.
#[derive(Clone, Copy, Debug)]
pub struct LatentInputs<'a, T> {
    /// Queries `[rows, heads · (nope + rope)]`, not rotated yet.
    pub q: &'a T,
    /// The latent and the key's rotated part `[rows, kv_rank + rope]`, as projected.
    pub kv: &'a T,
}

/// Latent attention of one layer over the sequences of a step.
#[derive(Debug)]
pub struct LatentParams<'a, M, V, R> {
    /// Attention to the cached vectors `[kv_rank + rope]`, which are its head's width.
    pub attention: AttentionParams<'a, V>,
    /// Width of the latent.
    pub kv_rank: usize,
    /// Width of the rotated part of queries and keys.
    pub rope: usize,
    /// Width of the part that is not rotated.
    pub nope: usize,
    /// Gain of the latent's norm.
    pub gain: &'a V,
    /// Under its root.
    pub eps: f32,
    /// Factor on the latent after it.
    pub kv_scale: Option<f32>,
    /// Angles, where the layer has a rope.
    pub rotation: Option<&'a R>,
    /// Factors on each row's queries, if the model has them.
    pub query_scales: Option<&'a [f32]>,
    /// For each head `[kv_rank, nope]`.
    pub embed_q: &'a M,
    /// For each head `[value, kv_rank]`.
    pub unembed_out: &'a M,
}

impl<M, V, R> LatentParams<'_, M, V, R> {
    /// Heads held here.
    #[must_use]
    pub const fn heads(&self) -> usize {
        self.attention.q_to_kv.len()
    }

    /// Width of a query.
    #[must_use]
    pub const fn query_width(&self) -> usize {
        self.nope + self.rope
    }

    /// What must hold of the latent's norm.
    pub(crate) const fn norm(&self) -> NormParams<'_, V> {
        NormParams { kind: NormKind::Rms, eps: self.eps, gain: self.gain, bias: None }
    }
}

/// The parameters that a backend reads.
pub type LatentParamsOf<'a, B> = LatentParams<
    'a,
    <B as super::Tensors>::Matrix,
    <B as super::Tensors>::Vector,
    <B as DenseOps>::Rotation,
>;

/// Multi-head latent attention.
pub trait LatentAttention: Attention + HeadOps + DenseOps {
    /// Appends latents to the caches, one per sequence, and attends to all keys that the mask shows:
    /// `[rows, heads · value]`.
    fn latent_attention(
        &self,
        inputs: LatentInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &LatentParamsOf<'_, Self>,
    ) -> Self::Tensor {
        let q = self.absorbed_queries(inputs.q, params);
        let cached = self.latents(inputs.kv, params);
        let qkv = Qkv { q: &q, k: &cached, v: &cached };
        let out = self.attention(qkv, caches, &params.attention);
        self.unabsorbed(&out, params)
    }

    /// Queries in the latent space ("absorbed"), `[rows, heads · (kv_rank + rope)]`, so that keys and
    /// values of single heads are never computed.
    fn absorbed_queries(
        &self,
        q: &Self::Tensor,
        params: &LatentParamsOf<'_, Self>,
    ) -> Self::Tensor {
        let (width, nope, heads) = (params.query_width(), params.nope, params.heads());
        let unrotated = self.slice_heads(q, width, 0..nope);
        let rotated = rotated(self, self.slice_heads(q, width, nope..width), params);
        let unrotated = self.head_linear(&unrotated, params.embed_q, heads);
        let q = self.join_heads(&unrotated, &rotated, heads);
        match params.query_scales {
            Some(scales) => self.scale_rows(q, scales),
            None => q,
        }
    }

    /// What is cached of each row, `[rows, kv_rank + rope]`.
    fn latents(&self, kv: &Self::Tensor, params: &LatentParamsOf<'_, Self>) -> Self::Tensor {
        let (rank, width) = (params.kv_rank, params.kv_rank + params.rope);
        let latent = self.norm(&self.slice_heads(kv, width, 0..rank), &params.norm());
        let latent = match params.kv_scale {
            Some(scale) => self.scale(latent, scale),
            None => latent,
        };
        let rotated = rotated(self, self.slice_heads(kv, width, rank..width), params);
        self.join_heads(&latent, &rotated, 1)
    }

    /// What heads attended to in the latent space as their values, `[rows, heads · value]`.
    fn unabsorbed(&self, out: &Self::Tensor, params: &LatentParamsOf<'_, Self>) -> Self::Tensor {
        let (rank, width) = (params.kv_rank, params.kv_rank + params.rope);
        let out = self.slice_heads(out, width, 0..rank);
        self.head_linear(&out, params.unembed_out, params.heads())
    }
}

fn rotated<B: LatentAttention + ?Sized>(
    backend: &B,
    x: B::Tensor,
    params: &LatentParamsOf<'_, B>,
) -> B::Tensor {
    let part = RotatedPart { head_dim: params.rope, offset: 0 };
    match params.rotation {
        Some(rotation) => backend.rotate(x, rotation, part),
        None => x,
    }
}
