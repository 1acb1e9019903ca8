//! Checks of attention to compressed KV entries, and of hash routing.

use shardpack_formats::memory::TOKENS_PER_PAGE;
use shardpack_formats::{
    Spec,
    spec::{CompressedAttention, Mask, RopeStyle},
};

use super::{LoadError, MAX_WIDTH, layout_error};

/// Widths of compressed attention, and that its layers have what they name.
pub(super) fn check(spec: &Spec) -> Result<(), LoadError> {
    let Some(compressed) = &spec.compressed_attention else {
        return match spec.layers.iter().position(|layer| layer.compressed_kv.is_some()) {
            None => check_experts(spec),
            Some(layer) => {
                Err(layout_error(&format!("layer {layer}"), &"no compressed KV entries", &"some"))
            }
        };
    };
    let attention = &spec.attention;
    if spec.mla.is_some() || spec.has_states() || spec.second_attention.is_some() {
        return Err(layout_error("compressed attention", &"no other form of attention", &"one"));
    }
    let CompressedAttention { q_rank, rope, groups, group_rank, .. } = *compressed;
    let products = u64::from(groups) * u64::from(group_rank);
    for size in [q_rank.into(), rope.into(), groups.into(), group_rank.into(), products] {
        if size == 0 || size > MAX_WIDTH {
            return Err(layout_error("a size of compressed", &format!("1 to {MAX_WIDTH}"), &size));
        }
    }
    if !attention.heads.is_multiple_of(groups) {
        let expected = format!("a divisor of {} heads", attention.heads);
        return Err(layout_error("compressed_attention.o_groups", &expected, &groups));
    }
    if rope > attention.head_dim {
        let expected = format!("at most {}, a head's width", attention.head_dim);
        return Err(layout_error("compressed_attention.qk_rope_head_dim", &expected, &rope));
    }
    for it in &spec.ropes {
        if it.inv_freq.len() * 2 != rope as usize || it.style != RopeStyle::Interleaved {
            let expected = format!("{} pairs of neighbours", rope / 2);
            let found = format!("{} {:?}", it.inv_freq.len(), it.style);
            return Err(layout_error("a rope of compressed attention", &expected, &found));
        }
    }
    check_index(compressed)?;
    for (index, layer) in spec.layers.iter().enumerate() {
        let what = format!("layer {index}");
        if !matches!(layer.mask, Mask::Sliding(_)) || layer.rope.is_none() {
            return Err(layout_error(&what, &"a window and positions", &"a layer without"));
        }
        let Some(entries) = layer.compressed_kv else { continue };
        let divides = TOKENS_PER_PAGE.checked_rem(entries.compression_ratio as usize) == Some(0);
        if !divides || (entries.sparse && compressed.indexer.is_none()) {
            let expected = format!(
                "entries of a divisor of {TOKENS_PER_PAGE} tokens, and an indexer where they are selected"
            );
            return Err(layout_error(&what, &expected, &format!("{entries:?}")));
        }
    }
    check_experts(spec)
}

fn check_index(compressed: &CompressedAttention) -> Result<(), LoadError> {
    let Some(index) = &compressed.indexer else { return Ok(()) };
    let products = index.heads.saturating_mul(index.width);
    for size in [index.heads, index.width, index.top_k, products] {
        if size == 0 || u64::from(size) > MAX_WIDTH {
            let expected = format!("1 to {MAX_WIDTH}");
            return Err(layout_error("a size of compressed_attention.indexer", &expected, &size));
        }
    }
    if index.width < compressed.rope || !index.rotated_last || index.style != RopeStyle::Interleaved
    {
        let expected = format!("the last {} elements rotated as pairs", compressed.rope);
        return Err(layout_error("compressed_attention.indexer", &expected, &format!("{index:?}")));
    }
    Ok(())
}

/// Hash routing needs experts.
fn check_experts(spec: &Spec) -> Result<(), LoadError> {
    let of_none = |layer: &shardpack_formats::spec::Layer| layer.hash_routing && !layer.moe;
    let beside = spec.moe.as_ref().is_some_and(|moe| moe.parallel_dense.is_some());
    let any = spec.layers.iter().any(|layer| layer.hash_routing);
    match spec.layers.iter().position(of_none) {
        Some(layer) => {
            let what = format!("layer {layer}");
            Err(layout_error(&what, &"experts for hash routing", &"no experts"))
        }
        None if any && beside => {
            Err(layout_error("hash routing", &"no parallel dense network", &"one"))
        }
        None => Ok(()),
    }
}
