//! The normalised architecture of a configuration.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json};

use super::{
    ResolveError,
    family::FamilyRules,
    parts,
    scopes::{at_layer, evaluate, flag, positive, size, wrong},
};
use crate::{
    expr::{Expr, Scope, Value},
    hex::HexF32,
    rope::{RopeParameters, RopeRequest},
    rules::{RopeRules, SpecRules},
    spec::{Attention, Block, Ffn, Layer, Mask, Norm, PositionScale, Rope, Spec},
};

/// Largest epsilon of a normalisation that is believed.
pub(super) const MAX_EPS: f64 = 1.0;

/// Largest factor on attention scores that is believed.
const MAX_SCALE: f64 = 1e3;

/// Largest factor on hidden vectors and logits, and largest cap, that is believed.
const MAX_FACTOR: f64 = 1e6;

/// Largest base of a position embedding that is believed.
const MAX_THETA: f64 = 1e12;

/// What a configuration says of an architecture.
pub(super) struct Architecture {
    pub(super) spec: Spec,
    pub(super) rope: RopeParameters,
    pub(super) local_rope: Option<RopeParameters>,
}

pub(super) fn resolve(
    family: &FamilyRules<'_>,
    config: &Map<String, Json>,
    scope: &Scope<'_>,
    layers: &[Scope<'_>],
) -> Result<Architecture, ResolveError> {
    let rules = &family.pack.file.spec;
    let max_positions = size(&rules.max_positions, scope, "max_positions")?;
    let mut attention = attention(rules, scope)?;
    let ropes = Ropes { family, config, scope, max_positions, head_dim: attention.head_dim };
    let (rope, first) = ropes.resolve(&rules.rope, "rope")?;
    let mut all = vec![first];
    let mut local_rope = None;
    if let Some(rules) = &rules.local_rope {
        let (parameters, second) = ropes.resolve(rules, "local_rope")?;
        local_rope = Some(parameters);
        all.push(second);
    }
    let eps = positive(&rules.norm.eps, scope, "norm.eps", MAX_EPS)?;
    let activation = named(&rules.ffn.activation, scope, "ffn.activation")?;
    let factor = |rule: &Option<Expr>, place| factor(rule.as_ref(), scope, place);
    let mla = rules.mla.as_ref().map(|mla| parts::mla(mla, scope)).transpose()?;
    if mla.is_some() {
        attention.scale = HexF32((f64::from(attention.scale.0) * parts::stretch(&rope)) as f32);
    }
    let all_layers = all_layers(rules, layers, all.len())?;
    parts::check_shared_keys(rules, mla.as_ref(), &all_layers)?;
    let has_experts = all_layers.iter().any(|layer| layer.moe);
    let spec = Spec {
        rules: family.pack.id().to_owned(),
        model_type: family.canonical().to_owned(),
        hidden_size: size(&rules.hidden_size, scope, "hidden_size")?,
        vocab_size: size(&rules.vocab_size, scope, "vocab_size")?,
        max_positions,
        norm: Norm {
            kind: rules.norm.kind,
            eps: HexF32(eps as f32),
            plus_one: rules.norm.plus_one,
            bias: rules.norm.bias,
        },
        attention,
        layers: all_layers,
        ropes: all,
        ffn: Ffn {
            size: size(&rules.ffn.size, scope, "ffn.size")?,
            activation,
            bias: flag(&rules.ffn.bias, scope, "ffn.bias")?,
            names: rules.ffn.names.clone(),
        },
        tied_embeddings: flag(&rules.tied_embeddings, scope, "tied_embeddings")?,
        block: block(rules, scope)?,
        embedding_scale: factor(&rules.embedding_scale, "embedding_scale")?,
        logit_scale: factor(&rules.logit_scale, "logit_scale")?,
        logit_softcap: factor(&rules.logit_softcap, "logit_softcap")?,
        // A family may have sizes with experts and sizes without.
        moe: match rules.moe.as_ref().filter(|_| has_experts) {
            Some(moe) => Some(parts::moe(moe, activation, scope)?),
            None => None,
        },
        mla,
        delta: rules.delta.as_ref().map(|delta| parts::delta(delta, scope)).transpose()?,
    };
    Ok(Architecture { spec, rope, local_rope })
}

fn all_layers(
    rules: &SpecRules,
    scopes: &[Scope<'_>],
    ropes: usize,
) -> Result<Vec<Layer>, ResolveError> {
    let layers = scopes.iter().enumerate();
    layers.map(|(index, scope)| layer(rules, scope, index, ropes)).collect()
}

fn attention(rules: &SpecRules, scope: &Scope<'_>) -> Result<Attention, ResolveError> {
    let rules = &rules.attention;
    let head_dim = size(&rules.head_dim, scope, "attention.head_dim")?;
    let scale = match &rules.scale {
        Some(scale) => positive(scale, scope, "attention.scale", MAX_SCALE)?,
        None => 1.0 / libm::sqrt(f64::from(head_dim)),
    };
    let position_scale = match &rules.position_scale {
        None => None,
        Some(rules) => match evaluate(&rules.beta, scope, "position_scale.beta")?.as_float() {
            // Absent and 0 leave queries as they are.
            None | Some(0.0) => None,
            Some(_) => Some(PositionScale {
                beta: HexF32(positive(&rules.beta, scope, "position_scale.beta", MAX_SCALE)? as f32),
                original: size(&rules.original, scope, "position_scale.original")?,
            }),
        },
    };
    let sinks = rules.sinks.as_ref().map(|sinks| flag(sinks, scope, "attention.sinks"));
    Ok(Attention {
        heads: size(&rules.heads, scope, "attention.heads")?,
        kv_heads: size(&rules.kv_heads, scope, "attention.kv_heads")?,
        head_dim,
        scale: HexF32(scale as f32),
        qkv_bias: flag(&rules.qkv_bias, scope, "attention.qkv_bias")?,
        o_bias: flag(&rules.o_bias, scope, "attention.o_bias")?,
        qk_norm: named(&rules.qk_norm, scope, "attention.qk_norm")?,
        softcap: factor(rules.softcap.as_ref(), scope, "attention.softcap")?,
        sinks: sinks.transpose()?.unwrap_or(false),
        gated: rules
            .gated
            .as_ref()
            .map_or(Ok(false), |gated| flag(gated, scope, "attention.gated"))?,
        position_scale,
    })
}

fn block(rules: &SpecRules, scope: &Scope<'_>) -> Result<Block, ResolveError> {
    let Some(rules) = &rules.block else { return Ok(Block::pre_norm()) };
    Ok(Block {
        before_attention: rules.before_attention.clone(),
        after_attention: rules.after_attention.clone(),
        before_ffn: rules.before_ffn.clone(),
        after_ffn: rules.after_ffn.clone(),
        parallel: rules.parallel,
        residual_scale: factor(rules.residual_scale.as_ref(), scope, "block.residual_scale")?,
    })
}

fn layer(
    rules: &SpecRules,
    scope: &Scope<'_>,
    index: usize,
    ropes: usize,
) -> Result<Layer, ResolveError> {
    let place = at_layer("layer.window", index);
    let mask = match evaluate(&rules.layer.window, scope, &place)? {
        Value::Null => Mask::Full,
        _ => Mask::Sliding(size(&rules.layer.window, scope, &place)?),
    };
    let place = at_layer("layer.rope", index);
    let rope = match evaluate(&rules.layer.rope, scope, &place)? {
        Value::Bool(has_rope) => has_rope.then_some(0),
        Value::Int(rope) if (0..ropes as i64).contains(&rope) => Some(rope as u32),
        other => {
            let expected = format!("true, false or one of {ropes} ropes");
            return Err(wrong(&rules.layer.rope, &place, &expected, &other.to_string()));
        }
    };
    let is = |rule: &Option<Expr>, place: &str| {
        rule.as_ref().map_or(Ok(false), |rule| flag(rule, scope, &at_layer(place, index)))
    };
    Ok(Layer {
        mask,
        rope,
        moe: is(&rules.layer.moe, "layer.moe")?,
        delta: is(&rules.layer.delta, "layer.delta")?,
        shares_keys: is(&rules.layer.shares_keys, "layer.shares_keys")?,
    })
}

/// What the position embeddings of a model depend on.
struct Ropes<'a> {
    family: &'a FamilyRules<'a>,
    config: &'a Map<String, Json>,
    scope: &'a Scope<'a>,
    max_positions: u32,
    head_dim: u32,
}

impl Ropes<'_> {
    fn resolve(
        &self,
        rules: &RopeRules,
        place: &str,
    ) -> Result<(RopeParameters, Rope), ResolveError> {
        let at = |field: &str| format!("{place}.{field}");
        let width = size(&rules.width, self.scope, &at("width"))?;
        if width > self.head_dim {
            let expected = format!("at most the head's {}", self.head_dim);
            return Err(wrong(&rules.width, &at("width"), &expected, &width.to_string()));
        }
        let theta = |rule: &Expr, field| positive(rule, self.scope, &at(field), MAX_THETA);
        let stated = rules.theta.as_ref().map(|rule| theta(rule, "theta")).transpose()?;
        let original = match &rules.original {
            Some(rule) if evaluate(rule, self.scope, &at("original"))? != Value::Null => {
                Some(size(rule, self.scope, &at("original"))?)
            }
            _ => None,
        };
        let scaled = rules.scaled.as_ref().map(|rule| flag(rule, self.scope, &at("scaled")));
        let request = RopeRequest {
            default_theta: theta(&rules.default_theta, "default_theta")?,
            theta: stated,
            max_positions: self.max_positions,
            original,
            section: rules.section.as_deref(),
            scaled: scaled.transpose()?.unwrap_or(true),
            extra: &self.family.family.rope,
            kinds: &self.family.family.rope_kinds,
        };
        let parameters = RopeParameters::parse(self.config, &request)?;
        let style = named(&rules.style, self.scope, &at("style"))?;
        let rope = parameters.resolve(width, style)?;
        Ok((parameters, rope))
    }
}

/// A factor or a cap; none where there is no rule or its value is null.
fn factor(
    rule: Option<&Expr>,
    scope: &Scope<'_>,
    place: &str,
) -> Result<Option<HexF32>, ResolveError> {
    let Some(rule) = rule else { return Ok(None) };
    if evaluate(rule, scope, place)? == Value::Null {
        return Ok(None);
    }
    Ok(Some(HexF32(positive(rule, scope, place, MAX_FACTOR)? as f32)))
}

/// The variant of an enumeration that a text names.
fn named<T: DeserializeOwned>(
    rule: &Expr,
    scope: &Scope<'_>,
    place: &str,
) -> Result<T, ResolveError> {
    let value = evaluate(rule, scope, place)?;
    let text = match &value {
        Value::Text(text) => text.clone(),
        other => other.to_string(),
    };
    serde_json::from_value(Json::String(text))
        .map_err(|error| wrong(rule, place, &error.to_string(), &value.to_string()))
}
