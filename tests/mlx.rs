//! Apple's MLX against our own kernels, on the processor, for every family: the same packages,
//! the same logits. Without an installed runtime (`SHARDPACK_ENGINES` names the folder;
//! `tests/mlx.sh` installs one) there is nothing to compare, and the tests say so.
#![expect(clippy::print_stdout, reason = "a test that is skipped says why")]

mod processes;

use std::{
    fs,
    path::{Path, PathBuf},
};

use shardpack_converter::{ConvertOptions, Plan, Source, plan::ExpertCut};
use shardpack_engine::{
    backend::{Arithmetic, Backend, Collectives, Cpu, CpuOptions, KvType, Mlx},
    engine::{LocalModel, memory_group},
    loading::{OpenOptions, Package},
};
use shardpack_engine_api::TokenId;
use shardpack_mlx::{Device, runtime};
use tempfile::tempdir;

use crate::{
    experts::{open_with, write},
    harness::{convert, data, fail, path, run, shardpack, text},
};

/// Largest difference of a logit, in f32 on both sides.
const TOLERANCE: f32 = 1e-3;

/// The installed runtime; without one says that there is none.
pub(crate) fn runtime_folder() -> Option<PathBuf> {
    let found = std::env::var_os("SHARDPACK_ENGINES")
        .map(|engines| Path::new(&engines).join(runtime::FOLDER))
        .filter(|folder| folder.is_dir());
    if found.is_none() {
        println!("skipped: no MLX runtime in $SHARDPACK_ENGINES; tests/mlx.sh installs one");
    }
    found
}

fn tokens(model: &Path) -> Vec<TokenId> {
    let file = fs::read(model.join("expected.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor("tokens_a").unwrap().data().to_vec();
    let token = |four: &[u8]| TokenId(u32::from_le_bytes(four.try_into().unwrap()));
    bytes.chunks_exact(4).map(token).collect()
}

fn on_cpu(packages: &[Package], tokens: &[TokenId]) -> Vec<f32> {
    let options = CpuOptions { threads: 1, platform: None, arithmetic: Arithmetic::Exact };
    let backends = packages.iter().map(|_| Cpu::with_options(&options).unwrap()).collect();
    let groups = memory_group(packages.len() as u32).unwrap();
    LocalModel::over(packages, &groups, backends).unwrap().logits(tokens).unwrap()
}

/// MLX computes one rank for each process.
fn on_mlx(runtime: &Path, packages: &[Package], tokens: &[TokenId]) -> Vec<f32> {
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
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The reference models.
fn families() -> Vec<PathBuf> {
    let entries = fs::read_dir(data("models")).unwrap();
    let mut models: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    models.retain(|model| model.is_dir());
    models.sort();
    models
}

#[test]
fn mlx_computes_what_cpu_computes() {
    let Some(runtime) = runtime_folder() else { return };
    let mut compared = 0;
    for model in &families() {
        if let Err(reason) = converts(model, 1) {
            println!("{}: not converted: {reason}", model.display());
            continue;
        }
        compared += 1;
        let tokens = tokens(model);
        for (bits, nodes) in [4, 8, 16].map(|bits| (bits, 1)) {
            let folder = tempdir().unwrap();
            let set = folder.path().join("set");
            write(model, &set, bits, nodes, ExpertCut::Inside);
            let packages = open_with(&set, nodes, OpenOptions::stored(1));
            let (cpu, mlx) = (on_cpu(&packages, &tokens), on_mlx(&runtime, &packages, &tokens));
            let worst = apart(&cpu, &mlx);
            let name = model.file_name().unwrap().display();
            println!("{name}, {bits} bits, {nodes} nodes: {worst:.2e}");
            assert!(worst < TOLERANCE, "{name}, {bits} bits, {nodes} nodes: {worst}");
        }
    }
    assert!(compared >= 18, "{compared} families");
}

/// Rows by themselves bring their chosen keys together, rows in company hide the others'; of a
/// window or a chunk only those keys are read that some row sees.
#[test]
fn mlx_attends_to_some_keys_in_steps_of_any_length() {
    let Some(runtime) = runtime_folder() else { return };
    let chosen =
        ["deepseek_v32", "deepseek_v4", "glm_moe_dsa_shared", "hy_v4", "minimax_m3_vl_text"];
    let near = ["mistral", "gemma2", "gpt_oss", "llama4_text", "mimo_v2_flash"];
    for model in chosen.into_iter().chain(near) {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        let model = data("models").join(model);
        write(&model, &set, 16, 1, ExpertCut::Inside);
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
fn mlx_keeps_keys_and_values_in_16_bits() {
    let Some(runtime) = runtime_folder() else { return };
    let with_kernel = ["llama-tied", "qwen3", "deepseek_v3"];
    let without = ["mistral", "gemma2", "gpt_oss", "deepseek_v32", "hy_v4"];
    let special = ["minimax_m3_vl_text", "deepseek_v4", "qwen3_next"];
    for name in with_kernel.into_iter().chain(without).chain(special) {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        let model = data("models").join(name);
        write(&model, &set, 16, 1, ExpertCut::Inside);
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

/// Whether this program knows the model's family and can cut it; what it knows is tested
/// elsewhere.
fn converts(model: &Path, nodes: u32) -> Result<(), String> {
    let source = Source::open(model).map_err(|error| error.to_string())?;
    let options = ConvertOptions::new(PathBuf::from("unused"), nodes);
    Plan::new(&source, options).map(drop).map_err(|error| error.to_string())
}

#[test]
fn mlx_that_is_not_installed_is_a_plain_sentence() {
    let folder = tempdir().unwrap();
    let engines = folder.path().join("engines");
    let check = ["engine", "check", "mlx", "--dir", engines.to_str().unwrap()];
    let output = fail(2, &check);
    assert!(output.contains("no MLX runtime"), "{output}");
    assert!(output.contains("engine install mlx"), "{output}");
    assert!(output.contains("--engine cpu"), "{output}");
}

#[test]
fn a_damaged_runtime_serves_nothing() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &[]);
    let damaged = folder.path().join("engines").join(runtime::FOLDER);
    fs::create_dir_all(&damaged).unwrap();
    fs::write(damaged.join("runtime.json"), "{}").unwrap();
    let engines = folder.path().join("engines");
    let refused = |args: &[&str], code: i32| {
        let output = shardpack().args(args).env("SHARDPACK_ENGINES", &engines).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        let error = text(&output.stderr);
        assert!(error.contains("not a runtime record"), "{error}");
        assert!(error.contains("engine install mlx"), "{error}");
    };
    refused(&["engine", "check", "mlx"], 1);
    refused(&["serve", path(&set), "--listen", "127.0.0.1:0", "--engine", "mlx"], 2);
    let store = folder.path().join("store");
    refused(&["node", "--listen", "127.0.0.1:0", "--store", path(&store), "--engine", "mlx"], 2);
}

/// How `serve` refuses what MLX would wait for for ever.
#[test]
fn collectives_of_mlx_that_could_not_work_are_refused() {
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2"]);
    let refused = |options: &[&str], words: &[&str]| {
        let mut args = vec!["serve", path(&set), "--listen", "127.0.0.1:0"];
        args.extend(options);
        let error = fail(2, &args);
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    };
    refused(&["--collectives", "ring"], &["--engine mlx"]);
    let jaccl = ["--engine", "mlx", "--collectives", "jaccl"];
    refused(&jaccl, &["which RDMA device"]);
    let hosts = folder.path().join("hosts.json");
    let hostfile = |json: &str| {
        fs::write(&hosts, json).unwrap();
        [jaccl.as_slice(), &["--hostfile", path(&hosts)]].concat()
    };
    let one = r#"[{"ips": ["10.0.0.1"], "rdma": [null]}]"#;
    refused(&hostfile(one), &["the host file has 1 hosts", "2 ranks"]);
    let open = r#"[{"ips": ["10.0.0.1"], "rdma": [null, null]}, {"ips": [], "rdma": ["a", null]}]"#;
    refused(&hostfile(open), &["rank 0 has no RDMA device to rank 1", "--collectives own"]);
    refused(&hostfile("[]"), &["hosts.json", "not a host file", "0 hosts"]);
    refused(&["--hostfile", path(&hosts)], &["--collectives ring or jaccl"]);
    refused(&["--engine", "mlx", "--exact"], &["--exact"]);
    let node = ["node", "--store", path(folder.path()), "--engine", "mlx", "--collectives", "ring"];
    assert!(run_error(&node).contains("serve"), "a node cannot know all ranks");
}

/// The error of a command that must not run.
fn run_error(args: &[&str]) -> String {
    let output = run(args);
    assert!(!output.status.success());
    text(&output.stderr)
}

/// A set's own description of its devices reaches MLX, which has no JACCL on Linux.
#[test]
fn jaccl_without_rdma_is_a_plain_sentence() {
    let Some(_) = runtime_folder() else { return };
    if cfg!(target_os = "macos") {
        return println!("skipped: this machine may have JACCL");
    }
    let folder = tempdir().unwrap();
    let set = convert("kjv-4m", &folder.path().join("set"), &["--nodes", "2"]);
    let hosts = folder.path().join("hosts.json");
    let json = r#"[{"ips": ["127.0.0.1"], "rdma": [null, "rdma_en5"]},
                   {"ips": ["127.0.0.1"], "rdma": ["rdma_en5", null]}]"#;
    fs::write(&hosts, json).unwrap();
    let options = ["--engine", "mlx", "--collectives", "jaccl", "--hostfile", path(&hosts)];
    let mut args = vec!["serve", path(&set), "--listen", "127.0.0.1:0"];
    args.extend(options);
    let error = fail(1, &args);
    assert!(error.contains("this build of MLX has no jaccl"), "{error}");
}
