//! The normalised architecture of a configuration.

use serde_json::{Map, Value as Json};

use super::{
    ResolveError,
    family::FamilyRules,
    parts,
    scopes::{at_layer, evaluate, flag, positive, size, wrong},
};
use crate::{
    expr::{Scope, Value},
    hex::HexF32,
    rope::RopeParameters,
    rules::SpecRules,
    spec::{Attention, Block, Ffn, Layer, Mask, Norm, QkNorm, Spec},
};

/// Largest epsilon of a normalisation that is believed.
pub(super) const MAX_EPS: f64 = 1.0;

/// Largest factor on attention scores that is believed.
const MAX_SCALE: f64 = 1e3;

/// Largest base of a position embedding that is believed.
const MAX_THETA: f64 = 1e12;

pub(super) fn resolve(
    family: &FamilyRules<'_>,
    config: &Map<String, Json>,
    scope: &Scope<'_>,
    layers: &[Scope<'_>],
) -> Result<(Spec, RopeParameters), ResolveError> {
    let rules = &family.pack.file.spec;
    let max_positions = size(&rules.max_positions, scope, "max_positions")?;
    let theta = positive(&rules.rope.default_theta, scope, "rope.default_theta", MAX_THETA)?;
    let rope = RopeParameters::parse(config, theta, max_positions)?;
    let rope_width = size(&rules.rope.width, scope, "rope.width")?;
    let attention = attention(rules, scope)?;
    if rope_width > attention.head_dim {
        let expected = format!("at most the head's {}", attention.head_dim);
        return Err(wrong(&rules.rope.width, "rope.width", &expected, &rope_width.to_string()));
    }
    let eps = positive(&rules.norm.eps, scope, "norm.eps", MAX_EPS)?;
    let spec = Spec {
        rules: family.pack.id().to_owned(),
        model_type: family.name.to_owned(),
        hidden_size: size(&rules.hidden_size, scope, "hidden_size")?,
        vocab_size: size(&rules.vocab_size, scope, "vocab_size")?,
        max_positions,
        norm: Norm { kind: rules.norm.kind, eps: HexF32(eps as f32), plus_one: false, bias: false },
        attention,
        ropes: vec![rope.resolve(rope_width, rules.rope.style)?],
        ffn: Ffn {
            size: size(&rules.ffn.size, scope, "ffn.size")?,
            activation: rules.ffn.activation,
            bias: flag(&rules.ffn.bias, scope, "ffn.bias")?,
            names: None,
        },
        layers: layers
            .iter()
            .enumerate()
            .map(|(index, scope)| layer(rules, scope, index))
            .collect::<Result<_, _>>()?,
        tied_embeddings: flag(&rules.tied_embeddings, scope, "tied_embeddings")?,
        block: Block::pre_norm(),
        embedding_scale: None,
        logit_scale: None,
        logit_softcap: None,
        moe: match &rules.moe {
            Some(moe) => Some(parts::moe(moe, rules.ffn.activation, scope)?),
            None => None,
        },
        mla: rules.mla.as_ref().map(|mla| parts::mla(mla, scope)).transpose()?,
        delta: rules.delta.as_ref().map(|delta| parts::delta(delta, scope)).transpose()?,
    };
    Ok((spec, rope))
}

fn attention(rules: &SpecRules, scope: &Scope<'_>) -> Result<Attention, ResolveError> {
    let rules = &rules.attention;
    let head_dim = size(&rules.head_dim, scope, "attention.head_dim")?;
    let scale = match &rules.scale {
        Some(scale) => positive(scale, scope, "attention.scale", MAX_SCALE)?,
        None => 1.0 / libm::sqrt(f64::from(head_dim)),
    };
    let qk_norm = match evaluate(&rules.qk_norm, scope, "attention.qk_norm")? {
        Value::Text(text) if text == "none" => QkNorm::None,
        Value::Text(text) if text == "head" => QkNorm::Head,
        other => {
            let expected = "'none' or 'head'";
            return Err(wrong(&rules.qk_norm, "attention.qk_norm", expected, &other.to_string()));
        }
    };
    Ok(Attention {
        heads: size(&rules.heads, scope, "attention.heads")?,
        kv_heads: size(&rules.kv_heads, scope, "attention.kv_heads")?,
        head_dim,
        scale: HexF32(scale as f32),
        qkv_bias: flag(&rules.qkv_bias, scope, "attention.qkv_bias")?,
        o_bias: flag(&rules.o_bias, scope, "attention.o_bias")?,
        qk_norm,
        softcap: None,
        sinks: false,
        position_scale: None,
    })
}

fn layer(rules: &SpecRules, scope: &Scope<'_>, index: usize) -> Result<Layer, ResolveError> {
    let place = at_layer("layer.window", index);
    let mask = match evaluate(&rules.layer.window, scope, &place)? {
        Value::Null => Mask::Full,
        _ => Mask::Sliding(size(&rules.layer.window, scope, &place)?),
    };
    let has_rope = flag(&rules.layer.rope, scope, &at_layer("layer.rope", index))?;
    let is = |rule: &Option<crate::expr::Expr>, place: &str| {
        rule.as_ref().map_or(Ok(false), |rule| flag(rule, scope, &at_layer(place, index)))
    };
    Ok(Layer {
        mask,
        rope: has_rope.then_some(0),
        moe: is(&rules.layer.moe, "layer.moe")?,
        delta: is(&rules.layer.delta, "layer.delta")?,
    })
}
