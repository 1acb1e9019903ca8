//! One decoder layer: a mixer, a feed-forward part, and their residual wiring.

use super::{
    LoadError,
    ffn::FeedForward,
    load::{LayerInfo, Loader},
    mixer::Mixer,
    residual::Residual,
    step::{CrossLayer, ForwardPass},
};
use crate::backend::{Backend, StepError};

/// One rank's part of a layer.
pub(super) struct Layer<B: Backend> {
    /// Absent in a layer with a feed-forward part alone (Nemotron-H).
    mixer: Option<Mixer<B>>,
    /// Absent in a layer with a mixer alone.
    ffn: Option<FeedForward<B>>,
    residual: Residual<B>,
}

impl<B: Backend> Layer<B> {
    pub(super) fn load(loader: &Loader<'_, B>, index: usize) -> Result<Self, LoadError> {
        let layer = LayerInfo::new(loader.spec, &loader.shard, index);
        let parts = layer.parts();
        Ok(Self {
            mixer: parts.mixer.then(|| Mixer::load(loader, &layer)).transpose()?,
            ffn: parts.ffn.then(|| FeedForward::load(loader, &layer)).transpose()?,
            residual: Residual::load(loader, &layer)?,
        })
    }

    /// The residual stream after this layer, `[tokens, hidden_size]` for each stream.
    pub(super) fn forward(
        &self,
        pass: &ForwardPass<'_, B>,
        cross: &mut CrossLayer<B>,
        x: B::Tensor,
        caches: &mut [&mut B::Cache],
    ) -> Result<B::Tensor, StepError> {
        let (mixer, ffn) = (self.mixer.as_ref(), self.ffn.as_ref());
        match &self.residual {
            Residual::Sequential(wiring) => {
                let x = match mixer {
                    None => x,
                    Some(mixer) => {
                        let read = wiring.mixer.read(pass, &x);
                        let read = read.as_ref().unwrap_or(&x);
                        let part = pass.all_reduce(mixer.forward(pass, cross, read, caches)?)?;
                        wiring.add(pass, x, wiring.mixer.written(pass, part))
                    }
                };
                let x = match ffn {
                    None => x,
                    Some(ffn) => {
                        let normed = wiring.ffn.read(pass, &x);
                        let normed = normed.as_ref().unwrap_or(&x);
                        let part = ffn.forward(pass, cross, &x, normed)?.all_reduce(pass)?;
                        wiring.add(pass, x, wiring.ffn.written(pass, part))
                    }
                };
                Ok(wiring.scaled(pass, x))
            }
            Residual::Parallel(wiring) => {
                let read = wiring.mixer.read(pass, &x);
                let read = read.as_ref().unwrap_or(&x);
                let mixed = match mixer {
                    Some(mixer) => mixer.forward(pass, cross, read, caches)?,
                    None => None,
                };
                let own = wiring.ffn.read(pass, &x);
                let part = match ffn {
                    Some(ffn) => {
                        let computed =
                            ffn.forward(pass, cross, &x, own.as_ref().unwrap_or(read))?;
                        computed.all_reduce_with(pass, mixed)?
                    }
                    None => pass.all_reduce(mixed)?,
                };
                Ok(wiring.scaled(pass, wiring.add(pass, x, part)))
            }
            Residual::HyperConnections(wiring) => {
                let mut streams = x;
                if let Some(mixer) = mixer {
                    let read = wiring.mixer.read(pass, &streams);
                    let normed = wiring.norms.mixer.read(pass, &read.x);
                    let normed = normed.as_ref().unwrap_or(&read.x);
                    let part = pass.all_reduce(mixer.forward(pass, cross, normed, caches)?)?;
                    let part = wiring.norms.mixer.written(pass, part);
                    streams = read.add(pass, streams, &part);
                }
                if let Some(ffn) = ffn {
                    let read = wiring.ffn.read(pass, &streams);
                    let normed = wiring.norms.ffn.read(pass, &read.x);
                    let normed = normed.as_ref().unwrap_or(&read.x);
                    let part = ffn.forward(pass, cross, &read.x, normed)?.all_reduce(pass)?;
                    let part = wiring.norms.ffn.written(pass, part);
                    streams = read.add(pass, streams, &part);
                }
                Ok(streams)
            }
        }
    }
}
