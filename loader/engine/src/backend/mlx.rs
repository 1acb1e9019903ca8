//! The backend over Apple's MLX: every call adds to a lazy graph, which is computed once per step.
//!
//! Activations between operations are f32. Products run in the type that the weights' scales are
//! stored in on a GPU, and in f32 on a processor, where MLX is for correctness and not for speed.
//! Bits are not promised: MLX chooses its kernels, and so the order of its sums, by shape.

use std::{ops::Range, path::Path, sync::mpsc, time::Duration};

use rayon::{ThreadPool, ThreadPoolBuilder};
use shardpack_formats::memory::KvType;
use shardpack_formats::{
    hex::HexF32,
    spec::{Activation, ClampedSwiglu, NormKind, Rope, RopeStyle, Router},
};
use shardpack_mlx::{Array, Binary, Device, Element, Library, OpenError, Reduce, Unary};

use super::{
    AttentionStep, Backend, BlockStep, CacheShape, ConvolutionInputs, ConvolutionStep, DeltaInputs,
    DeltaStep, ExpertStep, IndexInputs, IndexStep, NormStep, PoolStep, Qkv, Ranks, RouterVectors,
    StepError, StoredMatrix, StreamStep, Xielu,
};
use crate::loading::PackageTensor;

mod attention;
mod blocks;
mod cache;
mod convolution;
mod entries;
mod experts;
mod heads;
mod index;
mod memory;
mod ranks;
mod streams;
mod weights;

pub use cache::{Cache, Page};
pub use experts::Routes;
pub use index::Chosen;
pub use memory::{DoesNotFit, MemoryNeed, MemoryPlan};
pub use ranks::Collectives;
use ranks::Sums;
pub use weights::{Matrix, Taken};
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
    /// Keys and values cannot be stored so.
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
    sums: Sums,
    tally: Tally,
    kv: KvType,
}

/// Activations `[rows, width]`, f32, perhaps not computed yet.
#[derive(Clone, Debug)]
pub struct Tensor {
    rows: usize,
    width: usize,
    array: Array,
}

/// Cosines and sines `[rows, 1, pairs]` of one rotary embedding.
#[derive(Debug)]
pub struct Rotation {
    style: RopeStyle,
    pairs: usize,
    cos: Array,
    sin: Array,
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
            if found != (rank as i32, size as i32) {
                let (r, s) = found;
                return Err(problem(format!("rank {r} of {s}, expected rank {rank} of {size}")));
            }
        }
        let (sums, tally, kv) = (Sums::new(collectives), Tally::default(), KvType::F32);
        Ok(Self { pool, library, sums, tally, kv })
    }

    /// The same, with keys and values stored so.
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
        Taker { library: self.library, tally: &self.tally }
    }
}

/// Joins MLX's own group. MLX waits for ever for ranks that do not come, so its thread is left
/// behind when the time is up.
fn join(pool: &ThreadPool, library: Library, backend: &'static str) -> Result<(i32, i32), String> {
    if !pool.install(|| library.has_distributed(backend)) {
        return Err(format!("this build of MLX has no {backend} (JACCL needs macOS 26.2)"));
    }
    let (joined, join) = mpsc::channel();
    pool.spawn(move || {
        // Nobody waits when the time was up.
        let _ = joined.send(library.join_distributed(backend));
    });
    match join.recv_timeout(JOIN_TIMEOUT) {
        Ok(result) => result.map_err(|error| error.to_string()),
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

    /// `[rows, width / run, run]`.
    fn runs(&self, run: usize) -> Array {
        self.array.reshape(&[self.rows, self.width / run, run])
    }
}

impl Backend for Mlx {
    type Tensor = Tensor;
    type Matrix = Matrix;
    type Vector = Array;
    type Rotation = Rotation;
    type Routes = Routes;
    type Chosen = Chosen;
    type Cache = Cache;
    type Page = Page;

    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    fn matrix(&self, stored: StoredMatrix) -> Matrix {
        self.pool.install(|| Matrix::new(self.taker(), stored))
    }

    fn vector(&self, stored: &PackageTensor) -> Array {
        self.pool.install(|| weights::vector(self.taker(), stored, 0.0))
    }

    fn vector_plus_one(&self, stored: &PackageTensor) -> Array {
        self.pool.install(|| weights::vector(self.taker(), stored, 1.0))
    }

    fn ones(&self, len: usize) -> Array {
        self.pool.install(|| self.library.full(1.0, Element::F32, &[len]))
    }

    fn cache(&self, shape: &CacheShape, pages: &[Page]) -> Cache {
        self.pool.install(|| Cache::new(self.library, self.element(), shape, pages))
    }

    fn page(&self, cache: &Cache, index: usize) -> Page {
        self.pool.install(|| cache.page(index))
    }

    fn page_bytes(&self, shape: &CacheShape) -> u64 {
        cache::page_bytes(shape, self.element())
    }

    fn kv_type(&self) -> KvType {
        self.kv
    }

    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Rotation {
        assert_eq!(positions.len(), totals.len(), "a length for every row");
        let pairs = rope.inv_freq.len();
        let frequencies = |total: u32| match &rope.long {
            Some(long) if total > long.beyond => &long.inv_freq,
            _ => &rope.inv_freq,
        };
        let factor = rope.attention_factor.0;
        let table = |of: fn(f32) -> f32| {
            let angles = positions.iter().zip(totals).flat_map(|(position, total)| {
                let angle = |freq: &HexF32| *position as f32 * freq.0;
                frequencies(*total).iter().map(angle)
            });
            let values: Vec<f32> = angles.map(|angle| of(angle) * factor).collect();
            self.library.floats(&values, &[positions.len(), 1, pairs])
        };
        Rotation { style: rope.style, pairs, cos: table(f32::cos), sin: table(f32::sin) }
    }

    fn zeros(&self, rows: usize, width: usize) -> Tensor {
        let array = self.library.full(0.0, Element::F32, &[rows, width]);
        Tensor::new(rows, width, array)
    }

    fn tensor(&self, values: Vec<f32>, width: usize) -> Tensor {
        let rows = values.len().checked_div(width).unwrap_or(0);
        Tensor::new(rows, width, self.library.floats(&values, &[rows, width]))
    }

    fn embed(&self, tokens: &[u32], table: &Matrix, held: Range<usize>) -> Tensor {
        let inside = |token: &u32| held.contains(&(*token as usize));
        let index = |token: &u32| if inside(token) { *token - held.start as u32 } else { 0 };
        let indices: Vec<u32> = tokens.iter().map(index).collect();
        let rows = table.rows(&self.library.indices(&indices, &[tokens.len()]));
        let array = if tokens.iter().all(inside) {
            rows
        } else {
            let factor = |token: &u32| if inside(token) { 1.0 } else { 0.0 };
            let mask: Vec<f32> = tokens.iter().map(factor).collect();
            rows.binary(Binary::Multiply, &self.library.floats(&mask, &[tokens.len(), 1]))
        };
        Tensor::new(tokens.len(), table.inputs(), array)
    }

    fn linear(&self, x: &Tensor, matrix: &Matrix) -> Tensor {
        assert_eq!(x.width, matrix.inputs(), "inputs of a matrix");
        Tensor::new(x.rows, matrix.outputs(), matrix.product(&x.array))
    }

    fn add_bias(&self, x: Tensor, bias: &Array) -> Tensor {
        x.with(x.array.binary(Binary::Add, bias))
    }

    fn norm(&self, x: &Tensor, step: &NormStep<'_, Array>) -> Tensor {
        let run = step.gain.shape()[0];
        let runs = x.runs(run);
        let normed = match step.kind {
            NormKind::Rms => runs.rms_norm(Some(step.gain), step.eps),
            NormKind::Layer => runs.layer_norm(Some(step.gain), None, step.eps),
        };
        let out = x.with(normed.reshape(&[x.rows, x.width]));
        match step.bias {
            Some(bias) => self.add_bias(out, bias),
            None => out,
        }
    }

    fn square_sums(&self, parts: &[(&Tensor, Range<usize>)]) -> Tensor {
        let rows = parts.first().map_or(0, |(x, _)| x.rows);
        let sums: Vec<Array> = parts
            .iter()
            .map(|(x, columns)| {
                if columns.is_empty() {
                    return self.zeros(rows, 1).array;
                }
                let part = x.array.slice(1, columns.start, columns.end);
                part.unary(Unary::Square).reduce(Reduce::Sum, 1)
            })
            .collect();
        let array = self.library.concat(&sums.iter().collect::<Vec<_>>(), 1);
        Tensor::new(rows, parts.len(), array)
    }

    fn norm_by_sums(
        &self,
        x: Tensor,
        step: &NormStep<'_, Array>,
        (sums, column): (&Tensor, usize),
        full: usize,
    ) -> Tensor {
        let sum = sums.array.slice(1, column, column + 1);
        let mean = sum.with_constant(Binary::Divide, full as f32);
        let root = mean.with_constant(Binary::Add, step.eps).unary(Unary::Rsqrt);
        let scaled = x.array.binary(Binary::Multiply, &root);
        x.with(scaled.binary(Binary::Multiply, step.gain))
    }

    fn rotate(&self, x: Tensor, rotation: &Rotation, (width, first): (usize, usize)) -> Tensor {
        let rotated = rotation.apply(&x.runs(width), first);
        x.with(rotated.reshape(&[x.rows, x.width]))
    }

    fn attention(
        &self,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &AttentionStep<'_, Array>,
    ) -> Tensor {
        attention::attend(self.library, &qkv, None, caches, step)
    }

    fn choose_keys(
        &self,
        inputs: IndexInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &IndexStep<'_>,
    ) -> Chosen {
        index::choose(self.library, &inputs, caches, step)
    }

    fn attention_to(
        &self,
        chosen: &Chosen,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &AttentionStep<'_, Array>,
    ) -> Tensor {
        attention::attend(self.library, &qkv, Some(chosen), caches, step)
    }

    fn choose_blocks(
        &self,
        queries_and_keys: [&Tensor; 2],
        caches: &mut [&mut Cache],
        step: &BlockStep<'_>,
    ) -> Chosen {
        blocks::choose(self.library, queries_and_keys, caches, step)
    }

    fn has_entries(&self) -> bool {
        true
    }

    fn pool(
        &self,
        numbers: [&Tensor; 2],
        caches: &mut [&mut Cache],
        step: &PoolStep<'_, Array>,
    ) -> Tensor {
        entries::pool(self.library, numbers, caches, step)
    }

    fn choose_entries(
        &self,
        inputs: IndexInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &IndexStep<'_>,
    ) -> Chosen {
        entries::choose(self.library, &inputs, caches, step)
    }

    fn attention_beside(
        &self,
        beside: (usize, &Tensor, Option<&Chosen>),
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: (&AttentionStep<'_, Array>, usize),
    ) -> Tensor {
        entries::attend_beside(self.library, beside, &qkv, caches, step)
    }

    fn has_latent_and_linear_attention(&self) -> bool {
        true
    }

    fn gated_delta(
        &self,
        inputs: &DeltaInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &DeltaStep<'_, Array>,
    ) -> Tensor {
        heads::gated_delta(inputs, caches, step)
    }

    fn short_convolution(
        &self,
        inputs: ConvolutionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &ConvolutionStep<'_, Array>,
    ) -> Tensor {
        convolution::short_convolution(&inputs, caches, step)
    }

    fn activate(&self, activation: Activation, gate: Option<Tensor>, up: Tensor) -> Tensor {
        assert_eq!(gate.is_some(), activation.is_gated(), "a gate for {activation:?}");
        match gate {
            Some(gate) => {
                let open = silu_like(activation, &gate.array);
                up.with(open.binary(Binary::Multiply, &up.array))
            }
            None => up.with(silu_like(activation, &up.array)),
        }
    }

    fn xielu(&self, x: Tensor, numbers: &Xielu) -> Tensor {
        let Xielu { above, below, beta, eps } = *numbers;
        let x_ = &x.array;
        let square = x_.unary(Unary::Square).with_constant(Binary::Multiply, above);
        let power = x_.with_constant(Binary::Minimum, eps).unary(Unary::Exp);
        let bent = power.with_constant(Binary::Subtract, 1.0).binary(Binary::Subtract, x_);
        let bent = bent.with_constant(Binary::Multiply, below);
        let bent = x_.with_constant(Binary::Greater, 0.0).choose(&square, &bent);
        x.with(bent.binary(Binary::Add, &x_.with_constant(Binary::Multiply, beta)))
    }

    fn clamped_glu(&self, gate: Tensor, up: Tensor, limit: f32) -> Tensor {
        up.with(experts::limited_swiglu(&gate.array, &up.array, limit))
    }

    fn clamped_swiglu(&self, gate: Tensor, up: Tensor, clamped: ClampedSwiglu) -> Tensor {
        up.with(experts::clamped_swiglu(&gate.array, &up.array, clamped))
    }

    fn route_to(&self, logits: Tensor, router: &Router, taken: &[u32], top_k: u32) -> Routes {
        experts::route_to(&logits, router, taken, top_k as usize)
    }

    fn route(
        &self,
        logits: Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Array>,
    ) -> Routes {
        experts::route(&logits, router, top_k as usize, vectors)
    }

    fn experts(&self, x: &Tensor, routes: &Routes, step: &ExpertStep<'_, Matrix, Array>) -> Tensor {
        experts::experts(x, routes, step)
    }

    fn sigmoid_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(&x, gate, &gate.array.unary(Unary::Sigmoid))
    }

    fn softplus_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(&x, gate, &gate.array.with_constant(Binary::LogAddExp, 0.0))
    }

    fn limit(&self, x: Tensor, limit: f32) -> Tensor {
        let limited = x.array.with_constant(Binary::Maximum, -limit);
        x.with(limited.with_constant(Binary::Minimum, limit))
    }

    fn slice_heads(&self, x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
        heads::slice(x, width, part)
    }

    fn join_heads(&self, a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
        heads::join(a, b, heads)
    }

    fn head_linear(&self, x: &Tensor, stack: &Matrix, heads: usize) -> Tensor {
        heads::linear(x, stack, heads)
    }

    fn stream_weights(&self, mixes: &Tensor, step: &StreamStep<'_, Array>) -> Tensor {
        streams::weights(mixes, step)
    }

    fn mix_streams(
        &self,
        x: &Tensor,
        mixes: &Tensor,
        step: &StreamStep<'_, Array>,
        rounds: u32,
    ) -> Tensor {
        streams::mix(x, mixes, step, rounds)
    }

    fn collapse_streams(&self, x: &Tensor, weights: &Tensor) -> Tensor {
        streams::collapse(x, weights)
    }

    fn add_to_streams(&self, x: Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
        streams::add(&x, part, weights)
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        x.with(x.array.with_constant(Binary::Multiply, factor))
    }

    fn scale_rows(&self, x: Tensor, factors: &[f32]) -> Tensor {
        let factors = self.library.floats(factors, &[x.rows, 1]);
        x.with(x.array.binary(Binary::Multiply, &factors))
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        x.with(softcap(&x.array, cap))
    }

    fn add(&self, a: Tensor, b: &Tensor) -> Tensor {
        a.with(a.array.binary(Binary::Add, &b.array))
    }

    fn select_rows(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        let indices: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        let taken = x.array.take(&self.library.indices(&indices, &[rows.len()]), 0);
        Tensor::new(rows.len(), x.width, taken)
    }

    fn all_reduce(&self, x: Tensor, ranks: &Ranks<'_>) -> Result<Tensor, StepError> {
        if ranks.count() == 1 || x.rows * x.width == 0 {
            return Ok(x);
        }
        Ok(x.with(self.sums.sum(&x.array)))
    }

    fn gather_columns(
        &self,
        x: Tensor,
        widths: &[usize],
        ranks: &Ranks<'_>,
    ) -> Result<Tensor, StepError> {
        if let [width] = widths {
            assert_eq!(x.width, *width, "columns of the only rank");
            return Ok(x);
        }
        assert_eq!(x.width, widths[ranks.group.rank() as usize], "columns of this rank");
        let array = self.sums.gather(&x.array, x.rows, widths);
        Ok(Tensor::new(x.rows, widths.iter().sum(), array))
    }

    fn read(&self, x: Tensor, ranks: &Ranks<'_>) -> Result<Vec<f32>, StepError> {
        // It rests on every sum of the step so far, in their order.
        let last = self.sums.end();
        let arrays: Vec<&Array> = last.iter().chain([&x.array]).collect();
        ranks::evaluate(&self.library, ranks, || {
            self.library.eval(&arrays)?;
            x.array.read()
        })
    }

    fn settle(&self, caches: &mut [&mut Cache], ranks: &Ranks<'_>) -> Result<(), StepError> {
        let last = self.sums.end();
        let arrays = caches.iter().flat_map(|cache| cache.arrays()).chain(&last);
        let arrays: Vec<&Array> = arrays.collect();
        ranks::evaluate(&self.library, ranks, || self.library.eval(&arrays))
    }
}

/// Each column of the gate's factors for as many consecutive ones of `x`.
fn gated(x: &Tensor, gate: &Tensor, factors: &Array) -> Tensor {
    if [1, x.width].contains(&gate.width) {
        return x.with(x.array.binary(Binary::Multiply, factors));
    }
    let factors = factors.reshape(&[x.rows, gate.width, 1]);
    let gated = x.runs(x.width / gate.width.max(1)).binary(Binary::Multiply, &factors);
    x.with(gated.reshape(&[x.rows, x.width]))
}

impl Rotation {
    /// Rotates heads `[rows, heads, head_dim]`, each from its element `first` on.
    fn apply(&self, x: &Array, first: usize) -> Array {
        let shape = x.shape();
        let [rows, heads, head_dim] = shape[..] else { unreachable!("heads have three axes") };
        let (pairs, library) = (self.pairs, x.library());
        let end = first + 2 * pairs;
        let turn = |a: &Array, b: &Array| {
            let by = |x: &Array, table: &Array| x.binary(Binary::Multiply, table);
            let first = by(a, &self.cos).binary(Binary::Subtract, &by(b, &self.sin));
            let second = by(b, &self.cos).binary(Binary::Add, &by(a, &self.sin));
            [first, second]
        };
        let rotated = match self.style {
            RopeStyle::Half => {
                let [a, b] = turn(&x.slice(2, first, end - pairs), &x.slice(2, end - pairs, end));
                library.concat(&[&a, &b], 2)
            }
            RopeStyle::Interleaved => {
                let both = x.slice(2, first, end).reshape(&[rows, heads, pairs, 2]);
                let part = |index| both.slice(3, index, index + 1).reshape(&[rows, heads, pairs]);
                let halves = turn(&part(0), &part(1)).map(|x| x.reshape(&[rows, heads, pairs, 1]));
                let [a, b] = &halves;
                library.concat(&[a, b], 3).reshape(&[rows, heads, 2 * pairs])
            }
        };
        let whole = [x.slice(2, 0, first), rotated, x.slice(2, end, head_dim)];
        let parts = whole.iter().zip([first, 2 * pairs, head_dim - end]);
        let parts: Vec<_> = parts.filter_map(|(part, width)| (width > 0).then_some(part)).collect();
        match parts[..] {
            [rotated] => rotated.clone(),
            _ => library.concat(&parts, 2),
        }
    }
}

/// The function of an activation, its gate aside.
fn silu_like(activation: Activation, x: &Array) -> Array {
    match activation {
        Activation::SiluGlu | Activation::Silu => silu(x),
        Activation::GeluTanhGlu | Activation::GeluTanh => gelu_tanh(x),
        Activation::GeluGlu | Activation::Gelu => gelu(x),
        Activation::ReluSquared => x.with_constant(Binary::Maximum, 0.0).unary(Unary::Square),
        Activation::Xielu => unreachable!("it has numbers, so it is called by its name"),
    }
}

fn silu(x: &Array) -> Array {
    x.binary(Binary::Multiply, &x.unary(Unary::Sigmoid))
}

fn gelu_tanh(x: &Array) -> Array {
    // 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))
    const ROOT: f32 = 0.797_884_6;
    let cube = x.binary(Binary::Multiply, &x.unary(Unary::Square));
    let inner = x.binary(Binary::Add, &cube.with_constant(Binary::Multiply, 0.044_715));
    let tanh = inner.with_constant(Binary::Multiply, ROOT).unary(Unary::Tanh);
    let half = x.with_constant(Binary::Multiply, 0.5);
    half.binary(Binary::Multiply, &tanh.with_constant(Binary::Add, 1.0))
}

fn gelu(x: &Array) -> Array {
    let erf = x.with_constant(Binary::Multiply, std::f32::consts::FRAC_1_SQRT_2).unary(Unary::Erf);
    let half = x.with_constant(Binary::Multiply, 0.5);
    half.binary(Binary::Multiply, &erf.with_constant(Binary::Add, 1.0))
}

/// `cap · tanh(x / cap)`.
fn softcap(x: &Array, cap: f32) -> Array {
    let inner = x.with_constant(Binary::Divide, cap).unary(Unary::Tanh);
    inner.with_constant(Binary::Multiply, cap)
}
