//! What one rank holds of recurrent layers: linear attention and short convolutions.

use std::ops::Range;

use shardpack_formats::{Spec, spec::LinearAttentionKind};
use shardpack_manifests::Layout;

use super::{LoadError, MAX_WIDTH, layout_error, partition, ranges, read_heads};

/// Heads of linear attention.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinearHeads {
    /// Key heads held here.
    pub keys: Range<usize>,
    /// Value heads held here.
    pub values: Range<usize>,
    /// For each value head held here, the index of its key head among those held here.
    pub v_to_k: Vec<usize>,
    /// Whether value heads of one key head may be on several ranks.
    pub by_values: bool,
}

/// The axis of value heads, where they are what is sharded.
const VALUE_AXIS: &str = "lin_v";

pub(super) fn linear(spec: &Spec, layout: &Layout, rank: usize) -> Result<LinearHeads, LoadError> {
    let Some(delta) = &spec.linear_attention else {
        return match spec.layers.iter().position(|layer| layer.linear_attention) {
            None => Ok(LinearHeads::default()),
            Some(layer) => {
                let what = format!("layer {layer}");
                Err(layout_error(&what, &"no linear attention", &"linear attention"))
            }
        };
    };
    let sizes = [delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.kernel];
    let widths = [(delta.key_heads, delta.key_dim), (delta.value_heads, delta.value_dim)]
        .map(|(heads, width)| heads.saturating_mul(width));
    for width in sizes.into_iter().chain(widths) {
        if width == 0 || u64::from(width) > MAX_WIDTH {
            return Err(layout_error("a width of delta", &format!("1 to {MAX_WIDTH}"), &width));
        }
    }
    if delta.value_heads % delta.key_heads != 0 {
        let expected = format!("a multiple of {}", delta.key_heads);
        return Err(layout_error("linear_attention.value_heads", &expected, &delta.value_heads));
    }
    if delta.no_output_norm && delta.kind != LinearAttentionKind::Mamba2 {
        let what = "linear_attention.no_output_norm";
        return Err(layout_error(what, &"a norm, which the delta rule has", &"none"));
    }
    let per_key = (delta.value_heads / delta.key_heads) as usize;
    let by_values = layout.axes.contains_key(VALUE_AXIS);
    let (key_heads, key_dim) = (delta.key_heads.into(), delta.key_dim.into());
    let (keys, values) = if by_values {
        let (heads, width) = (delta.value_heads.into(), delta.value_dim.into());
        let values = partition(layout, VALUE_AXIS, heads, width)?[rank].clone();
        (ranges(layout, "lin_k", key_heads, key_dim)?[rank].clone(), values)
    } else {
        let keys = partition(layout, "lin_k", key_heads, key_dim)?[rank].clone();
        (keys.clone(), keys.start * per_key..keys.end * per_key)
    };
    let v_to_k = read_heads(|head| head / per_key, rank, &values, &keys)?;
    Ok(LinearHeads { keys, values, v_to_k, by_values })
}

/// Channels of short convolutions held here.
pub(super) fn channels(
    spec: &Spec,
    layout: &Layout,
    rank: usize,
) -> Result<Range<usize>, LoadError> {
    let Some(convolution) = &spec.short_convolution else {
        return match spec.layers.iter().position(|layer| layer.short_convolution) {
            None => Ok(0..0),
            Some(layer) => {
                let what = format!("layer {layer}");
                Err(layout_error(&what, &"no short convolution", &"a short convolution"))
            }
        };
    };
    if convolution.kernel == 0 || u64::from(convolution.kernel) > MAX_WIDTH {
        let expected = format!("1 to {MAX_WIDTH}");
        return Err(layout_error("short_convolution.kernel_size", &expected, &convolution.kernel));
    }
    Ok(partition(layout, "conv", spec.hidden_size.into(), 1)?[rank].clone())
}
