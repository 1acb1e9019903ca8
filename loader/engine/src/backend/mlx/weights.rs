//! Weights as MLX holds them.

use std::{
    ffi::CStr,
    ops::Deref,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use shardpack_mlx::{Array, Binary, Device, Element, Library, Quantized};
use shardpack_quantize::{Dtype, FloatFormat};

use super::gradients::Substitutes;
use crate::{
    backend::{StoredMatrix, StoredWeights},
    loading::PackageTensor,
};

/// A vector of floats.
///
/// Arithmetic that must not round reads it as it is, through [`Deref`]; products with activations
/// read it in their type.
#[derive(Clone, Debug)]
pub struct Vector {
    exact: Array,
    /// In the type of activations.
    pub(super) array: Array,
}

impl Deref for Vector {
    type Target = Array;

    fn deref(&self) -> &Array {
        &self.exact
    }
}

impl Vector {
    /// Of f32 values.
    pub(super) fn new(exact: Array, activations: Element) -> Self {
        let array = exact.cast(activations);
        Self { exact, array }
    }
}

/// A weight matrix `[outputs, inputs]`, or a stack of such.
#[derive(Debug)]
pub struct Matrix {
    outputs: usize,
    inputs: usize,
    /// Type that products are computed in: that in which scales, or plain weights, are stored.
    element: Element,
    /// Type of the results.
    output: Element,
    weights: Weights,
    /// The same as a stack, once it was asked for.
    stack: OnceLock<Weights>,
}

#[derive(Debug)]
enum Weights {
    /// `[outputs, inputs]`, or `[stack, inputs, outputs]`.
    Plain(Array),
    /// `[outputs, …]`, or `[stack, outputs, …]`.
    Groups {
        words: Array,
        scales: Array,
        biases: Option<Array>,
        bits: u32,
        group: u32,
        mode: &'static CStr,
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
    converted_bytes: AtomicU64,
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

    /// A tensor of which MLX holds `bytes` in another type as well.
    fn note_conversion(&self, bytes: u64) {
        self.converted_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Taken {
        let of = |value: &AtomicU64| value.load(Ordering::Relaxed);
        Taken {
            tensors: of(&self.tensors),
            bytes: of(&self.bytes),
            copied_tensors: of(&self.copied_tensors),
            copied_bytes: of(&self.copied_bytes),
            converted_bytes: of(&self.converted_bytes),
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
    /// Bytes of scales and plain weights that MLX holds in the type of its arithmetic besides.
    pub converted_bytes: u64,
}

/// Takes tensors into MLX.
#[derive(Clone, Copy)]
pub(super) struct Taker<'a> {
    pub(super) library: Library,
    pub(super) tally: &'a Tally,
    pub(super) substitutes: &'a Substitutes,
    /// Type of activations.
    pub(super) activations: Element,
    /// Whether products are computed in the type of what is stored, summed in f32, as on a GPU.
    pub(super) stored_products: bool,
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

/// A vector, with `added` to each value.
pub(super) fn vector(taker: Taker<'_>, stored: &PackageTensor, added: f32) -> Vector {
    let array = taker.take(stored).cast(Element::F32);
    let array = array.reshape(&[array.shape().iter().product()]);
    let array = if added == 0.0 { array } else { array.with_constant(Binary::Add, added) };
    Vector::new(array, taker.activations)
}

/// Most weights of a plain matrix that are held in f32 where its products decide: routers, and no
/// LM head.
const MAX_PRECISE_WEIGHTS: usize = 16 << 20;

impl Taker<'_> {
    /// The tensor in another type, which MLX then holds besides.
    fn take_as(&self, tensor: &PackageTensor, element: Element) -> Array {
        let array = self.take(tensor);
        if array.element() == element {
            return array;
        }
        let len: u64 = tensor.shape().iter().product();
        self.tally.note_conversion(len * element.size_bytes() as u64);
        array.cast(element)
    }
}

/// A tensor as rows, one for each output.
fn per_row(tensor: &PackageTensor, outputs: usize) -> [usize; 2] {
    let len: u64 = tensor.shape().iter().product();
    [outputs, (len as usize).checked_div(outputs).unwrap_or(0)]
}

/// MLX's name of float groups.
const fn mode(format: FloatFormat) -> &'static CStr {
    match format {
        FloatFormat::Mxfp4 => c"mxfp4",
        FloatFormat::Nvfp4 => c"nvfp4",
        FloatFormat::Mxfp8 => c"mxfp8",
    }
}

impl Matrix {
    /// `is_precise`: its products are f32, whatever the type of activations.
    pub(super) fn new(taker: Taker<'_>, stored: StoredMatrix, is_precise: bool) -> Self {
        let StoredMatrix { outputs, inputs, weights } = stored;
        let is_plain = matches!(weights, StoredWeights::Plain(_));
        let is_large = is_plain && outputs * inputs > MAX_PRECISE_WEIGHTS;
        let output = if is_precise && !is_large { Element::F32 } else { taker.activations };
        let element = match &weights {
            _ if output == Element::F32 || !taker.stored_products => Element::F32,
            // Their scales are of no type that activations have.
            StoredWeights::Float { .. } => taker.activations,
            StoredWeights::Plain(stored) | StoredWeights::Affine { scales: stored, .. } => {
                element(stored.dtype())
            }
        };
        let weights = match weights {
            StoredWeights::Plain(tensor) => {
                Weights::Plain(taker.take_as(&tensor, element).reshape(&[outputs, inputs]))
            }
            StoredWeights::Affine { words, scales, biases, bits, group } => {
                let packed = taker.take(&words).reshape(&per_row(&words, outputs));
                let held = (&packed, &scales);
                if let Some(weights) = taker.substitutes.weights(held, (bits, group), outputs) {
                    let weights = Weights::Plain(weights);
                    return Self {
                        outputs,
                        inputs,
                        element,
                        output,
                        weights,
                        stack: OnceLock::new(),
                    };
                }
                let floats = |tensor: &PackageTensor| {
                    taker.take_as(tensor, element).reshape(&per_row(tensor, outputs))
                };
                Weights::Groups {
                    scales: floats(&scales),
                    biases: Some(floats(&biases)),
                    words: packed,
                    bits,
                    group,
                    mode: c"affine",
                }
            }
            StoredWeights::Float { words, scales, format } => Weights::Groups {
                scales: taker.take(&scales).reshape(&per_row(&scales, outputs)),
                biases: None,
                words: taker.take(&words).reshape(&per_row(&words, outputs)),
                bits: format.bits(),
                group: format.group_size(),
                mode: mode(format),
            },
        };
        Self { outputs, inputs, element, output, weights, stack: OnceLock::new() }
    }

    pub(super) const fn outputs(&self) -> usize {
        self.outputs
    }

    pub(super) const fn inputs(&self) -> usize {
        self.inputs
    }

    /// `x · matrixᵀ`.
    pub(super) fn product(&self, x: &Array) -> Array {
        let x = x.cast(self.element);
        let y = match &self.weights {
            Weights::Plain(matrix) => x.matmul(&matrix.transpose(&[1, 0])),
            Weights::Groups { .. } => x.quantized_matmul(self.weights.quantized(), true),
        };
        y.cast(self.output)
    }

    /// Rows of the matrix in the type of its products.
    pub(super) fn rows(&self, indices: &Array) -> Array {
        match &self.weights {
            Weights::Plain(matrix) => matrix.take(indices, 0),
            groups @ Weights::Groups { .. } => {
                let rows = groups.each(|array| array.take(indices, 0));
                rows.quantized().dequantized(self.element)
            }
        }
    }

    /// The stack of `count` matrices that this is.
    fn stacked(&self, count: usize) -> &Weights {
        let each = self.outputs / count;
        let stack = |array: &Array| array.reshape(&[count, each, array.shape()[1]]);
        self.stack.get_or_init(|| match &self.weights {
            Weights::Plain(matrix) => Weights::Plain(stack(matrix).transpose(&[0, 2, 1])),
            groups @ Weights::Groups { .. } => groups.each(stack),
        })
    }

    /// For rows `x` `[…, 1, inputs]` the products with the experts that `chosen` names, out of
    /// `experts` in this stack: `[…, 1, outputs / experts]`. `is_sorted`:
    /// experts come in their order, each in one run.
    pub(super) fn gathered(
        &self,
        x: &Array,
        chosen: &Array,
        experts: usize,
        is_sorted: bool,
    ) -> Array {
        let x = x.cast(self.element);
        // Which row each product reads, as data: MLX would run three kernels for it. Sorted rows are
        // in order, and MLX's kernel for them wants to be told nothing.
        let rows = (!is_sorted).then(|| {
            let shape = x.shape();
            let batch = &shape[..shape.len() - 2];
            let rows: Vec<u32> = (0..batch.iter().product::<usize>() as u32).collect();
            x.library().indices(&rows, batch)
        });
        let rows = rows.as_ref();
        let y = match self.stacked(experts) {
            Weights::Plain(stack) if x.library().device() == Device::Cpu => {
                // MLX's gathered product on a processor is of f32 alone.
                let [x, stack] = [&x, stack].map(|it| it.cast(Element::F32));
                x.gather_matmul(&stack, rows, chosen, is_sorted)
            }
            Weights::Plain(stack) => x.gather_matmul(stack, rows, chosen, is_sorted),
            stack @ Weights::Groups { .. } => {
                x.gather_quantized(stack.quantized(), rows, chosen, is_sorted)
            }
        };
        y.cast(self.output)
    }

    /// Every head `x` `[…, heads, rows, inputs]` times its own matrix of a stack,
    /// `[…, heads, rows, outputs / heads]`.
    pub(super) fn per_head(&self, x: &Array, heads: usize) -> Array {
        let x = x.cast(self.element);
        let y = match self.stacked(heads) {
            Weights::Plain(stack) => x.matmul(stack),
            stack @ Weights::Groups { .. } => x.quantized_matmul(stack.quantized(), true),
        };
        y.cast(self.output)
    }

    /// The same by the transposed matrices: `[…, heads, rows, outputs / heads]` to
    /// `[…, heads, rows, inputs]`.
    pub(super) fn per_head_transposed(&self, x: &Array, heads: usize) -> Array {
        let x = x.cast(self.element);
        let y = match self.stacked(heads) {
            Weights::Plain(stack) => x.matmul(&stack.transpose(&[0, 2, 1])),
            stack @ Weights::Groups { .. } => x.quantized_matmul(stack.quantized(), false),
        };
        y.cast(self.output)
    }
}

impl Weights {
    /// In groups.
    fn quantized(&self) -> Quantized<'_> {
        match self {
            Self::Groups { words, scales, biases, bits, group, mode } => {
                let (group, bits, mode) = (*group, *bits, *mode);
                Quantized { words, scales, biases: biases.as_ref(), group, bits, mode }
            }
            Self::Plain(_) => unreachable!("called for groups"),
        }
    }

    /// The same of each of its arrays.
    fn each(&self, change: impl Fn(&Array) -> Array) -> Self {
        match self {
            Self::Plain(matrix) => Self::Plain(change(matrix)),
            Self::Groups { words, scales, biases, bits, group, mode } => Self::Groups {
                words: change(words),
                scales: change(scales),
                biases: biases.as_ref().map(change),
                bits: *bits,
                group: *group,
                mode,
            },
        }
    }
}
