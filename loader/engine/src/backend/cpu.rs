//! The backend over our own kernels: every call computes at once, on a team of threads of its own.

use std::{io, ops::Range, sync::Arc};

use shardpack_collectives::GroupError;
use shardpack_formats::memory::KvType;
use shardpack_formats::{
    Platform,
    hex::HexF32,
    spec::{Activation, ClampedSwiglu, NormKind, Rope, RopeStyle, Router},
};
use shardpack_kernels::{
    Activations, Matrix, Packing, Rotation, Team, TeamOptions, elementwise, gather, matmuls_before,
    memory, norm,
    pool::{Buffer, Pool},
};
use zerocopy::IntoBytes;

use super::{
    AttentionStep, Backend, BlockStep, CacheShape, ConvolutionInputs, ConvolutionStep, DeltaInputs,
    DeltaStep, ExpertStep, IndexInputs, IndexStep, NormStep, PoolStep, Qkv, Ranks, RouterVectors,
    StepError, StoredMatrix, StoredWeights, StreamStep, Xielu,
};
use crate::loading::PackageTensor;

mod attention;
mod blocks;
mod cache;
mod delta;
mod entries;
mod experts;
mod heads;
mod index;
mod order;
mod route;
mod streams;

pub use cache::{Cache, Page};
pub use index::Chosen;
pub use route::Routes;

/// Kernels on the threads of one team.
pub struct Cpu {
    team: Team,
    kv: KvType,
    order: order::Order,
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

    /// Room for results; holds any numbers.
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
        Ok(Self { team, kv: KvType::F32, order: order::Order::default() })
    }

    /// The same, with keys and values stored as `kv`; f32 by default.
    #[must_use]
    pub fn with_kv(self, kv: KvType) -> Self {
        Self { kv, ..self }
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
        }
    }
}

impl Backend for Cpu {
    type Tensor = Tensor;
    type Matrix = StoredMatrix;
    type Vector = Vec<f32>;
    type Rotation = (RopeStyle, Rotation);
    type Routes = Routes;
    type Chosen = Chosen;
    type Cache = Cache;
    type Page = Arc<Page>;

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

    fn cache(&self, shape: &CacheShape, pages: &[Arc<Page>]) -> Cache {
        Cache::new(shape, self.kv, pages)
    }

    fn page(&self, cache: &Cache, index: usize) -> Arc<Page> {
        cache.page(index)
    }

    fn rewinds(&self) -> bool {
        true
    }

    fn rewind(&self, cache: &mut Cache, rows: usize) {
        self.team.run(|| cache.rewind(rows));
    }

    fn page_bytes(&self, shape: &CacheShape) -> u64 {
        cache::page_bytes(shape, self.kv)
    }

    fn kv_type(&self) -> KvType {
        self.kv
    }

    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Self::Rotation {
        assert_eq!(positions.len(), totals.len(), "a length for every row");
        let floats = |all: &[HexF32]| all.iter().map(|freq| freq.0).collect::<Vec<f32>>();
        let short = floats(&rope.inv_freq);
        let long = rope.long.as_ref().map(|long| (long.beyond, floats(&long.inv_freq)));
        let frequencies = |total: u32| match &long {
            Some((beyond, long)) if total > *beyond => long.as_slice(),
            _ => short.as_slice(),
        };
        let rows: Vec<_> = positions
            .iter()
            .zip(totals)
            .map(|(position, total)| (*position, frequencies(*total)))
            .collect();
        (rope.style, Rotation::by_rows(short.len(), rope.attention_factor.0, &rows))
    }

    fn zeros(&self, rows: usize, width: usize) -> Tensor {
        Tensor::zeros(rows, width)
    }

    fn tensor(&self, values: Vec<f32>, width: usize) -> Tensor {
        Tensor { width, values: values.into() }
    }

    fn embed(&self, tokens: &[u32], table: &StoredMatrix, held: Range<usize>) -> Tensor {
        let mut out = Tensor::unset(tokens.len(), table.inputs);
        gather::gather(tokens, &table.view(), held, &mut out.values);
        out
    }

    fn linear(&self, x: &Tensor, matrix: &StoredMatrix) -> Tensor {
        let [out] = self.linears(x, [matrix]);
        out
    }

    fn linears<const N: usize>(&self, x: &Tensor, matrices: [&StoredMatrix; N]) -> [Tensor; N] {
        let mut outs = matrices.map(|matrix| {
            assert_eq!(x.width, matrix.inputs, "inputs of a matrix");
            Tensor::unset(x.rows(), matrix.outputs)
        });
        let views = matrices.map(StoredMatrix::view);
        let next = self.order.note(&views);
        let places = &mut outs.each_mut().map(|out| &mut out.values[..]);
        matmuls_before(&x.values, &views, places, next.as_deref());
        outs
    }

    fn add_bias(&self, mut x: Tensor, bias: &Vec<f32>) -> Tensor {
        assert_eq!(x.width, bias.len(), "width of a bias");
        elementwise::add_bias(&mut x.values, bias);
        x
    }

    fn norm(&self, x: &Tensor, step: &NormStep<'_, Vec<f32>>) -> Tensor {
        let mut out = Tensor::unset(x.rows(), x.width);
        let compute = match step.kind {
            NormKind::Rms => norm::rms_norm,
            NormKind::Layer => norm::layer_norm,
        };
        compute(&x.values, step.gain, step.eps, &mut out.values);
        match step.bias {
            Some(bias) => self.add_bias(out, bias),
            None => out,
        }
    }

    fn square_sums(&self, parts: &[(&Tensor, Range<usize>)]) -> Tensor {
        let rows = parts.first().map_or(0, |(x, _)| x.rows());
        let mut out = Tensor::zeros(rows, parts.len());
        for (index, (x, columns)) in parts.iter().enumerate() {
            assert_eq!(x.rows(), rows, "rows of all parts");
            let place = [index, parts.len()];
            norm::square_sums(&x.values, x.width, columns.clone(), &mut out.values, place);
        }
        out
    }

    fn norm_by_sums(
        &self,
        mut x: Tensor,
        step: &NormStep<'_, Vec<f32>>,
        (sums, column): (&Tensor, usize),
        full: usize,
    ) -> Tensor {
        assert!(
            step.kind == NormKind::Rms && step.bias.is_none(),
            "checked when a model is loaded"
        );
        assert_eq!((x.width, x.rows()), (step.gain.len(), sums.rows()), "sums and gains");
        let each = sums.values.chunks_exact(sums.width).map(|row| row[column]);
        norm::scale_by_square_sums(&mut x.values, step.gain, each, full, step.eps);
        x
    }

    fn rotate(&self, mut x: Tensor, rotation: &Self::Rotation, head: (usize, usize)) -> Tensor {
        match rotation.0 {
            RopeStyle::Half => rotation.1.rotate_half(&mut x.values, head),
            RopeStyle::Interleaved => rotation.1.rotate_interleaved(&mut x.values, head),
        }
        x
    }

    fn attention(
        &self,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &AttentionStep<'_, Vec<f32>>,
    ) -> Tensor {
        attention::attend(&qkv, None, caches, step)
    }

    fn choose_keys(
        &self,
        inputs: IndexInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &IndexStep<'_>,
    ) -> Chosen {
        index::choose(&inputs, caches, step)
    }

    fn attention_to(
        &self,
        chosen: &Chosen,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &AttentionStep<'_, Vec<f32>>,
    ) -> Tensor {
        match chosen {
            Chosen::Keys(keys) => index::attend_to(keys, &qkv, caches, step),
            Chosen::Blocks(tokens, blocks) => {
                attention::attend(&qkv, Some((*tokens, blocks)), caches, step)
            }
        }
    }

    fn choose_blocks(
        &self,
        queries_and_keys: [&Tensor; 2],
        caches: &mut [&mut Cache],
        step: &BlockStep<'_>,
    ) -> Chosen {
        blocks::choose(queries_and_keys, caches, step)
    }

    fn has_entries(&self) -> bool {
        true
    }

    fn pool(
        &self,
        numbers: [&Tensor; 2],
        caches: &mut [&mut Cache],
        step: &PoolStep<'_, Vec<f32>>,
    ) -> Tensor {
        entries::pool(numbers, caches, step)
    }

    fn choose_entries(
        &self,
        inputs: IndexInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &IndexStep<'_>,
    ) -> Chosen {
        index::choose_entries(&inputs, caches, step)
    }

    fn attention_beside(
        &self,
        entries: (usize, &Tensor, Option<&Chosen>),
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: (&AttentionStep<'_, Vec<f32>>, usize),
    ) -> Tensor {
        let (layer, entries, chosen) = entries;
        let chosen = chosen.map(|chosen| match chosen {
            Chosen::Keys(entries) => entries.as_slice(),
            Chosen::Blocks(..) => unreachable!("entries are chosen one by one"),
        });
        entries::attend_beside((layer, entries, chosen), &qkv, caches, step)
    }

    fn has_latent_and_linear_attention(&self) -> bool {
        true
    }

    fn gated_delta(
        &self,
        inputs: &DeltaInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &DeltaStep<'_, Vec<f32>>,
    ) -> Tensor {
        assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
        assert_eq!(step.lengths.iter().sum::<usize>(), inputs.v.rows(), "rows of all sequences");
        let mut out = Tensor::zeros(inputs.v.rows(), inputs.v.width);
        let mut row = 0;
        let drafts = step.drafts.iter().copied().chain(std::iter::repeat(0));
        for ((cache, length), drafts) in caches.iter_mut().zip(step.lengths).zip(drafts) {
            let rows = row..row + length;
            let place = &mut out.values[rows.start * inputs.v.width..rows.end * inputs.v.width];
            delta::run(inputs, (rows, drafts), cache.state(step.layer), step, place);
            row += length;
        }
        out
    }

    fn short_convolution(
        &self,
        inputs: ConvolutionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        step: &ConvolutionStep<'_, Vec<f32>>,
    ) -> Tensor {
        assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
        let width = inputs.x.width;
        let mut out = Tensor::zeros(inputs.x.rows(), width);
        let mut row = 0;
        let drafts = step.drafts.iter().copied().chain(std::iter::repeat(0));
        for ((cache, length), drafts) in caches.iter_mut().zip(step.lengths).zip(drafts) {
            let rows = row..row + length;
            let place = &mut out.values[rows.start * width..rows.end * width];
            delta::short::run(&inputs, (rows, drafts), cache.state(step.layer), step, place);
            row += length;
        }
        out
    }

    fn activate(&self, activation: Activation, gate: Option<Tensor>, mut up: Tensor) -> Tensor {
        assert_eq!(gate.is_some(), activation.is_gated(), "a gate for {activation:?}");
        if let Some(mut gate) = gate {
            let compute = match activation {
                Activation::GeluTanhGlu => elementwise::gelu_tanh_glu,
                Activation::GeluGlu => elementwise::gelu_glu,
                _ => elementwise::silu_glu,
            };
            compute(&mut gate.values, &up.values);
            return gate;
        }
        match activation {
            Activation::GeluTanh => elementwise::gelu_tanh(&mut up.values),
            Activation::Gelu => elementwise::gelu(&mut up.values),
            Activation::ReluSquared => elementwise::relu_squared(&mut up.values),
            Activation::Xielu => unreachable!("it has numbers, so it is called by its name"),
            _ => elementwise::silu(&mut up.values),
        }
        up
    }

    fn xielu(&self, mut x: Tensor, numbers: &Xielu) -> Tensor {
        let Xielu { above, below, beta, eps } = *numbers;
        elementwise::xielu(&mut x.values, [above, below, beta, eps]);
        x
    }

    fn clamped_glu(&self, mut gate: Tensor, up: Tensor, limit: f32) -> Tensor {
        experts::limited_swiglu(&mut gate.values, &up.values, limit);
        gate
    }

    fn clamped_swiglu(&self, mut gate: Tensor, up: Tensor, clamped: ClampedSwiglu) -> Tensor {
        experts::clamped_swiglu(&mut gate.values, &up.values, clamped);
        gate
    }

    fn route(
        &self,
        logits: Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Vec<f32>>,
    ) -> Routes {
        let RouterVectors { correction, scales } = vectors;
        let vectors = [correction, scales].map(|vector| vector.map(Vec::as_slice));
        route::route(&logits.values, logits.width, router, top_k as usize, vectors)
    }

    fn route_to(&self, logits: Tensor, router: &Router, taken: &[u32], top_k: u32) -> Routes {
        route::route_to(&logits.values, logits.width, router, (taken, top_k as usize))
    }

    fn experts(
        &self,
        x: &Tensor,
        routes: &Routes,
        step: &ExpertStep<'_, StoredMatrix, Vec<f32>>,
    ) -> Tensor {
        experts::experts(x, routes, step)
    }

    fn sigmoid_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(x, gate, route::sigmoid)
    }

    fn softplus_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        gated(x, gate, |gate| gate.max(0.0) + libm::log1pf(libm::expf(-gate.abs())))
    }

    fn limit(&self, mut x: Tensor, limit: f32) -> Tensor {
        elementwise::limit(&mut x.values, limit);
        x
    }

    fn slice_heads(&self, x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
        heads::slice(x, width, part)
    }

    fn join_heads(&self, a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
        heads::join(a, b, heads)
    }

    fn head_linear(&self, x: &Tensor, stack: &StoredMatrix, heads: usize) -> Tensor {
        heads::linear(x, stack, heads)
    }

    fn stream_weights(&self, mixes: &Tensor, step: &StreamStep<'_, Vec<f32>>) -> Tensor {
        streams::weights(mixes, step)
    }

    fn mix_streams(
        &self,
        x: &Tensor,
        mixes: &Tensor,
        step: &StreamStep<'_, Vec<f32>>,
        rounds: u32,
    ) -> Tensor {
        streams::mix(x, mixes, step, rounds)
    }

    fn collapse_streams(&self, x: &Tensor, weights: &Tensor) -> Tensor {
        streams::collapse(x, weights)
    }

    fn add_to_streams(&self, x: Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
        streams::add(x, part, weights)
    }

    fn scale(&self, mut x: Tensor, factor: f32) -> Tensor {
        elementwise::scale(&mut x.values, factor);
        x
    }

    fn scale_rows(&self, mut x: Tensor, factors: &[f32]) -> Tensor {
        assert_eq!(x.rows(), factors.len(), "a factor for every row");
        elementwise::scale_rows(&mut x.values, factors);
        x
    }

    fn softcap(&self, mut x: Tensor, cap: f32) -> Tensor {
        elementwise::softcap(&mut x.values, cap);
        x
    }

    fn add(&self, mut a: Tensor, b: &Tensor) -> Tensor {
        elementwise::add(&mut a.values, &b.values);
        a
    }

    fn select_rows(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        let row = |row: &usize| &x.values[row * x.width..(row + 1) * x.width];
        let values: Vec<f32> = rows.iter().flat_map(row).copied().collect();
        Tensor { width: x.width, values: values.into() }
    }

    fn all_reduce(&self, mut x: Tensor, ranks: &Ranks<'_>) -> Result<Tensor, StepError> {
        if ranks.count() > 1 {
            ranks.sum(&mut x.values)?;
        }
        Ok(x)
    }

    fn gather_columns(
        &self,
        x: Tensor,
        widths: &[usize],
        ranks: &Ranks<'_>,
    ) -> Result<Tensor, StepError> {
        let [width] = widths else { return gather_parts(&x, widths, ranks) };
        assert_eq!(x.width, *width, "columns of the only rank");
        Ok(x)
    }

    fn read(&self, x: Tensor, _: &Ranks<'_>) -> Result<Vec<f32>, StepError> {
        Ok(x.values.into_vec())
    }

    fn settle(&self, _: &mut [&mut Cache], _: &Ranks<'_>) -> Result<(), StepError> {
        Ok(())
    }
}

/// Each column of the gate, by a function of it, for as many consecutive ones of `x`.
fn gated(mut x: Tensor, gate: &Tensor, function: impl Fn(f32) -> f32) -> Tensor {
    assert_eq!(x.rows(), gate.rows(), "a gate for every row");
    assert!(x.width.is_multiple_of(gate.width.max(1)), "gates of a row");
    let each = x.width / gate.width.max(1);
    for (values, gate) in x.values.chunks_exact_mut(each).zip(&*gate.values) {
        let factor = function(*gate);
        for value in values.iter_mut() {
            *value *= factor;
        }
    }
    x
}

/// Puts the ranks' columns side by side; their sizes are foreign until compared.
fn gather_parts(x: &Tensor, widths: &[usize], ranks: &Ranks<'_>) -> Result<Tensor, StepError> {
    let mine = ranks.group.rank() as usize;
    assert_eq!(x.width, widths[mine], "columns of this rank");
    // A rank without columns has no rows to count; the others' tell.
    let parts = ranks.group.all_gather(x.values.as_bytes(), ranks.deadline())?;
    let rows = widths
        .iter()
        .zip(&parts)
        .find_map(|(width, part)| (part.len() / size_of::<f32>()).checked_div(*width))
        .unwrap_or(0);
    let mut out = Tensor::zeros(rows, widths.iter().sum());
    let mut column = 0;
    for (rank, (width, part)) in widths.iter().zip(&parts).enumerate() {
        let (floats, rest) = part.as_chunks::<4>();
        if floats.len() != rows * width || !rest.is_empty() || parts.len() != widths.len() {
            return Err(StepError::Group(GroupError::OutOfStep {
                rank: rank as u32,
                expected: format!("{rows} rows of {width} columns"),
                found: format!("{} bytes from one of {} ranks", part.len(), parts.len()),
            }));
        }
        for (row, floats) in floats.chunks_exact((*width).max(1)).enumerate() {
            let place = &mut out.values[row * out.width + column..][..*width];
            for (place, float) in place.iter_mut().zip(floats) {
                *place = f32::from_le_bytes(*float);
            }
        }
        column += width;
    }
    Ok(out)
}
