//! The normalised architecture of a configuration.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json};

use super::{
    ResolveError, block_sparse, compressed_attention,
    family::FamilyRules,
    parts,
    scopes::{at_layer, evaluate, flag, positive, size, wrong},
};
use crate::{
    expr::{Expr, Scope, Value},
    hex::HexF32,
    rope::{RopeParameters, RopeRequest, Scaling},
    rules::{AttentionRules, HeadGateRules, RopeRules, SpecRules},
    spec::{
        Activation, Attention, Block, Ffn, HeadGate, Layer, LinearAttention, Mask, Norm,
        PositionScale, Rope, ShortConvolution, Spec,
    },
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
    let mut attention = attention(&rules.attention, scope, "attention")?;
    let second_attention = second_attention(rules, scope, layers)?;
    let second = second_attention.as_ref().unwrap_or(&attention);
    let head_dims = [attention.head_dim, second.head_dim];
    let ropes = Ropes { family, config, scope, max_positions, head_dims };
    let (rope, first) = ropes.resolve(&rules.rope, "rope")?;
    let mut all = vec![first];
    let mut local_rope = None;
    let exists = |rules: &&RopeRules| match &rules.exists {
        None => Ok(true),
        Some(exists) => flag(exists, scope, "local_rope.exists"),
    };
    if let Some(rules) = &rules.local_rope
        && exists(&rules)?
    {
        let (parameters, second) = ropes.resolve(rules, "local_rope")?;
        local_rope = Some(parameters);
        all.push(second);
    }
    let activation = named(&rules.ffn.activation, scope, "ffn.activation")?;
    let factor = |rule: &Option<Expr>, place| factor(rule.as_ref(), scope, place);
    let mla = rules.mla.as_ref().map(|mla| parts::mla(mla, scope)).transpose()?;
    if mla.is_some() {
        attention.scale = HexF32((f64::from(attention.scale.0) * parts::stretch(&rope)) as f32);
    }
    let mut all_layers = all_layers(rules, layers, all.len())?;
    ropes.of_layers(&mut all_layers, layers, &mut all)?;
    parts::check_shared_keys(rules, mla.as_ref(), &all_layers)?;
    parts::check_shortcut(rules, &all_layers)?;
    attention.block_sparse = block_sparse::resolve(rules, scope, &attention, (&all_layers, &all))?;
    let compressed_attention =
        compressed_attention::resolve(rules, scope, &attention, &all_layers)?;
    let (linear_attention, short_convolution) = states(rules, scope, &all_layers)?;
    let has_experts = all_layers.iter().any(|layer| layer.moe);
    let spec = Spec {
        rules: family.pack.id().to_owned(),
        model_type: family.canonical().to_owned(),
        hidden_size: size(&rules.hidden_size, scope, "hidden_size")?,
        vocab_size: size(&rules.vocab_size, scope, "vocab_size")?,
        max_positions,
        norm: norm(rules, scope)?,
        attention,
        second_attention,
        linear_attention,
        short_convolution,
        layers: all_layers,
        ropes: all,
        ffn: ffn(rules, activation, scope)?,
        tied_embeddings: flag(&rules.tied_embeddings, scope, "tied_embeddings")?,
        block: block(rules, scope)?,
        embedding_scale: factor(&rules.embedding_scale, "embedding_scale")?,
        embedding_norm: rules.embedding_norm,
        lm_head_bias: lm_head_bias(rules, scope)?,
        logit_scale: factor(&rules.logit_scale, "logit_scale")?,
        logit_softcap: factor(&rules.logit_softcap, "logit_softcap")?,
        // A family may have sizes with experts and sizes without.
        moe: (rules.moe.as_ref().filter(|_| has_experts))
            .map(|moe| parts::moe(moe, activation, scope))
            .transpose()?,
        mla,
        compressed_attention,
        embedding: None,
        hyper_connections: rules
            .streams
            .as_ref()
            .map(|rules| parts::hyper_connections(rules, scope))
            .transpose()?,
    };
    Ok(Architecture { spec, rope, local_rope })
}

fn lm_head_bias(rules: &SpecRules, scope: &Scope<'_>) -> Result<bool, ResolveError> {
    rules.head_bias.as_ref().map_or(Ok(false), |rule| flag(rule, scope, "head_bias"))
}

fn norm(rules: &SpecRules, scope: &Scope<'_>) -> Result<Norm, ResolveError> {
    let eps = positive(&rules.norm.eps, scope, "norm.eps", MAX_EPS)?;
    Ok(Norm {
        kind: rules.norm.kind,
        eps: HexF32(eps as f32),
        plus_one: rules.norm.plus_one,
        bias: rules.norm.bias,
        plain: rules.norm.plain,
    })
}

fn ffn(rules: &SpecRules, activation: Activation, scope: &Scope<'_>) -> Result<Ffn, ResolveError> {
    let factor = |rule: &Option<Expr>, place| factor(rule.as_ref(), scope, place);
    let limits = (&rules.ffn.clamped_alpha, &rules.ffn.clamped_limit, rules.ffn.clamped_plain);
    Ok(Ffn {
        size: size(&rules.ffn.size, scope, "ffn.size")?,
        activation,
        bias: flag(&rules.ffn.bias, scope, "ffn.bias")?,
        names: rules.ffn.names.clone(),
        gate_scale: factor(&rules.ffn.gate_scale, "ffn.gate_scale")?,
        out_scale: factor(&rules.ffn.out_scale, "ffn.out_scale")?,
        clamped: parts::clamped(limits, scope, "ffn")?,
    })
}

/// What layers have that carry a state. A family may have sizes with such layers and sizes without.
fn states(
    rules: &SpecRules,
    scope: &Scope<'_>,
    layers: &[Layer],
) -> Result<(Option<LinearAttention>, Option<ShortConvolution>), ResolveError> {
    let delta = rules.delta.as_ref().filter(|_| layers.iter().any(|it| it.linear_attention));
    let delta = delta.map(|delta| parts::linear_attention(delta, scope)).transpose()?;
    let convolution =
        rules.convolution.as_ref().filter(|_| layers.iter().any(|it| it.short_convolution));
    let convolution =
        convolution.map(|rules| parts::short_convolution(rules, scope)).transpose()?;
    Ok((delta, convolution))
}

fn all_layers(
    rules: &SpecRules,
    scopes: &[Scope<'_>],
    ropes: usize,
) -> Result<Vec<Layer>, ResolveError> {
    let layers = scopes.iter().enumerate();
    layers.map(|(index, scope)| layer(rules, scope, index, ropes)).collect()
}

/// Attention of the second form; none where no layer is one.
fn second_attention(
    rules: &SpecRules,
    scope: &Scope<'_>,
    layers: &[Scope<'_>],
) -> Result<Option<Attention>, ResolveError> {
    let (Some(second), Some(is_second)) = (&rules.second_attention, &rules.layer.second) else {
        return Ok(None);
    };
    for (index, layer) in layers.iter().enumerate() {
        if flag(is_second, layer, &at_layer("layer.second", index))? {
            return attention(second, scope, "second_attention").map(Some);
        }
    }
    Ok(None)
}

fn attention(
    rules: &AttentionRules,
    scope: &Scope<'_>,
    place: &str,
) -> Result<Attention, ResolveError> {
    let at = |field: &str| format!("{place}.{field}");
    let head_dim = size(&rules.head_dim, scope, &at("head_dim"))?;
    let scale = match &rules.scale {
        Some(scale) => positive(scale, scope, &at("scale"), MAX_SCALE)?,
        None => 1.0 / libm::sqrt(f64::from(head_dim)),
    };
    let is = |rule: &Option<Expr>, field: &str| {
        rule.as_ref().map_or(Ok(false), |rule| flag(rule, scope, &at(field)))
    };
    let sinks_in = match &rules.sinks_in {
        Some(rule) if evaluate(rule, scope, &at("sinks_in"))? != Value::Null => {
            Some(named::<String>(rule, scope, &at("sinks_in"))?)
        }
        _ => None,
    };
    let heads = size(&rules.heads, scope, &at("heads"))?;
    Ok(Attention {
        heads,
        kv_heads: size(&rules.kv_heads, scope, &at("kv_heads"))?,
        head_dim,
        scale: HexF32(scale as f32),
        qkv_bias: flag(&rules.qkv_bias, scope, &at("qkv_bias"))?,
        o_bias: flag(&rules.o_bias, scope, &at("o_bias"))?,
        qk_norm: named(&rules.qk_norm, scope, &at("qk_norm"))?,
        softcap: factor(rules.softcap.as_ref(), scope, &at("softcap"))?,
        sinks: is(&rules.sinks, "sinks")?,
        sinks_in,
        gated: is(&rules.gated, "gated")?,
        position_scale: position_scale(rules, scope)?,
        value_dim: value_dim(rules, head_dim, scope)?,
        value_scale: factor(rules.value_scale.as_ref(), scope, &at("value_scale"))?,
        values_are_keys: is(&rules.values_are_keys, "values_are_keys")?,
        value_norm: is(&rules.value_norm, "value_norm")?,
        limit: factor(rules.limit.as_ref(), scope, &at("limit"))?,
        head_gate: match &rules.head_gate {
            Some(gate) => head_gate(gate, scope, "attention.head_gate")?,
            None => None,
        },
        block_sparse: None,
    })
}

fn position_scale(
    rules: &AttentionRules,
    scope: &Scope<'_>,
) -> Result<Option<PositionScale>, ResolveError> {
    let Some(rules) = &rules.position_scale else { return Ok(None) };
    // Absent and 0 leave queries as they are.
    match evaluate(&rules.beta, scope, "position_scale.beta")?.as_float() {
        None | Some(0.0) => Ok(None),
        Some(_) => Ok(Some(PositionScale {
            beta: HexF32(positive(&rules.beta, scope, "position_scale.beta", MAX_SCALE)? as f32),
            original: size(&rules.original, scope, "position_scale.original")?,
            from_one: rules.from_one,
            unrotated: rules.unrotated,
        })),
    }
}

/// The width of values, if it is another one than that of keys.
fn value_dim(
    rules: &AttentionRules,
    head_dim: u32,
    scope: &Scope<'_>,
) -> Result<Option<u32>, ResolveError> {
    const PLACE: &str = "attention.value_dim";
    let Some(rule) = &rules.value_dim else { return Ok(None) };
    if evaluate(rule, scope, PLACE)? == Value::Null {
        return Ok(None);
    }
    let width = size(rule, scope, PLACE)?;
    if width > head_dim {
        let expected = format!("at most the {head_dim} of keys");
        return Err(wrong(rule, PLACE, &expected, &width.to_string()));
    }
    Ok((width < head_dim).then_some(width))
}

/// Gates of heads; none where their module is null.
pub(super) fn head_gate(
    rules: &HeadGateRules,
    scope: &Scope<'_>,
    place: &str,
) -> Result<Option<HeadGate>, ResolveError> {
    if evaluate(&rules.module, scope, place)? == Value::Null {
        return Ok(None);
    }
    let per_head = rules.per_head.as_ref().map(|rule| flag(rule, scope, place));
    Ok(Some(HeadGate {
        module: named(&rules.module, scope, place)?,
        per_head: per_head.transpose()?.unwrap_or(false),
        function: rules.function,
    }))
}

fn block(rules: &SpecRules, scope: &Scope<'_>) -> Result<Block, ResolveError> {
    let Some(rules) = &rules.block else { return Ok(Block::pre_norm()) };
    Ok(Block {
        before_attention: rules.before_attention.clone(),
        after_attention: rules.after_attention.clone(),
        before_ffn: rules.before_ffn.clone(),
        after_ffn: rules.after_ffn.clone(),
        parallel: match &rules.parallel {
            Some(rule) => flag(rule, scope, "block.parallel")?,
            None => false,
        },
        layer_scale: rules.layer_scale.clone(),
        residual_scale: factor(rules.residual_scale.as_ref(), scope, "block.residual_scale")?,
    })
}

/// The value of a rule that may be absent.
fn has(rule: Option<&Expr>, scope: &Scope<'_>, place: &str) -> Result<bool, ResolveError> {
    rule.map_or(Ok(false), |rule| flag(rule, scope, place))
}

fn layer(
    rules: &SpecRules,
    scope: &Scope<'_>,
    index: usize,
    ropes: usize,
) -> Result<Layer, ResolveError> {
    let place = at_layer("layer.window", index);
    let chunk = match &rules.layer.chunk {
        Some(rule) if evaluate(rule, scope, &at_layer("layer.chunk", index))? != Value::Null => {
            Some(size(rule, scope, &at_layer("layer.chunk", index))?)
        }
        _ => None,
    };
    let mask = match (evaluate(&rules.layer.window, scope, &place)?, chunk) {
        (Value::Null, None) => Mask::Full,
        (Value::Null, Some(chunk)) => Mask::Chunked(chunk),
        _ => Mask::Sliding(size(&rules.layer.window, scope, &place)?),
    };
    let mask =
        if has(rules.layer.bidirectional.as_ref(), scope, &at_layer("layer.bidirectional", index))?
        {
            match mask {
                Mask::Sliding(window) => Mask::BidirectionalSliding(window),
                _ => Mask::Bidirectional,
            }
        } else {
            mask
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
    let is = |rule: &Option<Expr>, place: &str| has(rule.as_ref(), scope, &at_layer(place, index));
    let clamp = |rule: &Option<Expr>, place: &str| {
        let (Some(rule), place) = (rule, at_layer(place, index)) else { return Ok(None) };
        match evaluate(rule, scope, &place)?.as_float() {
            None | Some(0.0) => Ok(None),
            Some(_) => factor(Some(rule), scope, &place),
        }
    };
    let only = match &rules.layer.only {
        Some(rule) if evaluate(rule, scope, &at_layer("layer.only", index))? != Value::Null => {
            Some(named(rule, scope, &at_layer("layer.only", index))?)
        }
        _ => None,
    };
    Ok(Layer {
        mask,
        rope,
        moe: is(&rules.layer.moe, "layer.moe")?,
        linear_attention: is(&rules.layer.delta, "layer.delta")?,
        parallel_attention: is(&rules.layer.both, "layer.both")?,
        short_convolution: is(&rules.layer.convolution, "layer.convolution")?,
        reuses_top_k: is(&rules.layer.shares_keys, "layer.shares_keys")?,
        block_sparse: is(&rules.layer.chooses_blocks, "layer.chooses_blocks")?,
        second_attention: is(&rules.layer.second, "layer.second")?,
        compressed_kv: compressed_attention::compressed_kv(&rules.layer, scope, index)?,
        hash_routing: compressed_attention::hash_routing(&rules.layer, scope, index)?,
        only,
        clamp: clamp(&rules.layer.clamp, "layer.clamp")?,
        dense_clamp: clamp(&rules.layer.dense_clamp, "layer.dense_clamp")?,
    })
}

/// What the position embeddings of a model depend on.
struct Ropes<'a> {
    family: &'a FamilyRules<'a>,
    config: &'a Map<String, Json>,
    scope: &'a Scope<'a>,
    max_positions: u32,
    /// Of attention and of the second form of attention.
    head_dims: [u32; 2],
}

impl Ropes<'_> {
    fn resolve(
        &self,
        rules: &RopeRules,
        place: &str,
    ) -> Result<(RopeParameters, Rope), ResolveError> {
        self.with_theta(rules, place, None)
    }

    /// Gives layers with a base of their own the position embedding of that base.
    fn of_layers(
        &self,
        layers: &mut [Layer],
        scopes: &[Scope<'_>],
        all: &mut Vec<Rope>,
    ) -> Result<(), ResolveError> {
        let rules = &self.family.pack.file.spec;
        let Some(rule) = &rules.layer.theta else { return Ok(()) };
        for (index, (layer, scope)) in layers.iter_mut().zip(scopes).enumerate() {
            let place = at_layer("layer.theta", index);
            if layer.rope.is_none() || evaluate(rule, scope, &place)? == Value::Null {
                continue;
            }
            let theta = positive(rule, scope, &place, MAX_THETA)?;
            let (_, rope) = self.with_theta(&rules.rope, "rope", Some(theta))?;
            let found = all.iter().position(|other| *other == rope);
            layer.rope = Some(found.unwrap_or(all.len()) as u32);
            if found.is_none() {
                all.push(rope);
            }
        }
        Ok(())
    }

    fn with_theta(
        &self,
        rules: &RopeRules,
        place: &str,
        own_theta: Option<f64>,
    ) -> Result<(RopeParameters, Rope), ResolveError> {
        let at = |field: &str| format!("{place}.{field}");
        let width = size(&rules.width, self.scope, &at("width"))?;
        let head_dim = self.head_dims[usize::from(rules.second_heads)];
        if width > head_dim {
            let expected = format!("at most the head's {head_dim}");
            return Err(wrong(&rules.width, &at("width"), &expected, &width.to_string()));
        }
        let theta = |rule: &Expr, field| positive(rule, self.scope, &at(field), MAX_THETA);
        let stated = rules.theta.as_ref().map(|rule| theta(rule, "theta")).transpose()?;
        let stated = own_theta.or(stated);
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
        let mut parameters = RopeParameters::parse(self.config, &request)?;
        let stated = match &mut parameters.scaling {
            Scaling::Long(long) => Some(&mut long.attention_factor),
            Scaling::Yarn(yarn) => Some(&mut yarn.attention_factor),
            _ => None,
        };
        if let (Some(rule), Some(stated)) = (&rules.attention_factor, stated)
            && evaluate(rule, self.scope, &at("attention_factor"))? != Value::Null
        {
            *stated = positive(rule, self.scope, &at("attention_factor"), MAX_SCALE)?;
        }
        let style = named(&rules.style, self.scope, &at("style"))?;
        let mut rope = parameters.resolve(width, style)?;
        if rules.backwards {
            let long = rope.long.iter_mut().flat_map(|long| &mut long.inv_freq);
            rope.inv_freq.iter_mut().chain(long).for_each(|freq| freq.0 = -freq.0);
        }
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
