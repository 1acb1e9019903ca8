//! Checks of block-sparse attention.

use shardpack_formats::memory::TOKENS_PER_PAGE;
use shardpack_formats::{Spec, spec::BlockIndexer};

use super::{LoadError, MAX_WIDTH, layout_error};

/// Sizes of the block indexer, and that block-sparse layers have one.
pub(super) fn check(spec: &Spec) -> Result<(), LoadError> {
    let chooses = spec.layers.iter().enumerate().filter(|(_, layer)| layer.block_sparse);
    for (layer, form) in chooses {
        let attends = spec.mla.is_none() && spec.compressed_attention.is_none() && form.attends();
        if !attends || spec.attention_of(layer).block_sparse.is_none() {
            let what = format!("layer {layer}, block-sparse attention");
            return Err(layout_error(
                &what,
                &"grouped-query attention with a block indexer",
                &"none",
            ));
        }
    }
    let attentions = [Some(&spec.attention), spec.second_attention.as_ref()];
    let mut indexes =
        attentions.into_iter().flatten().filter_map(|it| Some((it, it.block_sparse.as_ref()?)));
    let Some((attention, index)) = indexes.next() else { return Ok(()) };
    if indexes.any(|(_, other)| other.width != index.width) {
        return Err(layout_error("attention.block_sparse", &"keys of one width", &"two"));
    }
    let BlockIndexer { tokens, top_k, local, width } = *index;
    let queries = u64::from(attention.kv_heads) * u64::from(width);
    for size in [tokens.into(), top_k.into(), local.into(), width.into(), queries] {
        if size == 0 || size > MAX_WIDTH {
            let expected = format!("1 to {MAX_WIDTH}");
            return Err(layout_error("a size of attention.block_sparse", &expected, &size));
        }
    }
    if !TOKENS_PER_PAGE.is_multiple_of(tokens as usize) {
        let expected = format!("a divisor of {TOKENS_PER_PAGE}");
        return Err(layout_error("attention.block_sparse.block_size", &expected, &tokens));
    }
    if local > top_k {
        let expected = format!("at most {top_k}, the blocks that are selected");
        return Err(layout_error("attention.block_sparse.local_blocks", &expected, &local));
    }
    match spec.ropes.iter().find(|rope| rope.inv_freq.len() * 2 > width as usize) {
        None => Ok(()),
        Some(rope) => {
            let expected = format!("at most {} pairs", width / 2);
            Err(layout_error("a rope of attention.block_sparse", &expected, &rope.inv_freq.len()))
        }
    }
}
