//! Apple's MLX against our own kernels, on the processor, for every family: the same packages,
//! the same logits. Without an installed runtime (`SHARDPACK_ENGINES` names the folder;
//! `tests/mlx.sh` installs one) the tests are skipped.
#![expect(clippy::print_stdout, reason = "what was measured is worth a line")]

mod distillation;
mod kernel_counts;
mod kv_memory;
mod linear_attention;
mod lookahead;
mod processes;

use std::{
    fs, iter,
    path::{Path, PathBuf},
};

use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::{
    backend::{Arithmetic, Backend, Collectives, Cpu, CpuOptions, Mlx},
    engine::{LocalModel, memory_group},
    loading::{OpenOptions, Package},
};
use shardpack_engine_api::TokenId;
use shardpack_formats::memory::KvType;
use shardpack_mlx::{Device, runtime};
use tempfile::tempdir;

use crate::{
    harness::data,
    reference_models::{ALL_BITS, all_models, open_with, write},
    skip::mlx_runtime,
};

/// Largest difference of a logit, in f32 on both sides.
pub(crate) const TOLERANCE: f32 = 1e-3;

pub(crate) fn tokens(model: &Path) -> Vec<TokenId> {
    numbers(model, "tokens_a").into_iter().map(TokenId).collect()
}

/// Whole numbers of a model's expectations.
fn numbers(model: &Path, name: &str) -> Vec<u32> {
    let file = fs::read(model.join("expected.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor(name).unwrap().data().to_vec();
    bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect()
}

pub(crate) fn on_cpu(packages: &[Package], tokens: &[TokenId]) -> Vec<f32> {
    let options = CpuOptions { threads: 1, platform: None, arithmetic: Arithmetic::Exact };
    let backends = packages.iter().map(|_| Cpu::with_options(&options).unwrap()).collect();
    let groups = memory_group(packages.len() as u32).unwrap();
    LocalModel::over(packages, &groups, backends).unwrap().logits(tokens).unwrap()
}

/// MLX computes one rank for each process.
pub(crate) fn on_mlx(runtime: &Path, packages: &[Package], tokens: &[TokenId]) -> Vec<f32> {
    in_steps(mlx(runtime, KvType::F32), packages, tokens, &[tokens.len()])
}

fn mlx(runtime: &Path, kv: KvType) -> Mlx {
    let mlx = Mlx::open(runtime, Some(Device::Cpu), Collectives::Own, [0, 1]);
    mlx.unwrap_or_else(|error| panic!("{error}")).with_kv(kv).unwrap()
}

/// Logits after each token, in steps of so many; the last length is that of all further ones.
fn in_steps<B: Backend>(
    backend: B,
    packages: &[Package],
    tokens: &[TokenId],
    steps: &[usize],
) -> Vec<f32> {
    let groups = memory_group(1).unwrap();
    let local = LocalModel::over(packages, &groups, vec![backend]).unwrap();
    let mut sequence = local.sequence(tokens.len());
    let (mut found, mut rest) = (Vec::new(), tokens);
    let last = *steps.last().unwrap();
    for step in steps.iter().copied().chain(std::iter::repeat(last)) {
        let (now, later) = rest.split_at(step.min(rest.len()));
        if now.is_empty() {
            break;
        }
        found.extend(local.extend(&mut sequence, now, 0).unwrap());
        rest = later;
    }
    found
}

/// The largest difference.
pub(crate) fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The reference models.
fn families() -> Vec<PathBuf> {
    all_models().iter().map(|model| data("models").join(model)).collect()
}

/// Families of three kinds of layers: dense, with experts, with linear attention.
const KINDS: [&str; 3] = ["llama", "mixtral", "qwen3_5"];

#[test]
fn mlx_logits_match_the_cpu_engine() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    // Products with weights of some width are nothing that families know: each has one width in turn, those of three
    // kinds of layers have all.
    for (model, bits) in families().iter().zip([4, 16, 6, 16, 8, 16].into_iter().cycle()) {
        let tokens = tokens(model);
        let has_all = KINDS.iter().any(|name| model.ends_with(name));
        let others = ALL_BITS.into_iter().filter(|other| has_all && *other != bits);
        for (bits, nodes) in iter::once(bits).chain(others).map(|bits| (bits, 1)) {
            let folder = tempdir().unwrap();
            let set = folder.path().join("set");
            write(model, &set, bits, nodes, ExpertSharding::Inside);
            let packages = open_with(&set, nodes, OpenOptions::stored(1));
            let (cpu, mlx) = (on_cpu(&packages, &tokens), on_mlx(&runtime, &packages, &tokens));
            let worst = apart(&cpu, &mlx);
            let name = model.file_name().unwrap().display();
            println!("{name}, {bits} bits, {nodes} nodes: {worst:.2e}");
            assert!(worst < TOLERANCE, "{name}, {bits} bits, {nodes} nodes: {worst}");
        }
    }
}

/// A copy of a model with its weights in bfloat16, as most are published.
fn in_bf16(model: &Path, folder: &Path) -> PathBuf {
    let copy = folder.join("bf16");
    copy_in_bf16(model, &copy, |_| true);
    copy
}

/// The same of some tensors, in one file.
fn copy_in_bf16(model: &Path, copy: &Path, keeps: impl Fn(&str) -> bool) {
    fs::create_dir(copy).unwrap();
    let mut tensors: Vec<(String, Rounded)> = Vec::new();
    for entry in fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") && name != "expected.safetensors" {
            let file = fs::read(&path).unwrap();
            let all = safetensors::SafeTensors::deserialize(&file).unwrap();
            let kept = all.iter().filter(|(name, _)| keeps(name));
            tensors.extend(kept.map(|(name, view)| (name.to_owned(), Rounded::of(&view))));
        } else if !name.ends_with(".index.json") {
            fs::copy(&path, copy.join(name)).unwrap();
        }
    }
    fs::write(copy.join("model.safetensors"), safetensors::serialize(tensors, None).unwrap())
        .unwrap();
}

/// A tensor, in bfloat16 if it was of f32.
struct Rounded {
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Rounded {
    fn of(view: &safetensors::tensor::TensorView<'_>) -> Self {
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        if dtype != safetensors::Dtype::F32 {
            return Self { dtype, shape, bytes: view.data().to_vec() };
        }
        let float = |four: &[u8; 4]| half::bf16::from_f32(f32::from_le_bytes(*four));
        let bytes = view.data().as_chunks().0.iter().flat_map(|four| float(four).to_le_bytes());
        Self { dtype: safetensors::Dtype::BF16, shape, bytes: bytes.collect() }
    }
}

impl safetensors::View for Rounded {
    fn dtype(&self) -> safetensors::Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        (&self.bytes).into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Of each row, the root of the mean square of the differences by that of the logits; sorted.
fn relative_errors(expected: &[f32], found: &[f32], rows: usize) -> Vec<f32> {
    let width = expected.len() / rows;
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| x * x).sum::<f32>().sqrt();
    let mut errors: Vec<f32> = expected
        .chunks(width)
        .zip(found.chunks(width))
        .map(|(a, b)| {
            let difference = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
            difference / norm(&mut a.iter().copied())
        })
        .collect();
    errors.sort_by(f32::total_cmp);
    errors
}

/// As on a GPU: activations, keys and values in bfloat16, logits in f32.
///
/// A value is rounded by up to 2⁻⁹, some ten times per layer: one or two in a hundred in the end, as
/// independent errors add up. Where a model chooses (experts, keys), rounding turns close choices
/// over, and with them what follows; so there the first rows tell.
#[test]
fn mlx_logits_in_16_bits_are_as_near_as_their_rounding() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    // Arithmetic in 16 bits is the families', products with packed weights are not: each family has one of
    // the two, those of three kinds of layers both.
    for (source, bits) in families().iter().zip([4, 16].into_iter().cycle()) {
        let tokens = tokens(source);
        let folder = tempdir().unwrap();
        let model = in_bf16(source, folder.path());
        let has_both = KINDS.iter().any(|name| source.ends_with(name));
        for bits in [bits, 20 - bits].into_iter().take(1 + usize::from(has_both)) {
            let set = folder.path().join(format!("set-{bits}"));
            write(&model, &set, bits, 1, ExpertSharding::Inside);
            let packages = open_with(&set, 1, OpenOptions::stored(1));
            let cpu = on_cpu(&packages, &tokens);
            let half = mlx(&runtime, KvType::F32).half();
            let half = in_steps(half, &packages, &tokens, &[tokens.len() / 2, 1]);
            let errors = relative_errors(&cpu, &half, tokens.len());
            let spec = &packages[0].manifest().architecture;
            let at = |part: usize| errors[(errors.len() - 1) * part / 8];
            let chooses = spec.moe.is_some()
                || spec.mla.as_ref().is_some_and(|mla| mla.indexer.is_some())
                || spec.compressed_attention.is_some()
                || spec.attention.block_sparse.is_some();
            let name = &spec.model_type;
            println!("{name}, {bits} bits: {:.4}, {:.4}, {:.4}", at(2), at(4), at(8));
            assert!(at(2) < 0.03, "{name}, {bits} bits: a quarter of the rows: {errors:?}");
            assert!(chooses || at(8) < 0.06, "{name}, {bits} bits: the worst row: {errors:?}");
        }
    }
}

/// Rows by themselves gather their top-k keys, rows in a batch hide the others'; of a
/// window or a chunk only those keys are read that some row sees.
#[test]
fn mlx_sparse_and_windowed_attention_match_cpu_in_chunks_of_any_length() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    let chosen =
        ["deepseek_v32", "deepseek_v4", "glm_moe_dsa_shared", "hy_v4", "minimax_m3_vl_text"];
    let near = ["mistral", "gemma2", "gpt_oss", "llama4_text", "mimo_v2_flash"];
    for model in chosen.into_iter().chain(near) {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        let model = data("models").join(model);
        write(&model, &set, 16, 1, ExpertSharding::Inside);
        let packages = open_with(&set, 1, OpenOptions::stored(1));
        let tokens = [tokens(&model), tokens(&model)].concat();
        let expected = on_cpu(&packages, &tokens);
        for steps in [&[1][..], &[5, 11, 1]] {
            let found = in_steps(mlx(&runtime, KvType::F32), &packages, &tokens, steps);
            let worst = apart(&found, &expected);
            assert!(worst < TOLERANCE, "{}, steps of {steps:?}: {worst}", model.display());
        }
    }
}

/// Rounded once, as `cpu` does, whether MLX has a kernel for the width of the heads or not.
#[test]
fn mlx_f16_and_bf16_kv_caches_match_cpu() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    let with_kernel = ["llama-tied", "qwen3", "deepseek_v3"];
    let without = ["mistral", "gemma2", "gpt_oss", "deepseek_v32", "hy_v4"];
    let special = ["minimax_m3_vl_text", "deepseek_v4", "qwen3_next"];
    for name in with_kernel.into_iter().chain(without).chain(special) {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        let model = data("models").join(name);
        write(&model, &set, 16, 1, ExpertSharding::Inside);
        let packages = open_with(&set, 1, OpenOptions::stored(1));
        let tokens = tokens(&model);
        let exact = CpuOptions { threads: 1, platform: None, arithmetic: Arithmetic::Exact };
        // On a processor MLX rounds scores as well where it has a kernel; its kernels do not.
        let scores = if with_kernel.contains(&name) { 8.0 } else { 1.0 };
        for (kv, bound) in [(KvType::F16, 2e-3), (KvType::Bf16, 1.2e-2)] {
            let bound = bound * scores;
            let cpu = Cpu::with_options(&exact).unwrap().with_kv(kv);
            let expected = in_steps(cpu, &packages, &tokens, &[tokens.len()]);
            for steps in [&[tokens.len()][..], &[7, 1]] {
                let found = in_steps(mlx(&runtime, kv), &packages, &tokens, steps);
                let worst = apart(&found, &expected);
                println!("{name}, {kv:?}, steps of {steps:?}: {worst:.2e}");
                assert!(worst < bound, "{name}, {kv:?}, steps of {steps:?}: {worst}");
            }
        }
    }
    let mlx = Mlx::open(&runtime, Some(Device::Cpu), Collectives::Own, [0, 1]).unwrap();
    let error = mlx.with_kv(KvType::Q8).map(drop).unwrap_err().to_string();
    assert!(error.contains("f32, f16 or bf16"), "{error}");
}
