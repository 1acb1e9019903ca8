//! How the positions of rotary embeddings are stretched: by keys, or by a tensor of factors.

use std::f64::consts::PI;

use serde_json::{Value as Json, json};

use super::{
    super::{FREQUENCIES, Value},
    BESIDE, FACTOR_TOLERANCE, GgufError, Model, decimal,
};

/// Tokens that Llama 3 was trained with before its positions were stretched.
const LLAMA3_POSITIONS: f64 = 8192.0;

/// How positions are stretched, if they are.
pub(super) fn scaling(
    model: &Model,
    head: u64,
    frequencies: Option<&[f32]>,
) -> Result<Option<Json>, GgufError> {
    let key = "rope.scaling.type";
    let stated = decimal(model, "rope.scaling.factor")?;
    // The older name counts where the newer is not there; zero and one stretch nothing.
    let stated = stated.or(decimal(model, "rope.scale_linear")?).filter(|factor| *factor != 0.0);
    let kind = match model.value(key).map(Value::text) {
        None if stated.is_none_or(|factor| factor == 1.0) => "none",
        None => "linear",
        Some(kind) => kind.ok_or_else(|| GgufError::key(model.name_of(key), "is no text"))?,
    };
    let factor = || stated.ok_or_else(|| model.missing("rope.scaling.factor"));
    let stated = match kind {
        "none" => None,
        "linear" if stated.is_none() => None,
        "linear" => Some(json!({"rope_type": "linear", "factor": factor()?})),
        "yarn" => Some(yarn(model, factor()?)?),
        other => {
            let problem = format!("is {other:?}, which is not read; {BESIDE}");
            return Err(GgufError::key(model.name_of(key), problem));
        }
    };
    let Some(frequencies) = frequencies else { return Ok(stated) };
    let theta = decimal(model, "rope.freq_base")?.unwrap_or(10000.0);
    let wrong = |problem: &str| GgufError::Tensor {
        tensor: FREQUENCIES.to_owned(),
        problem: format!("{problem}; {BESIDE}"),
    };
    if stated.is_some() {
        return Err(wrong("the keys describe another scaling of positions"));
    }
    if frequencies.iter().all(|factor| *factor == 1.0) {
        return Ok(None);
    }
    llama3(frequencies, head, theta)
        .map(Some)
        .ok_or_else(|| wrong("its factors are not those of Llama 3"))
}

fn yarn(model: &Model, factor: f64) -> Result<Json, GgufError> {
    let key = "rope.scaling.original_context_length";
    let original = match model.count(key)?.filter(|count| *count > 0) {
        Some(original) => original,
        None => model.needed_count("context_length")?,
    };
    let mut scaling = json!({
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    });
    for (key, ours) in [("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")] {
        if let Some(value) = decimal(model, &format!("rope.scaling.{key}"))? {
            scaling[ours] = value.into();
        }
    }
    Ok(scaling)
}

/// The scaling of Llama 3 whose factors these are. The lowest frequencies have the whole factor.
fn llama3(frequencies: &[f32], head: u64, theta: f64) -> Option<Json> {
    if frequencies.len() as u64 != head / 2 {
        return None;
    }
    let whole = f64::from(*frequencies.last()?);
    let (low, high) = (1.0, 4.0);
    let expected = |index: usize| {
        let frequency = 1.0 / libm::pow(theta, 2.0 * index as f64 / head as f64);
        let wave = 2.0 * PI / frequency;
        if wave < LLAMA3_POSITIONS / high {
            return 1.0;
        }
        if wave > LLAMA3_POSITIONS / low {
            return whole;
        }
        let smooth = (LLAMA3_POSITIONS / wave - low) / (high - low);
        1.0 / ((1.0 - smooth) / whole + smooth)
    };
    let near = |(index, found): (usize, &f32)| {
        let expected = expected(index);
        (f64::from(*found) - expected).abs() <= FACTOR_TOLERANCE * expected
    };
    let right = whole >= 1.0 && frequencies.iter().enumerate().all(near);
    right.then(|| {
        json!({
            "rope_type": "llama3",
            "factor": whole,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": LLAMA3_POSITIONS as u64,
        })
    })
}
