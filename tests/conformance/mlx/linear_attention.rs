//! Linear attention moves its state on by any number of rows at once.

use shardpack_converter::plan::ExpertSharding;
use shardpack_engine::loading::OpenOptions;
use shardpack_formats::memory::KvType;
use shardpack_mlx::runtime;
use tempfile::tempdir;

use super::{TOLERANCE, apart, in_steps, mlx, on_cpu, tokens};
use crate::{
    harness::data,
    reference_models::{open_with, write},
    skip::mlx_runtime,
};

#[test]
fn mlx_linear_attention_matches_cpu_in_steps_of_any_length() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    for name in ["qwen3_next", "kimi_linear", "nemotron_h", "falcon_h1"] {
        let folder = tempdir().unwrap();
        let set = folder.path().join("set");
        let model = data("models").join(name);
        write(&model, &set, 16, 1, ExpertSharding::Inside);
        let packages = open_with(&set, 1, OpenOptions::stored(1));
        // Twice, so that a state of some length moves on.
        let tokens = [tokens(&model), tokens(&model)].concat();
        let expected = on_cpu(&packages, &tokens);
        for steps in [&[tokens.len()][..], &[1], &[2, 11, 1, 5]] {
            let found = in_steps(mlx(&runtime, KvType::F32), &packages, &tokens, steps);
            let worst = apart(&found, &expected);
            println!("{name}, steps of {steps:?}: {worst:.2e}");
            assert!(worst < TOLERANCE, "{name}, steps of {steps:?}: {worst}");
        }
    }
}
