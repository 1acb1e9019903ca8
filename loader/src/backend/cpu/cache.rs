//! Keys and values of one sequence, in the blocks in which attention reads them.

use shardpack_kernels::{KvHead, attention::KEYS_PER_BLOCK};

use crate::backend::CacheShape;

/// Keys and values of one sequence; grows by blocks.
#[derive(Clone, Debug)]
pub struct Cache {
    shape: CacheShape,
    /// `[layer][kv_head]`, one after the other.
    heads: Vec<Head>,
}

#[derive(Clone, Debug, Default)]
struct Head {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Cache {
    pub(super) fn new(shape: &CacheShape) -> Self {
        Self { shape: *shape, heads: vec![Head::default(); shape.layers * shape.kv_heads] }
    }

    /// Appends `rows` keys and values `[rows, kv_heads, head_dim]` to a layer and returns the
    /// position of the first.
    pub(super) fn append(&mut self, layer: usize, k: &[f32], v: &[f32], rows: usize) -> usize {
        let CacheShape { kv_heads, head_dim, .. } = self.shape;
        assert_eq!(k.len(), rows * kv_heads * head_dim, "keys of {rows} rows");
        assert_eq!(v.len(), k.len(), "values of {rows} rows");
        let heads = &mut self.heads[layer * kv_heads..(layer + 1) * kv_heads];
        let first = heads.first().map_or(0, |head| stored(&head.keys) / head_dim);
        for (index, head) in heads.iter_mut().enumerate() {
            let rows_of = |x: &'_ [f32], row: usize| (row * kv_heads + index) * head_dim..x.len();
            for row in 0..rows {
                push(&mut head.keys, &k[rows_of(k, row)][..head_dim]);
                push(&mut head.values, &v[rows_of(v, row)][..head_dim]);
            }
        }
        first
    }

    /// The heads of a layer.
    pub(super) fn heads(&self, layer: usize) -> Vec<KvHead<'_>> {
        self.heads[layer * self.shape.kv_heads..(layer + 1) * self.shape.kv_heads]
            .iter()
            .map(|head| KvHead { keys: &head.keys, values: &head.values })
            .collect()
    }
}

fn stored(blocks: &[Vec<f32>]) -> usize {
    blocks.iter().map(Vec::len).sum()
}

fn push(blocks: &mut Vec<Vec<f32>>, row: &[f32]) {
    match blocks.last_mut() {
        Some(block) if block.len() < KEYS_PER_BLOCK * row.len() => block.extend_from_slice(row),
        _ => blocks.push(row.to_vec()),
    }
}
