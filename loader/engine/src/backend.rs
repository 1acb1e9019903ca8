//! What a model asks of a machine, so that each model is written once: one small trait per
//! capability, and [`Backend`] for all of them.
//!
//! Values of type [`Tensors::Tensor`] may be computed later: nothing asks for their values before
//! [`TensorParallel::read`]. The backend also carries out the collectives between ranks, since some
//! must be nodes of its own graph.

use std::{ops::Range, time::Duration};

use half::bf16;
use shardpack_collectives::{Deadline, Group, GroupError};

mod attention;
mod block_sparse;
mod compressed_kv;
pub mod cpu;
mod dense;
mod head_ops;
mod hyper_connections;
mod kv_cache;
mod latent_attention;
mod linear_attention;
mod lookahead;
mod mixture_of_experts;
pub mod mlx;
mod short_convolution;
mod sparse_indexer;
mod tensor_parallel;
mod tensors;
mod token_choice;

pub use attention::{Attention, AttentionParams, Qkv};
pub use block_sparse::{BlockIndexerInputs, BlockIndexerParams, BlockSparseAttention};
pub use compressed_kv::{CompressedEntries, CompressedKv, CompressorInputs, CompressorParams};
pub use cpu::{Arithmetic, Cpu, CpuError, CpuOptions};
pub use dense::{DenseOps, NormParams, RotatedPart, Xielu};
pub use head_ops::HeadOps;
pub use hyper_connections::{HyperConnections, StreamParams};
pub use kv_cache::{
    CacheShape, CompressedKvPart, CompressedKvShape, KvCache, KvRollback, LayerShape,
};
pub use latent_attention::{LatentAttention, LatentInputs, LatentParams, LatentParamsOf};
pub use linear_attention::{
    LinearAttention, LinearAttentionInputs, LinearAttentionParams, StateUpdate,
};
pub use lookahead::{ComputesAtOnce, Lookahead};
pub use mixture_of_experts::{ExpertParams, MixtureOfExperts, RouterVectors};
pub use mlx::{Collectives, DrawnStep, Mlx};
pub use short_convolution::{ShortConvolution, ShortConvolutionInputs, ShortConvolutionParams};
pub use sparse_indexer::{IndexerInputs, IndexerParams, SparseIndexer};
pub use tensor_parallel::{Columns, SquareSums, TensorParallel};
pub use tensors::{StoredMatrix, StoredWeights, Tensors};
pub use token_choice::{Best, ScoreNoise, ScoredRow, TokenChoice};

/// Arithmetic of one rank: every capability that models are built from.
pub trait Backend:
    DenseOps
    + TensorParallel
    + HeadOps
    + LatentAttention
    + BlockSparseAttention
    + CompressedKv
    + LinearAttention
    + ShortConvolution
    + MixtureOfExperts
    + HyperConnections
    + Lookahead
    + TokenChoice
{
}

impl<B> Backend for B where
    B: DenseOps
        + TensorParallel
        + HeadOps
        + LatentAttention
        + BlockSparseAttention
        + CompressedKv
        + LinearAttention
        + ShortConvolution
        + MixtureOfExperts
        + HyperConnections
        + Lookahead
        + TokenChoice
{
}

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
    /// The device failed during a step. It may refuse all further work of this process.
    #[error("the device failed: {0}")]
    Device(String),
}

/// The ranks of one step and the time that each call on them may take.
#[derive(Clone, Copy)]
pub struct Ranks<'a> {
    /// The rank group.
    pub group: &'a dyn Group,
    /// Longest wait of one call.
    pub timeout: Duration,
    /// The first rank that takes part in all-reduces, and one past the last.
    members: [u32; 2],
}

impl<'a> Ranks<'a> {
    /// All ranks of a group.
    #[must_use]
    pub fn all(group: &'a dyn Group, timeout: Duration) -> Self {
        Self { group, timeout, members: [0, group.size()] }
    }

    /// The same group, of which these ranks take part in all-reduces.
    #[must_use]
    pub const fn part(&self, members: &Range<u32>) -> Self {
        Self { members: [members.start, members.end], ..*self }
    }

    /// Number of ranks that take part in all-reduces.
    #[must_use]
    pub const fn count(&self) -> u32 {
        self.members[1] - self.members[0]
    }

    /// Replaces `values` by their all-reduce over those ranks.
    pub fn all_reduce(&self, values: &mut [f32]) -> Result<(), GroupError> {
        let [start, end] = self.members;
        if self.count() == self.group.size() {
            return self.group.all_reduce_sum(values, self.deadline());
        }
        self.group.sum_among(start..end, values, self.deadline())
    }

    /// The same for values in bfloat16.
    pub fn all_reduce_bf16(&self, values: &mut [bf16]) -> Result<(), GroupError> {
        let [start, end] = self.members;
        self.group.sum_bf16_among(start..end, values, self.deadline())
    }

    /// The deadline of a call that begins now.
    #[must_use]
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }
}
