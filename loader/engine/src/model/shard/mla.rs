//! Checks of multi-head latent attention and of its indexer.

use shardpack_formats::Spec;

use super::{LoadError, MAX_WIDTH, PipelineStage, layout_error};

/// Widths of multi-head latent attention.
pub(super) fn check(spec: &Spec) -> Result<(), LoadError> {
    let Some(mla) = &spec.mla else { return Ok(()) };
    let widths = [Some(mla.kv_rank), Some(mla.nope), Some(mla.rope), Some(mla.value), mla.q_rank];
    for width in widths.into_iter().flatten() {
        if width == 0 || u64::from(width) > MAX_WIDTH {
            return Err(layout_error("a width of mla", &format!("1 to {MAX_WIDTH}"), &width));
        }
    }
    if mla.nope + mla.rope != spec.attention.head_dim {
        let found = spec.attention.head_dim;
        return Err(layout_error("attention.head_dim", &(mla.nope + mla.rope), &found));
    }
    match spec.ropes.iter().find(|rope| rope.inv_freq.len() * 2 > mla.rope as usize) {
        None => Ok(()),
        Some(rope) => {
            let expected = format!("at most {} pairs", mla.rope / 2);
            Err(layout_error("a rope of mla", &expected, &rope.inv_freq.len()))
        }
    }
}

/// Widths of the indexer, and that a layer which reuses top-k indices comes after an indexer.
pub(super) fn check_index(spec: &Spec, stage: Option<&PipelineStage>) -> Result<(), LoadError> {
    let index = spec.mla.as_ref().and_then(|mla| mla.indexer.as_ref());
    let first = stage.map_or(0, |stage| stage.layers.start);
    let shares = |layer: usize| spec.layers.get(layer).is_some_and(|it| it.reuses_top_k);
    let Some(index) = index else {
        return match spec.layers.iter().position(|layer| layer.reuses_top_k) {
            None => Ok(()),
            Some(layer) => {
                let what = format!("attention of layer {layer}");
                Err(layout_error(&what, &"dense attention", &"shared top-k indices"))
            }
        };
    };
    if shares(first) {
        let what = format!("layer {first}, the first of its stage");
        return Err(layout_error(&what, &"an indexer", &"shared top-k indices"));
    }
    let products = index.heads.saturating_mul(index.width);
    for size in [index.heads, index.width, index.top_k, products] {
        if size == 0 || u64::from(size) > MAX_WIDTH {
            return Err(layout_error("a size of mla.indexer", &format!("1 to {MAX_WIDTH}"), &size));
        }
    }
    let latent = spec.mla.as_ref().and_then(|mla| mla.q_rank);
    if latent.is_none() {
        return Err(layout_error(
            "mla.indexer",
            &"q_rank, the latent that the indexer reads",
            &"none",
        ));
    }
    let rope = spec.mla.as_ref().map_or(0, |mla| mla.rope);
    if index.rotated_last && index.width < rope {
        let expected = format!("at least the rotated part's {rope}");
        return Err(layout_error("mla.indexer.head_dim", &expected, &index.width));
    }
    match spec.ropes.iter().find(|rope| rope.inv_freq.len() * 2 > index.width as usize) {
        None => Ok(()),
        Some(rope) => {
            let expected = format!("at most {} pairs", index.width / 2);
            Err(layout_error("a rope of mla.indexer", &expected, &rope.inv_freq.len()))
        }
    }
}
