//! The library against reference models and against itself: logits of transformers, the same bits
//! for any batch, chunking and number of ranks, MLX against the `cpu` engine. One target, so one
//! link.
#![expect(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

mod activation_quantization;
mod batch_invariance;
mod block_sparse_attention;
mod compressed_kv;
mod dense_families;
mod embeddings;
mod float_groups;
mod fuzz_corpus;
mod gpt_oss;
#[path = "../harness/program.rs"]
#[allow(dead_code, reason = "shared with tests/cli, which uses the rest")]
mod harness;
mod hybrid_families;
mod hyper_connections;
mod logits_parity;
mod manifest_requires;
mod mlx;
mod moe_families;
mod other_families;
mod other_layouts;
mod pipeline_stages;
#[path = "../harness/ports.rs"]
mod ports;
mod quantization_error;
mod reference_models;
#[path = "../harness/skip.rs"]
mod skip;
mod sparse_attention;
mod speculative_decoding;
