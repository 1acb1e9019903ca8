//! AVX2 with FMA: 32 weights at a time.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads")]
#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::x86_64::*;

use shardpack_quantize::Platform;

use crate::{floats::Floats, platform::Task};

mod factors;
mod floats;
mod gemv;
mod packed_gemm;
mod repack;
mod rows;
mod tile;
mod transpose;
mod unpack;

pub(crate) use floats::{Sixteen, four_of_eight, four_sums};
pub(crate) use packed_gemm::packed_gemm;
pub(crate) use repack::interleave;
pub(crate) use rows::rows;
pub(crate) use tile::Tiles;

/// Has the line of an address brought to the L2 cache. All processors of the family can.
#[inline]
pub(crate) fn fetch(address: usize) {
    let address = std::ptr::without_provenance::<i8>(address);
    // SAFETY: the instruction reads nothing and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address) }
}

/// The same to the L1 cache.
#[inline]
pub(crate) fn fetch_near(address: usize) {
    let address = std::ptr::without_provenance::<i8>(address);
    // SAFETY: the instruction reads nothing and never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address) }
}

/// Whether this machine has every instruction that functions here enable: [`Platform::Avx2`] asks
/// for them all.
#[inline]
pub(crate) fn is_available() -> bool {
    Platform::Avx2.is_available()
}

/// Runs a task inside a function that has the instructions enabled.
pub(crate) fn run<T: Task>(task: T) -> T::Output {
    assert!(is_available(), "the caller chose a platform of this machine");
    // SAFETY: the processor has just been asked.
    unsafe { enabled(task) }
}

/// Runs a task inside a function that has the instructions enabled, or as it is where the
/// processor lacks them.
#[inline]
pub(crate) fn run_if_available<T: Task>(task: T) -> T::Output {
    if is_available() { run(task) } else { task.run() }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enabled<T: Task>(task: T) -> T::Output {
    task.run()
}

/// The sum of 16 lanes, halves added to halves.
#[inline]
#[target_feature(enable = "avx2")]
fn tree(lanes: [__m256; 2]) -> f32 {
    let eight = _mm256_add_ps(lanes[0], lanes[1]);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// The sums of the lanes of four elements, halves added to halves.
#[inline]
#[target_feature(enable = "avx2")]
fn four_trees(lanes: [[__m256; 2]; 4]) -> __m128 {
    let [a, b, c, d] = lanes.map(|[low, high]| _mm256_add_ps(low, high));
    let four = |a, b| {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
    };
    let (ab, cd) = (four(a, b), four(c, d));
    let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
    let twos = _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
    let even = _mm256_shuffle_ps::<0b10_00_10_00>(twos, twos);
    let sums = _mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(twos, twos));
    // The first half has those of a and c, the second those of b and d.
    _mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums))
}

/// 32 bytes, or as many as there are and zeros.
#[inline]
#[target_feature(enable = "avx2")]
fn load_some(from: &[u8]) -> __m256i {
    if let Some(all) = from.first_chunk::<32>() {
        // SAFETY: the array is as long as the vector.
        return unsafe { _mm256_loadu_si256(all.as_ptr().cast()) };
    }
    let mut bytes = [0; 32];
    bytes[..from.len()].copy_from_slice(from);
    // SAFETY: the array is as long as the vector.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// `held` floats, at most eight, from `at` on, and zeros.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn floats_at(from: Floats<'_>, at: usize, held: usize) -> __m256 {
    match from {
        Floats::F32(values) => {
            let mut eight = [0.0; 8];
            eight[..held].copy_from_slice(&values[at..at + held]);
            // SAFETY: the array is as long as the vector.
            unsafe { _mm256_loadu_ps(eight.as_ptr()) }
        }
        Floats::BF16(bits) => {
            let words = _mm256_cvtepu16_epi32(halves(&bits[at..at + held]));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        }
        Floats::F16(bits) => _mm256_cvtph_ps(halves(&bits[at..at + held])),
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn halves(bits: &[u16]) -> __m128i {
    if let Some(eight) = bits.first_chunk::<8>() {
        // SAFETY: the array is as long as the vector.
        return unsafe { _mm_loadu_si128(eight.as_ptr().cast()) };
    }
    let mut eight = [0; 8];
    eight[..bits.len()].copy_from_slice(bits);
    // SAFETY: the array is as long as the vector.
    unsafe { _mm_loadu_si128(eight.as_ptr().cast()) }
}
