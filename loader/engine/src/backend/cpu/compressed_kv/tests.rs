//! Compressed KV entries as they are computed and cached: in steps of any length, on pages of other
//! sequences and after rows were rolled back.

use super::*;
use crate::backend::{CacheShape, LayerShape};

const WIDTH: usize = 8;

/// Entries with an indexer, whose tokens overlap, and entries that are all attended to.
const SHAPES: [CompressedKvShape; 2] = [
    CompressedKvShape { ratio: 4, width: WIDTH, key_width: 4 },
    CompressedKvShape { ratio: 32, width: WIDTH, key_width: 0 },
];

fn shape() -> CacheShape {
    CacheShape {
        layers: vec![LayerShape { kv_heads: 1, head_dim: WIDTH }; 2],
        states: 0,
        keys_are_values: true,
        indexes: 0,
        index_width: 0,
        entries: SHAPES.to_vec(),
    }
}

fn numbers(first: usize, count: usize, seed: f32) -> Vec<f32> {
    (first..first + count).map(|i| ((i as f32 + seed) * 0.731).sin() * 2.0).collect()
}

fn bias(layer: usize, part: CompressedKvPart) -> Vec<f32> {
    numbers(0, SHAPES[layer].ratio * SHAPES[layer].columns(part), 5.0)
}

/// Numbers `c` and `z` of some tokens.
fn of_tokens(layer: usize, part: CompressedKvPart, tokens: Range<usize>) -> [Tensor; 2] {
    let width = SHAPES[layer].columns(part);
    let of = |seed| {
        let values = numbers(tokens.start * width, tokens.len() * width, seed);
        Tensor { width, values: values.into() }
    };
    [of(1.0), of(300.0)]
}

fn parts(layer: usize) -> &'static [CompressedKvPart] {
    if SHAPES[layer].overlaps() {
        &[CompressedKvPart::Entries, CompressedKvPart::Keys]
    } else {
        &[CompressedKvPart::Entries]
    }
}

/// Runs a step of some tokens, of which the last may be rolled back, and returns the entries that are
/// complete with it, of every part of every layer.
fn step(cache: &mut Cache, tokens: Range<usize>, drafts: usize) -> Vec<Vec<f32>> {
    let mut found = Vec::new();
    for layer in 0..SHAPES.len() {
        for part in parts(layer) {
            let [c, z] = of_tokens(layer, *part, tokens.clone());
            let at = CompressorParams {
                layer,
                part: *part,
                lengths: &[tokens.len()],
                drafts: &[drafts],
                bias: &bias(layer, *part),
            };
            let inputs = CompressorInputs { values: &c, gates: &z };
            let entries = compress(inputs, &mut [&mut *cache], &at);
            cache.put_entries(layer, *part, &entries.values);
            found.push(entries.values.to_vec());
        }
        let k = numbers(tokens.start * WIDTH, tokens.len() * WIDTH, 9.0);
        assert_eq!(cache.append(layer, &k, &k, tokens.len()), tokens.start);
    }
    found
}

/// What is kept of the entries of so many tokens.
fn kept(cache: &Cache, tokens: usize) -> Vec<String> {
    let mut found = Vec::new();
    for (layer, shape) in SHAPES.iter().enumerate() {
        let (each, count) = (TOKENS_PER_PAGE / shape.ratio, tokens / shape.ratio);
        for (page, keys) in cache.entry_keys(layer).into_iter().enumerate() {
            let held = count.saturating_sub(page * each).min(each);
            let mut gathered = Gathered::default();
            gathered.add(cache.pages[page].entries[layer].block(), 0..held, WIDTH);
            found.push(format!("{:?}", gathered.blocks(WIDTH)));
            found.push(format!("{:?}", keys.slice(0..held * shape.key_width)));
        }
    }
    found
}

#[test]
fn an_entry_is_the_sum_of_its_tokens_by_their_softmax() {
    for (layer, shape) in SHAPES.iter().enumerate() {
        for part in parts(layer) {
            let (width, columns) = (shape.width(*part), shape.columns(*part));
            let mut cache = Cache::new(&shape_of(layer), KvType::F32, &[]);
            let [c, z] = of_tokens(layer, *part, 0..3 * shape.ratio + 1);
            let bias = bias(layer, *part);
            let rows = c.rows();
            let at = CompressorParams {
                layer: 0,
                part: *part,
                lengths: &[rows],
                drafts: &[],
                bias: &bias,
            };
            let inputs = CompressorInputs { values: &c, gates: &z };
            let found = compress(inputs, &mut [&mut cache], &at);
            assert_eq!((found.rows(), found.width), (3, width));
            for (entry, found) in found.values.chunks_exact(width).enumerate() {
                for (column, found) in found.iter().enumerate() {
                    let own = (0..shape.ratio).map(|at| (entry, at, columns - width));
                    let before = (0..shape.ratio).map(|at| (entry.wrapping_sub(1), at, 0));
                    let overlaps = shape.overlaps() && entry > 0;
                    let terms = before.filter(|_| overlaps).chain(own).map(|(entry, at, first)| {
                        let column = first + column;
                        let number = (entry * shape.ratio + at) * columns + column;
                        let z =
                            f64::from(z.values[number]) + f64::from(bias[at * columns + column]);
                        (z.exp(), f64::from(c.values[number]))
                    });
                    let (sum, all) = terms.fold((0.0, 0.0), |(sum, all), (weight, c)| {
                        (sum + weight * c, all + weight)
                    });
                    let wanted = sum / all;
                    assert!((f64::from(*found) - wanted).abs() < 1e-5, "{found} not {wanted}");
                }
            }
        }
    }
}

fn shape_of(layer: usize) -> CacheShape {
    CacheShape { entries: vec![SHAPES[layer]], ..shape() }
}

#[test]
fn steps_shared_pages_and_rolled_back_rows_change_no_entry() {
    for kind in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Q8] {
        let tokens = 600;
        let mut whole = Cache::new(&shape(), kind, &[]);
        let all = step(&mut whole, 0..tokens, 0);
        let wanted = kept(&whole, tokens);
        let check = |cache: &Cache, found: &[Vec<f32>], how: &str| {
            assert!(found == all, "{kind:?}, {how}: entries as they are made");
            assert!(kept(cache, tokens) == wanted, "{kind:?}, {how}: entries as they are kept");
        };
        let joined = |all: &mut Vec<Vec<f32>>, more: Vec<Vec<f32>>| {
            all.resize(more.len(), Vec::new());
            all.iter_mut().zip(more).for_each(|(all, more)| all.extend(more));
        };
        for each in [1, 3, 33, 256] {
            let (mut cache, mut found) = (Cache::new(&shape(), kind, &[]), Vec::new());
            for first in (0..tokens).step_by(each) {
                let more = step(&mut cache, first..tokens.min(first + each), 0);
                joined(&mut found, more);
            }
            check(&cache, &found, &format!("steps of {each}"));
        }
        // Up to three rows are rolled back after every step.
        let (mut cache, mut found, mut at) = (Cache::new(&shape(), kind, &[]), Vec::new(), 0);
        while at < tokens {
            let (taken, back) = (1 + at % 5, (at % 4).min(tokens - at));
            let until = tokens.min(at + taken);
            if back > 0 {
                step(&mut cache, at..at + back, back);
                cache.roll_back(back);
            }
            let more = step(&mut cache, at..until, 0);
            joined(&mut found, more);
            at = until;
        }
        check(&cache, &found, "rows rolled back");
        let pages = [whole.page(0), whole.page(1)];
        let mut second = Cache::new(&shape(), kind, &pages);
        let rest = step(&mut second, 512..tokens, 0);
        for (rest, all) in rest.iter().zip(&all) {
            assert_eq!(rest[..], all[all.len() - rest.len()..], "{kind:?}: on pages of another");
        }
        assert!(kept(&second, tokens) == wanted, "{kind:?}: on pages of another");
    }
}

#[test]
fn pages_count_their_entries() {
    let numbers = 2 * WIDTH * TOKENS_PER_PAGE * 4;
    let chosen = 64 * (WIDTH + 4) * 4 + 4 * 2 * (WIDTH + 4) * 4;
    let others = 8 * WIDTH * 4;
    let bytes = super::super::cache::page_bytes(&shape(), KvType::F32);
    assert_eq!(bytes, (numbers + chosen + others) as u64);
}
