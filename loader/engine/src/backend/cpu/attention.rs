//! Attention over the sequences of a params.

use shardpack_formats::spec::Mask;
use shardpack_kernels::{Attention as Kernel, ChosenBlocks, attend as attend_one};

use super::{Cache, Cpu, Tensor, block_sparse::TopKBlocks};
use crate::backend::{Attention, AttentionParams, LatentAttention, Qkv};

impl Attention for Cpu {
    fn attention(
        &self,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        attend(&qkv, None, caches, params)
    }
}

impl LatentAttention for Cpu {}

/// Appends keys and values to the caches and attends: to all that the mask shows, or to the top-k
/// blocks of these.
pub(super) fn attend(
    qkv: &Qkv<'_, Tensor>,
    top_k: Option<&TopKBlocks>,
    caches: &mut [&mut Cache],
    params: &AttentionParams<'_, Vec<f32>>,
) -> Tensor {
    let Qkv { q, k, v } = qkv;
    assert_eq!(caches.len(), params.lengths.len(), "one cache per sequence");
    assert_eq!(params.lengths.iter().sum::<usize>(), q.rows(), "rows of all sequences");
    let (window, chunk) = match params.mask {
        Mask::Full | Mask::Bidirectional | Mask::BidirectionalSliding(_) => (None, None),
        Mask::Sliding(window) => (Some(window), None),
        Mask::Chunked(chunk) => (None, Some(chunk)),
    };
    let mut out = Tensor::unset(q.rows(), q.width);
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(params.lengths) {
        let of = |x: &'_ Tensor| row * x.width..(row + length) * x.width;
        let first_position =
            cache.append(params.layer, &k.values[of(k)], &v.values[of(v)], *length);
        let held = cache.heads(params.layer);
        let heads = held.heads();
        let blocks = top_k.map(|top_k| {
            let lists = row * heads.len()..(row + length) * heads.len();
            ChosenBlocks { keys: top_k.block_tokens, blocks: &top_k.indices[lists] }
        });
        let attention = Kernel {
            head_dim: params.head_dim,
            scale: params.scale,
            softcap: params.softcap,
            sinks: params.sinks.map(Vec::as_slice),
            window,
            chunk,
            chosen: blocks,
            q_to_kv: params.q_to_kv,
            order: cache.order(params.layer),
            heads: &heads,
            first_position,
        };
        if params.mask.is_bidirectional() {
            let out = &mut out.values[of(q)];
            both_ways(&q.values[of(q)], out, attention, params.mask, *length);
        } else {
            attend_one(&q.values[of(q)], &attention, &mut out.values[of(q)]);
        }
        row += length;
    }
    out
}

/// Attention in both directions of a sequence whose `length` rows are all its tokens: each row by
/// itself, as if it stood at the last position that it sees.
fn both_ways(q: &[f32], out: &mut [f32], attention: Kernel<'_>, mask: Mask, length: usize) {
    let first = attention.first_position;
    let rows = q.chunks_exact(q.len() / length).zip(out.chunks_exact_mut(q.len() / length));
    for (at, (q, out)) in (first..).zip(rows) {
        let (last, window) = match mask {
            Mask::BidirectionalSliding(side) => {
                let side = side.max(1) as usize;
                let last = (at + side - 1).min(first + length - 1);
                (last, Some((last - (at + 1).saturating_sub(side) + 1) as u32))
            }
            _ => (first + length - 1, None),
        };
        attend_one(q, &Kernel { first_position: last, window, ..attention }, out);
    }
}
