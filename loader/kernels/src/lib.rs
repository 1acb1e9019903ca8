//! Arithmetic on the CPU: f32 activations, weights as they lie in a package.
//!
//! Every output element's order of summation depends on its length alone ([`lanes`]), never on
//! rows, batch, chunking or threads, so a token gives the same bits whether it is computed alone
//! or among others. Nothing here is left to the compiler's or the platform's choice: products
//! and sums are separate operations, and the transcendental functions are our own or `libm`'s.
//!
//! Kernels take slices and assert their lengths: a wrong length is a bug of the caller, who has
//! checked what came from outside. They use the rayon pool in which they are called.
//!
//! Reading order: [`lanes`], [`floats`] and [`matrix`] (weights), [`mod@matmul`], [`mod@gather`],
//! [`norm`], [`rope`], [`attention`], [`elementwise`].
#![forbid(unsafe_code)]
#![cfg_attr(
    test,
    expect(clippy::float_cmp, reason = "the order of operations is fixed, so exact bits are due")
)]

pub mod attention;
pub mod elementwise;
pub mod exp;
pub mod floats;
pub mod gather;
pub mod lanes;
pub mod matmul;
pub mod matrix;
pub mod norm;
pub mod rope;

pub use attention::{Attention, KvBlock, KvHead, attend};
pub use floats::Floats;
pub use matmul::matmul;
pub use matrix::Matrix;
pub use rope::Rotation;
