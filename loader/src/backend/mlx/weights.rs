//! Weights as MLX holds them.

use shardpack_formats::Dtype;
use shardpack_mlx::{Array, Binary, Device, Element, Library, Quantized};

use crate::{
    backend::{StoredMatrix, StoredWeights},
    open::PackageTensor,
};

/// A weight matrix `[outputs, inputs]`.
#[derive(Debug)]
pub struct Matrix {
    outputs: usize,
    inputs: usize,
    /// Type of the product.
    element: Element,
    weights: Weights,
}

#[derive(Debug)]
enum Weights {
    /// `[outputs, inputs]`.
    Plain(Array),
    Affine {
        words: Array,
        scales: Array,
        biases: Array,
        bits: u32,
        group: u32,
    },
}

/// The bytes of a tensor, kept as long as MLX wants them.
struct Owner(PackageTensor);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

fn element(dtype: Dtype) -> Element {
    match dtype {
        Dtype::F32 => Element::F32,
        Dtype::F16 => Element::F16,
        Dtype::BF16 => Element::Bf16,
        Dtype::U8 => Element::U8,
        Dtype::U32 => Element::U32,
        _ => unreachable!("element types are checked when a model is loaded"),
    }
}

/// The tensor where it lies, if the device can read it there, else copied.
fn take(library: Library, tensor: &PackageTensor) -> Array {
    let shape: Vec<usize> = tensor.shape().iter().map(|dim| *dim as usize).collect();
    library.wrap(Owner(tensor.clone()), element(tensor.dtype()), &shape).0
}

/// A vector in f32, with `added` to each value.
pub(super) fn vector(library: Library, stored: &PackageTensor, added: f32) -> Array {
    let array = take(library, stored).cast(Element::F32);
    let array = array.reshape(&[array.shape().iter().product()]);
    if added == 0.0 { array } else { array.with_constant(Binary::Add, added) }
}

impl Matrix {
    pub(super) fn new(library: Library, stored: StoredMatrix) -> Self {
        let StoredMatrix { outputs, inputs, weights } = stored;
        let compute = |dtype: Dtype| match library.device() {
            Device::Cpu => Element::F32,
            Device::Gpu => element(dtype),
        };
        match weights {
            StoredWeights::Plain(tensor) => {
                let element = compute(tensor.dtype());
                let array = take(library, &tensor).cast(element).reshape(&[outputs, inputs]);
                Self { outputs, inputs, element, weights: Weights::Plain(array) }
            }
            StoredWeights::Affine { words, scales, biases, bits, group } => {
                let element = compute(scales.dtype());
                let per_row = |tensor: &PackageTensor| {
                    let len: u64 = tensor.shape().iter().product();
                    [outputs, (len as usize).checked_div(outputs).unwrap_or(0)]
                };
                let floats = |tensor: &PackageTensor| {
                    take(library, tensor).cast(element).reshape(&per_row(tensor))
                };
                let weights = Weights::Affine {
                    scales: floats(&scales),
                    biases: floats(&biases),
                    words: take(library, &words).reshape(&per_row(&words)),
                    bits,
                    group,
                };
                Self { outputs, inputs, element, weights }
            }
        }
    }

    pub(super) const fn outputs(&self) -> usize {
        self.outputs
    }

    pub(super) const fn inputs(&self) -> usize {
        self.inputs
    }

    /// `x · matrixᵀ` in f32.
    pub(super) fn product(&self, x: &Array) -> Array {
        let x = x.cast(self.element);
        let y = match &self.weights {
            Weights::Plain(matrix) => x.matmul(&matrix.transpose(&[1, 0])),
            Weights::Affine { words, scales, biases, bits, group } => x.quantized_matmul(
                Quantized { words, scales, biases, group: *group, bits: *bits },
                true,
            ),
        };
        y.cast(Element::F32)
    }

    /// Rows of the matrix in f32.
    pub(super) fn rows(&self, indices: &Array) -> Array {
        let rows = match &self.weights {
            Weights::Plain(matrix) => matrix.take(indices, 0),
            Weights::Affine { words, scales, biases, bits, group } => {
                let [words, scales, biases] = [words, scales, biases].map(|x| x.take(indices, 0));
                let [words, scales, biases] = [&words, &scales, &biases];
                Quantized { words, scales, biases, group: *group, bits: *bits }.dequantized()
            }
        };
        rows.cast(Element::F32)
    }

    /// For each row of `x` `[rows, 1, 1, inputs]` and each of its `chosen` experts
    /// `[rows, taken]` the product with that expert's part of a stack of `experts`, in f32:
    /// `[rows, taken, 1, outputs / experts]`.
    pub(super) fn gathered(&self, x: &Array, chosen: &Array, experts: usize) -> Array {
        let x = x.cast(self.element);
        let each = self.outputs / experts;
        let stack = |array: &Array| {
            let columns = array.shape()[1];
            array.reshape(&[experts, each, columns])
        };
        let y = match &self.weights {
            Weights::Plain(matrix) => {
                x.gather_matmul(&stack(matrix).transpose(&[0, 2, 1]), None, chosen, false)
            }
            Weights::Affine { words, scales, biases, bits, group } => {
                let [words, scales, biases] = [stack(words), stack(scales), stack(biases)];
                let [words, scales, biases] = [&words, &scales, &biases];
                let matrix = Quantized { words, scales, biases, group: *group, bits: *bits };
                x.gather_quantized(matrix, None, chosen, false)
            }
        };
        y.cast(Element::F32)
    }
}
