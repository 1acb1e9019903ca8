//! The best tokens of rows of logits, found within the graph.

use shardpack_mlx::{Array, Device, Element, Noise};

use super::{Mlx, Tensor};
use crate::backend::{DenseOps, ScoredRow, TokenChoice};

/// Columns that f32 counts exactly.
const MAX_COLUMNS: usize = 1 << 24;

impl TokenChoice for Mlx {
    fn chooses(&self, noise: bool) -> bool {
        // A processor has the logits in its memory, and finds the noise that matters in fewer steps.
        !noise || self.library.device() == Device::Gpu
    }

    fn best_tokens(&self, logits: &Tensor, rows: &[ScoredRow], first: u32) -> Option<Tensor> {
        if !(2..MAX_COLUMNS).contains(&logits.width) || rows.is_empty() {
            return None;
        }
        let library = &self.library;
        let (noisy, plain): (Vec<usize>, Vec<usize>) =
            (0..rows.len()).partition(|place| rows[*place].noise.is_some());
        let part = |places: &[usize]| {
            let wanted: Vec<usize> = places.iter().map(|place| rows[*place].row).collect();
            let whole = wanted.len() == logits.rows && wanted.is_sorted();
            if whole { logits.clone() } else { self.select_rows(logits, &wanted) }.array
        };
        let mut found: Vec<Array> = Vec::new();
        if !plain.is_empty() {
            found.push(part(&plain).best_tokens(None, first));
        }
        if !noisy.is_empty() {
            let noises = || noisy.iter().filter_map(|place| rows[*place].noise);
            let keys: Vec<u32> =
                noises().flat_map(|it| [it.key as u32, (it.key >> 32) as u32]).collect();
            let keys = library.indices(&keys, &[noisy.len(), 2]);
            let temperatures: Vec<f32> = noises().map(|it| it.temperature).collect();
            let temperatures = library.floats(&temperatures, &[noisy.len(), 1]);
            let noise = Noise { keys: &keys, temperatures: &temperatures };
            found.push(part(&noisy).best_tokens(Some(noise), first));
        }
        let all = library.concat(&found.iter().collect::<Vec<_>>(), 0);
        // Back into the order that was asked for.
        let mut order = vec![0; rows.len()];
        for (place, row) in plain.iter().chain(&noisy).enumerate() {
            order[*row] = place as u32;
        }
        let all = if order.is_sorted() {
            all
        } else {
            all.take(&library.indices(&order, &[rows.len()]), 0)
        };
        debug_assert_eq!(all.shape(), [rows.len(), 6]);
        Some(Tensor::new(rows.len(), 6, all.cast(Element::F32)))
    }
}
