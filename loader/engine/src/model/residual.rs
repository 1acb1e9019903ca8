//! Residual wiring: how a layer's mixer and feed-forward part read the residual stream and add to it.
//!
//! | wiring | formula |
//! |---|---|
//! | sequential | `x += post(mixer(pre(x)))`, then `x += post(ffn(pre(x)))` |
//! | parallel | `x += mixer(pre(x)) + ffn(pre(x))`, one all-reduce for both |
//! | hyper-connections | several streams; see [`hyper_connections`](super::hyper_connections) |
//!
//! Pre-norm (Llama), post-norm (`OLMo` 2) and sandwich norm (Gemma 2) are sequential wirings with other
//! norms.

use shardpack_formats::hex::HexF32;

use super::{
    LoadError,
    hyper_connections::HyperConnection,
    load::{LayerInfo, Loader},
    norm::Norm,
    step::ForwardPass,
};
use crate::backend::Backend;

/// The residual wiring of one layer.
pub(super) enum Residual<B: Backend> {
    /// The feed-forward part reads what the mixer has added to.
    Sequential(Wiring<B>),
    /// Both parts read the same state (GPT-J, Phi, Cohere).
    Parallel(Wiring<B>),
    /// Several residual streams.
    HyperConnections(Box<StreamWiring<B>>),
}

/// One residual stream.
pub(super) struct Wiring<B: Backend> {
    pub(super) mixer: PartNorms<B>,
    pub(super) ffn: PartNorms<B>,
    /// Factor on what each part adds (`residual_multiplier`, Granite).
    part_scale: Option<HexF32>,
    /// Factor on the residual stream after the layer (`layer_scalar`, Gemma 3n).
    layer_scale: Option<f32>,
}

/// Several residual streams.
pub(super) struct StreamWiring<B: Backend> {
    pub(super) mixer: HyperConnection<B>,
    pub(super) ffn: HyperConnection<B>,
    pub(super) norms: LayerNorms<B>,
}

/// Norms of both parts of a layer.
pub(super) struct LayerNorms<B: Backend> {
    pub(super) mixer: PartNorms<B>,
    pub(super) ffn: PartNorms<B>,
}

/// Norms around one part of a layer; absent where the model has none.
pub(super) struct PartNorms<B: Backend> {
    pre: Option<Norm<B>>,
    post: Option<Norm<B>>,
}

impl<B: Backend> Residual<B> {
    pub(super) fn load(loader: &Loader<'_, B>, layer: &LayerInfo<'_>) -> Result<Self, LoadError> {
        let (block, parts) = (&loader.spec.block, layer.parts());
        let norm = |name: &Option<String>, is_there: bool| match name {
            Some(name) if is_there => {
                Norm::load(loader, &layer.name(name), &loader.hidden()).map(Some)
            }
            _ => Ok(None),
        };
        let mixer = PartNorms {
            pre: norm(&block.before_attention, parts.mixer)?,
            post: norm(&block.after_attention, parts.mixer)?,
        };
        let ffn = PartNorms {
            pre: norm(&block.before_ffn, parts.ffn)?,
            post: norm(&block.after_ffn, parts.ffn)?,
        };
        let layer_scale = match &block.layer_scale {
            Some(name) => Some(loader.number(&layer.name(name))?),
            None => None,
        };
        if let Some(streams) = &loader.spec.hyper_connections {
            let connection =
                |module: &str| HyperConnection::load(loader, streams, &layer.name(module));
            return Ok(Self::HyperConnections(Box::new(StreamWiring {
                mixer: connection("attn_hc")?,
                ffn: connection("ffn_hc")?,
                norms: LayerNorms { mixer, ffn },
            })));
        }
        let wiring = Wiring { mixer, ffn, part_scale: block.residual_scale, layer_scale };
        let is_parallel = block.parallel && parts.mixer && parts.ffn;
        Ok(if is_parallel { Self::Parallel(wiring) } else { Self::Sequential(wiring) })
    }
}

impl<B: Backend> Wiring<B> {
    /// The residual stream and what a part adds to it.
    pub(super) fn add(
        &self,
        pass: &ForwardPass<'_, B>,
        x: B::Tensor,
        part: B::Tensor,
    ) -> B::Tensor {
        let part = match self.part_scale {
            Some(scale) => pass.backend.scale(part, scale.0),
            None => part,
        };
        pass.backend.add(x, &part)
    }

    /// The residual stream as the next layer reads it.
    pub(super) fn scaled(&self, pass: &ForwardPass<'_, B>, x: B::Tensor) -> B::Tensor {
        match self.layer_scale {
            Some(scale) => pass.backend.scale(x, scale),
            None => x,
        }
    }
}

impl<B: Backend> PartNorms<B> {
    /// What the part reads, if that is not `x` itself.
    pub(super) fn read(&self, pass: &ForwardPass<'_, B>, x: &B::Tensor) -> Option<B::Tensor> {
        self.pre.as_ref().map(|norm| norm.apply(pass.backend, x))
    }

    /// What the part adds to the residual stream, of its all-reduced result.
    pub(super) fn written(&self, pass: &ForwardPass<'_, B>, part: B::Tensor) -> B::Tensor {
        match &self.post {
            Some(norm) => norm.apply(pass.backend, &part),
            None => part,
        }
    }
}
