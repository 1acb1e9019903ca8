//! AVX-512 with VNNI: 64 weights at a time, straight from the packed stream.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads")]
#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::x86_64::*;

use crate::platform::Task;

mod read;
mod rows;
mod tile;

pub(crate) use read::read;
pub(crate) use rows::rows;
pub(crate) use tile::Tiles;

pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Runs a task inside a function that has the instructions enabled.
pub(crate) fn run<T: Task>(task: T) -> T::Output {
    assert!(is_available(), "the caller chose a platform of this machine");
    // SAFETY: the processor has just been asked.
    unsafe { enabled(task) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn enabled<T: Task>(task: T) -> T::Output {
    task.run()
}

/// The sum of 16 lanes, halves added to halves.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn tree(lanes: __m512) -> f32 {
    let high = _mm512_extractf32x8_ps::<1>(lanes);
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
