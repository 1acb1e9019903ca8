//! Sixteen floats of attention in two registers.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

use crate::{attention::Vectors, exp::ROUNDER, lanes::LANES, platform::Task};

/// Used by tasks that [`super::run`] carries out, and nowhere else.
pub(crate) struct Sixteen;

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: tasks with these vectors run only within `super::run`, which has asked the
        // processor; loads and stores are of halves of arrays as long as two vectors.
        unsafe { $instruction }
    };
}

/// Sixteen bytes from element `at` of sixteen.
#[inline(always)]
fn bytes<T>(from: &[T; LANES], at: usize) -> __m128i {
    let from = &from[at..][..16 / size_of::<T>()];
    value!(_mm_loadu_si128(from.as_ptr().cast()))
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn apart<T: Task>(task: T) -> T::Output {
    task.run()
}

#[inline(always)]
fn upper_halves(eight: __m128i) -> __m256 {
    value!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight))))
}

#[inline(always)]
fn integers(eight: __m128i) -> __m256 {
    value!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)))
}

impl Vectors for Sixteen {
    type Floats = [__m256; 2];
    type Pair = __m256;
    type Quarter = [__m256; 2];
    type Integers = [__m256i; 2];
    type Shorts = [__m256i; 2];
    const KEY_HEADS: usize = 2;
    const KEYS: usize = 2;
    const VALUE_VECTORS: usize = 2;
    const HEADS: usize = 4;
    const USUAL_WIDTHS: bool = true;

    #[inline(always)]
    fn run<T: Task>(task: T) -> T::Output {
        value!(apart(task))
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> [__m256; 2] {
        let [a, b] = [&from[..8], &from[8..]];
        [value!(_mm256_loadu_ps(a.as_ptr())), value!(_mm256_loadu_ps(b.as_ptr()))]
    }

    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> [__m256; 2] {
        [value!(_mm256_cvtph_ps(bytes(from, 0))), value!(_mm256_cvtph_ps(bytes(from, 8)))]
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> [__m256; 2] {
        [upper_halves(bytes(from, 0)), upper_halves(bytes(from, 8))]
    }

    #[inline(always)]
    fn load_bf16_pairs(from: &[u16; 2 * LANES]) -> [[__m256; 2]; 2] {
        let [a, b] = [&from[..LANES], &from[LANES..]];
        let a = value!(_mm256_loadu_si256(a.as_ptr().cast()));
        let b = value!(_mm256_loadu_si256(b.as_ptr().cast()));
        let upper = value!(_mm256_set1_epi32(i32::MIN >> 15));
        let [c, d] = [value!(_mm256_and_si256(a, upper)), value!(_mm256_and_si256(b, upper))];
        let [a, b] = [value!(_mm256_slli_epi32::<16>(a)), value!(_mm256_slli_epi32::<16>(b))];
        [
            [value!(_mm256_castsi256_ps(a)), value!(_mm256_castsi256_ps(b))],
            [value!(_mm256_castsi256_ps(c)), value!(_mm256_castsi256_ps(d))],
        ]
    }

    #[inline(always)]
    fn load_i8(from: &[i8; LANES]) -> [__m256; 2] {
        let all = bytes(from, 0);
        [integers(all), integers(value!(_mm_unpackhi_epi64(all, all)))]
    }

    #[inline(always)]
    fn store([a, b]: [__m256; 2], to: &mut [f32; LANES]) {
        let (low, high) = to.split_at_mut(8);
        value!(_mm256_storeu_ps(low.as_mut_ptr(), a));
        value!(_mm256_storeu_ps(high.as_mut_ptr(), b));
    }

    #[inline(always)]
    fn splat(value: f32) -> [__m256; 2] {
        [value!(_mm256_set1_ps(value)); 2]
    }

    #[inline(always)]
    fn add([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_add_ps(a, c)), value!(_mm256_add_ps(b, d))]
    }

    #[inline(always)]
    fn max([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_max_ps(a, c)), value!(_mm256_max_ps(b, d))]
    }

    #[inline(always)]
    fn mul([a, b]: [__m256; 2], [c, d]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_mul_ps(a, c)), value!(_mm256_mul_ps(b, d))]
    }

    #[inline(always)]
    fn fma([a, b]: [__m256; 2], [c, d]: [__m256; 2], [e, f]: [__m256; 2]) -> [__m256; 2] {
        [value!(_mm256_fmadd_ps(a, c, e)), value!(_mm256_fmadd_ps(b, d, f))]
    }

    #[inline(always)]
    fn power_of_two([a, b]: [__m256; 2]) -> [__m256; 2] {
        let less = value!(_mm256_set1_epi32(127_i32.wrapping_sub(ROUNDER.to_bits().cast_signed())));
        let a = value!(_mm256_add_epi32(_mm256_castps_si256(a), less));
        let b = value!(_mm256_add_epi32(_mm256_castps_si256(b), less));
        let [a, b] = [value!(_mm256_slli_epi32::<23>(a)), value!(_mm256_slli_epi32::<23>(b))];
        [value!(_mm256_castsi256_ps(a)), value!(_mm256_castsi256_ps(b))]
    }

    /// Eight rows by eight columns at a time: four by four within each half of a register, then the halves.
    #[inline(always)]
    fn transpose(from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
        for (row, column) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            let mut rows = [value!(_mm256_setzero_ps()); 8];
            for (eight, from) in rows.iter_mut().zip(&from[row..row + 8]) {
                let from = &from[column..column + 8];
                *eight = value!(_mm256_loadu_ps(from.as_ptr()));
            }
            let [a, b, c, d, e, f, g, h] = rows;
            let (first, second) = (turned([a, b, c, d]), turned([e, f, g, h]));
            for number in 0..4 {
                let (a, b) = (first[number], second[number]);
                let left = &mut to[column + number][row..row + 8];
                let low = value!(_mm256_permute2f128_ps::<0x20>(a, b));
                value!(_mm256_storeu_ps(left.as_mut_ptr(), low));
                let right = &mut to[column + 4 + number][row..row + 8];
                let high = value!(_mm256_permute2f128_ps::<0x31>(a, b));
                value!(_mm256_storeu_ps(right.as_mut_ptr(), high));
            }
        }
    }

    /// Four lanes are left of each vector.
    #[inline(always)]
    fn pair([a, b]: [[__m256; 2]; 2]) -> __m256 {
        four_of_eight(eight(a), eight(b))
    }

    #[inline(always)]
    fn quarter(pairs: [__m256; 2]) -> [__m256; 2] {
        pairs
    }

    #[inline(always)]
    fn sums([a, b, c, d]: [[__m256; 2]; 4]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        Self::store([ones(twos(a), twos(b)), ones(twos(c), twos(d))], &mut out);
        out
    }

    #[inline(always)]
    fn no_integers() -> [__m256i; 2] {
        [value!(_mm256_setzero_si256()); 2]
    }

    #[inline(always)]
    fn from_integers([a, b]: [__m256i; 2]) -> [__m256; 2] {
        [value!(_mm256_cvtepi32_ps(a)), value!(_mm256_cvtepi32_ps(b))]
    }

    #[inline(always)]
    fn shorts(from: &[i16; 2 * LANES]) -> [__m256i; 2] {
        let [a, b] = [&from[..LANES], &from[LANES..]];
        [
            value!(_mm256_loadu_si256(a.as_ptr().cast())),
            value!(_mm256_loadu_si256(b.as_ptr().cast())),
        ]
    }

    #[inline(always)]
    fn bytes(from: &[i8; 2 * LANES]) -> [__m256i; 2] {
        let [a, b] = from.as_chunks::<LANES>().0 else { unreachable!("two halves") };
        [value!(_mm256_cvtepi8_epi16(bytes(a, 0))), value!(_mm256_cvtepi8_epi16(bytes(b, 0)))]
    }

    #[inline(always)]
    fn pairs(first: &[i8; LANES], second: &[i8; LANES]) -> [__m256i; 2] {
        let (first, second) = (bytes(first, 0), bytes(second, 0));
        [
            value!(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second))),
            value!(_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second))),
        ]
    }

    #[inline(always)]
    fn splat_pair([even, odd]: [i16; 2]) -> [__m256i; 2] {
        let (even, odd) = (even.cast_unsigned(), odd.cast_unsigned());
        [value!(_mm256_set1_epi32((u32::from(even) | u32::from(odd) << 16).cast_signed())); 2]
    }

    #[inline(always)]
    fn splat_two(pair: i32) -> [__m256i; 2] {
        [value!(_mm256_set1_epi32(pair)); 2]
    }

    #[inline(always)]
    fn even_and_odd(from: &[i8; 4 * LANES]) -> [[__m256i; 2]; 2] {
        let [a, b] = [&from[..2 * LANES], &from[2 * LANES..]];
        let a = value!(_mm256_loadu_si256(a.as_ptr().cast()));
        let b = value!(_mm256_loadu_si256(b.as_ptr().cast()));
        [
            [
                value!(_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a))),
                value!(_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b))),
            ],
            [value!(_mm256_srai_epi16::<8>(a)), value!(_mm256_srai_epi16::<8>(b))],
        ]
    }

    #[inline(always)]
    fn add_products(
        [s, t]: [__m256i; 2],
        [a, b]: [__m256i; 2],
        [c, d]: [__m256i; 2],
    ) -> [__m256i; 2] {
        [
            value!(_mm256_add_epi32(s, _mm256_madd_epi16(a, c))),
            value!(_mm256_add_epi32(t, _mm256_madd_epi16(b, d))),
        ]
    }

    #[inline(always)]
    fn integer_sums([a, b, c, d]: [[__m256i; 2]; 4]) -> [i32; 4] {
        four_sums([folded(a), folded(b), folded(c), folded(d)])
    }
}

/// Four by four within each half.
#[inline(always)]
fn turned([a, b, c, d]: [__m256; 4]) -> [__m256; 4] {
    let (ab, cd) = (value!(_mm256_unpacklo_ps(a, b)), value!(_mm256_unpacklo_ps(c, d)));
    let (ef, gh) = (value!(_mm256_unpackhi_ps(a, b)), value!(_mm256_unpackhi_ps(c, d)));
    [
        value!(_mm256_shuffle_ps::<0b01_00_01_00>(ab, cd)),
        value!(_mm256_shuffle_ps::<0b11_10_11_10>(ab, cd)),
        value!(_mm256_shuffle_ps::<0b01_00_01_00>(ef, gh)),
        value!(_mm256_shuffle_ps::<0b11_10_11_10>(ef, gh)),
    ]
}

#[inline(always)]
fn eight([low, high]: [__m256; 2]) -> __m256 {
    value!(_mm256_add_ps(low, high))
}

/// The halves of each added.
#[inline(always)]
pub(crate) fn four_of_eight(a: __m256, b: __m256) -> __m256 {
    let own = value!(_mm256_blend_ps::<0b1111_0000>(a, b));
    value!(_mm256_add_ps(own, _mm256_permute2f128_ps::<0x21>(a, b)))
}

/// The first pair of each four added to the second.
#[inline(always)]
fn twos([a, b]: [__m256; 2]) -> __m256 {
    let own = value!(_mm256_blend_ps::<0b1100_1100>(a, b));
    value!(_mm256_add_ps(own, _mm256_shuffle_ps::<0b01_00_11_10>(a, b)))
}

/// The pairs added.
#[inline(always)]
fn ones(a: __m256, b: __m256) -> __m256 {
    let even = value!(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
    let sums = value!(_mm256_add_ps(even, _mm256_shuffle_ps::<0b11_01_11_01>(a, b)));
    // The lower half has the sums of vectors 0, 2, 4 and 6.
    let order = value!(_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    value!(_mm256_permutevar8x32_ps(sums, order))
}

#[inline(always)]
fn folded([low, high]: [__m256i; 2]) -> __m256i {
    value!(_mm256_add_epi32(low, high))
}

/// The sum of all lanes of each.
#[inline(always)]
pub(crate) fn four_sums([a, b, c, d]: [__m256i; 4]) -> [i32; 4] {
    let (a, b) = (value!(_mm256_hadd_epi32(a, b)), value!(_mm256_hadd_epi32(c, d)));
    let halves = value!(_mm256_hadd_epi32(a, b));
    let high = value!(_mm256_extracti128_si256::<1>(halves));
    let sums = value!(_mm_add_epi32(_mm256_castsi256_si128(halves), high));
    let mut out = [0; 4];
    value!(_mm_storeu_si128(out.as_mut_ptr().cast(), sums));
    out
}
