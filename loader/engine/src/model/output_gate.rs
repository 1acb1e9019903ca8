//! Gates on the heads' results, from a projection of the layer's input
//! ([`HeadGate`](shardpack_formats::spec::HeadGate)).

use shardpack_formats::spec::{GateFunction, HeadGate};

use super::{
    LoadError,
    load::{Loader, TensorSlice},
};
use crate::backend::Backend;

/// The gate of one layer's heads.
pub(super) struct OutputGate<B: Backend> {
    /// `[heads, hidden_size]`, or one row for each element of the heads.
    matrix: B::Matrix,
    function: GateFunction,
}

impl<B: Backend> OutputGate<B> {
    /// None on a rank without heads. A gate has a row for each head, or for each of its elements.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        gate: &HeadGate,
        module: &str,
        [per_head, per_element]: [&TensorSlice; 2],
    ) -> Result<Option<Self>, LoadError> {
        let rows = if gate.per_head { per_head } else { per_element };
        let matrix = loader.matrix(&format!("{module}.{}", gate.module), rows, &loader.hidden())?;
        Ok(matrix.map(|matrix| Self { matrix, function: gate.function }))
    }

    /// Heads times the gates that follow from `x`.
    pub(super) fn apply(&self, backend: &B, x: &B::Tensor, heads: B::Tensor) -> B::Tensor {
        let gate = backend.linear(x, &self.matrix);
        match self.function {
            GateFunction::Sigmoid => backend.sigmoid_gate(heads, &gate),
            GateFunction::Softplus => backend.softplus_gate(heads, &gate),
        }
    }
}
