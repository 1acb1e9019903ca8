//! Block-sparse attention.

use super::{
    ResolveError,
    scopes::{at_layer, size, wrong},
};
use crate::{
    expr::Scope,
    rules::SpecRules,
    spec::{Attention, BlockIndexer, Layer, Mask, QkNorm, Rope},
};

/// Most tokens of a block. It divides this number, of which the engine's pages of keys are: no
/// block lies on two pages.
const MOST_TOKENS: u32 = 256;

/// The indexer of block-sparse attention; none where no layer has it.
pub(super) fn resolve(
    rules: &SpecRules,
    scope: &Scope<'_>,
    attention: &Attention,
    (layers, ropes): (&[Layer], &[Rope]),
) -> Result<Option<BlockIndexer>, ResolveError> {
    let Some(layer) = layers.iter().position(|layer| layer.block_sparse) else {
        return Ok(None);
    };
    let place = at_layer("layer.chooses_blocks", layer);
    let rule =
        rules.layer.chooses_blocks.as_ref().expect("without the rule no layer is block-sparse");
    let Some(index) = &rules.attention.blocks else {
        return Err(wrong(rule, &place, "false, without an indexer (attention.blocks)", "true"));
    };
    let is_plain = |layer: &Layer| {
        layer.attends()
            && layer.mask == Mask::Full
            && !layer.second_attention
            && layer.compressed_kv.is_none()
    };
    let is_else = |layer: &Layer| layer.block_sparse && !is_plain(layer);
    if let Some(layer) = layers.iter().position(is_else) {
        let place = at_layer("layer.chooses_blocks", layer);
        return Err(wrong(rule, &place, "false, in a layer without attention to all keys", "true"));
    }
    // The index's queries and keys are normalised as those of heads are.
    if attention.qk_norm != QkNorm::Head || rules.mla.is_some() || rules.compressed.is_some() {
        let expected = "per-head QK norms, with block-sparse attention";
        let found = format!("{:?}", attention.qk_norm);
        return Err(wrong(&rules.attention.qk_norm, "attention.qk_norm", expected, &found));
    }
    let number = |rule, field: &str| {
        let place = format!("attention.blocks.{field}");
        size(rule, scope, &place).map(|found| (found, place))
    };
    let (heads, place) = number(&index.heads, "heads")?;
    if heads != attention.kv_heads {
        let expected = format!("{}, one for each KV head", attention.kv_heads);
        return Err(wrong(&index.heads, &place, &expected, &heads.to_string()));
    }
    let (tokens, place) = number(&index.tokens, "tokens")?;
    if !MOST_TOKENS.is_multiple_of(tokens) {
        let expected =
            format!("a divisor of {MOST_TOKENS}: blocks lie within a page of the KV cache");
        return Err(wrong(&index.tokens, &place, &expected, &tokens.to_string()));
    }
    let (width, place) = number(&index.width, "width")?;
    let rotated = layers.iter().filter(|layer| layer.block_sparse).filter_map(|it| it.rope);
    let rotated = rotated.map(|rope| 2 * ropes[rope as usize].inv_freq.len()).max().unwrap_or(0);
    if (width as usize) < rotated {
        let expected = format!("at least the rotated part's {rotated}");
        return Err(wrong(&index.width, &place, &expected, &width.to_string()));
    }
    let (top_k, _) = number(&index.top_k, "top_k")?;
    let (local, place) = number(&index.local, "local")?;
    if local > top_k {
        let expected = format!("at most {top_k}, the blocks that are selected");
        return Err(wrong(&index.local, &place, &expected, &local.to_string()));
    }
    Ok(Some(BlockIndexer { tokens, top_k, local, width }))
}
