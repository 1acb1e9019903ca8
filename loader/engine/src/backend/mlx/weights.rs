//! Weights as MLX holds them.

use std::sync::atomic::{AtomicU64, Ordering};

use shardpack_formats::Dtype;
use shardpack_mlx::{Array, Binary, Device, Element, Library, Quantized};

use crate::{
    backend::{StoredMatrix, StoredWeights},
    loading::PackageTensor,
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

/// The bytes of a tensor with the rest of their last page, kept as long as MLX wants them.
struct Owner(PackageTensor);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.0.page_bytes()
    }
}

/// What became of the tensors that were taken.
#[derive(Debug, Default)]
pub(super) struct Tally {
    tensors: AtomicU64,
    bytes: AtomicU64,
    copied_tensors: AtomicU64,
    copied_bytes: AtomicU64,
}

impl Tally {
    fn note(&self, bytes: u64, copied: bool) {
        self.tensors.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if copied {
            self.copied_tensors.fetch_add(1, Ordering::Relaxed);
            self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn read(&self) -> Taken {
        let of = |value: &AtomicU64| value.load(Ordering::Relaxed);
        Taken {
            tensors: of(&self.tensors),
            bytes: of(&self.bytes),
            copied_tensors: of(&self.copied_tensors),
            copied_bytes: of(&self.copied_bytes),
        }
    }
}

/// What became of a package's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Tensors taken.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those that MLX copied, and did not use where they lay.
    pub copied_tensors: u64,
    /// Their bytes.
    pub copied_bytes: u64,
}

/// Takes tensors into MLX.
#[derive(Clone, Copy)]
pub(super) struct Taker<'a> {
    pub(super) library: Library,
    pub(super) tally: &'a Tally,
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

impl Taker<'_> {
    /// The tensor where it lies, if the device can read it there, else copied. Metal takes whole
    /// pages only, so the rest of the last one is wrapped with it and cut off again, which costs
    /// nothing.
    fn take(&self, tensor: &PackageTensor) -> Array {
        let shape: Vec<usize> = tensor.shape().iter().map(|dim| *dim as usize).collect();
        let (len, element): (usize, _) = (shape.iter().product(), element(tensor.dtype()));
        if len == 0 {
            return self.library.full(0.0, element, &shape);
        }
        let owner = Owner(tensor.clone());
        let whole = owner.as_ref().len() / element.size_bytes();
        let (array, copied) = self.library.wrap(owner, element, &[whole]);
        self.tally.note((len * element.size_bytes()) as u64, copied);
        array.slice(0, 0, len).reshape(&shape)
    }
}

/// A vector in f32, with `added` to each value.
pub(super) fn vector(taker: Taker<'_>, stored: &PackageTensor, added: f32) -> Array {
    let array = taker.take(stored).cast(Element::F32);
    let array = array.reshape(&[array.shape().iter().product()]);
    if added == 0.0 { array } else { array.with_constant(Binary::Add, added) }
}

impl Matrix {
    pub(super) fn new(taker: Taker<'_>, stored: StoredMatrix) -> Self {
        let StoredMatrix { outputs, inputs, weights } = stored;
        let compute = |dtype: Dtype| match taker.library.device() {
            Device::Cpu => Element::F32,
            Device::Gpu => element(dtype),
        };
        match weights {
            StoredWeights::Plain(tensor) => {
                let element = compute(tensor.dtype());
                let array = taker.take(&tensor).cast(element).reshape(&[outputs, inputs]);
                Self { outputs, inputs, element, weights: Weights::Plain(array) }
            }
            StoredWeights::Affine { words, scales, biases, bits, group } => {
                let element = compute(scales.dtype());
                let per_row = |tensor: &PackageTensor| {
                    let len: u64 = tensor.shape().iter().product();
                    [outputs, (len as usize).checked_div(outputs).unwrap_or(0)]
                };
                let floats = |tensor: &PackageTensor| {
                    taker.take(tensor).cast(element).reshape(&per_row(tensor))
                };
                let weights = Weights::Affine {
                    scales: floats(&scales),
                    biases: floats(&biases),
                    words: taker.take(&words).reshape(&per_row(&words)),
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
