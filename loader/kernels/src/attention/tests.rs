//! Attention against a plain reference.

use super::*;
use crate::{Activations, Team, TeamOptions};

/// f32 sums of some hundred terms below 1, with our own exponential.
const TOLERANCE: f64 = 2e-6;

fn numbers(len: usize, seed: u32) -> Vec<f32> {
    (0..len).map(|i| ((i as f32 + seed as f32 * 17.3) * 0.7371).sin()).collect()
}

/// What a query sees and how its scores are changed.
#[derive(Clone, Copy, Debug, Default)]
struct Variant {
    window: Option<u32>,
    softcap: Option<f32>,
    sinks: Option<[f32; 3]>,
}

fn views(blocks: &[Vec<f32>]) -> Vec<KvBlock<'_>> {
    blocks.iter().map(|block| KvBlock::Floats(Floats::F32(block))).collect()
}

fn floats(values: &[f32], block: usize) -> Vec<KvBlock<'_>> {
    values.chunks(block).map(|block| KvBlock::Floats(Floats::F32(block))).collect()
}

fn bf16(bits: &[u16], block: usize) -> Vec<KvBlock<'_>> {
    bits.chunks(block).map(|block| KvBlock::Floats(Floats::BF16(block))).collect()
}

fn q8<'a>(values: &'a [i8], scales: &'a [f32], block: usize) -> Vec<KvBlock<'a>> {
    let scales = scales.chunks(KEYS_PER_BLOCK);
    values
        .chunks(block)
        .zip(scales)
        .map(|(values, scales)| KvBlock::Q8 { values, scales })
        .collect()
}

/// Keys and values of `heads` heads, `[head][key][head_dim]` and in blocks.
struct Cache {
    head_dim: usize,
    flat: Vec<[Vec<f32>; 2]>,
}

impl Cache {
    fn new(heads: usize, keys: usize, head_dim: usize) -> Self {
        let flat = (0..heads as u32)
            .map(|head| {
                [numbers(keys * head_dim, head * 2 + 1), numbers(keys * head_dim, head * 2 + 2)]
            })
            .collect();
        Self { head_dim, flat }
    }

    fn blocks(&self, keys: usize) -> Vec<[Vec<Vec<f32>>; 2]> {
        let cut = |flat: &Vec<f32>| {
            flat[..keys * self.head_dim]
                .chunks(KEYS_PER_BLOCK * self.head_dim)
                .map(<[f32]>::to_vec)
                .collect()
        };
        self.flat.iter().map(|[keys, values]| [cut(keys), cut(values)]).collect()
    }

    fn attend(&self, q: &[f32], first_position: usize, variant: Variant) -> Vec<f32> {
        let q_to_kv = [1, 0, 1];
        let keys = first_position + q.len() / (q_to_kv.len() * self.head_dim);
        let blocks = self.blocks(keys);
        let views: Vec<_> =
            blocks.iter().map(|head| head.each_ref().map(|all| views(all))).collect();
        let heads: Vec<_> = views.iter().map(|[keys, values]| KvHead { keys, values }).collect();
        let attention = Attention {
            head_dim: self.head_dim,
            scale: 0.3,
            softcap: variant.softcap,
            sinks: variant.sinks.as_ref().map(<[f32; 3]>::as_slice),
            window: variant.window,
            q_to_kv: &q_to_kv,
            heads: &heads,
            first_position,
        };
        let mut out = vec![f32::NAN; q.len()];
        attend(q, &attention, &mut out);
        out
    }

    /// Softmax in f64 without blocks.
    fn reference(&self, q: &[f32], position: usize, q_head: usize, variant: Variant) -> Vec<f64> {
        let [keys, values] = &self.flat[[1, 0, 1][q_head]];
        let window = variant.window.map_or(usize::MAX, |window| window as usize);
        let visible = (position + 1).saturating_sub(window)..position + 1;
        let row = |flat: &'_ [f32], key: usize| -> Vec<f64> {
            flat[key * self.head_dim..][..self.head_dim].iter().map(|x| f64::from(*x)).collect()
        };
        let weights: Vec<f64> = visible
            .clone()
            .map(|key| {
                let products = row(keys, key).into_iter().zip(q).map(|(k, q)| k * f64::from(*q));
                let score = products.sum::<f64>() * f64::from(0.3_f32);
                variant
                    .softcap
                    .map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            })
            .map(f64::exp)
            .collect();
        let sink = variant.sinks.map_or(0.0, |sinks| f64::from(sinks[q_head]).exp());
        let total: f64 = weights.iter().sum::<f64>() + sink;
        let mut out = vec![0.0; self.head_dim];
        for (key, weight) in visible.zip(weights) {
            for (out, value) in out.iter_mut().zip(row(values, key)) {
                *out += weight / total * value;
            }
        }
        out
    }
}

fn check(first_position: usize, queries: usize, variant: Variant) {
    let head_dim = 24;
    let cache = Cache::new(2, first_position + queries, head_dim);
    let q = numbers(queries * 3 * head_dim, 99);
    let found = cache.attend(&q, first_position, variant);
    for (index, (q, found)) in
        q.chunks_exact(head_dim).zip(found.chunks_exact(head_dim)).enumerate()
    {
        let expected = cache.reference(q, first_position + index / 3, index % 3, variant);
        for (found, expected) in found.iter().zip(expected) {
            let difference = (f64::from(*found) - expected).abs();
            assert!(
                difference < TOLERANCE,
                "position {}: {found} instead of {expected}",
                first_position + index / 3
            );
        }
    }
}

#[test]
fn agrees_with_a_plain_softmax() {
    for (first, queries) in [(0, 1), (0, 7), (254, 4), (255, 1), (256, 1), (511, 3), (700, 2)] {
        for window in [None, Some(1), Some(16), Some(256), Some(400)] {
            check(first, queries, Variant { window, ..Variant::default() });
        }
    }
}

#[test]
fn caps_and_sinks_agree_with_a_plain_softmax() {
    for window in [None, Some(5)] {
        check(250, 9, Variant { window, softcap: Some(0.7), sinks: None });
        check(250, 9, Variant { window, softcap: None, sinks: Some([0.5, -2.0, 1.25]) });
        check(3, 2, Variant { window, softcap: Some(2.0), sinks: Some([40.0, -60.0, 0.0]) });
    }
}

#[test]
fn prefill_and_decode_have_the_same_bits() {
    let (head_dim, queries) = (16, 530);
    let cache = Cache::new(2, queries, head_dim);
    let q = numbers(queries * 3 * head_dim, 5);
    for window in [None, Some(300)] {
        let variant = Variant { window, softcap: Some(3.0), sinks: Some([0.1, 1.0, -1.0]) };
        let whole = cache.attend(&q, 0, variant);
        for chunk in [1, 97, 256] {
            let width = 3 * head_dim;
            let pieces: Vec<f32> = q
                .chunks(chunk * width)
                .enumerate()
                .flat_map(|(index, q)| cache.attend(q, index * chunk, variant))
                .collect();
            let same = whole.iter().zip(&pieces).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && whole.len() == pieces.len(), "chunks of {chunk}, window {window:?}");
        }
    }
}

/// A head's keys or values as they may be stored.
struct Stored {
    f32: Vec<f32>,
    half: Vec<u16>,
    q8: Vec<i8>,
    scales: Vec<f32>,
}

const KINDS: [&str; 4] = ["f32", "f16", "bf16", "q8"];

impl Stored {
    /// All of them the same numbers, up to the rounding of halves.
    fn new(kind: &str, keys: usize, head_dim: usize, seed: u32) -> Self {
        let q8: Vec<i8> =
            numbers(keys * head_dim, seed).iter().map(|x| (x * 127.0) as i8).collect();
        let scales: Vec<f32> = (0..keys).map(|key| 0.01 + key as f32 * 1e-5).collect();
        let value = |(i, value): (usize, &i8)| f32::from(*value) * scales[i / head_dim];
        let exact: Vec<f32> = q8.iter().enumerate().map(value).collect();
        let round = |value: &f32| match kind {
            "f16" => half::f16::from_f32(*value).to_bits(),
            _ => half::bf16::from_f32(*value).to_bits(),
        };
        let half: Vec<u16> = exact.iter().map(round).collect();
        let f32 = match kind {
            "f16" => Floats::F16(&half).to_vec(),
            "bf16" => Floats::BF16(&half).to_vec(),
            _ => exact,
        };
        Self { f32, half, q8, scales }
    }

    fn blocks(&self, kind: &str, keys: usize, head_dim: usize) -> Vec<KvBlock<'_>> {
        let (block, len) = (KEYS_PER_BLOCK * head_dim, keys * head_dim);
        match kind {
            "f32" => floats(&self.f32[..len], block),
            "f16" => self.half[..len]
                .chunks(block)
                .map(|block| KvBlock::Floats(Floats::F16(block)))
                .collect(),
            "bf16" => bf16(&self.half[..len], block),
            _ => q8(&self.q8[..len], &self.scales[..keys], block),
        }
    }
}

/// Bits of attention of the last `queries` of `keys` positions, of nine query heads to two.
fn bits(
    stored: &[[Stored; 2]; 2],
    kind: &str,
    (keys, queries, head_dim): (usize, usize, usize),
    q: &[f32],
) -> Vec<u32> {
    let blocks = stored
        .each_ref()
        .map(|head| head.each_ref().map(|stored| stored.blocks(kind, keys, head_dim)));
    let heads = blocks.each_ref().map(|[keys, values]| KvHead { keys, values });
    let q_to_kv = [0, 0, 0, 0, 0, 0, 0, 1, 1];
    let attention = Attention {
        head_dim,
        scale: 0.2,
        softcap: None,
        sinks: None,
        window: Some(290),
        q_to_kv: &q_to_kv,
        heads: &heads,
        first_position: keys - queries,
    };
    let width = q_to_kv.len() * head_dim;
    let mut out = vec![f32::NAN; queries * width];
    attend(&q[(keys - queries) * width..keys * width], &attention, &mut out);
    out.into_iter().map(f32::to_bits).collect()
}

/// Queries and weights of 16 bits, the least of them by as much as the largest, of results below 2.
const ROUNDED: f32 = 5e-4;

/// Whatever the platform, the threads, how keys and values are stored, and how many queries come
/// at a time: the bits are those of the same numbers in f32 on plain Rust, or, where products are
/// those of integers, of the same integers.
#[test]
fn platforms_types_and_chunks_have_the_same_bits() {
    const KEYS: usize = 263;
    for head_dim in [16, 24, 48, 64, 80, 96, 128, 256] {
        let q = numbers(KEYS * 9 * head_dim, 7);
        for kind in KINDS {
            let stored =
                [1, 3].map(|seed| [seed, seed + 1].map(|at| Stored::new(kind, KEYS, head_dim, at)));
            let run = |platform, kind: &str, sizes: &[[usize; 2]]| {
                let options = TeamOptions { threads: 2, platform, activations: Activations::Int8 };
                let team = Team::new(&options).unwrap();
                let part = |[keys, queries]: &[usize; 2]| {
                    bits(&stored, kind, (*keys, *queries, head_dim), &q)
                };
                team.run(|| sizes.iter().flat_map(part).collect::<Vec<_>>())
            };
            let mut expected = run(Platform::Portable, "f32", &[[KEYS, 12]]);
            if kind == "q8" && head_dim % integers::STEP == 0 {
                let exact =
                    std::mem::replace(&mut expected, run(Platform::Portable, kind, &[[KEYS, 12]]));
                let pairs = exact.iter().zip(&expected).map(|(a, b)| [a, b]);
                for [exact, found] in pairs.map(|pair| pair.map(|bits| f32::from_bits(*bits))) {
                    assert!((exact - found).abs() < ROUNDED, "{found} instead of {exact}");
                }
            }
            for platform in Platform::available() {
                let single: Vec<_> = (KEYS - 11..=KEYS).map(|keys| [keys, 1]).collect();
                for sizes in [vec![[KEYS, 12]], vec![[KEYS - 3, 9], [KEYS, 3]], single] {
                    let found = run(platform, kind, &sizes);
                    assert!(found == expected, "{platform}, {kind}, {head_dim}, {sizes:?}");
                }
            }
        }
    }
}

/// Zeros behind each row change nothing, and rows that are not whole vectors are computed by
/// [`dot`] and [`weighted_sum`].
#[test]
fn whole_vectors_have_the_bits_of_the_plain_loops() {
    const KEYS: usize = 300;
    for head_dim in [16, 48, 64, 128] {
        let wide = head_dim + 8;
        let pad = |rows: &[f32]| -> Vec<f32> {
            rows.chunks(head_dim).flat_map(|row| row.iter().copied().chain([0.0; 8])).collect()
        };
        let q = numbers(6 * head_dim, 3);
        let [k, v] = [1, 2].map(|seed| numbers(KEYS * head_dim, seed));
        let attend_to = |q: &[f32], k: &[f32], v: &[f32], head_dim: usize| {
            let cut = KEYS_PER_BLOCK * head_dim;
            let attention = Attention {
                head_dim,
                scale: 0.2,
                softcap: None,
                sinks: None,
                window: None,
                q_to_kv: &[0; 6],
                heads: &[KvHead { keys: &floats(k, cut), values: &floats(v, cut) }],
                first_position: KEYS - 1,
            };
            let mut out = vec![f32::NAN; q.len()];
            attend(q, &attention, &mut out);
            out
        };
        let found = attend_to(&q, &k, &v, head_dim);
        let expected = attend_to(&pad(&q), &pad(&k), &pad(&v), wide);
        for (found, expected) in found.chunks(head_dim).zip(expected.chunks(wide)) {
            let same = found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "heads of {head_dim}");
        }
    }
}

/// Rounded keys and values give what their exact floats give, bit for bit.
#[test]
fn stored_types_are_read_exactly() {
    let (head_dim, keys) = (24, 300);
    let integers = |seed: usize| -> Vec<i8> {
        (0..keys * head_dim).map(|i| ((i * 31 + seed * 17) % 255) as u8 as i8).collect()
    };
    let scales: Vec<f32> = (0..keys).map(|key| 0.01 + key as f32 * 1e-5).collect();
    let [k, v] = [integers(1), integers(2)];
    let exact = |values: &[i8]| -> Vec<f32> {
        let value = |(i, value): (usize, &i8)| f32::from(*value) * scales[i / head_dim];
        values.iter().enumerate().map(value).collect()
    };
    let q = numbers(3 * head_dim, 4);
    let attend_to = |keys_in_blocks: &[KvBlock<'_>], values: &[KvBlock<'_>]| {
        let attention = Attention {
            head_dim,
            scale: 0.2,
            softcap: None,
            sinks: None,
            window: None,
            q_to_kv: &[0, 0, 0],
            heads: &[KvHead { keys: keys_in_blocks, values }],
            first_position: keys - 1,
        };
        let mut out = vec![f32::NAN; q.len()];
        attend(&q, &attention, &mut out);
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let cut = KEYS_PER_BLOCK * head_dim;
    let [exact_k, exact_v] = [exact(&k), exact(&v)];
    let of = |k: &[f32], v: &[f32]| attend_to(&floats(k, cut), &floats(v, cut));
    let found = attend_to(&q8(&k, &scales, cut), &q8(&v, &scales, cut));
    assert_eq!(found, of(&exact_k, &exact_v));
    let half = |values: &[f32]| -> Vec<u16> {
        values.iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect()
    };
    let [half_k, half_v] = [half(&exact_k), half(&exact_v)];
    let widened = |bits: &[u16]| Floats::BF16(bits).to_vec();
    let [wide_k, wide_v] = [widened(&half_k), widened(&half_v)];
    let found = attend_to(&bf16(&half_k, cut), &bf16(&half_v, cut));
    assert_eq!(found, of(&wide_k, &wide_v));
}
