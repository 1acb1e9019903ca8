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
/// behind the last.
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
        let mut words = [V::splat_word(proof, 0); MAX_WORDS];
        match bits {
            2 => merge::<V, G, 2>(proof, q, &mut words),
            3 => merge::<V, G, 3>(proof, q, &mut words),
            4 => merge::<V, G, 4>(proof, q, &mut words),
            5 => merge::<V, G, 5>(proof, q, &mut words),
            6 => merge::<V, G, 6>(proof, q, &mut words),
            _ => merge::<V, G, 8>(proof, q, &mut words),
        }
        let count = G * bits as usize / 32;
        for first in (0..count).step_by(V::N) {
            turn_words::<V>(&mut words, first);
        }
        // A vector may reach into the next row, which is written after it.
        for i in 0..V::N {
            for first in (0..count).step_by(V::N) {
                V::store_words(words[first + i], &mut self.words[i * count + first..]);
            }
        }
        for (bytes, word) in out.chunks_exact_mut(4).zip(&self.words) {
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
    /// Zero, or NaN when an element is NaN or infinite.
    pub(super) flaw: V,
}

impl<V: Lanes> Range<V> {
    #[inline(always)]
    pub(super) fn of<const G: usize>(values: &[V; G]) -> Self {
        // Four at a time, for the processor's sake; the result does not depend on the order.
        let mut low = [values[0], values[1], values[2], values[3]];
        let mut high = low;
        let mut flaw = low;
        for j in 0..4 {
            flaw[j] = values[j].sub(values[j]);
        }
        for four in values[4..].chunks_exact(4) {
            for j in 0..4 {
                low[j] = low[j].min(four[j]);
                high[j] = high[j].max(four[j]);
                flaw[j] = flaw[j].add(four[j].sub(four[j]));
            }
        }
        Self {
            low: low[0].min(low[1]).min(low[2].min(low[3])),
            high: high[0].max(high[1]).max(high[2].max(high[3])),
            flaw: flaw[0].add(flaw[1]).add(flaw[2].add(flaw[3])),
        }
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
