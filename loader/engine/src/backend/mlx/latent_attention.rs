//! Multi-head latent attention within the graph.
//!
//! A row by itself attends in the latent space, so that the cache is read once for all heads. Rows of
//! a prompt attend with the keys and values of each head, which are computed of the latents: heads
//! of their width have a kernel, and scores in the latent space would cost four times as much.

use shardpack_formats::spec::Mask;
use shardpack_mlx::{Array, Binary};

use super::{
    Cache, Matrix, Mlx, Rotation, Tensor, Vector,
    cache::HeldTogether,
    calls::{Call, covering},
    joined, some_rows,
    sparse_indexer::seen,
};
use crate::backend::{
    Attention as _, DenseOps as _, LatentAttention, LatentInputs, LatentParams, Qkv,
};

type Params<'a> = LatentParams<'a, Matrix, Vector, Rotation>;

/// Most scores of rotated parts that are held at once; rows beyond follow one after the other.
const MAX_SCORES: usize = 64 << 20;

impl LatentAttention for Mlx {
    fn latent_attention(
        &self,
        inputs: LatentInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &Params<'_>,
    ) -> Tensor {
        if params.attention.mask != Mask::Full || params.attention.sinks.is_some() {
            let q = self.absorbed_queries(inputs.q, params);
            let cached = self.latents(inputs.kv, params);
            let qkv = Qkv { q: &q, k: &cached, v: &cached };
            let out = self.attention(qkv, caches, &params.attention);
            return self.unabsorbed(&out, params);
        }
        attend(self, inputs, caches, params)
    }
}

/// Queries of rows: `[rows, heads, nope]` and, rotated, `[rows, heads, rope]`.
struct Queries {
    unrotated: Array,
    rotated: Array,
}

fn attend(
    backend: &Mlx,
    LatentInputs { q, kv }: LatentInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &Params<'_>,
) -> Tensor {
    let heads = params.heads();
    let cached = latents(backend, kv, params);
    let queries = queries(backend, q, params);
    let (layer, lengths) = (params.attention.layer, params.attention.lengths);
    let (width, value) = (params.kv_rank + params.rope, params.unembed_out.outputs() / heads);
    let calls = Call::all(caches, layer, lengths);
    let output = |call: &Call| {
        let rows = call.rows.len();
        let queries =
            Queries { unrotated: call.of(&queries.unrotated), rotated: call.of(&queries.rotated) };
        let out = if let [one] = call.sequences[..] {
            let new = call.of(&cached).reshape(&[1, 1, rows, width]);
            let all = caches[one].append(layer, &[new.clone(), new]).all.keys;
            if rows == 1 {
                absorbed(&queries, &all, None, params)
            } else {
                unabsorbed(&queries, &all, params)
            }
        } else {
            let new = call.of(&cached).reshape(&[rows, 1, 1, width]);
            let HeldTogether { all, firsts } =
                Cache::append_together(caches, &call.sequences, layer, &[new.clone(), new]);
            let seen: Vec<_> = firsts.iter().map(|first| 0..first + 1).collect();
            let all = all.keys.slice(2, 0, covering(&seen).end);
            let visible = backend.call_masks.get(backend.library, &seen);
            absorbed(&queries, &all, visible.as_ref(), params)
        };
        out.reshape(&[rows, heads * value])
    };
    let outputs: Vec<Array> = calls.iter().map(output).collect();
    let array = Call::in_order(&calls, &outputs).cast(q.array.element());
    Tensor::new(q.rows, array.shape()[1], array)
}

/// What is cached of each row, `[rows, kv_rank + rope]`.
fn latents(backend: &Mlx, kv: &Tensor, params: &Params<'_>) -> Array {
    let (rank, width) = (params.kv_rank, params.kv_rank + params.rope);
    let latent = Tensor::new(kv.rows, rank, kv.array.slice(1, 0, rank));
    let latent = backend.norm(&latent, &params.norm());
    let latent = match params.kv_scale {
        Some(scale) => backend.scale(latent, scale),
        None => latent,
    };
    let rotated = kv.array.slice(1, rank, width);
    let rotated = match params.rotation {
        Some(rotation) => {
            let heads = rotated.reshape(&[kv.rows, 1, params.rope]);
            rotation.apply(&heads, 0).reshape(&[kv.rows, params.rope])
        }
        None => rotated,
    };
    kv.array.library().concat(&[&latent.array, &rotated], 1)
}

fn queries(backend: &Mlx, q: &Tensor, params: &Params<'_>) -> Queries {
    let (nope, width) = (params.nope, params.query_width());
    let q = match params.query_scales {
        Some(scales) => backend.scale_rows(q.clone(), scales),
        None => q.clone(),
    };
    let heads = q.runs(width);
    let rotated = heads.slice(2, nope, width);
    let rotated = match params.rotation {
        Some(rotation) => rotation.apply(&rotated, 0),
        None => rotated,
    };
    Queries { unrotated: heads.slice(2, 0, nope), rotated }
}

/// One row of each sequence in the latent space, over what is cached
/// `[sequences, 1, keys, kv_rank + rope]`: `[sequences, heads · value]`.
fn absorbed(queries: &Queries, all: &Array, visible: Option<&Array>, params: &Params<'_>) -> Array {
    let (heads, rank) = (params.heads(), params.kv_rank);
    let (library, sequences) = (all.library(), all.shape()[0]);
    // Rows of the heads' matrices, so that these are read once for all sequences.
    let by_head = |x: &Array, width: usize| match sequences {
        1 => x.reshape(&[1, heads, 1, width]),
        _ => x.reshape(&[1, sequences, heads, width]).transpose(&[0, 2, 1, 3]),
    };
    let by_sequence = |x: &Array, width: usize| match sequences {
        1 => x.clone(),
        _ => x.transpose(&[2, 1, 0, 3]).reshape(&[sequences, heads, 1, width]),
    };
    let q = params.embed_q.per_head(&by_head(&queries.unrotated, params.nope), heads);
    let rotated = queries.rotated.reshape(&[sequences, heads, 1, params.rope]);
    let q = library.concat(&[&by_sequence(&q, rank), &rotated], 3);
    let latents = all.slice(3, 0, rank);
    let out = q.attention(all, &latents, params.attention.scale, visible, None);
    let out = params.unembed_out.per_head(&by_head(&out, rank), heads);
    let value = out.shape()[3];
    by_sequence(&out, value).reshape(&[sequences, heads * value])
}

/// Several rows with the keys and values of each head: `[rows, heads, value]`.
fn unabsorbed(queries: &Queries, all: &Array, params: &Params<'_>) -> Array {
    let (heads, rank) = (params.heads(), params.kv_rank);
    let [rows, total] = [queries.unrotated.shape()[0], all.shape()[2]];
    let library = all.library();
    let element = queries.unrotated.element();
    let latents = all.slice(3, 0, rank).cast(element);
    let keys = params.embed_q.per_head_transposed(&latents, heads);
    let values = params.unembed_out.per_head(&latents, heads);
    let rotated_keys =
        all.slice(3, rank, rank + params.rope).cast(element).transpose(&[0, 1, 3, 2]);
    let by_head = |x: &Array, width: usize| {
        let shape = x.shape();
        x.reshape(&[1, shape[0], heads, width]).transpose(&[0, 2, 1, 3])
    };
    let first = total - rows;
    let at_once = (MAX_SCORES / (heads * total)).max(1);
    let hidden = library.full(f32::NEG_INFINITY, element, &[]);
    let mut outputs = Vec::new();
    for from in (0..rows).step_by(at_once) {
        let some = from..rows.min(from + at_once);
        let count = some.len();
        let q = by_head(&some_rows(&queries.unrotated, some.clone()), params.nope);
        let rotated = by_head(&some_rows(&queries.rotated, some), params.rope);
        // Scores of the rotated parts are added to those of the others, as a mask is.
        let scores =
            rotated.with_constant(Binary::Multiply, params.attention.scale).matmul(&rotated_keys);
        let visible = seen(library, first + from, count, total);
        let scores = visible.choose(&scores, &hidden);
        let out = q.attention(&keys, &values, params.attention.scale, Some(&scores), None);
        let width = values.shape()[3];
        outputs.push(out.transpose(&[0, 2, 1, 3]).reshape(&[count, heads, width]));
    }
    joined(&outputs)
}
