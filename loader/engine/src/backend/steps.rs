//! What the operations of a step read and are told.

use std::ops::Range;

use shardpack_formats::spec::{Activation, ClampedSwiglu, Delta, Mask, NormKind};

/// Attention of one layer over the sequences of a step. `V` is the backend's vector.
#[derive(Debug)]
pub struct AttentionStep<'a, V> {
    /// The layer, counted among those that keep keys and values here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches; they follow what is cached.
    pub lengths: &'a [usize],
    /// For each query head held here, the key-value head held here that it reads.
    pub q_to_kv: &'a [usize],
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on `q · k`.
    pub scale: f32,
    /// Scores become `cap · tanh(score / cap)` before the mask.
    pub softcap: Option<f32>,
    /// For each query head held here one more score in the softmax's denominator.
    pub sinks: Option<&'a V>,
    /// Which keys a query sees.
    pub mask: Mask,
}

/// What the index of one layer reads of each row.
#[derive(Clone, Copy, Debug)]
pub struct IndexInputs<'a, T> {
    /// Short queries `[rows, heads · width]`, rotated.
    pub q: &'a T,
    /// Keys `[rows, width]`, rotated.
    pub k: &'a T,
    /// How much each short query counts, `[rows, heads]`.
    pub weights: &'a T,
}

/// The choice of keys in one layer for the sequences of a step.
#[derive(Clone, Copy, Debug)]
pub struct IndexStep<'a> {
    /// The layer, counted among those that keep keys of an index here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches; they follow what is cached.
    pub lengths: &'a [usize],
    /// Short queries of a row.
    pub heads: usize,
    /// Their width, and that of the keys.
    pub width: usize,
    /// Keys that are chosen.
    pub top_k: usize,
}

/// The choice of blocks of keys in one layer for the sequences of a step.
#[derive(Clone, Copy, Debug)]
pub struct BlockStep<'a> {
    /// The layer, counted among those that keep keys of an index here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches; they follow what is cached.
    pub lengths: &'a [usize],
    /// Short queries of a row: one for each key-value head held here.
    pub heads: usize,
    /// Their width, and that of the keys.
    pub width: usize,
    /// Tokens of a block: a divisor of [`shardpack_formats::memory::TOKENS_PER_PAGE`].
    pub tokens: usize,
    /// Blocks that are chosen.
    pub top_k: usize,
    /// Blocks up to a row's own that are chosen in any case.
    pub local: usize,
}

/// Weights of residual streams, from some columns of a tensor.
#[derive(Debug)]
pub struct StreamStep<'a, V> {
    /// The columns, one for each stream.
    pub numbers: Range<usize>,
    /// A summand for each column of the tensor.
    pub base: &'a V,
    /// Factor on the columns.
    pub scale: f32,
    /// Factor on the sigmoids.
    pub magnitude: f32,
    /// Added to them in the end.
    pub eps: f32,
}

/// A norm's formula and gains.
#[derive(Debug)]
pub struct NormStep<'a, V> {
    /// The formula.
    pub kind: NormKind,
    /// Under the root.
    pub eps: f32,
    /// Factors; their number is the length of the runs that are normalised by themselves.
    pub gain: &'a V,
    /// What is added in the end.
    pub bias: Option<&'a V>,
}

/// Queries `[rows, heads · head_dim]`, keys and values `[rows, kv_heads · head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a, T> {
    /// Queries, rotated.
    pub q: &'a T,
    /// Keys, rotated.
    pub k: &'a T,
    /// Values.
    pub v: &'a T,
}

/// What linear attention reads of each row: queries and keys `[rows, key_heads · key_dim]`, values
/// and their gate `z` `[rows, value_heads · value_dim]`, `a` and `b` `[rows, value_heads]`; by Kimi's
/// rule `a` is as wide as the keys.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a, T> {
    /// Queries.
    pub q: &'a T,
    /// Keys.
    pub k: &'a T,
    /// Values.
    pub v: &'a T,
    /// How much of the result goes through.
    pub z: &'a T,
    /// How fast the state fades.
    pub a: &'a T,
    /// How strongly it changes; by Mamba 2's rule not read.
    pub b: &'a T,
}

/// What a short convolution reads of each row, `[rows, channels]` each.
#[derive(Clone, Copy, Debug)]
pub struct ConvolutionInputs<'a, T> {
    /// Factors on what is convolved.
    pub b: &'a T,
    /// Factors on the result.
    pub c: &'a T,
    /// What is convolved.
    pub x: &'a T,
}

/// The short convolution of one layer over the sequences of a step.
#[derive(Debug)]
pub struct ConvolutionStep<'a, V> {
    /// The layer, counted among those that keep a state here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches.
    pub lengths: &'a [usize],
    /// The last of them that may be taken back; empty where none are.
    pub drafts: &'a [usize],
    /// Tokens that it sees.
    pub kernel: usize,
    /// `[channels, kernel]`.
    pub taps: &'a V,
}

/// Linear attention of one layer over the sequences of a step.
#[derive(Debug)]
pub struct DeltaStep<'a, V> {
    /// The layer, counted among those that keep a state here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches.
    pub lengths: &'a [usize],
    /// The last of them that may be taken back; empty where none are.
    pub drafts: &'a [usize],
    /// Key heads held here.
    pub key_heads: usize,
    /// For each value head held here, the key head held here that it reads.
    pub v_to_k: &'a [usize],
    /// Widths and epsilon.
    pub delta: &'a Delta,
    /// Of queries, keys and values: `[channels, kernel]`.
    pub convolutions: [&'a V; 3],
    /// One for each value head.
    pub a_log: &'a V,
    /// As wide as `a`.
    pub dt_bias: &'a V,
    /// Of the result's norm, one for each element of a head; by Mamba 2's rule one for each
    /// element of all heads. Absent where it is not normalised here.
    pub gain: Option<&'a V>,
    /// Of the convolutions, where they have biases: of queries, keys and values.
    pub conv_biases: Option<[&'a V; 3]>,
    /// By Mamba 2's rule one for each value head: how much of a value the result has.
    pub skip: Option<&'a V>,
}

/// The experts of one layer that are held here. Stacks are matrices whose outputs are those of
/// all experts held here, one after the other.
#[derive(Debug)]
pub struct ExpertStep<'a, M, V> {
    /// The experts held here.
    pub held: Range<usize>,
    /// Inner columns of each that are held here.
    pub size: usize,
    /// Stack of `[size, hidden]`; absent where the activation has no gate.
    pub gate: Option<&'a M>,
    /// Stack of `[size, hidden]`.
    pub up: &'a M,
    /// Stack of `[hidden, size]`.
    pub down: &'a M,
    /// `[held, size]`.
    pub gate_bias: Option<&'a V>,
    /// `[held, size]`.
    pub up_bias: Option<&'a V>,
    /// `[held, hidden]`, on the rank that adds it.
    pub down_bias: Option<&'a V>,
    /// What stands between the projections.
    pub activation: Activation,
    /// In its place.
    pub clamped: Option<ClampedSwiglu>,
    /// Largest `silu(gate)` and largest magnitude of `up`.
    pub limit: Option<f32>,
    /// Whether weights count for inputs, not for outputs.
    pub weighs_inputs: bool,
    /// The first expert without weights, which give what they read, on the rank that adds it.
    pub identities: Option<usize>,
}

/// Numbers of [`Activation::Xielu`], as it is computed with them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xielu {
    /// Of the square above zero.
    pub above: f32,
    /// Of the exponential below.
    pub below: f32,
    /// Of the straight part.
    pub beta: f32,
    /// Largest exponent.
    pub eps: f32,
}

/// Numbers of a router for each expert.
#[derive(Clone, Copy, Debug)]
pub struct RouterVectors<'a, V> {
    /// What is added to scores for the choice alone.
    pub correction: Option<&'a V>,
    /// Factors on weights.
    pub scales: Option<&'a V>,
}
