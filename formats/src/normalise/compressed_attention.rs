//! Compressed attention, and hash routing.

use super::{
    ResolveError,
    architecture::MAX_EPS,
    parts::index,
    scopes::{at_layer, evaluate, flag, positive, size, wrong},
};
use crate::{
    expr::{Expr, Scope, Value},
    hex::HexF32,
    rules::{LayerRules, SpecRules},
    spec::{Attention, CompressedAttention, CompressedKv, Layer},
};

/// Most tokens of an entry. It divides this number, of which the engine's pages of keys are: no
/// entry's tokens lie on two pages.
const MOST_TOKENS: u32 = 256;

/// The attention of a model whose layers may have `layers`' entries.
pub(super) fn resolve(
    rules: &SpecRules,
    scope: &Scope<'_>,
    attention: &Attention,
    layers: &[Layer],
) -> Result<Option<CompressedAttention>, ResolveError> {
    let first = |has: &dyn Fn(CompressedKv) -> bool| {
        layers.iter().position(|it| it.compressed_kv.is_some_and(has))
    };
    let Some(compressed) = &rules.compressed else {
        return match (first(&|_| true), &rules.layer.entries_every) {
            (Some(layer), Some(rule)) => {
                let place = at_layer("layer.entries_every", layer);
                Err(wrong(rule, &place, "null, without compressed attention", "a number"))
            }
            _ => Ok(None),
        };
    };
    let rope = size(&compressed.rope, scope, "compressed.rope")?;
    if rope >= attention.head_dim {
        let expected = format!("less than the head's {}", attention.head_dim);
        return Err(wrong(&compressed.rope, "compressed.rope", &expected, &rope.to_string()));
    }
    let groups = size(&compressed.groups, scope, "compressed.groups")?;
    if !attention.heads.is_multiple_of(groups) {
        let expected = format!("a divisor of {}, the heads", attention.heads);
        return Err(wrong(&compressed.groups, "compressed.groups", &expected, &groups.to_string()));
    }
    let indexer = match (first(&|it| it.sparse), &compressed.index, &rules.layer.entries_chosen) {
        (None, ..) => None,
        (Some(_), Some(rules), _) => Some(index(rules, rope, scope, "compressed.index")?),
        (Some(layer), None, chosen) => {
            let rule = chosen.as_ref().unwrap_or(&compressed.groups);
            let place = at_layer("layer.entries_chosen", layer);
            return Err(wrong(
                rule,
                &place,
                "false, without an indexer (compressed.index)",
                "true",
            ));
        }
    };
    Ok(Some(CompressedAttention {
        q_rank: size(&compressed.q_rank, scope, "compressed.q_rank")?,
        rope,
        eps: HexF32(positive(&compressed.eps, scope, "compressed.eps", MAX_EPS)? as f32),
        groups,
        group_rank: size(&compressed.group_rank, scope, "compressed.group_rank")?,
        indexer,
    }))
}

/// Compressed KV entries of a layer, if it has any.
pub(super) fn compressed_kv(
    rules: &LayerRules,
    scope: &Scope<'_>,
    layer: usize,
) -> Result<Option<CompressedKv>, ResolveError> {
    let place = at_layer("layer.entries_every", layer);
    let Some(rule) = &rules.entries_every else { return Ok(None) };
    if evaluate(rule, scope, &place)? == Value::Null {
        return Ok(None);
    }
    let compression_ratio = size(rule, scope, &place)?;
    if !MOST_TOKENS.is_multiple_of(compression_ratio) {
        let expected = format!(
            "a divisor of {MOST_TOKENS}: compressed KV entries lie within a page of the KV cache"
        );
        return Err(wrong(rule, &place, &expected, &compression_ratio.to_string()));
    }
    let sparse = is(rules.entries_chosen.as_ref(), scope, "layer.entries_chosen", layer)?;
    Ok(Some(CompressedKv { compression_ratio, sparse }))
}

/// Whether a layer has hash routing.
pub(super) fn hash_routing(
    rules: &LayerRules,
    scope: &Scope<'_>,
    layer: usize,
) -> Result<bool, ResolveError> {
    const PLACE: &str = "layer.experts_by_token";
    let by_token = is(rules.experts_by_token.as_ref(), scope, PLACE, layer)?;
    let has_experts = is(rules.moe.as_ref(), scope, "layer.moe", layer)?;
    match &rules.experts_by_token {
        Some(rule) if by_token && !has_experts => {
            Err(wrong(rule, &at_layer(PLACE, layer), "false, in a layer without experts", "true"))
        }
        _ => Ok(by_token),
    }
}

/// A flag of a layer that is false where no rule is.
fn is(
    rule: Option<&Expr>,
    scope: &Scope<'_>,
    place: &str,
    layer: usize,
) -> Result<bool, ResolveError> {
    rule.map_or(Ok(false), |rule| flag(rule, scope, &at_layer(place, layer)))
}
