//! Gradients by scales and biases of groups: while a graph is differentiated, arrays stand in the
//! place of what is stored of them.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use shardpack_mlx::{Array, Binary, Element, Library, MlxError, Quantized, Reduce, Unary};

use super::{Mlx, Tensor};
use crate::{
    backend::{StepError, Tensors as _},
    loading::PackageTensor,
};

/// Scales and biases of a matrix in affine groups, in the order in which they are stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupParams {
    /// One for each group.
    pub scales: Vec<f32>,
    /// One for each group.
    pub biases: Vec<f32>,
}

/// A matrix in affine groups whose scales and biases are not those of the package.
#[derive(Clone, Copy, Debug)]
pub struct Substitute<'a> {
    /// The package's scales, by which the matrix is known.
    pub stored: &'a PackageTensor,
    /// What stands in their place and in that of the biases.
    pub params: &'a GroupParams,
}

/// What a part of a model makes of its input, and what that does to the loss.
#[derive(Clone, Debug)]
pub struct PartGradients {
    /// What it makes.
    pub value: Vec<f32>,
    /// The loss by its input; empty where it has none.
    pub input: Vec<f32>,
    /// The loss by each substitute, in their order.
    pub params: Vec<GroupParams>,
}

/// What a part of a model reads, `[rows, width]`: values and width.
pub type PartInput<'a> = (&'a [f32], usize);

/// Arrays in the place of stored scales and biases, by the address of the scales.
#[derive(Default)]
pub(super) struct Substitutes(Mutex<HashMap<usize, [Array; 2]>>);

impl Substitutes {
    fn held(&self) -> MutexGuard<'_, HashMap<usize, [Array; 2]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The weights `[outputs, inputs]` of a matrix in groups as floats, if its scales and biases are
    /// arrays.
    pub(super) fn weights(
        &self,
        (words, scales): (&Array, &PackageTensor),
        (bits, group): (u32, u32),
        outputs: usize,
    ) -> Option<Array> {
        let [found, biases] = self.held().get(&address(scales))?.clone();
        let groups = found.shape().iter().product::<usize>();
        let library = found.library();
        let [one, zero] =
            [1.0, 0.0].map(|it| library.full(it, Element::F32, &[outputs, groups / outputs]));
        let integers =
            Quantized { words, scales: &one, biases: Some(&zero), group, bits, mode: c"affine" };
        let integers = integers.dequantized(Element::F32).reshape(&[groups, group as usize]);
        let [found, biases] = [found, biases].map(|it| it.reshape(&[groups, 1]));
        let weights = integers.binary(Binary::Multiply, &found).binary(Binary::Add, &biases);
        Some(weights.reshape(&[outputs, groups * group as usize / outputs]))
    }
}

fn address(tensor: &PackageTensor) -> usize {
    tensor.bytes().as_ptr().addr()
}

impl GroupParams {
    fn arrays(&self, library: Library) -> [Array; 2] {
        [&self.scales, &self.biases].map(|values| library.floats(values, &[values.len()]))
    }
}

impl Mlx {
    /// What `build` makes of its input, with some scales and biases in the place of stored ones.
    /// `build` takes the weights from their package itself.
    pub fn with_substitutes<E: From<StepError> + Send>(
        &self,
        substitutes: &[Substitute<'_>],
        input: Option<PartInput<'_>>,
        build: &mut (dyn FnMut(Option<Tensor>) -> Result<Tensor, E> + Send),
    ) -> Result<Vec<f32>, E> {
        self.run(|| {
            let params = substitutes.iter().map(|it| it.params.arrays(self.library));
            self.put(substitutes, params);
            let built = build(input.map(|(values, width)| self.exact_tensor(values, width)));
            self.substitutes.held().clear();
            Ok(built?.array.read().map_err(StepError::from)?)
        })
    }

    /// The same and the gradients of its product with `cotangent`, which has its shape.
    pub fn gradients<E: From<StepError> + Send>(
        &self,
        substitutes: &[Substitute<'_>],
        input: Option<PartInput<'_>>,
        cotangent: PartInput<'_>,
        build: &mut (dyn FnMut(Option<Tensor>) -> Result<Tensor, E> + Send),
    ) -> Result<PartGradients, E> {
        self.run(|| {
            let x = input.map(|(values, width)| self.exact_tensor(values, width).array);
            let params = substitutes.iter().flat_map(|it| it.params.arrays(self.library));
            let inputs: Vec<Array> = x.into_iter().chain(params).collect();
            let inputs: Vec<&Array> = inputs.iter().collect();
            let has_input = usize::from(input.is_some());
            let mut error = None;
            let mut function = |arrays: &[Array]| {
                let (x, params) = arrays.split_at(has_input);
                let pairs = params.as_chunks::<2>().0.iter().cloned();
                self.put(substitutes, pairs);
                let x = x.first().zip(input);
                let x = x.map(|(x, (values, width))| {
                    Tensor::new(values.len() / width, width, x.clone())
                });
                let built = build(x);
                self.substitutes.held().clear();
                match built {
                    Ok(tensor) => Some(tensor.array.cast(Element::F32)),
                    Err(failed) => {
                        error = Some(failed);
                        None
                    }
                }
            };
            let cotangent = self.exact_tensor(cotangent.0, cotangent.1).array;
            let found = self.library.gradients(&inputs, &cotangent, &mut function);
            if let Some(error) = error {
                return Err(error);
            }
            let found = found.map_err(StepError::from)?;
            let all: Vec<&Array> = [&found.value].into_iter().chain(&found.inputs).collect();
            self.library.eval(&all).map_err(StepError::from)?;
            let read = |array: &Array| array.read().map_err(StepError::from);
            let mut gradients = found.inputs.iter();
            let input = match gradients.by_ref().take(has_input).next() {
                Some(array) => read(array)?,
                None => Vec::new(),
            };
            let mut params = Vec::new();
            while let (Some(scales), Some(biases)) = (gradients.next(), gradients.next()) {
                params.push(GroupParams { scales: read(scales)?, biases: read(biases)? });
            }
            Ok(PartGradients { value: read(&found.value)?, input, params })
        })
    }

    fn put(&self, substitutes: &[Substitute<'_>], arrays: impl Iterator<Item = [Array; 2]>) {
        let keys = substitutes.iter().map(|it| address(it.stored));
        *self.substitutes.held() = keys.zip(arrays).collect();
    }

    fn exact_tensor(&self, values: &[f32], width: usize) -> Tensor {
        let rows = values.len().checked_div(width).unwrap_or(0);
        Tensor::new(rows, width, self.library.floats(values, &[rows, width]))
    }

    /// `Σ p · (ln p − ln q)` for each row of two tensors of logits, `[rows, 1]`; `p` are those of
    /// `reference`.
    #[must_use]
    pub fn divergence(&self, reference: &Tensor, logits: &Tensor) -> Tensor {
        let [p, q] = [reference, logits].map(|it| log_odds(&it.exact()));
        let terms = p.unary(Unary::Exp).binary(Binary::Multiply, &p.binary(Binary::Subtract, &q));
        Tensor::new(logits.rows, 1, terms.reduce(Reduce::Sum, 1))
    }
}

/// Logarithms of the probabilities of rows of logits.
fn log_odds(logits: &Array) -> Array {
    let shifted = logits.binary(Binary::Subtract, &logits.reduce(Reduce::Max, 1));
    let sums = shifted.unary(Unary::Exp).reduce(Reduce::Sum, 1).unary(Unary::Log);
    shifted.binary(Binary::Subtract, &sums)
}

impl From<MlxError> for StepError {
    fn from(error: MlxError) -> Self {
        Self::Backend(error.to_string())
    }
}
