//! Parts of the architecture that only some models have.

use super::{
    ResolveError,
    architecture::MAX_EPS,
    scopes::{at_layer, evaluate, flag, positive, size, wrong},
};
use crate::{
    expr::{Expr, Scope, Value},
    hex::HexF32,
    rope::{RopeParameters, Scaling},
    rules::{
        HyperConnectionRules, IndexerRules, LinearAttentionRules, MlaRules, MoeRules,
        MultiplierRules, RouterRules, ShortConvolutionRules, SpecRules,
    },
    spec::{
        Activation, ClampedSwiglu, ExpertGroups, GroupScore, HyperConnections, Indexer, Layer,
        LinearAttention, LinearAttentionKind, LinearAttentionMultipliers, Mla, Moe, MoeNames,
        Renormalise, RopeStyle, Router, RouterInput, Scores, SharedExpert, ShortConvolution,
    },
};

/// Largest factor, limit or offset of a router or an activation that is believed.
const MAX_FACTOR: f64 = 1e4;

pub(super) fn moe(
    rules: &MoeRules,
    activation: Activation,
    scope: &Scope<'_>,
) -> Result<Moe, ResolveError> {
    let experts = size(&rules.experts, scope, "moe.experts")?;
    let zero_experts = match &rules.identities {
        Some(rule) if evaluate(rule, scope, "moe.identities")? != Value::Int(0) => {
            size(rule, scope, "moe.identities")?
        }
        _ => 0,
    };
    let top_k = size(&rules.top_k, scope, "moe.top_k")?;
    let choices = experts.saturating_add(zero_experts);
    if top_k > choices {
        let expected = format!("at most {choices}, the experts");
        return Err(wrong(&rules.top_k, "moe.top_k", &expected, &top_k.to_string()));
    }
    let limits = (&rules.clamped_alpha, &rules.clamped_limit, rules.clamped_plain);
    let clamped = clamped(limits, scope, "moe")?;
    let shared = match &rules.shared_size {
        None => None,
        Some(rule) => match evaluate(rule, scope, "moe.shared_size")? {
            Value::Null | Value::Int(0) => None,
            _ => Some(SharedExpert {
                size: size(rule, scope, "moe.shared_size")?,
                gated: is(rules.shared_gated.as_ref(), scope, "moe.shared_gated")?,
                scale: maybe(rules.shared_scale.as_ref(), scope, "moe.shared_scale")?,
                limit: maybe(rules.shared_limit.as_ref(), scope, "moe.shared_limit")?,
            }),
        },
    };
    Ok(Moe {
        experts,
        zero_experts,
        top_k,
        size: size(&rules.size, scope, "moe.size")?,
        activation,
        clamped,
        bias: is(rules.bias.as_ref(), scope, "moe.bias")?,
        latent: match &rules.latent {
            Some(rule) if evaluate(rule, scope, "moe.latent")? != Value::Null => {
                Some(size(rule, scope, "moe.latent")?)
            }
            _ => None,
        },
        router: router(&rules.router, (choices, top_k), scope)?,
        shared,
        weighs_inputs: is(rules.weighs_inputs.as_ref(), scope, "moe.weighs_inputs")?,
        after: rules.after.clone(),
        parallel_dense: rules.beside.clone(),
        shortcut: rules.deferred,
        names: names(rules, scope)?,
    })
}

/// A clamped activation by its alpha, limit and whether it has no offset; none where alpha is null.
pub(super) fn clamped(
    (alpha, limit, plain): (&Option<Expr>, &Option<Expr>, bool),
    scope: &Scope<'_>,
    place: &str,
) -> Result<Option<ClampedSwiglu>, ResolveError> {
    let at = |field: &str| format!("{place}.clamped_{field}");
    let (Some(alpha), Some(limit)) = (alpha, limit) else { return Ok(None) };
    if evaluate(alpha, scope, &at("alpha"))? == Value::Null {
        return Ok(None);
    }
    Ok(Some(ClampedSwiglu {
        alpha: factor(alpha, scope, &at("alpha"))?,
        limit: factor(limit, scope, &at("limit"))?,
        plain,
    }))
}

fn router(
    rules: &RouterRules,
    (experts, top_k): (u32, u32),
    scope: &Scope<'_>,
) -> Result<Router, ResolveError> {
    let kinds = [
        ("softmax", Scores::Softmax),
        ("softmax_of_taken", Scores::SoftmaxOfTopK),
        ("sigmoid", Scores::Sigmoid),
        ("sqrt_softplus", Scores::SqrtSoftplus),
        ("sigmoid_of_taken", Scores::SigmoidOfTopK),
        ("sparse_mixer", Scores::SparseMixer),
    ];
    let renormalise = if flag(&rules.renormalise, scope, "moe.router.renormalise")? {
        let number = |rule: &Option<Expr>, place| {
            let Some(rule) = rule else { return Ok(HexF32(0.0)) };
            match evaluate(rule, scope, place)? {
                Value::Null => Ok(HexF32(0.0)),
                _ => factor(rule, scope, place),
            }
        };
        let added = number(&rules.added, "moe.router.added")?;
        Some(Renormalise { added, least: number(&rules.least, "moe.router.least")? })
    } else {
        None
    };
    let groups = groups(rules, experts, top_k, scope)?;
    let scale = rules.scale.as_ref();
    Ok(Router {
        scores: one_of(&rules.scores, scope, "moe.router.scores", &kinds)?,
        softcap: maybe(rules.softcap.as_ref(), scope, "moe.router.softcap")?,
        jitter: maybe(rules.jitter.as_ref(), scope, "moe.router.jitter")?,
        bias: is(rules.bias.as_ref(), scope, "moe.router.bias")?,
        correction: is(rules.correction.as_ref(), scope, "moe.router.correction")?,
        groups,
        renormalise,
        scale: scale.map_or(Ok(HexF32(1.0)), |rule| factor(rule, scope, "moe.router.scale"))?,
        input: match &rules.input {
            Some(input) => Some(RouterInput {
                gain: input.gain.clone(),
                scale: factor(&input.scale, scope, "moe.router.input.scale")?,
            }),
            None => None,
        },
        expert_scales: rules.expert_scales.clone(),
    })
}

/// Groups; none where all experts are in one, or all groups are kept.
fn groups(
    rules: &RouterRules,
    experts: u32,
    top_k: u32,
    scope: &Scope<'_>,
) -> Result<Option<ExpertGroups>, ResolveError> {
    let (Some(count_rule), Some(kept_rule), Some(by)) =
        (&rules.groups, &rules.groups_kept, &rules.groups_by)
    else {
        return Ok(None);
    };
    let count = size(count_rule, scope, "moe.router.groups")?;
    if count == 1 {
        return Ok(None);
    }
    let kept = size(kept_rule, scope, "moe.router.groups_kept")?;
    if !experts.is_multiple_of(count) {
        let expected = format!("a divisor of {experts}, the experts");
        return Err(wrong(count_rule, "moe.router.groups", &expected, &count.to_string()));
    }
    if kept > count || kept * (experts / count) < top_k {
        let expected = format!("at most {count} groups, with {top_k} experts at least");
        return Err(wrong(kept_rule, "moe.router.groups_kept", &expected, &kept.to_string()));
    }
    let kinds = [("best", GroupScore::Best), ("best_two", GroupScore::BestTwo)];
    let by = one_of(by, scope, "moe.router.groups_by", &kinds)?;
    if by == GroupScore::BestTwo && experts / count < 2 {
        let expected = "two experts in each group at least";
        return Err(wrong(count_rule, "moe.router.groups", expected, &count.to_string()));
    }
    Ok((kept < count).then_some(ExpertGroups { count, kept, by }))
}

fn names(rules: &MoeRules, scope: &Scope<'_>) -> Result<MoeNames, ResolveError> {
    let usual = MoeNames::default();
    let name = |rule: &Option<Expr>, usual: String| match rule {
        None => Ok(usual),
        Some(rule) => match evaluate(rule, scope, "moe.names")? {
            Value::Text(name) => Ok(name),
            other => Err(wrong(rule, "moe.names", "a text", &other.to_string())),
        },
    };
    let rules = &rules.names;
    Ok(MoeNames {
        block: name(&rules.block, usual.block)?,
        router: name(&rules.router, usual.router)?,
        correction: name(&rules.correction, usual.correction)?,
        experts: name(&rules.experts, usual.experts)?,
        shared: name(&rules.shared, usual.shared)?,
        shared_gate: name(&rules.shared_gate, usual.shared_gate)?,
    })
}

pub(super) fn mla(rules: &MlaRules, scope: &Scope<'_>) -> Result<Mla, ResolveError> {
    let q_rank = match evaluate(&rules.q_rank, scope, "mla.q_rank")? {
        Value::Null => None,
        _ => Some(size(&rules.q_rank, scope, "mla.q_rank")?),
    };
    Ok(Mla {
        q_rank,
        kv_rank: size(&rules.kv_rank, scope, "mla.kv_rank")?,
        nope: size(&rules.nope, scope, "mla.nope")?,
        rope: size(&rules.rope, scope, "mla.rope")?,
        value: size(&rules.value, scope, "mla.value")?,
        eps: HexF32(positive(&rules.eps, scope, "mla.eps", MAX_EPS)? as f32),
        bias: is(rules.bias.as_ref(), scope, "mla.bias")?,
        kv_scale: maybe(rules.kv_scale.as_ref(), scope, "mla.kv_scale")?,
        indexer: match &rules.index {
            None => None,
            Some(index) => self::mla_index(index, rules, scope)?,
        },
    })
}

/// The indexer of sparse attention, if the model has it.
fn mla_index(
    rules: &IndexerRules,
    mla: &MlaRules,
    scope: &Scope<'_>,
) -> Result<Option<Indexer>, ResolveError> {
    if evaluate(&rules.heads, scope, "mla.index.heads")? == Value::Null {
        return Ok(None);
    }
    if evaluate(&mla.q_rank, scope, "mla.q_rank")? == Value::Null {
        let expected = "the latent of queries, which the indexer reads";
        return Err(wrong(&mla.q_rank, "mla.q_rank", expected, "null"));
    }
    index(rules, size(&mla.rope, scope, "mla.rope")?, scope, "mla.index").map(Some)
}

/// An indexer of a model that rotates `rope` elements of a head.
pub(super) fn index(
    rules: &IndexerRules,
    rope: u32,
    scope: &Scope<'_>,
    place: &str,
) -> Result<Indexer, ResolveError> {
    let at = |field: &str| format!("{place}.{field}");
    let width = size(&rules.width, scope, &at("width"))?;
    if width < rope {
        let expected = format!("at least the rotated part's {rope}");
        return Err(wrong(&rules.width, &at("width"), &expected, &width.to_string()));
    }
    let styles = [("half", RopeStyle::Half), ("interleaved", RopeStyle::Interleaved)];
    Ok(Indexer {
        heads: size(&rules.heads, scope, &at("heads"))?,
        width,
        top_k: size(&rules.top_k, scope, &at("top_k"))?,
        style: one_of(&rules.style, scope, &at("style"), &styles)?,
        eps: HexF32(positive(&rules.eps, scope, &at("eps"), MAX_EPS)? as f32),
        rotated_last: rules.rotated_last,
    })
}

/// A layer reuses the top-k indices of an earlier one, so the first layer has an indexer of its own.
pub(super) fn check_shared_keys(
    rules: &SpecRules,
    mla: Option<&Mla>,
    layers: &[Layer],
) -> Result<(), ResolveError> {
    let Some(rule) = &rules.layer.shares_keys else { return Ok(()) };
    let indexed = mla.is_some_and(|mla| mla.indexer.is_some());
    let wrongly = |(index, layer): (usize, &Layer)| layer.reuses_top_k && (index == 0 || !indexed);
    match layers.iter().enumerate().position(wrongly) {
        None => Ok(()),
        Some(index) => {
            let place = at_layer("layer.shares_keys", index);
            Err(wrong(rule, &place, "an earlier layer with an indexer", "none"))
        }
    }
}

/// The output of shortcut-connected experts is added a layer later: that layer must exist and have no
/// experts.
pub(super) fn check_shortcut(rules: &SpecRules, layers: &[Layer]) -> Result<(), ResolveError> {
    let deferred = rules.moe.as_ref().is_some_and(|moe| moe.deferred);
    let Some(rule) = rules.layer.moe.as_ref().filter(|_| deferred) else { return Ok(()) };
    let adds = |index: usize| layers.get(index).is_some_and(|layer| !layer.moe);
    let wrongly = |(index, layer): (usize, &Layer)| layer.moe && !adds(index + 1);
    match layers.iter().enumerate().position(wrongly) {
        None => Ok(()),
        Some(index) => {
            let place = at_layer("layer.moe", index);
            Err(wrong(rule, &place, "a layer without experts behind it", "none"))
        }
    }
}

/// Factor of YaRN on the scores of MLA: the square of `0.1 ·
/// mscale_all_dim · ln(factor) + 1`.
pub(super) fn stretch(rope: &RopeParameters) -> f64 {
    let Scaling::Yarn(yarn) = &rope.scaling else { return 1.0 };
    let [_, all] = yarn.mscale;
    match all {
        Some(all) if all != 0.0 && yarn.factor > 1.0 => {
            let scale = 0.1 * all * libm::log(yarn.factor) + 1.0;
            scale * scale
        }
        _ => 1.0,
    }
}

pub(super) fn linear_attention(
    rules: &LinearAttentionRules,
    scope: &Scope<'_>,
) -> Result<LinearAttention, ResolveError> {
    let key_heads = size(&rules.key_heads, scope, "delta.key_heads")?;
    let value_heads = size(&rules.value_heads, scope, "delta.value_heads")?;
    if value_heads % key_heads != 0 {
        let expected = format!("a multiple of {key_heads}, the key heads");
        let found = value_heads.to_string();
        return Err(wrong(&rules.value_heads, "delta.value_heads", &expected, &found));
    }
    let full_rank_gates = is(rules.direct.as_ref(), scope, "delta.direct")?;
    let decay_limit = match &rules.fade_limit {
        Some(rule) if evaluate(rule, scope, "delta.fade_limit")? != Value::Null => {
            Some(factor(rule, scope, "delta.fade_limit")?)
        }
        _ => None,
    };
    if let (Some(rule), false) = (
        rules.fade_limit.as_ref().or(rules.direct.as_ref()),
        rules.rule == LinearAttentionKind::KimiDeltaAttention,
    ) && (full_rank_gates || decay_limit.is_some())
    {
        return Err(wrong(rule, "delta", "kind kimi_delta", "another kind"));
    }
    Ok(LinearAttention {
        key_heads,
        value_heads,
        key_dim: size(&rules.key_dim, scope, "delta.key_dim")?,
        value_dim: size(&rules.value_dim, scope, "delta.value_dim")?,
        kernel: size(&rules.kernel, scope, "delta.kernel")?,
        eps: HexF32(positive(&rules.eps, scope, "delta.eps", MAX_EPS)? as f32),
        kind: rules.rule,
        conv_bias: is(rules.conv_bias.as_ref(), scope, "delta.conv_bias")?,
        no_output_norm: match &rules.normed {
            Some(rule) => !flag(rule, scope, "delta.normed")?,
            None => false,
        },
        multipliers: match &rules.factors {
            Some(rules) => multipliers(rules, scope)?,
            None => None,
        },
        full_rank_gates,
        decay_limit,
    })
}

/// Multipliers; none where all are one.
fn multipliers(
    rules: &MultiplierRules,
    scope: &Scope<'_>,
) -> Result<Option<LinearAttentionMultipliers>, ResolveError> {
    let of = |rule| factor(rule, scope, "delta.factors");
    let [q, k, v] = [of(&rules.q)?, of(&rules.k)?, of(&rules.v)?];
    let [z, a, out] = [of(&rules.z)?, of(&rules.a)?, of(&rules.out)?];
    let all_one = [q, k, v, z, a, out].iter().all(|factor| factor.0 == 1.0);
    Ok((!all_one).then_some(LinearAttentionMultipliers { q, k, v, z, a, out }))
}

pub(super) fn short_convolution(
    rules: &ShortConvolutionRules,
    scope: &Scope<'_>,
) -> Result<ShortConvolution, ResolveError> {
    Ok(ShortConvolution { kernel: size(&rules.kernel, scope, "convolution.kernel")? })
}

/// Hyper-connections, if the model has them.
pub(super) fn hyper_connections(
    rules: &HyperConnectionRules,
    scope: &Scope<'_>,
) -> Result<HyperConnections, ResolveError> {
    Ok(HyperConnections {
        expansion_rate: size(&rules.count, scope, "streams.count")?,
        magnitude: factor(&rules.magnitude, scope, "streams.magnitude")?,
        eps: HexF32(positive(&rules.eps, scope, "streams.eps", MAX_EPS)? as f32),
        sinkhorn_iterations: match &rules.mixed {
            Some(rule) if evaluate(rule, scope, "streams.mixed")? != Value::Null => {
                Some(size(rule, scope, "streams.mixed")?)
            }
            _ => None,
        },
    })
}

fn factor(rule: &Expr, scope: &Scope<'_>, place: &str) -> Result<HexF32, ResolveError> {
    Ok(HexF32(positive(rule, scope, place, MAX_FACTOR)? as f32))
}

/// None where there is no rule or its value is null or 0.
fn maybe(
    rule: Option<&Expr>,
    scope: &Scope<'_>,
    place: &str,
) -> Result<Option<HexF32>, ResolveError> {
    let Some(rule) = rule else { return Ok(None) };
    match evaluate(rule, scope, place)?.as_float() {
        None | Some(0.0) => Ok(None),
        Some(_) => factor(rule, scope, place).map(Some),
    }
}

/// A flag that is false where no rule is.
fn is(rule: Option<&Expr>, scope: &Scope<'_>, place: &str) -> Result<bool, ResolveError> {
    rule.map_or(Ok(false), |rule| flag(rule, scope, place))
}

fn one_of<T: Copy>(
    rule: &Expr,
    scope: &Scope<'_>,
    place: &str,
    kinds: &[(&str, T)],
) -> Result<T, ResolveError> {
    let value = evaluate(rule, scope, place)?;
    let found = kinds.iter().find(|(name, _)| value == Value::Text((*name).to_owned()));
    found.map(|(_, kind)| *kind).ok_or_else(|| {
        let names: Vec<&str> = kinds.iter().map(|(name, _)| *name).collect();
        wrong(rule, place, &names.join(" or "), &value.to_string())
    })
}
