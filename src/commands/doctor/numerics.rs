//! Whether the engines compute correct logits for the bundled model, and whether its weights are
//! used without copies.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde_json::json;
use shardpack_converter::{ConvertOptions, Pickles};
use shardpack_engine::{
    backend::{Arithmetic, Collectives, Cpu, CpuError, CpuOptions, Mlx},
    engine::memory_group,
    loading::{OpenOptions, Package},
    rank_engine::{LocalBackends, take_weights},
};
use shardpack_engine_api::TokenId;
use shardpack_mlx::Device;

use super::report::{Finding, Report};
use crate::{
    commands::{convert, demo},
    engines,
    progress::size,
    source::{Input, Keep},
};

/// Largest difference of a logit if both sides compute in f32.
const TOLERANCE: f32 = 1e-3;

/// The same of two ranks, whose partial sums are rounded before they are added.
const TOLERANCE_OF_RANKS: f32 = 2e-3;

/// The same if the GPU multiplies in the 16-bit type of the scales, relative to the largest logit:
/// eight bits of mantissa over a dozen layers.
const TOLERANCE_16_BITS: f32 = 0.05;

/// Instruction sets that a machine may have.
const PLATFORMS: [&str; 4] = ["portable", "neon", "avx2", "avx512"];

/// The bundled model in a folder of its own, and what is made of it.
pub(super) struct Bundled<'a> {
    folder: &'a Path,
}

impl<'a> Bundled<'a> {
    pub(super) fn unpack(folder: &'a Path) -> anyhow::Result<Self> {
        demo::model::unpack(&folder.join("model"))?;
        Ok(Self { folder })
    }

    /// A folder for files of a check.
    pub(super) fn scratch(&self, name: &str) -> anyhow::Result<PathBuf> {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        Ok(folder)
    }

    /// The model with these bits and nodes; converted at first use.
    pub(super) fn set(&self, bits: u32, nodes: u32) -> anyhow::Result<PathBuf> {
        let set = self.folder.join(format!("set-{bits}-{nodes}"));
        if !set.exists() {
            let source = self.folder.join("model");
            let input = Input {
                source: &source,
                subfolder: None,
                adapters: &[],
                pickles: Pickles::Refuse,
                ignored_config_keys: &[],
                keep: Keep::All,
            };
            let name = Some("kjv-4m".to_owned());
            let options = ConvertOptions { bits, name, ..ConvertOptions::new(set.clone(), nodes) };
            convert::convert_source(&input, options)
                .map_err(crate::failure::Failure::into_error)?;
        }
        Ok(set)
    }

    pub(super) fn package(&self, bits: u32) -> anyhow::Result<Package> {
        let folder = self.set(bits, 1)?.join("node-0");
        Ok(Package::open(&folder, &OpenOptions::stored(1), &|_| ())?)
    }
}

/// A sequence that uses much of the vocabulary.
pub(super) fn tokens() -> Vec<TokenId> {
    (0..48_u32).map(|index| TokenId(3 + index.wrapping_mul(97) % 500)).collect()
}

fn logits(package: &Package, backends: LocalBackends) -> anyhow::Result<Vec<f32>> {
    let groups = memory_group(1)?;
    Ok(backends.logits(std::slice::from_ref(package), &groups, &tokens())?)
}

fn exact(platform: Option<&str>) -> Result<LocalBackends, CpuError> {
    let platform = platform.map(str::to_owned);
    let options = CpuOptions { threads: 1, platform, arithmetic: Arithmetic::Exact };
    Ok(LocalBackends::Cpu(vec![Cpu::with_options(&options)?]))
}

/// Logits of the `cpu` engine, with exact activations.
pub(super) fn expected(package: &Package) -> anyhow::Result<Vec<f32>> {
    logits(package, exact(None)?)
}

/// Checks that the built-in kernels give the same bits with every instruction set of the machine.
pub(super) fn check_cpu(bundled: &Bundled<'_>, report: &mut Report) {
    let compare = || {
        let package = bundled.package(4)?;
        let expected = logits(&package, exact(Some("portable"))?)?;
        let mut compared = Vec::new();
        for platform in PLATFORMS {
            let Ok(backend) = exact(Some(platform)) else { continue };
            let found = logits(&package, backend)?;
            let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            ensure!(same, "{platform} gives different bits than portable");
            compared.push(platform);
        }
        let detail = format!("{} give the same bits", compared.join(", "));
        Ok(Finding::new(detail, json!({ "platforms": compared })))
    };
    report.add_result("cpu kernels", compare());
}

/// Compares MLX with the built-in kernels.
pub(super) fn check_mlx(bundled: &Bundled<'_>, report: &mut Report) {
    for bits in [4, 8, 16] {
        report.add_result(&format!("MLX against cpu, {bits} bits"), compare_mlx(bundled, bits));
    }
    wrapping(bundled, report);
}

fn open() -> anyhow::Result<Mlx> {
    Ok(Mlx::open(&engines::mlx_folder(None)?, None, Collectives::Own, [0, 1])?)
}

fn compare_mlx(bundled: &Bundled<'_>, bits: u32) -> anyhow::Result<Finding> {
    let package = bundled.package(bits)?;
    let cpu = expected(&package)?;
    let backend = open()?;
    let is_gpu = backend.library().device() == Device::Gpu;
    let mlx = logits(&package, LocalBackends::Mlx(backend))?;
    compare(&cpu, &mlx, if is_gpu { limit_of_16_bits(&cpu) } else { F32_LIMIT })
}

/// The largest difference that an arithmetic explains.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    most: f32,
    why: &'static str,
}

const F32_LIMIT: Limit = Limit { most: TOLERANCE, why: "both compute in f32" };

fn limit_of_16_bits(expected: &[f32]) -> Limit {
    let largest = expected.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let why = "the GPU multiplies in the 16-bit type of the scales: 5 % of the largest logit";
    Limit { most: TOLERANCE_16_BITS * largest, why }
}

/// The same for two ranks.
pub(super) fn limit_of_ranks(is_gpu: bool, expected: &[f32]) -> Limit {
    let why = "two ranks round their partial sums, in f32";
    if is_gpu { limit_of_16_bits(expected) } else { Limit { most: TOLERANCE_OF_RANKS, why } }
}

/// The largest difference, which must be within the limit, and how often the top token is the same.
pub(super) fn compare(expected: &[f32], found: &[f32], limit: Limit) -> anyhow::Result<Finding> {
    ensure!(expected.len() == found.len(), "{} logits, not {}", found.len(), expected.len());
    let rows = tokens().len();
    let width = expected.len() / rows;
    let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
    let pairs = expected.chunks(width).zip(found.chunks(width));
    let same = pairs.filter(|(a, b)| best(a) == best(b)).count();
    let differences = expected.iter().zip(found).map(|(a, b)| (a - b).abs());
    // NaN counts as the largest difference.
    let worst =
        differences.fold(0.0_f32, |worst, it| if it > worst || it.is_nan() { it } else { worst });
    let Limit { most, why } = limit;
    let detail = format!(
        "largest difference of a logit {worst:.1e}, same top token at {same} of {rows} positions"
    );
    let expected = format!("at most {most:.1e}: {why}");
    let is_right = worst <= most;
    ensure!(is_right, "{detail}; expected {expected}");
    let figures = json!({ "worst": worst, "limit": most, "same_tokens": same, "tokens": rows });
    Ok(Finding::new(detail, figures).expected(expected))
}

/// Whether MLX uses weights without copies.
fn wrapping(bundled: &Bundled<'_>, report: &mut Report) {
    const NAME: &str = "weights without copies";
    let load = || -> anyhow::Result<_> {
        let (package, backend) = (bundled.package(4)?, open()?);
        let device = backend.library().device();
        Ok((device, take_weights(&package, &backend)?))
    };
    match load() {
        Ok((Device::Cpu, _)) => {
            report.skip(NAME, "MLX's CPU build always copies");
        }
        Ok((Device::Gpu, taken)) => report.add_result(NAME, {
            let figures = json!({
                "tensors": taken.tensors, "copied_tensors": taken.copied_tensors,
                "bytes": taken.bytes, "copied_bytes": taken.copied_bytes,
            });
            let (copied, all) = (taken.copied_tensors, taken.tensors);
            let detail = format!("{copied} of {all} tensors copied ({})", size(taken.copied_bytes));
            let found = Finding::new(detail.clone(), figures).expected("none");
            if copied == 0 { Ok(found) } else { Err(anyhow::anyhow!(detail)) }
        }),
        Err(error) => report.add_result(NAME, Err(error)),
    }
}

/// Reads the logits that a self-test's process wrote.
pub(super) fn read_logits(path: &Path) -> anyhow::Result<Vec<f32>> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let (values, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        bail!("{}: {} bytes are not a list of f32 logits", path.display(), bytes.len());
    }
    Ok(values.iter().map(|four| f32::from_le_bytes(*four)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_healthy_gpu_passes_and_a_wrong_one_does_not() {
        let expected: Vec<f32> = (0..tokens().len() * 3).map(|it| (it % 7) as f32).collect();
        let off = |by: f32| expected.iter().map(|value| value + by).collect::<Vec<_>>();
        for (is_gpu, right, wrong) in [(true, 0.1, 0.4), (false, 1e-3, 0.1)] {
            let limit = limit_of_ranks(is_gpu, &expected);
            compare(&expected, &off(right), limit).unwrap();
            compare(&expected, &off(wrong), limit).unwrap_err();
            compare(&expected, &off(f32::NAN), limit).unwrap_err();
        }
    }
}
