//! Decode attention over long contexts next to plain reads of the same keys and values,
//! alternately: `cargo run --release -p shardpack-kernels --example attention -- [THREADS] [ROUNDS]
//! [PLATFORM] [TYPE] [HEAD_DIM] [SHARING] [rows]`.
//!
//! The limit: a step reads every cached key and value once, so a context costs at least the time of
//! reading them. Both are averages over the same moments, since the speed of memory drifts with
//! what else the machine does.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{env, error::Error, hint::black_box, time::Instant};

use memmap2::MmapMut;
use shardpack_kernels::{
    Activations, Attention, Floats, KvBlock, KvHead, Team, TeamOptions, attend,
    attention::{KEYS_PER_BLOCK, Order},
    memory::{self, Read},
};
use shardpack_quantize::Platform;
use zerocopy::FromBytes;

/// Heads of keys and values.
const KV_HEADS: usize = 8;

/// Keys and values that are read: of all layers together far more than any cache, and of one layer
/// in the cache again and again.
const BYTES: usize = 256 << 20;

/// Keys that a new token meets, and whether they lie in the cache: the limit of arithmetic.
const CONTEXTS: [(usize, bool); 5] =
    [(256, true), (256, false), (1024, false), (4096, false), (16384, false)];

/// A block of one layer: `[kv_head][keys, values]`, as the loader caches them.
struct Block {
    memory: MmapMut,
    scales: Vec<f32>,
}

impl Block {
    fn new(bytes: usize) -> Result<Self, Box<dyn Error>> {
        let mut memory = MmapMut::map_anon(bytes.next_multiple_of(2 << 20))?;
        #[cfg(target_os = "linux")]
        memory.advise(memmap2::Advice::HugePage)?;
        // As floats, halves and integers these are small numbers.
        memory.fill(0x3c);
        Ok(Self { memory, scales: vec![0.01; KV_HEADS * 2 * KEYS_PER_BLOCK] })
    }

    fn part(&self, kind: &str, index: usize, head_dim: usize) -> Result<KvBlock<'_>, String> {
        let len = KEYS_PER_BLOCK * head_dim;
        let bytes = &self.memory[index * len * width(kind)?..][..len * width(kind)?];
        let halves = || <[u16]>::ref_from_bytes(bytes).map_err(|error| error.to_string());
        Ok(match kind {
            "f32" => KvBlock::Floats(Floats::F32(
                <[f32]>::ref_from_bytes(bytes).map_err(|error| error.to_string())?,
            )),
            "f16" => KvBlock::Floats(Floats::F16(halves()?)),
            "bf16" => KvBlock::Floats(Floats::BF16(halves()?)),
            _ => KvBlock::Q8 {
                values: <[i8]>::ref_from_bytes(bytes).map_err(|error| error.to_string())?,
                scales: &self.scales[index * KEYS_PER_BLOCK..][..KEYS_PER_BLOCK],
            },
        })
    }
}

/// Bytes of a number.
fn width(kind: &str) -> Result<usize, String> {
    match kind {
        "f32" => Ok(4),
        "f16" | "bf16" => Ok(2),
        "q8" => Ok(1),
        other => Err(format!("unknown type {other:?}; known: f32, f16, bf16, q8")),
    }
}

/// Seconds of some work on the team.
fn seconds(team: &Team, work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    team.run(work);
    begun.elapsed().as_secs_f64()
}

/// Seconds of attention and of plain reads, and bytes of one step.
fn measure(
    team: &Team,
    (kind, head_dim, sharing, order): (&str, usize, usize, Order),
    (context, cached): (usize, bool),
    rounds: usize,
) -> Result<([f64; 3], usize), Box<dyn Error>> {
    let block_bytes = KV_HEADS * 2 * KEYS_PER_BLOCK * head_dim * width(kind)?;
    let blocks = context.div_ceil(KEYS_PER_BLOCK);
    let layers = (BYTES / (block_bytes * blocks)).max(1);
    let (layers, times) = if cached { (1, layers) } else { (layers, 1) };
    let new = || (0..blocks).map(|_| Block::new(block_bytes)).collect::<Result<Vec<_>, _>>();
    let cache = (0..layers).map(|_| new()).collect::<Result<Vec<_>, _>>()?;
    let mut views: Vec<Vec<Vec<KvBlock<'_>>>> = Vec::with_capacity(layers);
    for layer in &cache {
        let parts = |index| layer.iter().map(|block| block.part(kind, index, head_dim)).collect();
        views.push((0..2 * KV_HEADS).map(parts).collect::<Result<_, String>>()?);
    }
    let heads: Vec<Vec<KvHead<'_>>> = views
        .iter()
        .map(|parts| {
            parts.chunks(2).map(|pair| KvHead { keys: &pair[0], values: &pair[1] }).collect()
        })
        .collect();
    let q_to_kv: Vec<usize> = (0..KV_HEADS * sharing).map(|head| head / sharing).collect();
    let q: Vec<f32> =
        (0..q_to_kv.len() * head_dim).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
    let mut out = vec![0.0; q.len()];
    let attend_to = |heads: &[KvHead<'_>], out: &mut [f32]| {
        let attention = Attention {
            head_dim,
            scale: 0.1,
            softcap: None,
            sinks: None,
            window: None,
            chunk: None,
            chosen: None,
            q_to_kv: &q_to_kv,
            order,
            heads,
            first_position: context - 1,
        };
        attend(&q, &attention, black_box(out));
    };
    let read = |layer: &[Block], how| {
        let pieces: Vec<_> = layer.iter().map(|block| &block.memory[..block_bytes]).collect();
        black_box(memory::read_all(&pieces, how));
    };
    let all =
        |work: &mut dyn FnMut(usize)| (0..times).for_each(|_| (0..layers).for_each(&mut *work));
    let mut sums = [0.0; 3];
    for _ in 0..rounds {
        sums[0] += seconds(team, || all(&mut |layer| attend_to(&heads[layer], &mut out)));
        for (sum, how) in sums[1..].iter_mut().zip([Read::Plain, Read::Fetched]) {
            *sum += seconds(team, || all(&mut |layer| read(&cache[layer], how)));
        }
    }
    let seconds = sums.map(|sum| sum / rounds as f64);
    Ok((seconds, times * layers * blocks * block_bytes))
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number =
        |index: usize, default| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let (threads, rounds): (usize, usize) = (number(0, 2)?, number(1, 5)?);
    // Query heads that share keys.
    let (head_dim, sharing): (usize, usize) = (number(4, 64)?, number(5, 4)?);
    let order = match arguments.get(6).map(String::as_str) {
        Some("rows") => Order::Rows,
        _ => Order::fastest(head_dim),
    };
    let platform = arguments.get(2).map_or(Ok(Platform::detect()), |name| name.parse())?;
    let kinds = match arguments.get(3).map(String::as_str) {
        None | Some("all") => vec!["f32", "f16", "bf16", "q8"],
        Some(kind) => vec![kind],
    };
    let team = Team::new(&TeamOptions { threads, platform, activations: Activations::Int8 })?;
    println!("| type | keys | MB | ms | GB/s | read GB/s | of the read limit |");
    println!("|---|---|---|---|---|---|---|");
    for kind in kinds {
        for (context, cached) in CONTEXTS {
            let ([seconds, plain, fetched], bytes) =
                measure(&team, (kind, head_dim, sharing, order), (context, cached), rounds)?;
            let (bytes, limit) = (bytes as f64 / 1e9, plain.min(fetched));
            println!(
                "| {kind} | {context}{} | {:.0} | {:.2} | {:.1} | {:.1} | {:.2} |",
                if cached { " in the cache" } else { "" },
                bytes * 1e3,
                seconds * 1e3,
                bytes / seconds,
                bytes / limit,
                limit / seconds,
            );
        }
    }
    Ok(())
}
