//! The dense layers after the pooling of an embedding model: a few products of one vector for each
//! text, so they are plain loops in f32 on any backend. Every rank of the last stage holds them whole.

use super::{
    LoadError,
    load::{Loader, TensorSlice},
};
use crate::backend::Backend;

/// Dense layers, in their order.
pub(super) struct EmbeddingDense(Vec<DenseLayer>);

struct DenseLayer {
    /// `[outputs, inputs]`.
    weight: Vec<f32>,
    inputs: usize,
    bias: Option<Vec<f32>>,
    tanh: bool,
}

impl EmbeddingDense {
    pub(super) fn load<B: Backend>(loader: &Loader<'_, B>) -> Result<Self, LoadError> {
        let is_here = loader.shard.stage.as_ref().is_none_or(|stage| stage.is_last);
        let form = loader.spec.embedding.as_ref().filter(|_| is_here);
        let mut layers = Vec::new();
        let mut width = loader.spec.hidden_size;
        for (index, dense) in form.iter().flat_map(|form| form.dense.iter().enumerate()) {
            if dense.inputs != width {
                return Err(LoadError::Layout {
                    what: format!("embedding.dense[{index}].inputs"),
                    expected: width.to_string(),
                    found: dense.inputs.to_string(),
                });
            }
            width = dense.outputs;
            let [outputs, inputs] =
                [dense.outputs, dense.inputs].map(|len| TensorSlice::whole(len as usize));
            let name = |part: &str| format!("embedding.dense.{index}.{part}");
            let bias =
                dense.bias.then(|| loader.float_values(&name("bias"), &[&outputs])).transpose()?;
            layers.push(DenseLayer {
                weight: loader.float_values(&name("weight"), &[&outputs, &inputs])?,
                inputs: dense.inputs as usize,
                bias,
                tanh: dense.tanh,
            });
        }
        Ok(Self(layers))
    }

    pub(super) fn apply(&self, mut vector: Vec<f32>) -> Vec<f32> {
        if vector.is_empty() {
            // On a rank of an earlier stage.
            return vector;
        }
        for layer in &self.0 {
            vector = layer.apply(&vector);
        }
        vector
    }
}

impl DenseLayer {
    fn apply(&self, vector: &[f32]) -> Vec<f32> {
        let dot = |(index, row): (usize, &[f32])| {
            let products = row.iter().zip(vector).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[index]));
            let sum = products.sum::<f64>() + bias;
            (if self.tanh { libm::tanh(sum) } else { sum }) as f32
        };
        self.weight.chunks_exact(self.inputs).enumerate().map(dot).collect()
    }
}
