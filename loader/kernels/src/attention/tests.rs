//! Attention against a plain reference.

use super::*;
use crate::{Activations, Team, TeamOptions};

/// f32 sums of some hundred terms below 1, with our own exponential.
const TOLERANCE: f64 = 2e-6;

fn elements(len: usize, seed: u32) -> Vec<f32> {
    (0..len).map(|i| ((i as f32 + seed as f32 * 17.3) * 0.7371).sin()).collect()
}

/// What a query sees and how its scores are changed.
#[derive(Clone, Copy, Debug, Default)]
struct Variant {
    window: Option<u32>,
    chunk: Option<u32>,
    softcap: Option<f32>,
    sinks: Option<[f32; 3]>,
    /// Keys of the blocks that are chosen.
    blocks: Option<usize>,
}

impl Variant {
    /// Blocks of a row that each of two heads sees; one in five sees all.
    fn chosen(&self, position: usize, head: usize) -> Option<Vec<u32>> {
        let own = position / self.blocks?;
        let takes = |block: &usize| *block == own || (block * 7 + position + 3 * head) % 4 > 1;
        let some = || (0..=own).filter(takes).map(|block| block as u32).collect();
        (!position.is_multiple_of(5)).then(some)
    }

    fn sees(&self, position: usize, head: usize, key: usize) -> bool {
        let chosen = self.chosen(position, head);
        let block = |keys: usize| (key / keys) as u32;
        chosen.is_none_or(|chosen| self.blocks.is_none_or(|keys| chosen.contains(&block(keys))))
    }
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

/// Which part of a head.
const PARTS: [fn(usize) -> Row; 2] = [Row::Key, Row::Value];

/// Rows in whole blocks of [`Order::Lanes`], and behind the last what must not count.
fn in_lanes<T: Copy>(
    rows: &[T],
    (head_dim, together): (usize, usize),
    part: fn(usize) -> Row,
    beyond: T,
) -> Vec<T> {
    let block = KEYS_PER_BLOCK * head_dim;
    let mut blocks = vec![beyond; rows.len().next_multiple_of(block)];
    for (rows, block) in rows.chunks(block).zip(blocks.chunks_mut(block)) {
        for (index, row) in rows.chunks(head_dim).enumerate() {
            Order::Lanes.put(part(index), together, row.iter().copied(), block);
        }
    }
    blocks
}

/// Keys and values of `heads` heads, `[head][key][head_dim]` and in blocks.
struct Cache {
    head_dim: usize,
    order: Order,
    flat: Vec<[Vec<f32>; 2]>,
}

impl Cache {
    fn new(heads: usize, keys: usize, head_dim: usize) -> Self {
        let flat = (0..heads as u32)
            .map(|head| {
                [elements(keys * head_dim, head * 2 + 1), elements(keys * head_dim, head * 2 + 2)]
            })
            .collect();
        Self { head_dim, order: Order::fastest(head_dim), flat }
    }

    fn blocks(&self, keys: usize) -> Vec<[Vec<Vec<f32>>; 2]> {
        let cut = |index: usize, flat: &Vec<f32>| {
            let rows = &flat[..keys * self.head_dim];
            let rows = match self.order {
                Order::Rows => rows.to_vec(),
                Order::Lanes => in_lanes(rows, (self.head_dim, 1), PARTS[index], f32::NAN),
            };
            rows.chunks(KEYS_PER_BLOCK * self.head_dim).map(<[f32]>::to_vec).collect()
        };
        self.flat.iter().map(|[keys, values]| [cut(0, keys), cut(1, values)]).collect()
    }

    fn attend(&self, q: &[f32], first_position: usize, variant: Variant) -> Vec<f32> {
        let q_to_kv = [1, 0, 1];
        let keys = first_position + q.len() / (q_to_kv.len() * self.head_dim);
        let blocks = self.blocks(keys);
        let views: Vec<_> =
            blocks.iter().map(|head| head.each_ref().map(|all| views(all))).collect();
        let heads: Vec<_> = views.iter().map(|[keys, values]| KvHead { keys, values }).collect();
        let both = |position: usize| [0, 1].map(|head| variant.chosen(position, head));
        let chosen: Vec<_> = (first_position..keys).flat_map(both).collect();
        let blocks = |keys: usize| ChosenBlocks { keys, blocks: &chosen };
        let attention = Attention {
            head_dim: self.head_dim,
            scale: 0.3,
            softcap: variant.softcap,
            sinks: variant.sinks.as_ref().map(<[f32; 3]>::as_slice),
            window: variant.window,
            chunk: variant.chunk,
            chosen: variant.blocks.map(blocks),
            q_to_kv: &q_to_kv,
            order: self.order,
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
        let chunk = variant.chunk.map_or(0, |chunk| position / chunk as usize * chunk as usize);
        let visible = (position + 1).saturating_sub(window).max(chunk)..position + 1;
        let visible = visible.filter(|key| variant.sees(position, [1, 0, 1][q_head], *key));
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
    for head_dim in [24, 32] {
        check_width(head_dim, first_position, queries, variant);
    }
}

fn check_width(head_dim: usize, first_position: usize, queries: usize, variant: Variant) {
    let cache = Cache::new(2, first_position + queries, head_dim);
    let q = elements(queries * 3 * head_dim, 99);
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
        for chunk in [1, 5, 128, 256, 512].map(Some) {
            check(first, queries, Variant { chunk, ..Variant::default() });
        }
    }
}

#[test]
fn selected_blocks_agree_with_a_plain_softmax() {
    for (first, queries) in [(0, 1), (3, 9), (250, 12), (511, 2), (1100, 1), (1100, 11)] {
        for blocks in [1, 8, 64, 128, 256].map(Some) {
            check(first, queries, Variant { blocks, ..Variant::default() });
            let sinks = Some([0.5, -2.0, 1.25]);
            check(
                first,
                queries,
                Variant { blocks, sinks, window: Some(300), ..Variant::default() },
            );
        }
    }
}

#[test]
fn a_selection_of_all_blocks_has_the_bits_of_none() {
    let (position, head_dim) = (700, 32);
    let cache = Cache::new(2, position + 1, head_dim);
    let blocks = cache.blocks(position + 1);
    let [keys, values] = &blocks[0].each_ref().map(|all| views(all));
    let q = elements(head_dim, 3);
    let run = |chosen: Option<ChosenBlocks<'_>>| {
        let attention = Attention {
            head_dim,
            scale: 0.3,
            softcap: None,
            sinks: None,
            window: None,
            chunk: None,
            chosen,
            q_to_kv: &[0],
            order: cache.order,
            heads: &[KvHead { keys, values }],
            first_position: position,
        };
        let mut out = vec![f32::NAN; head_dim];
        attend(&q, &attention, &mut out);
        out
    };
    let all = [Some((0..=position as u32 / 32).collect())];
    assert_eq!(run(None), run(Some(ChosenBlocks { keys: 32, blocks: &all })));
    let last = [Some(vec![position as u32 / 32])];
    assert_ne!(run(None), run(Some(ChosenBlocks { keys: 32, blocks: &last })));
}

#[test]
fn caps_and_sinks_agree_with_a_plain_softmax() {
    for window in [None, Some(5)] {
        let plain = Variant { window, ..Variant::default() };
        check(250, 9, Variant { softcap: Some(0.7), ..plain });
        check(250, 9, Variant { sinks: Some([0.5, -2.0, 1.25]), ..plain });
        check(3, 2, Variant { softcap: Some(2.0), sinks: Some([40.0, -60.0, 0.0]), ..plain });
    }
}

#[test]
fn prefill_and_decode_have_the_same_bits() {
    let queries = 530;
    let spans = [
        (None, None, None),
        (Some(300), None, None),
        (None, Some(100), None),
        (None, None, Some(16)),
    ];
    for (head_dim, (window, span, blocks)) in
        [16, 96].into_iter().flat_map(|dim| spans.map(|s| (dim, s)))
    {
        let cache = Cache::new(2, queries, head_dim);
        let q = elements(queries * 3 * head_dim, 5);
        let sinks = Some([0.1, 1.0, -1.0]);
        let variant = Variant { window, chunk: span, softcap: Some(3.0), sinks, blocks };
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
    order: Order,
    f32: Vec<f32>,
    half: Vec<u16>,
    q8: Vec<i8>,
    scales: Vec<f32>,
}

const KINDS: [&str; 4] = ["f32", "f16", "bf16", "q8"];

impl Stored {
    /// All of them the same values, up to the rounding of f16 and bf16.
    fn new(kind: &str, keys: usize, head_dim: usize, seed: u32) -> Self {
        let q8: Vec<i8> =
            elements(keys * head_dim, seed).iter().map(|x| (x * 127.0) as i8).collect();
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
        Self { order: Order::Rows, f32, half, q8, scales }
    }

    /// The same in lanes. Behind the end floats are none, and integers whatever.
    fn in_lanes(&self, kind: &str, head_dim: usize, part: fn(usize) -> Row) -> Self {
        let nan = if kind == "f16" { 0x7e00 } else { 0x7fc0 };
        let halves = if kind == "bf16" { TOGETHER_BF16 } else { 1 };
        Self {
            order: Order::Lanes,
            f32: in_lanes(&self.f32, (head_dim, 1), part, f32::NAN),
            half: in_lanes(&self.half, (head_dim, halves), part, nan),
            q8: in_lanes(&self.q8, (head_dim, TOGETHER_Q8), part, -77),
            scales: self.scales.clone(),
        }
    }

    fn blocks(&self, kind: &str, keys: usize, head_dim: usize) -> Vec<KvBlock<'_>> {
        let block = KEYS_PER_BLOCK * head_dim;
        let len = match self.order {
            Order::Rows => keys * head_dim,
            Order::Lanes => keys.div_ceil(KEYS_PER_BLOCK) * block,
        };
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
        chunk: None,
        chosen: None,
        q_to_kv: &q_to_kv,
        order: stored[0][0].order,
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
        for kind in KINDS {
            let rows =
                [1, 3].map(|seed| [seed, seed + 1].map(|at| Stored::new(kind, KEYS, head_dim, at)));
            if Order::fastest(head_dim) == Order::Lanes {
                let in_lanes =
                    |part: usize, stored: &Stored| stored.in_lanes(kind, head_dim, PARTS[part]);
                let lanes = rows.each_ref().map(|[k, v]| [in_lanes(0, k), in_lanes(1, v)]);
                check_bits(&lanes, kind, KEYS, head_dim);
            }
            check_bits(&rows, kind, KEYS, head_dim);
        }
    }
}

fn check_bits(stored: &[[Stored; 2]; 2], kind: &str, keys: usize, head_dim: usize) {
    let q = elements(keys * 9 * head_dim, 7);
    let run = |platform, kind: &str, sizes: &[[usize; 2]]| {
        let options = TeamOptions { threads: 2, platform, activations: Activations::Int8 };
        let team = Team::new(&options).unwrap();
        let part =
            |[keys, queries]: &[usize; 2]| bits(stored, kind, (*keys, *queries, head_dim), &q);
        team.run(|| sizes.iter().flat_map(part).collect::<Vec<_>>())
    };
    let mut expected = run(Platform::Portable, "f32", &[[keys, 12]]);
    if kind == "q8" && head_dim.is_multiple_of(integers::STEP) {
        let exact = std::mem::replace(&mut expected, run(Platform::Portable, kind, &[[keys, 12]]));
        let pairs = exact.iter().zip(&expected).map(|(a, b)| [a, b]);
        for [exact, found] in pairs.map(|pair| pair.map(|bits| f32::from_bits(*bits))) {
            assert!((exact - found).abs() < ROUNDED, "{found} instead of {exact}");
        }
    }
    for platform in Platform::available() {
        let single: Vec<_> = (keys - 11..=keys).map(|keys| [keys, 1]).collect();
        for sizes in [vec![[keys, 12]], vec![[keys - 3, 9], [keys, 3]], single] {
            let found = run(platform, kind, &sizes);
            assert!(found == expected, "{platform}, {kind}, {head_dim}, {sizes:?}");
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
        let q = elements(6 * head_dim, 3);
        let [k, v] = [1, 2].map(|seed| elements(KEYS * head_dim, seed));
        let attend_to = |q: &[f32], k: &[f32], v: &[f32], head_dim: usize| {
            let cut = KEYS_PER_BLOCK * head_dim;
            let attention = Attention {
                head_dim,
                scale: 0.2,
                softcap: None,
                sinks: None,
                window: None,
                chunk: None,
                chosen: None,
                q_to_kv: &[0; 6],
                order: Order::Rows,
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
    let q = elements(3 * head_dim, 4);
    let attend_to = |keys_in_blocks: &[KvBlock<'_>], values: &[KvBlock<'_>]| {
        let attention = Attention {
            head_dim,
            scale: 0.2,
            softcap: None,
            sinks: None,
            window: None,
            chunk: None,
            chosen: None,
            q_to_kv: &[0, 0, 0],
            order: Order::Rows,
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
