//! What the KV cache of a long prompt holds in MLX's memory while its pages are handed out.

use std::{env, path::Path, process::Command, time::Duration};

use shardpack_collectives::LinkedGroup;
use shardpack_engine::backend::{
    Attention as _, AttentionParams, CacheShape, Collectives, KvCache as _, LayerShape, Mlx, Qkv,
    Ranks, TensorParallel as _, Tensors as _,
};
use shardpack_formats::{memory::TOKENS_PER_PAGE, spec::Mask};
use shardpack_mlx::{Device, runtime};

use crate::skip::mlx_runtime;

/// Says to a process of this test program that it is to measure: MLX counts the memory of a process.
const VARIABLE: &str = "SHARDPACK_TEST_KV_MEMORY";

const TOKENS: usize = 16 << 10;
const STEP: usize = 512;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// Bytes of MLX's arrays after a prompt in steps, with every full page handed out and kept.
fn after_a_prompt(runtime: &Path) -> usize {
    let backend = Mlx::open(runtime, Some(Device::Cpu), Collectives::Own, [0, 1]).unwrap();
    let layers = vec![LayerShape { kv_heads: KV_HEADS, head_dim: HEAD_DIM }];
    let shape = CacheShape {
        layers,
        states: 0,
        keys_are_values: false,
        indexes: 0,
        index_width: 0,
        entries: Vec::new(),
    };
    let group = LinkedGroup::single(0);
    let ranks = Ranks::all(&group, Duration::from_mins(10));
    let mut cache = backend.cache(&shape, &[]);
    let mut pages = Vec::new();
    for first in (0..TOKENS).step_by(STEP) {
        let lengths = [STEP];
        let params = AttentionParams {
            layer: 0,
            lengths: &lengths,
            q_to_kv: &[0, 1],
            head_dim: HEAD_DIM,
            scale: 0.125,
            softcap: None,
            sinks: None,
            mask: Mask::Full,
        };
        backend.run(|| {
            let rows = backend.zeros(STEP, KV_HEADS * HEAD_DIM);
            let qkv = Qkv { q: &rows, k: &rows, v: &rows };
            let out = backend.attention(qkv, &mut [&mut cache], &params);
            backend.read(out, &ranks).unwrap();
            backend.flush(&mut [&mut cache], &ranks).unwrap();
        });
        let full = first / TOKENS_PER_PAGE..(first + STEP) / TOKENS_PER_PAGE;
        pages.extend(full.map(|index| backend.page(&cache, index)));
    }
    assert_eq!(pages.len(), TOKENS / TOKENS_PER_PAGE);
    backend.library().active_bytes()
}

#[test]
fn mlx_kv_memory_of_a_long_prompt_is_the_cache_and_its_pages() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    if env::var_os(VARIABLE).is_some() {
        println!("\nactive bytes: {}", after_a_prompt(&runtime));
        return;
    }
    let name = "mlx::kv_memory::mlx_kv_memory_of_a_long_prompt_is_the_cache_and_its_pages";
    let mut command = Command::new(env::current_exe().unwrap());
    let output =
        command.args(["--exact", name, "--nocapture"]).env(VARIABLE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let bytes = text.lines().find_map(|line| line.strip_prefix("active bytes: "));
    let bytes: usize = bytes.unwrap_or_else(|| panic!("{text}")).parse().unwrap();
    let cache = 2 * TOKENS * KV_HEADS * HEAD_DIM * size_of::<f32>();
    let ratio = bytes as f64 / cache as f64;
    println!("{TOKENS} tokens in steps of {STEP}: {ratio:.2} times the KV cache");
    assert!((1.0..2.2).contains(&ratio), "{bytes} bytes, the cache has {cache}");
}
