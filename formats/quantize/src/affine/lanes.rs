//! Groups in vectors: lane `i` of vector `k` holds element `k` of the batch's group `i`. So a
//! group never meets its neighbours, and sums over a group need no sums across lanes.

use super::floats::widen_inline;
use crate::{
    dtype::Dtype,
    simd::{Lanes, MAX_LANES},
};

/// Largest group.
pub(super) const MAX_GROUP: usize = 128;

/// Most words of one group's integers: 128 of 8 bits.
pub(super) const MAX_WORDS: usize = MAX_GROUP * 8 / 32;

/// 2²³. Added to an integer from 0 to 2²² it leaves the integer in the low bits.
const ROUNDER: f32 = 8_388_608.0;

/// Rows of a batch before they are turned, with room for what a whole vector reads or writes
/// behind the last. Aligned as vectors are, so that none crosses a cache line.
#[repr(align(64))]
pub(super) struct Rows {
    floats: [f32; MAX_LANES * MAX_GROUP],
    words: [u32; MAX_LANES * MAX_WORDS + MAX_LANES],
}

impl Rows {
    pub(super) const fn new() -> Self {
        Self { floats: [0.0; MAX_LANES * MAX_GROUP], words: [0; MAX_LANES * MAX_WORDS + MAX_LANES] }
    }

    /// Loads up to `N` groups of `G` from their bytes; lanes without a group hold zeros.
    #[inline(always)]
    pub(super) fn load<V: Lanes, const G: usize>(
        &mut self,
        proof: V::Proof,
        dtype: Dtype,
        bytes: &[u8],
        out: &mut [V; G],
    ) {
        if dtype == Dtype::BF16 && bytes.len() == V::N * G * 2 {
            return load_bf16(proof, bytes, out);
        }
        let values = bytes.len() / dtype.size_bytes();
        widen_inline(dtype, bytes, &mut self.floats[..values]);
        self.floats[values..V::N * G].fill(0.0);
        self.turn(proof, out);
    }

    /// Takes row `i` of `G` numbers from `row(i)`.
    #[inline(always)]
    pub(super) fn load_rows<'a, V: Lanes, const G: usize>(
        &mut self,
        proof: V::Proof,
        row: impl Fn(usize) -> &'a [f32],
        out: &mut [V; G],
    ) {
        for i in 0..V::N {
            self.floats[i * G..][..G].copy_from_slice(row(i));
        }
        self.turn(proof, out);
    }

    #[inline(always)]
    fn turn<V: Lanes, const G: usize>(&self, proof: V::Proof, out: &mut [V; G]) {
        for (step, out) in out.chunks_exact_mut(V::N).enumerate() {
            let mut block = [V::splat(proof, 0.0); MAX_LANES];
            for (i, vector) in block[..V::N].iter_mut().enumerate() {
                *vector = V::load(proof, &self.floats[i * G + step * V::N..]);
            }
            V::transpose(&mut block);
            out.copy_from_slice(&block[..V::N]);
        }
    }

    /// Packs integers into the groups' bit streams. `out` holds the batch's groups, at most `N`.
    #[inline(always)]
    pub(super) fn pack<V: Lanes, const G: usize>(
        &mut self,
        proof: V::Proof,
        bits: u32,
        q: &[V; G],
        out: &mut [u8],
    ) {
        match bits {
            2 => self.pack_as::<V, G, 2>(proof, q, out),
            3 => self.pack_as::<V, G, 3>(proof, q, out),
            4 => self.pack_as::<V, G, 4>(proof, q, out),
            5 => self.pack_as::<V, G, 5>(proof, q, out),
            6 => self.pack_as::<V, G, 6>(proof, q, out),
            _ => self.pack_as::<V, G, 8>(proof, q, out),
        }
    }

    #[inline(always)]
    fn pack_as<V: Lanes, const G: usize, const BITS: usize>(
        &mut self,
        proof: V::Proof,
        q: &[V; G],
        out: &mut [u8],
    ) {
        let mut words = [V::splat_word(proof, 0); MAX_WORDS];
        if 16 % BITS == 0 {
            merge_halves::<V, G, BITS>(proof, q, &mut words);
        } else {
            merge::<V, G, BITS>(proof, q, &mut words);
        }
        let count = G * BITS / 32;
        for first in (0..count).step_by(V::N) {
            turn_words::<V>(&mut words, first);
        }
        // A vector may reach into the next row, which is written after it; those that would reach
        // beyond the last go by way of a buffer.
        let beyond = (count - 1) / V::N * V::N + V::N;
        let whole = out.len() == V::N * count * 4;
        let last = if whole { (V::N * count - beyond) / count + 1 } else { 0 };
        for i in 0..last {
            for first in (0..count).step_by(V::N) {
                V::store_bytes(words[first + i], &mut out[(i * count + first) * 4..]);
            }
        }
        for i in last..V::N {
            for first in (0..count).step_by(V::N) {
                V::store_words(words[first + i], &mut self.words[i * count + first..]);
            }
        }
        let rest = &mut out[last * count * 4..];
        for (bytes, word) in rest.chunks_exact_mut(4).zip(&self.words[last * count..]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// The inverse of [`Rows::pack`]; lanes without a group hold zeros.
    #[inline(always)]
    pub(super) fn unpack<V: Lanes, const G: usize>(
        &mut self,
        proof: V::Proof,
        bits: u32,
        bytes: &[u8],
        q: &mut [V; G],
    ) {
        let count = G * bits as usize / 32;
        for (word, bytes) in self.words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        self.words[bytes.len() / 4..V::N * count].fill(0);
        let mut words = [V::splat_word(proof, 0); MAX_WORDS];
        for first in (0..count).step_by(V::N) {
            for i in 0..V::N {
                words[first + i] = V::load_words(proof, &self.words[i * count + first..]);
            }
            turn_words::<V>(&mut words, first);
        }
        match bits {
            2 => split::<V, G, 2>(proof, &words, q),
            3 => split::<V, G, 3>(proof, &words, q),
            4 => split::<V, G, 4>(proof, &words, q),
            5 => split::<V, G, 5>(proof, &words, q),
            6 => split::<V, G, 6>(proof, &words, q),
            _ => split::<V, G, 8>(proof, &words, q),
        }
    }
}

/// Loads `N` groups of bf16. Two neighbours are one word until they are in their lane, which halves
/// the work of turning them.
#[inline(always)]
fn load_bf16<V: Lanes, const G: usize>(proof: V::Proof, bytes: &[u8], out: &mut [V; G]) {
    let upper = V::splat_word(proof, 0xffff_0000);
    for (step, out) in out.chunks_exact_mut(2 * V::N).enumerate() {
        let mut block = [V::splat(proof, 0.0); MAX_LANES];
        for (i, vector) in block[..V::N].iter_mut().enumerate() {
            let row = &bytes[(i * G + step * 2 * V::N) * 2..];
            *vector = V::from_words(V::load_bytes(proof, row));
        }
        V::transpose(&mut block);
        for (pair, out) in block.iter().zip(out.chunks_exact_mut(2)) {
            out[0] = V::from_words(V::shift_left(pair.words(), 16));
            out[1] = V::from_words(V::and(pair.words(), upper));
        }
    }
}

/// Transposes the square of words from `first` on.
#[inline(always)]
fn turn_words<V: Lanes>(words: &mut [V::Words; MAX_WORDS], first: usize) {
    let mut block = [V::from_words(words[first]); MAX_LANES];
    for i in 1..V::N {
        block[i] = V::from_words(words[first + i]);
    }
    V::transpose(&mut block);
    for i in 0..V::N {
        words[first + i] = block[i].words();
    }
}

/// Integers, held as floats, into words of the bit stream. 32 integers fill `BITS` words.
#[inline(always)]
fn merge<V: Lanes, const G: usize, const BITS: usize>(
    proof: V::Proof,
    q: &[V; G],
    words: &mut [V::Words; MAX_WORDS],
) {
    let rounder = V::splat(proof, ROUNDER);
    let mask = V::splat_word(proof, (1 << BITS) - 1);
    for (q, words) in q.chunks_exact(32).zip(words.chunks_exact_mut(BITS)) {
        let mut word = V::splat_word(proof, 0);
        let mut filled = 0;
        let mut index = 0;
        for q in q {
            let q = V::and(q.add(rounder).words(), mask);
            word = V::or(word, V::shift_left(q, filled));
            filled += BITS as u32;
            if filled >= 32 {
                words[index] = word;
                index += 1;
                filled -= 32;
                // What did not fit; nothing when the word ended with the integer.
                word = V::shift_right(q, BITS as u32 - filled);
            }
        }
    }
}

/// The same where integers fill half a word: 16 bits are put together as floats, which hold them
/// exactly.
#[inline(always)]
fn merge_halves<V: Lanes, const G: usize, const BITS: usize>(
    proof: V::Proof,
    q: &[V; G],
    words: &mut [V::Words; MAX_WORDS],
) {
    let count = 16 / BITS;
    let rounder = V::splat(proof, ROUNDER);
    let factor = V::splat(proof, (1 << BITS) as f32);
    let mask = V::splat_word(proof, 0xffff);
    for (q, word) in q.chunks_exact(2 * count).zip(words) {
        let mut halves = [q[count - 1], q[2 * count - 1]];
        for k in (0..count - 1).rev() {
            halves[0] = halves[0].mul_add_exact(factor, q[k]);
            halves[1] = halves[1].mul_add_exact(factor, q[count + k]);
        }
        let low = V::and(halves[0].add(rounder).words(), mask);
        *word = V::or(low, V::shift_left(halves[1].add(rounder).words(), 16));
    }
}

/// The inverse of [`merge`].
#[inline(always)]
fn split<V: Lanes, const G: usize, const BITS: usize>(
    proof: V::Proof,
    words: &[V::Words; MAX_WORDS],
    q: &mut [V; G],
) {
    let rounder = V::splat(proof, ROUNDER);
    let mask = V::splat_word(proof, (1 << BITS) - 1);
    for (out, words) in q.chunks_exact_mut(32).zip(words.chunks_exact(BITS)) {
        for (k, out) in out.iter_mut().enumerate() {
            let (index, shift) = (k * BITS / 32, (k * BITS % 32) as u32);
            let mut q = V::shift_right(words[index], shift);
            if shift + BITS as u32 > 32 {
                q = V::or(q, V::shift_left(words[index + 1], 32 - shift));
            }
            // An integer in the low bits of 2²³ is that much more than 2²³.
            *out = V::from_words(V::or(V::and(q, mask), rounder.words())).sub(rounder);
        }
    }
}

/// The ends of each group, and whether its numbers are numbers.
#[derive(Clone, Copy)]
pub(super) struct Range<V> {
    pub(super) low: V,
    pub(super) high: V,
    /// The sum of all elements: neither NaN nor infinite when none of them is, unless they are so
    /// large that their sum is.
    sum: V,
}

impl<V: Lanes> Range<V> {
    #[inline(always)]
    pub(super) fn of<const G: usize>(values: &[V; G]) -> Self {
        // Four at a time, for the processor's sake; the result does not depend on the order.
        let mut low = [values[0], values[1], values[2], values[3]];
        let mut high = low;
        let mut sum = low;
        for four in values[4..].chunks_exact(4) {
            for j in 0..4 {
                low[j] = low[j].min(four[j]);
                high[j] = high[j].max(four[j]);
                sum[j] = sum[j].add(four[j]);
            }
        }
        Self {
            low: low[0].min(low[1]).min(low[2].min(low[3])),
            high: high[0].max(high[1]).max(high[2].max(high[3])),
            sum: sum[0].add(sum[1]).add(sum[2].add(sum[3])),
        }
    }

    /// Whether an element may be NaN or infinite; sure when not.
    #[inline(always)]
    pub(super) fn may_have_flaw(self) -> bool {
        let mut sums = [0.0; MAX_LANES];
        self.sum.store(&mut sums);
        let mut flaw = false;
        for sum in sums {
            flaw |= !sum.is_finite();
        }
        flaw
    }

    /// The larger magnitude of both ends.
    #[inline(always)]
    pub(super) fn magnitude(self) -> V {
        self.low.abs().max(self.high.abs())
    }
}

/// Rounds to integers from 0 to `largest`, ties to even. NaN becomes 0.
#[inline(always)]
pub(super) fn round<V: Lanes>(proof: V::Proof, steps: V, largest: V) -> V {
    // Clamped first, which gives the same integers.
    steps.max(V::splat(proof, 0.0)).min(largest).rint_small(proof)
}
