//! What the configurations of single architectures say beyond that of most.

use serde_json::{Map, Value as Json, json};

use super::{
    super::SHORT_FREQUENCIES, BESIDE, FACTOR_TOLERANCE, Frequencies, GgufError, LONG_FREQUENCIES,
    Model, decimal,
};

/// Keys that are read of an architecture.
pub(super) fn keys(architecture: &str) -> &'static [&'static str] {
    match architecture {
        "gemma2" => &["attn_logit_softcapping", "final_logit_softcapping"],
        "gemma3" => &["final_logit_softcapping", "rope.freq_base_swa"],
        "phi3" => &["rope.scaling.attn_factor"],
        _ => &[],
    }
}

/// Whether layers of an architecture can see a window.
pub(super) fn has_windows(architecture: &str) -> bool {
    matches!(architecture, "gemma2" | "gemma3" | "phi3" | "gpt-oss")
}

/// Adds what is an architecture's own; heads, hidden size and the size of a head are known.
pub(super) fn add(
    model: &Model,
    (heads, hidden, head): (u64, u64, u64),
    frequencies: &Frequencies,
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    let name = model.architecture.name;
    if let Some(window) = model.count("attention.sliding_window")?.filter(|window| *window > 0)
        && has_windows(name)
    {
        config.insert("sliding_window".to_owned(), window.into());
    }
    match name {
        "gemma2" | "gemma3" => gemma(model, (heads, hidden, head), config),
        "phi3" => phi3(model, head, frequencies, config),
        "granite" => granite(model, head, config),
        "gpt-oss" => {
            // Of this model alone the bounds of the stretched frequencies are not rounded.
            if let Some(Json::Object(scaling)) = config.get_mut("rope_scaling") {
                scaling.insert("truncate".to_owned(), false.into());
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn gemma(
    model: &Model,
    (heads, hidden, head): (u64, u64, u64),
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
    let is_third = model.architecture.name == "gemma3";
    for key in ["hidden_act", "hidden_activation"] {
        set(key, "gelu_pytorch_tanh".into());
    }
    // llama.cpp knows the largest of each generation, whose queries are scaled otherwise, by its
    // layers.
    let largest = if is_third { 62 } else { 46 };
    let is_largest = model.needed_count("block_count")? == largest;
    set("query_pre_attn_scalar", if is_largest { hidden / heads } else { head }.into());
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = decimal(model, key)?.filter(|cap| *cap != 0.0) {
            set(key, cap.into());
        }
    }
    if is_third {
        set("rope_local_base_freq", decimal(model, "rope.freq_base_swa")?.unwrap_or(1e4).into());
        let windows = model.count("attention.sliding_window")?.is_some_and(|window| window > 0);
        // Each sixth layer sees everything, or every one.
        set("sliding_window_pattern", if windows { 6 } else { 1 }.into());
    }
    Ok(())
}

/// Zero is what llama.cpp takes for an absent key: nothing is multiplied.
fn granite(model: &Model, head: u64, config: &mut Map<String, Json>) -> Result<(), GgufError> {
    let factor = |key: &str| Ok(decimal(model, key)?.filter(|value| *value != 0.0));
    for (key, ours) in [
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ] {
        if let Some(value) = factor(key)? {
            config.insert(ours.to_owned(), value.into());
        }
    }
    let scale = factor("attention.scale")?.unwrap_or(1.0 / libm::sqrt(head as f64));
    config.insert("attention_multiplier".to_owned(), scale.into());
    Ok(())
}

fn phi3(
    model: &Model,
    head: u64,
    frequencies: &Frequencies,
    config: &mut Map<String, Json>,
) -> Result<(), GgufError> {
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
    let rotated = model.count("rope.dimension_count")?.unwrap_or(head);
    if rotated > head {
        let problem = format!("is {rotated}, more than the {head} of a head");
        return Err(GgufError::key(model.name_of("rope.dimension_count"), problem));
    }
    if rotated < head {
        set("partial_rotary_factor", (rotated as f64 / head as f64).into());
    }
    let positions = model.needed_count("context_length")?;
    let original = model.count("rope.scaling.original_context_length")?;
    if let Some(original) = original {
        set("original_max_position_embeddings", original.into());
    }
    let (Some(long), Some(short)) = (&frequencies.long, &frequencies.short) else {
        let lone = frequencies.long.is_some() || frequencies.short.is_some();
        let problem = format!("it comes with {SHORT_FREQUENCIES} or not at all");
        let tensor = LONG_FREQUENCIES.to_owned();
        return if lone { Err(GgufError::Tensor { tensor, problem }) } else { Ok(()) };
    };
    if [long, short].iter().any(|factors| factors.len() as u64 != rotated / 2) {
        let problem = format!("expected {} factors, as {SHORT_FREQUENCIES} has", rotated / 2);
        return Err(GgufError::Tensor { tensor: LONG_FREQUENCIES.to_owned(), problem });
    }
    let original = original
        .filter(|original| *original > 1)
        .ok_or_else(|| model.missing("rope.scaling.original_context_length"))?;
    // What transformers makes of the positions, which the configuration does not state.
    let stretch = positions as f64 / original as f64;
    let expected = if stretch > 1.0 {
        libm::sqrt(1.0 + libm::log(stretch) / libm::log(original as f64))
    } else {
        1.0
    };
    let key = "rope.scaling.attn_factor";
    let stated = decimal(model, key)?.unwrap_or(expected);
    if (stated - expected).abs() > FACTOR_TOLERANCE * expected {
        let problem = format!("is {stated}, expected {expected}; {BESIDE}");
        return Err(GgufError::key(model.name_of(key), problem));
    }
    // The decimal that was meant, not that of its 32 bits.
    let decimals = |factors: &[f32]| -> Vec<Json> {
        let shortest =
            |factor: &f32| factor.to_string().parse::<f64>().map_or(Json::Null, Json::from);
        factors.iter().map(shortest).collect()
    };
    set(
        "rope_scaling",
        json!({
            "type": "longrope",
            "long_factor": decimals(long),
            "short_factor": decimals(short),
        }),
    );
    Ok(())
}
