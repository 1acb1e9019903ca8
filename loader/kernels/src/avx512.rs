//! AVX-512 with VNNI: 64 weights at a time, straight from the packed stream.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads")]
#![allow(clippy::wildcard_imports, reason = "the instructions' names, as their manual has them")]

use std::arch::x86_64::*;

use shardpack_quantize::Platform;

use crate::platform::Task;

mod block;
mod floats;
mod read;
mod repack;
mod rows;

pub(crate) use floats::Sixteen;
pub(crate) use read::read;
pub(crate) use repack::interleave;
pub(crate) use rows::rows;

/// Whether this machine has every instruction that functions here enable: [`Platform::Avx512`] asks
/// for them all.
#[inline]
pub(crate) fn is_available() -> bool {
    Platform::Avx512.is_available()
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

/// The sums of the lanes of 16 vectors, halves added to halves.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn trees(vectors: &[__m512; 16]) -> [f32; 16] {
    let mut eights = [_mm512_setzero_ps(); 8];
    for (eights, [a, b]) in eights.iter_mut().zip(vectors.as_chunks::<2>().0) {
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(*a, *b);
        let high = _mm512_shuffle_f32x4::<0b11_10_11_10>(*a, *b);
        *eights = _mm512_add_ps(low, high);
    }
    let mut fours = [_mm512_setzero_ps(); 4];
    for (fours, [a, b]) in fours.iter_mut().zip(eights.as_chunks::<2>().0) {
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(*a, *b);
        let high = _mm512_shuffle_f32x4::<0b11_01_11_01>(*a, *b);
        *fours = _mm512_add_ps(low, high);
    }
    let mut twos = [_mm512_setzero_ps(); 2];
    for (twos, [a, b]) in twos.iter_mut().zip(fours.as_chunks::<2>().0) {
        let low = _mm512_shuffle_ps::<0b01_00_01_00>(*a, *b);
        let high = _mm512_shuffle_ps::<0b11_10_11_10>(*a, *b);
        *twos = _mm512_add_ps(low, high);
    }
    let even = _mm512_shuffle_ps::<0b10_00_10_00>(twos[0], twos[1]);
    let odd = _mm512_shuffle_ps::<0b11_01_11_01>(twos[0], twos[1]);
    // Quarter q has the sums of vectors q, 4 + q, 8 + q and 12 + q.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let sums = _mm512_permutexvar_ps(order, _mm512_add_ps(even, odd));
    let mut out = [0.0; 16];
    // SAFETY: the array is as long as the vector.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
    out
}
