//! The backend over our own kernels: every call computes at once, on a team of threads of its own.

use std::{io, ops::Range, sync::Arc};

use shardpack_formats::memory::KvType;
use shardpack_kernels::{
    Activations, Matrix, Packing, Team, TeamOptions, memory,
    pool::{Buffer, Pool},
};
use shardpack_quantize::Platform;

use super::{ComputesAtOnce, StoredMatrix, StoredWeights, Tensors, TokenChoice};
use crate::loading::PackageTensor;

mod attention;
mod block_sparse;
mod cache;
mod compressed_kv;
mod dense;
mod head_ops;
mod hyper_connections;
mod linear_attention;
mod mixture_of_experts;
mod observer;
mod prefetch_order;
mod route;
mod sparse_indexer;
mod tensor_parallel;

pub use block_sparse::TopKBlocks;
pub use cache::{Cache, Page};
pub use dense::Rotation;
pub use observer::InputObserver;
pub use route::Routes;
pub use sparse_indexer::TopK;

/// Kernels on the threads of one team.
pub struct Cpu {
    team: Team,
    kv: KvType,
    order: prefetch_order::PrefetchOrder,
    observer: Option<Arc<dyn InputObserver>>,
}

/// Activations `[rows, width]`.
#[derive(Clone, Debug)]
pub struct Tensor {
    width: usize,
    values: Buffer<f32>,
}

static FLOATS: Pool<f32> = Pool::new();

impl Tensor {
    fn zeros(rows: usize, width: usize) -> Self {
        let mut zeros = Self::unset(rows, width);
        zeros.values.fill(0.0);
        zeros
    }

    /// Room for results; holds any values.
    fn unset(rows: usize, width: usize) -> Self {
        Self { width, values: FLOATS.take(rows * width) }
    }

    fn rows(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or_default()
    }
}

impl Cpu {
    /// A backend with `threads` threads, the machine's best instructions and activations of 8
    /// bits before quantized weights.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        Self::with_options(&CpuOptions { threads, platform: None, arithmetic: Arithmetic::Fast })
    }

    /// A backend as `options` say.
    pub fn with_options(options: &CpuOptions) -> Result<Self, CpuError> {
        let platform = match &options.platform {
            Some(name) => available(name)?,
            None => Platform::detect(),
        };
        let activations = options.arithmetic.activations();
        memory::give_back_large_pieces();
        let team = Team::new(&TeamOptions { threads: options.threads, platform, activations })?;
        let order = prefetch_order::PrefetchOrder::default();
        Ok(Self { team, kv: KvType::F32, order, observer: None })
    }

    /// The same, with keys and values stored as `kv`; f32 by default.
    #[must_use]
    pub fn with_kv(self, kv: KvType) -> Self {
        Self { kv, ..self }
    }

    /// The same, with somebody who hears what matrices read.
    #[must_use]
    pub fn with_observer(self, observer: Arc<dyn InputObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }
}

/// How a [`Cpu`] computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads.
    pub threads: usize,
    /// Name of the instruction set; the machine's best without one. Results are the same on all.
    pub platform: Option<String>,
    /// How closely.
    pub arithmetic: Arithmetic,
}

impl CpuOptions {
    /// The packing with which such a backend is fastest: how a package for it is best opened.
    pub fn packing(&self) -> Result<Packing, CpuError> {
        let platform = self.platform.as_deref().map_or(Ok(Platform::detect()), available)?;
        Ok(Packing::best(platform, self.arithmetic.activations()))
    }
}

/// How closely products with quantized weights are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Activations rounded to 8 bits, one scale per group of inputs: as fast as memory allows.
    Fast,
    /// Activations as they are.
    Exact,
}

impl Arithmetic {
    const fn activations(self) -> Activations {
        match self {
            Self::Fast => Activations::Int8,
            Self::Exact => Activations::F32,
        }
    }
}

/// A backend could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// An instruction set that this machine does not have or that there is no code for.
    #[error("no instructions named {name:?} on this machine; it has {available}")]
    Platform {
        /// What was asked for.
        name: String,
        /// What there is.
        available: String,
    },
    /// The system gave no threads.
    #[error("cannot start threads")]
    Threads(#[from] io::Error),
}

fn available(name: &str) -> Result<Platform, CpuError> {
    let all = Platform::available();
    all.iter().find(|platform| platform.name() == name).copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|platform| platform.name()).collect();
        CpuError::Platform { name: name.to_owned(), available: names.join(", ") }
    })
}

impl StoredMatrix {
    /// Some of the outputs.
    fn rows(&self, outputs: Range<usize>) -> Matrix<'_> {
        self.view().slice(outputs)
    }

    fn view(&self) -> Matrix<'_> {
        const CHECKED: &str = "element types are checked when a model is loaded";
        match &self.weights {
            StoredWeights::Plain(weights) => {
                Matrix::plain(self.outputs, self.inputs, weights.floats().expect(CHECKED))
            }
            StoredWeights::Affine { words, scales, biases, bits, group } => Matrix::affine(
                [self.outputs, self.inputs],
                words.words().expect(CHECKED),
                scales.floats().expect(CHECKED),
                biases.floats().expect(CHECKED),
                [*bits, *group],
            )
            .packed_as(words.packing()),
            StoredWeights::Float { words, scales, format } => Matrix::float_groups(
                [self.outputs, self.inputs],
                words.words().expect(CHECKED),
                scales.bytes(),
                *format,
            ),
        }
    }
}

impl ComputesAtOnce for Cpu {}

impl TokenChoice for Cpu {}

impl Tensors for Cpu {
    type Tensor = Tensor;
    type Matrix = StoredMatrix;
    type Vector = Vec<f32>;

    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.team.run(work)
    }

    fn reads(&self, packing: Packing) -> bool {
        let options = self.team.options();
        packing == Packing::Stored
            || options.activations == Activations::F32
            || packing == Packing::best(options.platform, options.activations)
    }

    fn matrix(&self, stored: StoredMatrix) -> StoredMatrix {
        stored
    }

    fn vector(&self, stored: &PackageTensor) -> Vec<f32> {
        stored.floats().expect("element types are checked when a model is loaded").to_vec()
    }

    fn vector_plus_one(&self, stored: &PackageTensor) -> Vec<f32> {
        self.vector(stored).into_iter().map(|value| value + 1.0).collect()
    }

    fn ones(&self, len: usize) -> Vec<f32> {
        vec![1.0; len]
    }

    fn zeros(&self, rows: usize, width: usize) -> Tensor {
        Tensor::zeros(rows, width)
    }

    fn tensor(&self, values: Vec<f32>, width: usize) -> Tensor {
        Tensor { width, values: values.into() }
    }
}
