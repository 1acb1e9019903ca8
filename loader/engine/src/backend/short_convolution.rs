//! Gated short convolutions: the last few tokens in place of keys and values.

use super::KvCache;

/// Gated short convolutions.
pub trait ShortConvolution: KvCache {
    /// The causal convolution of each channel of `b · x` over the last tokens, times `c`; each
    /// cache's state moves on by its rows.
    fn short_convolution(
        &self,
        inputs: ShortConvolutionInputs<'_, Self::Tensor>,
        caches: &mut [&mut Self::Cache],
        params: &ShortConvolutionParams<'_, Self::Vector>,
    ) -> Self::Tensor;
}

/// What a short convolution reads of each row, `[rows, channels]` each.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvolutionInputs<'a, T> {
    /// Factors on what is convolved.
    pub b: &'a T,
    /// Factors on the result.
    pub c: &'a T,
    /// What is convolved.
    pub x: &'a T,
}

/// The short convolution of one layer over the sequences of a step.
#[derive(Debug)]
pub struct ShortConvolutionParams<'a, V> {
    /// The layer, counted among those that keep a state here.
    pub layer: usize,
    /// Rows of each sequence, in the order of the caches.
    pub lengths: &'a [usize],
    /// The last of them that may be rolled back; empty where none are.
    pub drafts: &'a [usize],
    /// Tokens that it sees.
    pub kernel: usize,
    /// `[channels, kernel]`.
    pub taps: &'a V,
}
