//! Memory that MLX computes on: taken without copies, read at full speed, wired for the GPU.

use std::time::Instant;

use anyhow::ensure;
use serde_json::json;
use shardpack_mlx::{Element, Library, Reduce};

use super::{Outcome, is_gpu};
use crate::{
    commands::doctor::{apple::system, machine, report::Finding},
    progress::size,
};

/// Pages of macOS on Apple silicon: what Metal takes must begin and end on one.
const PAGE: usize = 16 << 10;

/// Share of the chip's stated bandwidth, in percent, below which something is wrong.
const BANDWIDTH_PERCENT: f64 = 60.0;

/// Bytes that are wired: enough for a rate, and little for a Mac that others use too.
const WIRED_BYTES: usize = 4 << 30;

/// Slowest wiring that does not delay a start by minutes, in seconds per GB.
const WIRING_SECONDS: f64 = 0.3;

/// A part of a region that begins on a page, as a package's weights lie.
struct Part {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl Part {
    /// `len` bytes, `offset` after the start of a page, with values that tell every place apart.
    fn new(offset: usize, len: usize) -> Self {
        let mut bytes = vec![0_u8; offset + len + 2 * PAGE];
        let start = bytes.as_ptr().align_offset(PAGE) + offset;
        for (index, value) in bytes[start..start + len].chunks_exact_mut(4).enumerate() {
            value.copy_from_slice(&(index as f32).to_ne_bytes());
        }
        Self { bytes, start, len }
    }
}

/// Whether regions and parts of regions stay uncopied.
pub(super) fn no_copy(library: Library) -> anyhow::Result<Outcome> {
    // What is said of each: begins on a page, ends on a page.
    let cases = [
        ("a whole region", 0, 64 * PAGE, true),
        ("a part from its second page on", PAGE, 16 * PAGE, true),
        ("a part that ends within a page", PAGE, 16 * PAGE + 256, false),
        ("a part that begins within a page", 4096, 16 * PAGE, false),
    ];
    let mut shown = Vec::new();
    let mut refused = Vec::new();
    for (name, offset, len, is_needed) in cases {
        let (array, copied) = library.wrap(Part::new(offset, len), Element::F32, &[1, len / 4]);
        let values = array.read()?;
        let is_right = values.iter().enumerate().all(|(index, it)| *it as usize == index);
        ensure!(is_right, "{name}: MLX reads other bytes");
        shown.push(format!("{name} {}", if copied { "was copied" } else { "was taken in place" }));
        if copied && is_needed {
            refused.push(name);
        }
    }
    if !is_gpu(library) {
        return Ok(Outcome::Skipped("MLX's CPU build always copies".to_owned()));
    }
    let detail = shown.join("; ");
    if refused.is_empty() {
        let expected = "whole pages are taken in place";
        return Ok(Outcome::Found(Finding::new(detail, json!(null)).expected(expected)));
    }
    let advice = "weights take twice their memory while they load: leave room for them, and attach \
                  this report to a bug";
    Ok(Outcome::Failed(detail, advice.to_owned()))
}

/// Bytes per second of a sum over more than any cache holds.
pub(super) fn bandwidth(library: Library) -> anyhow::Result<Outcome> {
    const COLUMNS: usize = 4096;
    const PASSES: usize = 6;
    let rows = if is_gpu(library) { 65_536 } else { 8192 };
    let bytes = rows * COLUMNS * 4;
    let ones = library.full(1.0, Element::F32, &[rows, COLUMNS]);
    library.eval(&[&ones])?;
    let mut best = 0.0_f64;
    for _ in 0..PASSES {
        let begun = Instant::now();
        let sum = ones.reduce(Reduce::Sum, 1).reduce(Reduce::Sum, 0).read()?;
        best = best.max(bytes as f64 / 1e9 / begun.elapsed().as_secs_f64());
        // Sums of whole rows are exact.
        ensure!(sum.first() == Some(&((rows * COLUMNS) as f32)), "the sum of ones is {sum:?}");
    }
    let detail = format!("{best:.0} GB/s over {}", size(bytes as u64));
    let chip = machine::ask("sysctl", &["-n", "machdep.cpu.brand_string"]).unwrap_or_default();
    let stated = system::memory_bandwidth(&chip).filter(|_| is_gpu(library)).map(f64::from);
    let figures = json!({ "gigabytes_per_second": best, "stated": stated });
    let found = Finding::new(detail, figures);
    let Some(stated) = stated else { return Ok(Outcome::Found(found)) };
    let least = stated * BANDWIDTH_PERCENT / 100.0;
    let expected =
        format!("at least {least:.0} GB/s; Apple states {stated:.0} for {}", chip.trim());
    let advice =
        "decoding is as slow as this: end other programs, turn Low Power Mode off (pmset -g)";
    Ok(Outcome::Found(found.expected(expected).slow_if(best < least, advice)))
}

/// How long it takes until memory is wired for the GPU.
pub(super) fn wiring(library: Library) -> anyhow::Result<Outcome> {
    let working_set = library.device_figure("max_recommended_working_set_size");
    let Some(working_set) = working_set.filter(|_| is_gpu(library)) else {
        return Ok(Outcome::Skipped("MLX computes on the processor here".to_owned()));
    };
    let bytes = WIRED_BYTES.min(working_set / 4);
    library.set_limits(working_set, 0, Some(working_set))?;
    let begun = Instant::now();
    let held = library.full(1.0, Element::F32, &[bytes / 4096 / 4, 4096]);
    library.eval(&[&held])?;
    let first = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    held.reduce(Reduce::Max, 1).read()?;
    let second = begun.elapsed().as_secs_f64();
    let rate = first / (bytes as f64 / 1e9);
    let detail = format!(
        "{} took {first:.2} s to allocate, wire and write, {second:.2} s to read: {:.0} s for 200 GB",
        size(bytes as u64),
        rate * 200.0
    );
    let figures = json!({ "bytes": bytes, "first_seconds": first, "second_seconds": second });
    let expected = format!("at most {:.0} s for 200 GB", WIRING_SECONDS * 200.0);
    let advice = "the start of a large model waits for this: end other programs that hold memory";
    let found = Finding::new(detail, figures).expected(expected);
    Ok(Outcome::Found(found.slow_if(rate > WIRING_SECONDS, advice)))
}
