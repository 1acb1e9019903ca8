//! CPU kernels: GEMV and GEMM over quantized weights, attention, norms, rotary embeddings.
//! Activations are f32, weights as they are stored in a package.
//!
//! Every output element's order of summation depends on its length alone ([`lanes`]), never on
//! rows, batch, chunking or threads: results are batch-invariant, bit for bit. Nothing here is left to the compiler's or the platform's choice: products
//! and sums are separate operations or fused ones as it is written, and the transcendental
//! functions are our own or `libm`'s.
//!
//! Kernels take slices and assert their lengths: a wrong length is a bug of the caller, who has
//! checked what came from outside. They use the threads and instructions of the [`Team`] within
//! whose [`Team::run`] they are called.
//!
//! Reading order: [`lanes`], [`floats`], `float_groups` and [`matrix`] (weights), `platform`, [`team`], [`pool`],
//! [`repack`], `outer`, [`mod@matmul`] (`quantized`, then `portable`, which `avx512`, `avx2` and `neon` equal bit for
//! bit), [`mod@gather`], `moments`, [`norm`], [`rope`], [`attention`], [`elementwise`].
#![cfg_attr(
    test,
    expect(clippy::float_cmp, reason = "the order of operations is fixed, so exact bits are due")
)]

pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod elementwise;
pub mod exp;
mod float_groups;
pub mod floats;
pub mod gather;
pub mod lanes;
pub mod matmul;
pub mod matrix;
pub mod memory;
mod moments;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod norm;
mod outer;
mod platform;
pub mod pool;
mod portable;
mod quantized;
pub mod repack;
pub mod rope;
pub mod team;
mod tiles;

pub use attention::{Attention, ChosenBlocks, KvBlock, KvHead, attend};
pub use floats::Floats;
pub use matmul::{Beginning, matmul, matmul_in_two_planes, matmuls, matmuls_before};
pub use matrix::Matrix;
pub use moments::add_second_moments;
pub use repack::{Packing, Repack};
pub use rope::Rotation;
pub use team::{Activations, Team, TeamOptions};
