//! Checks of shortcut-connected mixtures of experts.

use shardpack_formats::Spec;

use super::{LoadError, PipelineStage, layout_error};

/// That the layer which adds the shortcut is on the same stage, and that no norm follows the experts.
pub(super) fn check(spec: &Spec, stage: Option<&PipelineStage>) -> Result<(), LoadError> {
    let Some(moe) = spec.moe.as_ref().filter(|moe| moe.shortcut) else { return Ok(()) };
    if moe.parallel_dense.is_some() || moe.after.is_some() {
        return Err(layout_error("moe.shortcut", &"experts without norms after them", &"norms"));
    }
    let layers = stage.map_or(0..spec.layers.len(), |stage| stage.layers.clone());
    let adds = |layer: usize| {
        layers.contains(&layer) && !spec.layers[layer].moe && spec.layers[layer].only.is_none()
    };
    let leaves = |layer: usize| spec.layers[layer].moe;
    if layers.start > 0 && leaves(layers.start - 1) {
        let what = format!("layer {}, the first of its stage", layers.start);
        return Err(layout_error(&what, &"no shortcut into it", &"that of the layer before"));
    }
    match layers.clone().find(|layer| leaves(*layer) && !adds(layer + 1)) {
        None => Ok(()),
        Some(layer) => {
            let what = format!("experts of layer {layer}");
            Err(layout_error(&what, &"a dense layer after it, which adds the shortcut", &"none"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use shardpack_formats::spec::{Layer, LayerPart, Moe};

    use super::*;
    use crate::testing::models;

    /// Experts in these layers.
    fn spec(experts: &[bool]) -> Spec {
        let moe: Moe = serde_json::from_value(json!({
            "experts": 4, "zero_experts": 2, "top_k": 2, "intermediate_size": 32, "activation": "silu_glu",
            "router": {"scoring": "softmax", "scale": "3f800000"}, "shortcut": true,
        }))
        .unwrap();
        let layers = experts.iter().map(|moe| Layer { moe: *moe, ..Layer::plain() }).collect();
        Spec { moe: Some(moe), layers, ..models::spec("llama") }
    }

    fn stage(layers: std::ops::Range<usize>) -> PipelineStage {
        let (is_first, is_last) = (layers.start == 0, layers.end == 4);
        PipelineStage {
            layers,
            ranks: 0..1,
            is_first,
            is_last,
            recv_from: None,
            send_to: Vec::new(),
        }
    }

    #[test]
    fn a_shortcut_is_added_on_the_stage_that_it_begins_on() {
        let pairs = spec(&[true, false, true, false]);
        for stage in [None, Some(stage(0..2)), Some(stage(2..4)), Some(stage(0..4))] {
            check(&pairs, stage.as_ref()).unwrap();
        }
        for stage in [stage(0..1), stage(1..4), stage(0..3)] {
            check(&pairs, Some(&stage)).unwrap_err();
        }
        check(&spec(&[true, true, false]), None).unwrap_err();
        check(&spec(&[false, true]), None).unwrap_err();
        let mut without = spec(&[true, false]);
        without.layers[1].only = Some(LayerPart::Attention);
        check(&without, None).unwrap_err();
    }
}
