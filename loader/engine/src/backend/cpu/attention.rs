//! Attention over the sequences of a step.

use shardpack_formats::spec::Mask;
use shardpack_kernels::{Attention, ChosenBlocks, attend as attend_one};

use super::{Cache, Tensor, index::Choice};
use crate::backend::{AttentionStep, Qkv};

/// Appends keys and values to the caches and attends: to all that the mask shows, or to chosen
/// blocks of these.
pub(super) fn attend(
    qkv: &Qkv<'_, Tensor>,
    chosen: Option<(usize, &[Choice])>,
    caches: &mut [&mut Cache],
    step: &AttentionStep<'_, Vec<f32>>,
) -> Tensor {
    let Qkv { q, k, v } = qkv;
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    assert_eq!(step.lengths.iter().sum::<usize>(), q.rows(), "rows of all sequences");
    let (window, chunk) = match step.mask {
        Mask::Full => (None, None),
        Mask::Sliding(window) => (Some(window), None),
        Mask::Chunked(chunk) => (None, Some(chunk)),
    };
    let mut out = Tensor::unset(q.rows(), q.width);
    let mut row = 0;
    for (cache, length) in caches.iter_mut().zip(step.lengths) {
        let of = |x: &'_ Tensor| row * x.width..(row + length) * x.width;
        let first_position = cache.append(step.layer, &k.values[of(k)], &v.values[of(v)], *length);
        let held = cache.heads(step.layer);
        let heads = held.heads();
        let blocks = chosen.map(|(keys, blocks)| {
            let lists = row * heads.len()..(row + length) * heads.len();
            ChosenBlocks { keys, blocks: &blocks[lists] }
        });
        let attention = Attention {
            head_dim: step.head_dim,
            scale: step.scale,
            softcap: step.softcap,
            sinks: step.sinks.map(Vec::as_slice),
            window,
            chunk,
            chosen: blocks,
            q_to_kv: step.q_to_kv,
            order: cache.order(step.layer),
            heads: &heads,
            first_position,
        };
        attend_one(&q.values[of(q)], &attention, &mut out.values[of(q)]);
        row += length;
    }
    out
}
