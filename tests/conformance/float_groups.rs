//! Models in float groups: on the `cpu` engine with the bits of the floats that they stand for, on
//! any number of nodes, and on MLX.

use std::path::{Path, PathBuf};

use shardpack_converter::{
    ConvertOptions, ExportForm, ExportOptions, Plan, Source, UnshardedModel, convert, export,
};
use shardpack_engine::loading::OpenOptions;
use shardpack_mlx::runtime;
use shardpack_quantize::FloatFormat;
use tempfile::tempdir;

use crate::{
    harness::data,
    mlx::{TOLERANCE, apart, on_cpu, on_mlx, tokens},
    reference_models::open_with,
    skip::mlx_runtime,
};

/// Dense, MLA with experts, and experts with biases.
const MODELS: [&str; 3] = ["llama", "deepseek_v3", "gpt_oss"];

/// Bits, and float groups if it is not plain.
type Form = (u32, Option<FloatFormat>);

fn set(model: &Path, output: PathBuf, (bits, float): Form, nodes: u32) -> PathBuf {
    let source = Source::open(model).unwrap();
    // Floats that were computed in 32 bits stay what they are.
    let dtype = Some("F32".to_owned());
    let options = ConvertOptions { bits, float, dtype, ..ConvertOptions::new(output, nodes) };
    let plan = Plan::new(&source, options).unwrap_or_else(|error| panic!("{error}"));
    convert(&source, &plan, &|_| ()).unwrap().output
}

#[test]
fn float_groups_compute_as_the_floats_that_they_stand_for() {
    let formats = MODELS.iter().flat_map(|model| FloatFormat::ALL.map(|format| (model, format)));
    for (name, format) in formats {
        let model = data("models").join(name);
        let (folder, tokens) = (tempdir().unwrap(), tokens(&model));
        let at = |name: &str| folder.path().join(name);
        let logits =
            |set: &Path, nodes| on_cpu(&open_with(set, nodes, OpenOptions::stored(1)), &tokens);
        let form = (format.bits(), Some(format));
        let one = set(&model, at("one"), form, 1);
        let found = logits(&one, 1);
        let unsharded = UnshardedModel::open(std::slice::from_ref(&one)).unwrap();
        let hf = ExportForm::HuggingFace { dtype: Some("F32".to_owned()) };
        let options = ExportOptions { output: at("floats"), form: hf, memory_bytes: 256 << 20 };
        export(&unsharded, &options, &|_| ()).unwrap();
        let floats = logits(&set(&at("floats"), at("plain"), (16, None), 1), 1);
        let bits = |all: &[f32]| all.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        assert!(bits(&found) == bits(&floats), "{name} in {format}: not the floats' logits");
        let two = logits(&set(&model, at("two"), form, 2), 2);
        let worst = apart(&found, &two);
        assert!(worst < TOLERANCE, "{name} in {format} on two nodes: {worst}");
    }
}

#[test]
fn mlx_computes_float_groups_as_the_cpu_engine() {
    let Some(runtime) = mlx_runtime(runtime::FOLDER) else { return };
    let formats = MODELS.iter().flat_map(|model| FloatFormat::ALL.map(|format| (model, format)));
    for (name, format) in formats {
        let model = data("models").join(name);
        let (folder, tokens) = (tempdir().unwrap(), tokens(&model));
        let one = set(&model, folder.path().join("set"), (format.bits(), Some(format)), 1);
        let packages = open_with(&one, 1, OpenOptions::stored(1));
        let worst = apart(&on_cpu(&packages, &tokens), &on_mlx(&runtime, &packages, &tokens));
        assert!(worst < TOLERANCE, "{name} in {format}: {worst}");
    }
}
