//! The backend over Apple's MLX: every call adds to a lazy graph, which is computed once per step.
//!
//! Activations between operations are bfloat16 on a GPU, which has the range of f32, and f32 where
//! exact results are asked for and on a processor, where MLX is for correctness and not for speed.
//! Logits, of tokens and of experts, are f32 in any case. Bits are not promised: MLX chooses its
//! kernels, and so the order of its sums, by shape.

use std::{ops::Range, path::Path, sync::mpsc, time::Duration};

use rayon::{ThreadPool, ThreadPoolBuilder};
use shardpack_formats::memory::KvType;
use shardpack_mlx::{Array, Device, Element, Library, OpenError};

use super::{StepError, StoredMatrix, Tensors};
use crate::loading::PackageTensor;

mod attention;
mod block_sparse;
mod cache;
mod calls;
mod compressed_kv;
mod dense;
mod drawing;
mod fused;
mod gradients;
mod head_ops;
mod hyper_connections;
mod latent_attention;
mod linear_attention;
mod lookahead;
mod memory;
mod mixture_of_experts;
mod ranks;
mod short_convolution;
mod sparse_indexer;
mod tensor_parallel;
mod token_choice;
mod weights;

pub use block_sparse::TopKBlocks;
pub use cache::{Cache, Page};
use calls::CallMasks;
pub use dense::Rotation;
pub use drawing::{DrawnStep, Forward};
use gradients::Substitutes;
pub use gradients::{GroupParams, PartGradients, PartInput, Substitute};
pub use lookahead::LateTokens;
pub use memory::{DoesNotFit, MemoryNeed, MemoryPlan};
pub use mixture_of_experts::Routes;
use ranks::AllReduces;
pub use ranks::Collectives;
pub use sparse_indexer::TopK;
pub use weights::{Matrix, Taken, Vector};
use weights::{Taker, Tally};

/// How long ranks wait for each other in MLX's own group: they join before they read weights, so
/// only their starts lie between them.
const JOIN_TIMEOUT: Duration = Duration::from_mins(1);

/// Why the backend cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum MlxBackendError {
    /// MLX cannot be loaded.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The thread for MLX could not be made.
    #[error("no thread for MLX")]
    Thread(#[from] rayon::ThreadPoolBuildError),
    /// This KV type is not supported.
    #[error("MLX's attention takes no keys and values as {0:?}: store them as f32, f16 or bf16")]
    KvType(KvType),
    /// MLX's own group could not be joined, or is another one.
    #[error("MLX's group over {backend}: {problem}")]
    Group {
        /// MLX's name of it.
        backend: &'static str,
        /// What is wrong.
        problem: String,
    },
}

/// MLX on a thread of its own: its streams belong to the thread that made them.
pub struct Mlx {
    pool: ThreadPool,
    library: Library,
    all_reduces: AllReduces,
    call_masks: CallMasks,
    tally: Tally,
    substitutes: Substitutes,
    /// Type of activations.
    activations: Element,
    /// Whether products are computed in the type of what is stored. On a processor MLX would sum in
    /// that type too, so there they are computed in f32.
    stored_products: bool,
    kv: KvType,
}

/// Activations `[rows, width]`, perhaps not computed yet: of the backend's type, or f32 where they
/// decide between alternatives.
#[derive(Clone, Debug)]
pub struct Tensor {
    rows: usize,
    width: usize,
    array: Array,
}

impl Mlx {
    /// Loads the runtime in `folder`, checked byte by byte, on a thread that is MLX's from now
    /// on; `device` as in [`Library::open`]. For MLX's own collectives its group is joined now,
    /// and must have `size` ranks with this one at `rank`.
    pub fn open(
        folder: &Path,
        device: Option<Device>,
        collectives: Collectives,
        [rank, size]: [u32; 2],
    ) -> Result<Self, MlxBackendError> {
        let name = |_| "mlx".to_owned();
        let pool = ThreadPoolBuilder::new().num_threads(1).thread_name(name).build()?;
        let library = pool.install(|| Library::open(folder, device))?;
        if let Some(backend) = collectives.of_mlx() {
            let problem = |problem: String| MlxBackendError::Group { backend, problem };
            let found = join(&pool, library, backend).map_err(problem)?;
            if found != [rank as i32, size as i32] {
                let [r, s] = found;
                return Err(problem(format!("rank {r} of {s}, expected rank {rank} of {size}")));
            }
        }
        let all_reduces = AllReduces::new(collectives);
        let (activations, kv) = match library.device() {
            Device::Gpu => (Element::Bf16, KvType::Bf16),
            Device::Cpu => (Element::F32, KvType::F32),
        };
        let (tally, stored_products) = (Tally::default(), library.device() == Device::Gpu);
        let call_masks = CallMasks::default();
        let substitutes = Substitutes::default();
        Ok(Self {
            pool,
            library,
            all_reduces,
            call_masks,
            tally,
            substitutes,
            activations,
            stored_products,
            kv,
        })
    }

    /// The same with activations, keys and values in f32: exact, and half as fast.
    #[must_use]
    pub fn exact(self) -> Self {
        Self { activations: Element::F32, kv: KvType::F32, ..self }
    }

    /// The same with activations, keys and values in bfloat16, as on a GPU.
    #[must_use]
    pub fn half(self) -> Self {
        Self { activations: Element::Bf16, kv: KvType::Bf16, ..self }
    }

    /// The same with products in the type of what is stored besides, as on a GPU. On a processor such
    /// products are summed in that type too: for graphs that are drawn.
    #[must_use]
    pub fn as_on_gpu(self) -> Self {
        Self { stored_products: true, ..self.half() }
    }

    /// The same, with keys and values stored as `kv`.
    pub fn with_kv(self, kv: KvType) -> Result<Self, MlxBackendError> {
        match cache::element(kv) {
            Some(_) => Ok(Self { kv, ..self }),
            None => Err(MlxBackendError::KvType(kv)),
        }
    }

    /// Keys' and values'.
    fn element(&self) -> Element {
        cache::element(self.kv).expect("checked when it was chosen")
    }

    /// MLX itself, for figures and limits.
    #[must_use]
    pub const fn library(&self) -> &Library {
        &self.library
    }

    /// What the GPU's driver recommends to use at most, in bytes; none without a GPU.
    #[must_use]
    pub fn working_set(&self) -> Option<u64> {
        let figure = self.library.device_figure("max_recommended_working_set_size");
        figure.filter(|_| self.library.device() == Device::Gpu).map(|bytes| bytes as u64)
    }

    /// Holds MLX to a plan.
    pub fn set_limits(&self, plan: &MemoryPlan) -> Result<(), StepError> {
        let MemoryPlan { memory_limit, cache_limit, wired_limit, .. } = *plan;
        let set = || self.library.set_limits(memory_limit, cache_limit, wired_limit);
        self.pool.install(set).map_err(|error| StepError::Backend(error.to_string()))
    }

    /// What became of the tensors that were taken so far.
    #[must_use]
    pub fn taken(&self) -> Taken {
        self.tally.read()
    }

    const fn taker(&self) -> Taker<'_> {
        Taker {
            library: self.library,
            tally: &self.tally,
            substitutes: &self.substitutes,
            activations: self.activations,
            stored_products: self.stored_products,
        }
    }
}

/// Joins MLX's own group: its rank and size. MLX waits for ever for ranks that do not come, so its thread is left
/// behind when the time is up.
fn join(pool: &ThreadPool, library: Library, backend: &'static str) -> Result<[i32; 2], String> {
    if !pool.install(|| library.has_distributed(backend)) {
        return Err(format!("this build of MLX has no {backend} (JACCL needs macOS 26.2)"));
    }
    let (joined, join) = mpsc::channel();
    pool.spawn(move || {
        // Nobody waits when the time was up.
        let _ = joined.send(library.join_distributed(backend));
    });
    match join.recv_timeout(JOIN_TIMEOUT) {
        Ok(Ok((rank, size))) => Ok([rank, size]),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("not all ranks joined within {} s", JOIN_TIMEOUT.as_secs())),
    }
}

impl Tensor {
    fn new(rows: usize, width: usize, array: Array) -> Self {
        debug_assert_eq!(array.shape(), [rows, width]);
        Self { rows, width, array }
    }

    fn with(&self, array: Array) -> Self {
        Self { rows: self.rows, width: self.width, array }
    }

    /// The same values in f32, for arithmetic that must not round.
    fn exact(&self) -> Array {
        self.array.cast(Element::F32)
    }

    /// What was computed in f32, in the type of this tensor.
    fn with_exact(&self, array: &Array) -> Self {
        self.with(array.cast(self.array.element()))
    }

    /// Some rows.
    fn some_rows(&self, rows: Range<usize>) -> Array {
        some_rows(&self.array, rows)
    }

    /// `[rows, width / run, run]`.
    fn runs(&self, run: usize) -> Array {
        self.array.reshape(&[self.rows, self.width / run, run])
    }
}

/// Some rows of an array; all of them are the array itself.
fn some_rows(x: &Array, rows: Range<usize>) -> Array {
    if rows == (0..x.shape()[0]) { x.clone() } else { x.slice(0, rows.start, rows.end) }
}

/// Arrays one after the other along the first axis; one array is that itself.
fn joined(arrays: &[Array]) -> Array {
    match arrays {
        [one] => one.clone(),
        many => many[0].library().concat(&many.iter().collect::<Vec<_>>(), 0),
    }
}

impl Tensors for Mlx {
    type Tensor = Tensor;
    type Matrix = Matrix;
    type Vector = Vector;

    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    fn matrix(&self, stored: StoredMatrix) -> Matrix {
        self.pool.install(|| Matrix::new(self.taker(), stored, false))
    }

    fn precise_matrix(&self, stored: StoredMatrix) -> Matrix {
        self.pool.install(|| Matrix::new(self.taker(), stored, true))
    }

    fn vector(&self, stored: &PackageTensor) -> Vector {
        self.pool.install(|| weights::vector(self.taker(), stored, 0.0))
    }

    fn vector_plus_one(&self, stored: &PackageTensor) -> Vector {
        self.pool.install(|| weights::vector(self.taker(), stored, 1.0))
    }

    fn ones(&self, len: usize) -> Vector {
        let ones = || Vector::new(self.library.full(1.0, Element::F32, &[len]), self.activations);
        self.pool.install(ones)
    }

    fn zeros(&self, rows: usize, width: usize) -> Tensor {
        let array = self.library.full(0.0, self.activations, &[rows, width]);
        Tensor::new(rows, width, array)
    }

    fn tensor(&self, values: Vec<f32>, width: usize) -> Tensor {
        let rows = values.len().checked_div(width).unwrap_or(0);
        let array = self.library.floats(&values, &[rows, width]);
        Tensor::new(rows, width, array.cast(self.activations))
    }
}
