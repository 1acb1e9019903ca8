//! What a model asks of a machine: one trait, so that each model is written once.
//!
//! Values of type [`Backend::Tensor`] may be promises: nothing asks for their numbers before
//! [`Backend::read`]. The backend also carries out the sums between ranks, since some must stand
//! inside its own graph; a failure of the rank group comes back as a value, from the call itself
//! or, where work is deferred, from [`Backend::read`].

use std::{ops::Range, time::Duration};

use shardpack_collectives::{Deadline, Group, GroupError};
use shardpack_formats::{
    memory::KvType,
    spec::{Activation, ClampedSwiglu, Rope, Router},
};

use crate::open::{PackageTensor, Packing};

pub mod cpu;
pub mod mlx;
mod steps;

pub use cpu::{Arithmetic, Cpu, CpuError, CpuOptions};
pub use mlx::{Collectives, Mlx};
pub use steps::{
    AttentionStep, BlockStep, ConvolutionInputs, ConvolutionStep, DeltaInputs, DeltaStep,
    ExpertStep, IndexInputs, IndexStep, NormStep, Qkv, RouterVectors, StreamStep, Xielu,
};

/// A step could not be carried through. After a group's error every cache that the step touched
/// is in an unknown state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The rank group failed.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The backend could not compute, for want of memory for example.
    #[error("the step could not be computed: {0}")]
    Backend(String),
}

/// The ranks of one step and the time that each call on them may take.
#[derive(Clone, Copy)]
pub struct Ranks<'a> {
    /// The rank group.
    pub group: &'a dyn Group,
    /// Longest wait of one call.
    pub timeout: Duration,
    /// First of those among which sums are, and one past the last.
    members: [u32; 2],
}

impl<'a> Ranks<'a> {
    /// All ranks of a group.
    #[must_use]
    pub fn all(group: &'a dyn Group, timeout: Duration) -> Self {
        Self { group, timeout, members: [0, group.size()] }
    }

    /// The same group, of which these ranks sum among themselves.
    #[must_use]
    pub const fn part(&self, members: &Range<u32>) -> Self {
        Self { members: [members.start, members.end], ..*self }
    }

    /// Number of ranks among which sums are.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.members[1] - self.members[0]
    }

    /// Replaces `values` by the sum over those ranks.
    pub fn sum(&self, values: &mut [f32]) -> Result<(), GroupError> {
        let [start, end] = self.members;
        if self.count() == self.group.size() {
            return self.group.all_reduce_sum(values, self.deadline());
        }
        self.group.sum_among(start..end, values, self.deadline())
    }

    /// The deadline of a call that begins now.
    #[must_use]
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }
}

/// A stored weight matrix `[outputs, inputs]` of this rank.
#[derive(Clone, Debug)]
pub struct StoredMatrix {
    /// Outputs held here.
    pub outputs: usize,
    /// Inputs held here.
    pub inputs: usize,
    /// The bytes; shapes and element types have been checked.
    pub weights: StoredWeights,
}

/// How a matrix is stored.
#[derive(Clone, Debug)]
pub enum StoredWeights {
    /// As floats `[outputs, inputs]`.
    Plain(PackageTensor),
    /// In MLX's affine groups.
    Affine {
        /// Packed integers, `[outputs, inputs · bits / 32]` words.
        words: PackageTensor,
        /// Floats `[outputs, inputs / group]`.
        scales: PackageTensor,
        /// Floats `[outputs, inputs / group]`.
        biases: PackageTensor,
        /// Bits per weight.
        bits: u32,
        /// Inputs per group.
        group: u32,
    },
}

/// Room for the keys and values of one sequence on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers that keep keys and values.
    pub layers: Vec<LayerShape>,
    /// Layers that keep a state instead.
    pub states: usize,
    /// Whether keys serve as values too, which are not kept then.
    pub keys_are_values: bool,
    /// Layers that keep the key of an index besides.
    pub indexes: usize,
    /// Width of that key.
    pub index_width: usize,
    /// Of the layers that keep entries of far tokens besides.
    pub entries: Vec<EntryShape>,
}

/// Entries of one layer, each of several tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryShape {
    /// Tokens of an entry, a divisor of [`shardpack_formats::memory::TOKENS_PER_PAGE`].
    pub every: usize,
    /// Width of an entry.
    pub width: usize,
    /// Width of the keys that choose entries; 0 where all are attended to. Entries that are chosen
    /// stand for the tokens before theirs too.
    pub key_width: usize,
}

impl EntryShape {
    /// Whether entries stand for the tokens before theirs too.
    #[must_use]
    pub const fn overlaps(&self) -> bool {
        self.key_width > 0
    }

    /// Width of what is kept.
    #[must_use]
    pub const fn width(&self, part: EntryPart) -> usize {
        match part {
            EntryPart::Entries => self.width,
            EntryPart::Keys => self.key_width,
        }
    }

    /// Numbers `c` of a token, and as many `z`: with those for the next entry before the others.
    #[must_use]
    pub const fn columns(&self, part: EntryPart) -> usize {
        self.width(part) * if self.overlaps() { 2 } else { 1 }
    }
}

/// What is made of tokens' numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryPart {
    /// Entries, which are keys and values.
    Entries = 0,
    /// The keys by which they are chosen.
    Keys = 1,
}

/// Entries of one layer for the sequences of a step.
#[derive(Debug)]
pub struct PoolStep<'a, V> {
    /// The layer, counted among those that keep entries here.
    pub layer: usize,
    /// What is made.
    pub part: EntryPart,
    /// Rows of each sequence, in the order of the caches.
    pub lengths: &'a [usize],
    /// The last of them that may be taken back; empty where none are.
    pub drafts: &'a [usize],
    /// A summand of `z`, `[every, columns]`.
    pub bias: &'a V,
}

/// Keys and values of one token in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Key-value heads held here.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Arithmetic of one rank. Activations are `[rows, width]`, one row per token of the step.
pub trait Backend: Send + Sync {
    /// Activations; cheap to pass by value, perhaps not computed yet.
    type Tensor: Send;
    /// A weight matrix.
    type Matrix: Send + Sync;
    /// A gain or a bias.
    type Vector: Send + Sync;
    /// Angles of one rotary embedding at the positions of one step.
    type Rotation: Send;
    /// Which experts the rows of a step go to, and how much each counts.
    type Routes: Send;
    /// The keys that the rows of a step attend to.
    type Chosen: Send;
    /// Keys and values of one sequence in all layers; grows with it.
    type Cache: Send;
    /// A handle to a full page of a cache, [`shardpack_formats::memory::TOKENS_PER_PAGE`] tokens in all layers; cheap to
    /// clone. The page lives as long as a cache or a handle holds it.
    type Page: Clone + Send + Sync;

    /// Calls `work` where this backend computes (its threads, its stream). A step runs in one
    /// such call.
    fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R;

    /// Whether it reads integers that stand so; all read them as they are stored.
    fn reads(&self, packing: Packing) -> bool {
        packing == Packing::Stored
    }

    /// Takes a matrix.
    fn matrix(&self, stored: StoredMatrix) -> Self::Matrix;

    /// Takes a vector of floats.
    fn vector(&self, stored: &PackageTensor) -> Self::Vector;

    /// Takes a vector of floats, one more than each is stored.
    fn vector_plus_one(&self, stored: &PackageTensor) -> Self::Vector;

    /// A vector of ones.
    fn ones(&self, len: usize) -> Self::Vector;

    /// The cache of a sequence that begins with the tokens of `pages`; empty without pages.
    fn cache(&self, shape: &CacheShape, pages: &[Self::Page]) -> Self::Cache;

    /// A page of a cache, counted from the sequence's beginning, which has to be full.
    fn page(&self, cache: &Self::Cache, index: usize) -> Self::Page;

    /// Whether it computes every row as if it were alone, bit for bit, and can take rows back:
    /// drafts then never change a token.
    fn rewinds(&self) -> bool {
        false
    }

    /// Takes back the last `rows` that the latest step has put into a cache, none of them in a
    /// page that was handed out; called after every step in which the cache's sequence had drafts,
    /// be it for no row.
    fn rewind(&self, cache: &mut Self::Cache, rows: usize) {
        let _ = (cache, rows);
        unreachable!("no step of this backend has drafts")
    }

    /// Memory of one page.
    fn page_bytes(&self, shape: &CacheShape) -> u64;

    /// How keys and values are stored; the same on all ranks.
    fn kv_type(&self) -> KvType;

    /// Angles for rows at `positions` of sequences that end with `totals` tokens, which decides
    /// on the frequencies for long sequences.
    fn rotation(&self, rope: &Rope, positions: &[u32], totals: &[u32]) -> Self::Rotation;

    /// Zeros `[rows, width]`: the part of a rank that holds nothing.
    fn zeros(&self, rows: usize, width: usize) -> Self::Tensor;

    /// Activations `[rows, width]` from their numbers; the opposite of [`Backend::read`].
    fn tensor(&self, values: Vec<f32>, width: usize) -> Self::Tensor;

    /// Rows of `table`, which has those of the tokens `held`; zeros for other tokens.
    fn embed(&self, tokens: &[u32], table: &Self::Matrix, held: Range<usize>) -> Self::Tensor;

    /// `x · matrixᵀ`.
    fn linear(&self, x: &Self::Tensor, matrix: &Self::Matrix) -> Self::Tensor;

    /// [`Backend::linear`] of each of several matrices of the same inputs.
    fn linears<const N: usize>(
        &self,
        x: &Self::Tensor,
        matrices: [&Self::Matrix; N],
    ) -> [Self::Tensor; N] {
        matrices.map(|matrix| self.linear(x, matrix))
    }

    /// Adds `bias` to every row.
    fn add_bias(&self, x: Self::Tensor, bias: &Self::Vector) -> Self::Tensor;

    /// Normalises each consecutive run of the gain's length.
    fn norm(&self, x: &Self::Tensor, step: &NormStep<'_, Self::Vector>) -> Self::Tensor;

    /// For each row the sum of squares over the given columns of each tensor `[rows, parts]`;
    /// the first factor of a norm whose rows are cut between ranks.
    fn square_sums(&self, parts: &[(&Self::Tensor, Range<usize>)]) -> Self::Tensor;

    /// `gain · x / sqrt(sum / full + eps)` with each row's sum in `column` of `sums`.
    fn norm_by_sums(
        &self,
        x: Self::Tensor,
        step: &NormStep<'_, Self::Vector>,
        sums: (&Self::Tensor, usize),
        full: usize,
    ) -> Self::Tensor;

    /// Rotates heads of so many elements, each from an element on.
    fn rotate(
        &self,
        x: Self::Tensor,
        rotation: &Self::Rotation,
        head: (usize, usize),
    ) -> Self::Tensor;

    /// Appends keys and values to the caches, one per sequence, and attends.
    fn attention(
        &self,
        qkv: Qkv<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        step: &AttentionStep<'_, Self::Vector>,
    ) -> Self::Tensor;

    /// Appends the keys of an index to the caches, one per sequence, and chooses for each row the
    /// `top_k` keys up to its own whose score `Σ weight · max(q · k, 0)` is largest; all where
    /// there are no more. A sequence's choice depends on nothing else, and is the same on every
    /// rank.
    fn choose_keys(
        &self,
        inputs: IndexInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        step: &IndexStep<'_>,
    ) -> Self::Chosen {
        let _ = (inputs, caches, step);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// Of short queries `q` `[rows, heads · width]` and keys `k` `[rows, width]` of an index appends
    /// the latter to the caches and chooses for each row and each key-value head the `top_k` blocks
    /// whose best key up to the row's own has the largest `q · k`; all where there are no more.
    fn choose_blocks(
        &self,
        queries_and_keys: [&Self::Tensor; 2],
        caches: &mut [&mut Self::Cache],
        step: &BlockStep<'_>,
    ) -> Self::Chosen;

    /// [`Backend::attention`] to chosen keys alone, where keys are values, or to chosen blocks of
    /// keys. Rows that attend to all keys have the same results as there.
    fn attention_to(
        &self,
        chosen: &Self::Chosen,
        qkv: Qkv<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        step: &AttentionStep<'_, Self::Vector>,
    ) -> Self::Tensor {
        let _ = (chosen, qkv, caches, step);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// Whether it has the operations on entries below; a model that needs them is refused otherwise.
    fn has_entries(&self) -> bool {
        false
    }

    /// Takes numbers `c` and `z` `[rows, columns]` of every row's token and gives the entries that
    /// are complete with them, or their keys, `[entries, width]` in the order of the sequences: of
    /// an entry's tokens the sum of `softmax(z + bias) · c`, element by element.
    fn pool(
        &self,
        numbers: [&Self::Tensor; 2],
        caches: &mut [&mut Self::Cache],
        step: &PoolStep<'_, Self::Vector>,
    ) -> Self::Tensor {
        let _ = (numbers, caches, step);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// [`Backend::choose_keys`] among entries: `k` are the keys of those that [`Backend::pool`] gave
    /// last, and the layer is counted among those that keep entries here.
    fn choose_entries(
        &self,
        inputs: IndexInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        step: &IndexStep<'_>,
    ) -> Self::Chosen {
        let _ = (inputs, caches, step);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// [`Backend::attention`] to the last `window` tokens and to entries, where keys are values:
    /// those that were chosen, or all whose last token is not after the row's own. `entries` are
    /// those that [`Backend::pool`] gave last, of the layer counted among those that keep some.
    fn attention_beside(
        &self,
        (layer, entries, chosen): (usize, &Self::Tensor, Option<&Self::Chosen>),
        qkv: Qkv<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        (step, window): (&AttentionStep<'_, Self::Vector>, usize),
    ) -> Self::Tensor {
        let _ = (layer, entries, chosen, qkv, caches, step, window);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// Whether it has the operations on heads and states below, which attention over latents,
    /// gated attention and linear attention need; a model that needs them is refused otherwise.
    fn has_latent_and_linear_attention(&self) -> bool {
        false
    }

    /// Linear attention by the rule that [`shardpack_formats::spec::Delta`] names; each cache's state
    /// moves on by its rows.
    fn gated_delta(
        &self,
        inputs: &DeltaInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        step: &DeltaStep<'_, Self::Vector>,
    ) -> Self::Tensor {
        let _ = (inputs, caches, step);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// The causal convolution of each channel of `b · x` over the last tokens, times `c`; each cache's
    /// state moves on by its rows.
    fn short_convolution(
        &self,
        inputs: ConvolutionInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        step: &ConvolutionStep<'_, Self::Vector>,
    ) -> Self::Tensor {
        let _ = (inputs, caches, step);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// What stands between the projections of a feed-forward part: a function of `gate` times
    /// `up`, or of `up` alone where the activation has no gate.
    fn activate(
        &self,
        activation: Activation,
        gate: Option<Self::Tensor>,
        up: Self::Tensor,
    ) -> Self::Tensor;

    /// The activation with numbers of its own, see [`Activation::Xielu`].
    fn xielu(&self, x: Self::Tensor, numbers: &Xielu) -> Self::Tensor;

    /// `min(silu(gate), limit) · clamp(up, −limit, limit)`.
    fn clamped_glu(&self, gate: Self::Tensor, up: Self::Tensor, limit: f32) -> Self::Tensor;

    /// What [`ClampedSwiglu`] says.
    fn clamped_swiglu(
        &self,
        gate: Self::Tensor,
        up: Self::Tensor,
        clamped: ClampedSwiglu,
    ) -> Self::Tensor;

    /// Chooses `top_k` experts for each row of logits `[rows, experts]`. Every rank comes to the
    /// same choice.
    fn route(
        &self,
        logits: Self::Tensor,
        router: &Router,
        top_k: u32,
        vectors: RouterVectors<'_, Self::Vector>,
    ) -> Self::Routes;

    /// The same of the experts that `taken` names, `top_k` for each row: the router weighs them alone.
    fn route_to(
        &self,
        logits: Self::Tensor,
        router: &Router,
        taken: &[u32],
        top_k: u32,
    ) -> Self::Routes;

    /// For each row the weighted sum of its experts, of what is held here.
    fn experts(
        &self,
        x: &Self::Tensor,
        routes: &Self::Routes,
        step: &ExpertStep<'_, Self::Matrix, Self::Vector>,
    ) -> Self::Tensor;

    /// `x · sigmoid(gate)`; each column of the gate is for as many consecutive ones of `x`.
    fn sigmoid_gate(&self, x: Self::Tensor, gate: &Self::Tensor) -> Self::Tensor;

    /// `x · ln(1 + exp(gate))`; each column of the gate is for as many consecutive ones of `x`.
    fn softplus_gate(&self, x: Self::Tensor, gate: &Self::Tensor) -> Self::Tensor;

    /// `min(max(x, −limit), limit)`.
    fn limit(&self, x: Self::Tensor, limit: f32) -> Self::Tensor;

    /// Columns `part` of every head of `width` columns.
    fn slice_heads(&self, x: &Self::Tensor, width: usize, part: Range<usize>) -> Self::Tensor {
        let _ = (x, width, part);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// Each head of `a` with the same head of `b` behind it.
    fn join_heads(&self, a: &Self::Tensor, b: &Self::Tensor, heads: usize) -> Self::Tensor {
        let _ = (a, b, heads);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// Every head times its own matrix of a stack.
    fn head_linear(&self, x: &Self::Tensor, stack: &Self::Matrix, heads: usize) -> Self::Tensor {
        let _ = (x, stack, heads);
        unreachable!("a model with such layers is not loaded for this backend")
    }

    /// `magnitude · sigmoid(scale · x + base) + eps` of some columns, `[rows, streams]`.
    fn stream_weights(
        &self,
        mixes: &Self::Tensor,
        step: &StreamStep<'_, Self::Vector>,
    ) -> Self::Tensor;

    /// Mixes the streams of `[rows, streams · width]`: stream `k` becomes the sum over `j` of
    /// `matrix[j, k] · stream j`. The matrix is `softmax(scale · x + base) + eps` of `streams²`
    /// columns, row by row, whose columns and rows are divided in turn by their sum and `eps`:
    /// columns first and last, `rounds` times.
    fn mix_streams(
        &self,
        x: &Self::Tensor,
        mixes: &Self::Tensor,
        step: &StreamStep<'_, Self::Vector>,
        rounds: u32,
    ) -> Self::Tensor;

    /// For each row of `[rows, streams · width]` the sum of its streams, times their weights
    /// `[rows, streams]`, in their order.
    fn collapse_streams(&self, x: &Self::Tensor, weights: &Self::Tensor) -> Self::Tensor;

    /// Adds a part `[rows, width]` to every stream of `[rows, streams · width]`, times its weight.
    fn add_to_streams(
        &self,
        x: Self::Tensor,
        part: &Self::Tensor,
        weights: &Self::Tensor,
    ) -> Self::Tensor;

    /// `factor · x`.
    fn scale(&self, x: Self::Tensor, factor: f32) -> Self::Tensor;

    /// Each row times its factor.
    fn scale_rows(&self, x: Self::Tensor, factors: &[f32]) -> Self::Tensor;

    /// `cap · tanh(x / cap)`.
    fn softcap(&self, x: Self::Tensor, cap: f32) -> Self::Tensor;

    /// `a + b`.
    fn add(&self, a: Self::Tensor, b: &Self::Tensor) -> Self::Tensor;

    /// The given rows, in this order.
    fn select_rows(&self, x: &Self::Tensor, rows: &[usize]) -> Self::Tensor;

    /// The sum over ranks, added in rank order.
    fn all_reduce(&self, x: Self::Tensor, ranks: &Ranks<'_>) -> Result<Self::Tensor, StepError>;

    /// The ranks' columns side by side in rank order; `widths` says how many each brings.
    fn gather_columns(
        &self,
        x: Self::Tensor,
        widths: &[usize],
        ranks: &Ranks<'_>,
    ) -> Result<Self::Tensor, StepError>;

    /// The numbers, rows contiguous. Sums between ranks that were deferred take place now.
    fn read(&self, x: Self::Tensor, ranks: &Ranks<'_>) -> Result<Vec<f32>, StepError>;

    /// Ends a step: what was deferred and is kept in the caches is computed.
    fn settle(&self, caches: &mut [&mut Self::Cache], ranks: &Ranks<'_>) -> Result<(), StepError>;
}
