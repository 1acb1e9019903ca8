//! Sixteen floats of attention in one register.

#![expect(clippy::inline_always, reason = "compiled inside the function that has the features")]

use std::arch::x86_64::*;

use crate::{attention::Vectors, avx2, exp::ROUNDER, lanes::LANES, platform::Task};

/// Used by tasks that [`super::run`] carries out, and nowhere else.
pub(crate) struct Sixteen;

macro_rules! value {
    ($instruction:expr) => {
        // SAFETY: tasks with these vectors run only within `super::run`, which has asked the
        // processor; loads and stores are of arrays as long as the vector.
        unsafe { $instruction }
    };
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,f16c,fma")]
fn apart<T: Task>(task: T) -> T::Output {
    task.run()
}

impl Vectors for Sixteen {
    type Floats = __m512;
    type Pair = __m256;
    type Quarter = [__m256; 2];
    type Integers = __m512i;
    type Shorts = __m512i;
    const KEY_HEADS: usize = 4;
    const KEYS: usize = 4;
    const VALUE_VECTORS: usize = 4;
    const HEADS: usize = 4;
    const USUAL_WIDTHS: bool = true;

    #[inline(always)]
    fn run<T: Task>(task: T) -> T::Output {
        value!(apart(task))
    }

    #[inline(always)]
    fn load(from: &[f32; LANES]) -> __m512 {
        value!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn load_f16(from: &[u16; LANES]) -> __m512 {
        value!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_bf16(from: &[u16; LANES]) -> __m512 {
        let words = value!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast())));
        value!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)))
    }

    #[inline(always)]
    fn load_bf16_pairs(from: &[u16; 2 * LANES]) -> [__m512; 2] {
        let words = value!(_mm512_loadu_si512(from.as_ptr().cast()));
        let upper = value!(_mm512_and_si512(words, _mm512_set1_epi32(i32::MIN >> 15)));
        let lower = value!(_mm512_slli_epi32::<16>(words));
        [value!(_mm512_castsi512_ps(lower)), value!(_mm512_castsi512_ps(upper))]
    }

    #[inline(always)]
    fn load_i8(from: &[i8; LANES]) -> __m512 {
        value!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))))
    }

    #[inline(always)]
    fn store(floats: __m512, to: &mut [f32; LANES]) {
        value!(_mm512_storeu_ps(to.as_mut_ptr(), floats));
    }

    #[inline(always)]
    fn splat(value: f32) -> __m512 {
        value!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn add(a: __m512, b: __m512) -> __m512 {
        value!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn max(a: __m512, b: __m512) -> __m512 {
        value!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn mul(a: __m512, b: __m512) -> __m512 {
        value!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        value!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn power_of_two(bits: __m512) -> __m512 {
        let less = value!(_mm512_set1_epi32(127_i32.wrapping_sub(ROUNDER.to_bits().cast_signed())));
        let power = value!(_mm512_add_epi32(_mm512_castps_si512(bits), less));
        value!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(power)))
    }

    /// Four by four within each quarter of a register, then the quarters.
    #[inline(always)]
    fn transpose(from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
        let mut fours = [[Self::splat(0.0); 4]; 4];
        for (fours, from) in fours.iter_mut().zip(from.as_chunks::<4>().0) {
            let [a, b, c, d] = from;
            let (a, b, c, d) = (Self::load(a), Self::load(b), Self::load(c), Self::load(d));
            let (ab, cd) = (value!(_mm512_unpacklo_ps(a, b)), value!(_mm512_unpacklo_ps(c, d)));
            let (ef, gh) = (value!(_mm512_unpackhi_ps(a, b)), value!(_mm512_unpackhi_ps(c, d)));
            *fours = [
                value!(_mm512_shuffle_ps::<0b01_00_01_00>(ab, cd)),
                value!(_mm512_shuffle_ps::<0b11_10_11_10>(ab, cd)),
                value!(_mm512_shuffle_ps::<0b01_00_01_00>(ef, gh)),
                value!(_mm512_shuffle_ps::<0b11_10_11_10>(ef, gh)),
            ];
        }
        // Of four rows each: quarter q of the register with this number is column 4q + number.
        let [first, second, third, fourth] = fours;
        for number in 0..4 {
            let [a, b] = [first[number], second[number]];
            let [c, d] = [third[number], fourth[number]];
            let even = value!(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b));
            let odd = value!(_mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
            let even_below = value!(_mm512_shuffle_f32x4::<0b10_00_10_00>(c, d));
            let odd_below = value!(_mm512_shuffle_f32x4::<0b11_01_11_01>(c, d));
            let columns = [
                value!(_mm512_shuffle_f32x4::<0b10_00_10_00>(even, even_below)),
                value!(_mm512_shuffle_f32x4::<0b10_00_10_00>(odd, odd_below)),
                value!(_mm512_shuffle_f32x4::<0b11_01_11_01>(even, even_below)),
                value!(_mm512_shuffle_f32x4::<0b11_01_11_01>(odd, odd_below)),
            ];
            for (quarter, column) in columns.into_iter().enumerate() {
                Self::store(column, &mut to[4 * quarter + number]);
            }
        }
    }

    #[inline(always)]
    fn pair([a, b]: [__m512; 2]) -> __m256 {
        avx2::four_of_eight(eight(a), eight(b))
    }

    #[inline(always)]
    fn quarter(pairs: [__m256; 2]) -> [__m256; 2] {
        pairs
    }

    #[inline(always)]
    fn sums(quarters: [[__m256; 2]; 4]) -> [f32; LANES] {
        avx2::Sixteen::sums(quarters)
    }

    #[inline(always)]
    fn no_integers() -> __m512i {
        value!(_mm512_setzero_si512())
    }

    #[inline(always)]
    fn from_integers(integers: __m512i) -> __m512 {
        value!(_mm512_cvtepi32_ps(integers))
    }

    #[inline(always)]
    fn shorts(from: &[i16; 2 * LANES]) -> __m512i {
        value!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn bytes(from: &[i8; 2 * LANES]) -> __m512i {
        value!(_mm512_cvtepi8_epi16(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn pairs(first: &[i8; LANES], second: &[i8; LANES]) -> __m512i {
        let first = value!(_mm_loadu_si128(first.as_ptr().cast()));
        let second = value!(_mm_loadu_si128(second.as_ptr().cast()));
        let low = value!(_mm_unpacklo_epi8(first, second));
        let high = value!(_mm_unpackhi_epi8(first, second));
        value!(_mm512_cvtepi8_epi16(_mm256_set_m128i(high, low)))
    }

    #[inline(always)]
    fn splat_pair([even, odd]: [i16; 2]) -> __m512i {
        let (even, odd) = (even.cast_unsigned(), odd.cast_unsigned());
        value!(_mm512_set1_epi32((u32::from(even) | u32::from(odd) << 16).cast_signed()))
    }

    #[inline(always)]
    fn splat_two(pair: i32) -> __m512i {
        value!(_mm512_set1_epi32(pair))
    }

    #[inline(always)]
    fn even_and_odd(from: &[i8; 4 * LANES]) -> [__m512i; 2] {
        let all = value!(_mm512_loadu_si512(from.as_ptr().cast()));
        let even = value!(_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(all)));
        [even, value!(_mm512_srai_epi16::<8>(all))]
    }

    #[inline(always)]
    fn add_products(sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        value!(_mm512_dpwssd_epi32(sums, a, b))
    }

    #[inline(always)]
    fn integer_sums([a, b, c, d]: [__m512i; 4]) -> [i32; 4] {
        avx2::four_sums([folded(a), folded(b), folded(c), folded(d)])
    }
}

/// The halves added, which takes half as long in shorter registers.
#[inline(always)]
fn eight(a: __m512) -> __m256 {
    let high = value!(_mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(a))));
    value!(_mm256_add_ps(_mm512_castps512_ps256(a), high))
}

/// The same of integers.
#[inline(always)]
fn folded(a: __m512i) -> __m256i {
    let high = value!(_mm512_extracti64x4_epi64::<1>(a));
    value!(_mm256_add_epi32(_mm512_castsi512_si256(a), high))
}
