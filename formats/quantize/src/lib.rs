//! Weights as small numbers: affine and float groups, the roundings that find them, and the vector
//! arithmetic that these loops share with the kernels. Compiled as one unit, since what is small
//! must be compiled into the loops that need it.
//!
//! Reading order: [`dtype`] (element types), [`simd`] (instruction sets), [`affine`] and
//! [`small_floats`], [`float_groups`] (quantized groups), [`dequantize`] (their rows as floats), [`lowrank`]
//! (products that adapters add).
//! This crate knows slices; it knows no files, tensors' names or models.

pub mod affine;
pub mod dequantize;
pub mod dtype;
pub mod float_groups;
pub mod lowrank;
pub mod simd;
pub mod small_floats;

pub use affine::{AffineFormat, Rounding};
pub use dtype::Dtype;
pub use float_groups::FloatFormat;
pub use simd::Platform;
