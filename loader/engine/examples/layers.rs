//! Profile of a step by operation:
//! `cargo run --release -p shardpack-engine --example layers -- SET [THREADS] [CONTEXT] [ROWS]`.
//!
//! Every operation of the backend is timed where the model calls it, so a product's time has in it
//! the rounding of its activations, the waking of the threads and the waiting for the last one.
//! What a step takes beyond the sum of its parts is the model's own code. The bytes of attention are
//! those of the cached keys and values.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{
    collections::BTreeMap,
    env,
    error::Error,
    ops::Range,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use shardpack_engine::{
    backend::{
        Attention, AttentionParams, BlockIndexerInputs, BlockIndexerParams, BlockSparseAttention,
        CacheShape, Columns, CompressedEntries, CompressedKv, CompressorInputs, CompressorParams,
        ComputesAtOnce, Cpu, DenseOps, ExpertParams, HeadOps, HyperConnections, IndexerInputs,
        IndexerParams, KvCache, LatentAttention, LinearAttention, LinearAttentionInputs,
        LinearAttentionParams, MixtureOfExperts, NormParams, Qkv, Ranks, RotatedPart,
        RouterVectors, ShortConvolution, ShortConvolutionInputs, ShortConvolutionParams,
        SparseIndexer, SquareSums, StepError, StoredMatrix, StoredWeights, StreamParams,
        TensorParallel, Tensors, TokenChoice, Xielu,
    },
    bench::read_bandwidth,
    engine::{LocalModel, memory_group},
    loading::{OpenOptions, Package, PackageTensor},
};
use shardpack_engine_api::TokenId;
use shardpack_formats::memory::KvType;
use shardpack_formats::spec::{Activation, ClampedSwiglu, Mask, Rope, Router};
use shardpack_kernels::Packing;

/// Steps that are measured.
const STEPS: usize = 32;

/// Calls, time in them, and bytes of weights that they read.
type Parts = BTreeMap<String, (usize, Duration, usize)>;

/// A backend that keeps the time of another.
struct Timed {
    inner: Cpu,
    parts: Arc<Mutex<Parts>>,
    /// Tokens whose keys and values a step reads.
    context: Arc<AtomicUsize>,
}

impl Timed {
    fn time<R>(&self, name: &str, work: impl FnOnce(&Cpu) -> R) -> R {
        self.time_bytes(name, 0, work)
    }

    fn time_bytes<R>(&self, name: &str, bytes: usize, work: impl FnOnce(&Cpu) -> R) -> R {
        let begun = Instant::now();
        let result = work(&self.inner);
        let spent = begun.elapsed();
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let part = parts.entry(name.to_owned()).or_default();
        *part = (part.0 + 1, part.1 + spent, part.2 + bytes);
        result
    }
}

fn bytes_of(matrix: &StoredMatrix) -> usize {
    match &matrix.weights {
        StoredWeights::Plain(weights) => weights.bytes().len(),
        StoredWeights::Affine { words, scales, biases, .. } => {
            [words, scales, biases].iter().map(|part| part.bytes().len()).sum()
        }
        StoredWeights::Float { words, scales, .. } => words.bytes().len() + scales.bytes().len(),
    }
}

type Tensor = <Cpu as Tensors>::Tensor;
type Rotation = <Cpu as DenseOps>::Rotation;
type Routes = <Cpu as MixtureOfExperts>::Routes;
type TopK = <Cpu as SparseIndexer>::TopK;
type TopKBlocks = <Cpu as BlockSparseAttention>::TopKBlocks;
type Cache = <Cpu as KvCache>::Cache;
type Page = <Cpu as KvCache>::Page;

impl Tensors for Timed {
    type Tensor = Tensor;
    type Matrix = StoredMatrix;
    type Vector = Vec<f32>;

    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.inner.run(work)
    }

    fn reads(&self, packing: Packing) -> bool {
        self.inner.reads(packing)
    }

    fn matrix(&self, stored: StoredMatrix) -> StoredMatrix {
        self.inner.matrix(stored)
    }

    fn vector(&self, stored: &PackageTensor) -> Vec<f32> {
        self.inner.vector(stored)
    }

    fn vector_plus_one(&self, stored: &PackageTensor) -> Vec<f32> {
        self.inner.vector_plus_one(stored)
    }

    fn ones(&self, len: usize) -> Vec<f32> {
        self.inner.ones(len)
    }

    fn zeros(&self, rows: usize, width: usize) -> Tensor {
        self.inner.zeros(rows, width)
    }

    fn tensor(&self, values: Vec<f32>, width: usize) -> Tensor {
        self.inner.tensor(values, width)
    }
}

impl KvCache for Timed {
    type Cache = Cache;
    type Page = Page;

    fn cache(&self, shape: &CacheShape, pages: &[Page]) -> Cache {
        self.inner.cache(shape, pages)
    }

    fn page(&self, cache: &Cache, index: usize) -> Page {
        self.inner.page(cache, index)
    }

    fn page_bytes(&self, shape: &CacheShape) -> u64 {
        self.inner.page_bytes(shape)
    }

    fn kv_type(&self) -> KvType {
        self.inner.kv_type()
    }
}

impl DenseOps for Timed {
    type Rotation = Rotation;

    fn embed(&self, tokens: &[u32], table: &StoredMatrix, held: Range<usize>) -> Tensor {
        self.time("embed", |cpu| cpu.embed(tokens, table, held))
    }

    fn linear(&self, x: &Tensor, matrix: &StoredMatrix) -> Tensor {
        let name = format!("product {} x {}", matrix.outputs, matrix.inputs);
        self.time_bytes(&name, bytes_of(matrix), |cpu| cpu.linear(x, matrix))
    }

    fn linears<const N: usize>(&self, x: &Tensor, matrices: [&StoredMatrix; N]) -> [Tensor; N] {
        let outputs: Vec<_> = matrices.iter().map(|matrix| matrix.outputs.to_string()).collect();
        let name = format!("product {} x {}", outputs.join("+"), matrices[0].inputs);
        let bytes = matrices.iter().map(|matrix| bytes_of(matrix)).sum();
        self.time_bytes(&name, bytes, |cpu| cpu.linears(x, matrices))
    }

    fn add_bias(&self, x: Tensor, bias: &Vec<f32>) -> Tensor {
        self.time("bias", |cpu| cpu.add_bias(x, bias))
    }

    fn norm(&self, x: &Tensor, params: &NormParams<'_, Vec<f32>>) -> Tensor {
        self.time("norm", |cpu| cpu.norm(x, params))
    }

    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Rotation {
        self.time("rotation", |cpu| cpu.rotation(rope, positions, totals))
    }

    fn rotate(&self, x: Tensor, rotation: &Rotation, part: RotatedPart) -> Tensor {
        self.time("rotate", |cpu| cpu.rotate(x, rotation, part))
    }

    fn activate(&self, activation: Activation, gate: Option<Tensor>, up: Tensor) -> Tensor {
        self.time("activation", |cpu| cpu.activate(activation, gate, up))
    }

    fn xielu(&self, x: Tensor, params: &Xielu) -> Tensor {
        self.time("activation", |cpu| cpu.xielu(x, params))
    }

    fn clamped_glu(&self, gate: Tensor, up: Tensor, limit: f32) -> Tensor {
        self.time("activation", |cpu| cpu.clamped_glu(gate, up, limit))
    }

    fn clamped_swiglu(&self, gate: Tensor, up: Tensor, clamped: ClampedSwiglu) -> Tensor {
        self.time("activation", |cpu| cpu.clamped_swiglu(gate, up, clamped))
    }

    fn sigmoid_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        self.time("gate", |cpu| cpu.sigmoid_gate(x, gate))
    }

    fn softplus_gate(&self, x: Tensor, gate: &Tensor) -> Tensor {
        self.time("gate", |cpu| cpu.softplus_gate(x, gate))
    }

    fn limit(&self, x: Tensor, limit: f32) -> Tensor {
        self.time("limit", |cpu| cpu.limit(x, limit))
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        self.time("scale", |cpu| cpu.scale(x, factor))
    }

    fn scale_rows(&self, x: Tensor, factors: &[f32]) -> Tensor {
        self.time("scale", |cpu| cpu.scale_rows(x, factors))
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        self.time("scale", |cpu| cpu.softcap(x, cap))
    }

    fn add(&self, a: Tensor, b: &Tensor) -> Tensor {
        self.time("add", |cpu| cpu.add(a, b))
    }

    fn select_rows(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        self.inner.select_rows(x, rows)
    }
}

impl TensorParallel for Timed {
    fn all_reduce(&self, x: Tensor, ranks: &Ranks<'_>) -> Result<Tensor, StepError> {
        self.time("all-reduce", |cpu| cpu.all_reduce(x, ranks))
    }

    fn gather_columns(
        &self,
        x: Tensor,
        widths: &[usize],
        ranks: &Ranks<'_>,
    ) -> Result<Tensor, StepError> {
        self.time("all-gather", |cpu| cpu.gather_columns(x, widths, ranks))
    }

    fn square_sums(&self, parts: &[Columns<'_, Tensor>]) -> Tensor {
        self.time("norm", |cpu| cpu.square_sums(parts))
    }

    fn norm_by_sums(
        &self,
        x: Tensor,
        params: &NormParams<'_, Vec<f32>>,
        sums: SquareSums<'_, Tensor>,
    ) -> Tensor {
        self.time("norm", |cpu| cpu.norm_by_sums(x, params, sums))
    }

    fn read(&self, x: Tensor, ranks: &Ranks<'_>) -> Result<Vec<f32>, StepError> {
        self.inner.read(x, ranks)
    }

    fn flush(&self, caches: &mut [&mut Cache], ranks: &Ranks<'_>) -> Result<(), StepError> {
        self.inner.flush(caches, ranks)
    }
}

impl ComputesAtOnce for Timed {}

impl TokenChoice for Timed {}

impl HeadOps for Timed {
    fn slice_heads(&self, x: &Tensor, width: usize, part: Range<usize>) -> Tensor {
        self.time("heads", |cpu| cpu.slice_heads(x, width, part))
    }

    fn join_heads(&self, a: &Tensor, b: &Tensor, heads: usize) -> Tensor {
        self.time("heads", |cpu| cpu.join_heads(a, b, heads))
    }

    fn head_linear(&self, x: &Tensor, stack: &StoredMatrix, heads: usize) -> Tensor {
        let bytes = bytes_of(stack);
        self.time_bytes("product of heads", bytes, |cpu| cpu.head_linear(x, stack, heads))
    }
}

impl Attention for Timed {
    fn attention(
        &self,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        let kv_heads = params.q_to_kv.iter().max().map_or(0, |last| last + 1);
        let row_bytes = kv_heads * params.head_dim * 2 * size_of::<f32>();
        let bytes = match params.mask {
            Mask::Full | Mask::Bidirectional => row_bytes * self.context.load(Ordering::Relaxed),
            Mask::Sliding(seen) | Mask::Chunked(seen) | Mask::BidirectionalSliding(seen) => {
                row_bytes * self.context.load(Ordering::Relaxed).min(seen as usize)
            }
        };
        self.time_bytes("attention", bytes, |cpu| cpu.attention(qkv, caches, params))
    }
}

impl SparseIndexer for Timed {
    type TopK = TopK;

    fn top_k_keys(
        &self,
        inputs: IndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &IndexerParams<'_>,
    ) -> TopK {
        let bytes = params.width * size_of::<f32>() * self.context.load(Ordering::Relaxed);
        self.time_bytes("indexer", bytes, |cpu| cpu.top_k_keys(inputs, caches, params))
    }

    fn sparse_attention(
        &self,
        top_k: &TopK,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        self.time("sparse attention", |cpu| cpu.sparse_attention(top_k, qkv, caches, params))
    }
}

impl LatentAttention for Timed {}

impl BlockSparseAttention for Timed {
    type TopKBlocks = TopKBlocks;

    fn top_k_blocks(
        &self,
        inputs: BlockIndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &BlockIndexerParams<'_>,
    ) -> TopKBlocks {
        self.time("block indexer", |cpu| cpu.top_k_blocks(inputs, caches, params))
    }

    fn block_sparse_attention(
        &self,
        top_k: &TopKBlocks,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        self.time("block-sparse attention", |cpu| {
            cpu.block_sparse_attention(top_k, qkv, caches, params)
        })
    }
}

impl CompressedKv for Timed {
    fn compress(
        &self,
        inputs: CompressorInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &CompressorParams<'_, Vec<f32>>,
    ) -> Tensor {
        self.time("compressor", |cpu| cpu.compress(inputs, caches, params))
    }

    fn top_k_entries(
        &self,
        inputs: IndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &IndexerParams<'_>,
    ) -> TopK {
        self.time("indexer of entries", |cpu| cpu.top_k_entries(inputs, caches, params))
    }

    fn compressed_attention(
        &self,
        entries: CompressedEntries<'_, Tensor, TopK>,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vec<f32>>,
    ) -> Tensor {
        self.time("attention", |cpu| cpu.compressed_attention(entries, qkv, caches, params))
    }
}

impl LinearAttention for Timed {
    fn linear_attention(
        &self,
        inputs: &LinearAttentionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &LinearAttentionParams<'_, Tensor, Vec<f32>>,
    ) -> Tensor {
        self.time("linear attention", |cpu| cpu.linear_attention(inputs, caches, params))
    }
}

impl ShortConvolution for Timed {
    fn short_convolution(
        &self,
        inputs: ShortConvolutionInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &ShortConvolutionParams<'_, Vec<f32>>,
    ) -> Tensor {
        self.time("short convolution", |cpu| cpu.short_convolution(inputs, caches, params))
    }
}

impl MixtureOfExperts for Timed {
    type Routes = Routes;

    fn route(
        &self,
        logits: Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Vec<f32>>,
    ) -> Routes {
        self.time("route", |cpu| cpu.route(logits, router, top_k, vectors))
    }

    fn hash_route(&self, logits: Tensor, router: &Router, experts: &[u32], top_k: u32) -> Routes {
        self.time("route", |cpu| cpu.hash_route(logits, router, experts, top_k))
    }

    fn experts(
        &self,
        x: &Tensor,
        routes: &Routes,
        params: &ExpertParams<'_, StoredMatrix, Vec<f32>>,
    ) -> Tensor {
        self.time("experts", |cpu| cpu.experts(x, routes, params))
    }
}

impl HyperConnections for Timed {
    fn stream_weights(&self, mixes: &Tensor, params: &StreamParams<'_, Vec<f32>>) -> Tensor {
        self.time("hyper-connections", |cpu| cpu.stream_weights(mixes, params))
    }

    fn mix_streams(
        &self,
        x: &Tensor,
        mixes: &Tensor,
        params: &StreamParams<'_, Vec<f32>>,
        rounds: u32,
    ) -> Tensor {
        self.time("hyper-connections", |cpu| cpu.mix_streams(x, mixes, params, rounds))
    }

    fn collapse_streams(&self, x: &Tensor, weights: &Tensor) -> Tensor {
        self.time("hyper-connections", |cpu| cpu.collapse_streams(x, weights))
    }

    fn add_to_streams(&self, x: Tensor, part: &Tensor, weights: &Tensor) -> Tensor {
        self.time("hyper-connections", |cpu| cpu.add_to_streams(x, part, weights))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number =
        |index: usize, default| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let set = arguments.first().ok_or("expected a package set")?;
    let (threads, context, rows): (usize, usize, usize) =
        (number(1, 2)?, number(2, 8)?, number(3, 1)?);
    let folder = Path::new(set).join("node-0");
    let packages = [Package::open(&folder, &OpenOptions::fast(threads), &|_| {})?];
    let parts = Arc::new(Mutex::new(Parts::new()));
    let held = Arc::new(AtomicUsize::new(0));
    let backend =
        Timed { inner: Cpu::new(threads)?, parts: Arc::clone(&parts), context: Arc::clone(&held) };
    let model = LocalModel::over(&packages, &memory_group(1)?, vec![backend])?;
    let tokens = |first: usize, count: usize| -> Vec<TokenId> {
        (first..first + count).map(|index| TokenId(((index * 7919 + 5) % 500) as u32)).collect()
    };
    let steps = if rows == 1 { STEPS } else { 1 };
    let mut sequence = model.sequence(context + steps * rows);
    for first in (0..context).step_by(512) {
        let count = 512.min(context - first);
        model.extend(&mut sequence, &tokens(first, count), count - 1)?;
    }
    parts.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let begun = Instant::now();
    for step in 0..steps {
        held.store(context + (step + 1) * rows, Ordering::Relaxed);
        model.extend(&mut sequence, &tokens(context + step * rows, rows), rows - 1)?;
    }
    let wall = begun.elapsed();
    let parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
    let each = |time: Duration| time.as_secs_f64() * 1e6 / steps as f64;
    let limit = read_bandwidth(threads)? / 1e9;
    println!(
        "| part | calls a step | us a call | us a step | of the step | MB a step | GB/s | of the read \
         limit |\n|---|---|---|---|---|---|---|---|"
    );
    let line = |name: &str, (calls, time, bytes): (usize, Duration, usize)| {
        let share = time.as_secs_f64() / wall.as_secs_f64();
        let pace = bytes as f64 / 1e9 / time.as_secs_f64();
        let single = time.as_secs_f64() * 1e6 / calls.max(1) as f64;
        let calls = calls / steps;
        let megabytes = bytes as f64 / 1e6 / steps as f64;
        println!(
            "| {name} | {calls} | {single:.1} | {:.0} | {share:.3} | {megabytes:.1} | {pace:.1} | \
             {:.2} |",
            each(time),
            pace / limit
        );
    };
    let mut ordered: Vec<_> = parts.iter().collect();
    ordered.sort_by_key(|(_, part)| std::cmp::Reverse(part.1));
    for (name, part) in &ordered {
        line(name, **part);
    }
    let all = |(calls, time, bytes): (usize, Duration, usize), part: &(usize, Duration, usize)| {
        (calls + part.0, time + part.1, bytes + part.2)
    };
    line("all parts", parts.values().fold((0, Duration::ZERO, 0), all));
    let bytes = parts.values().map(|part| part.2).sum();
    line("step", (steps, wall, bytes));
    println!("read limit of {threads} threads: {limit:.1} GB/s");
    Ok(())
}
