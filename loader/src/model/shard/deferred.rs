//! What must hold where experts' sums are added a layer later.

use shardpack_formats::Spec;

use super::{LoadError, Place, layout_error};

/// That what experts leave is added by a layer that is run here, and that nothing else is done to it.
pub(super) fn check(spec: &Spec, stage: Option<&Place>) -> Result<(), LoadError> {
    let Some(moe) = spec.moe.as_ref().filter(|moe| moe.deferred) else { return Ok(()) };
    if moe.beside.is_some() || moe.after.is_some() {
        return Err(layout_error("moe.deferred", &"experts alone", &"norms of what they give"));
    }
    let layers = stage.map_or(0..spec.layers.len(), |stage| stage.layers.clone());
    let adds = |layer: usize| {
        layers.contains(&layer) && !spec.layers[layer].moe && spec.layers[layer].only.is_none()
    };
    let leaves = |layer: usize| spec.layers[layer].moe;
    if layers.start > 0 && leaves(layers.start - 1) {
        let what = format!("layer {}, the first that is run here", layers.start);
        return Err(layout_error(&what, &"a sum of its own", &"that of experts before it"));
    }
    match layers.clone().find(|layer| leaves(*layer) && !adds(layer + 1)) {
        None => Ok(()),
        Some(layer) => {
            let what = format!("experts of layer {layer}");
            Err(layout_error(&what, &"a dense layer behind them", &"none"))
        }
    }
}
