//! Checkpoints in every stored precision, through the program: repacked, quantized anew, refused.

use std::{fs, path::Path};

use safetensors::SafeTensors;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tempfile::tempdir;

use crate::harness::{convert, data, fail, path, succeed};

fn json(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

/// What became of the matrix that ends so.
fn carried(model: &str, options: &[&str], ending: &str) -> (Option<String>, f64) {
    let folder = tempdir().unwrap();
    let set = convert(&format!("sources/{model}"), &folder.path().join("set"), options);
    let report = json(&set.join("report.json"));
    let tensors = report["tensors"].as_object().unwrap();
    let (_, tensor) = tensors.iter().find(|(name, _)| name.ends_with(ending)).unwrap();
    let carried = tensor["prequantized"].as_str().map(str::to_owned);
    assert_eq!(carried.is_some(), tensor["source"].is_string(), "{model}: {tensor}");
    (carried, tensor["relative_rmse"].as_f64().unwrap_or(-1.0))
}

/// Expects the source's own integers and no error at all: what the packages dequantize to is, bit
/// for bit, what the library of the source's format reads from it.
fn check_repacked(model: &str, options: &[&str]) {
    let (carried, rmse) = carried(model, options, "mlp.up_proj.weight");
    assert_eq!((carried.as_deref(), rmse), (Some("repacked"), 0.0), "{model} {options:?}");

    let folder = tempdir().unwrap();
    let set = convert(&format!("sources/{model}"), &folder.path().join("set"), options);
    let floats = folder.path().join("floats");
    succeed(&["export", path(&set), "-o", path(&floats), "--hf", "--dtype", "f32"]);
    let name = "model.layers.0.mlp.up_proj.weight";
    let values = exported(&floats, name).unwrap_or_else(|| panic!("{model}: no {name}"));
    let expected = json(&data("sources").join(model).join("expected.json"));
    let digest = |text: String, byte: &u8| text + &format!("{byte:02x}");
    let digest = Sha256::digest(values).iter().fold(String::new(), digest);
    assert_eq!(digest, expected["tensors"][name]["f32_sha256"], "{model} {options:?}");
}

/// Bytes of a tensor of an exported folder.
fn exported(folder: &Path, name: &str) -> Option<Vec<u8>> {
    fs::read_dir(folder).unwrap().find_map(|entry| {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|ending| ending != "safetensors") {
            return None;
        }
        let bytes = fs::read(file).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        tensors.tensor(name).ok().map(|tensor| tensor.data().to_vec())
    })
}

/// Expects new integers, and the error of their grid.
fn check_requantized(model: &str, options: &[&str], most: f64) {
    let (carried, rmse) = carried(model, options, "mlp.up_proj.weight");
    assert_eq!(carried.as_deref(), Some("requantized"), "{model} {options:?}");
    assert!(0.0 < rmse && rmse < most, "{model} {options:?}: {rmse}");
}

#[test]
fn integers_on_an_affine_grid_are_repacked_without_loss() {
    let four = |group| ["--bits", "4", "--group-size", group];
    check_repacked("gptq_4bit_g64_sym", &four("64"));
    check_repacked("gptq_4bit_g64_sym", &four("32"));
    check_repacked("gptq_8bit_g64_sym", &["--bits", "8", "--nodes", "2"]);
    check_repacked("mlx_4bit_g64", &four("64"));
    check_repacked("mlx_8bit_g32_overrides", &["--bits", "8", "--group-size", "32"]);
    check_repacked("ct_int8_channel", &["--bits", "8", "--group-size", "32"]);
    check_repacked("mlx_mxfp4", &["--bits", "6", "--group-size", "32"]);
    check_repacked("gguf_q8_0", &["--bits", "8", "--group-size", "32"]);
}

#[test]
fn weights_off_the_grid_are_requantized() {
    // Relative errors of 4, 6 and 8 bits on Gaussian weights are about 0.09, 0.02 and 0.006.
    check_requantized("gptq_4bit_g64_sym", &["--bits", "4", "--group-size", "128"], 0.12);
    check_requantized("gptq_4bit_g64_desc_act", &["--bits", "4"], 0.12);
    check_requantized("fp8_block_ragged", &["--bits", "8", "--group-size", "32"], 0.01);
    check_requantized("fp8_block_ue8m0", &["--bits", "6"], 0.03);
    check_requantized("fp8_per_tensor", &["--bits", "4", "--nodes", "2"], 0.12);
    check_requantized("ct_fp8_channel", &["--bits", "8"], 0.01);
    check_requantized("ct_nvfp4", &["--bits", "8"], 0.01);
    check_requantized("modelopt_nvfp4", &["--bits", "8"], 0.01);
    check_requantized("modelopt_fp8", &["--bits", "8"], 0.01);
    check_requantized("modelopt_int4_awq", &["--bits", "8", "--group-size", "32"], 0.01);
    check_requantized("torchao_int4_g32", &["--bits", "8", "--group-size", "32"], 0.01);
    check_requantized("bnb_nf4", &["--bits", "8", "--group-size", "32"], 0.01);
    check_requantized("bnb_fp4_nested", &["--bits", "6", "--group-size", "32"], 0.03);
    check_requantized("hqq_4bit", &["--bits", "8", "--group-size", "32"], 0.01);
    check_requantized("mlx_mxfp4", &["--bits", "4", "--group-size", "32"], 0.12);
    check_requantized("gguf_q4_k_m", &["--bits", "4", "--group-size", "32"], 0.12);
    check_requantized("gguf_q6_k", &["--bits", "6"], 0.03);
}

#[test]
fn sixteen_bits_are_rounded_once() {
    for model in ["ct_int4_g128_asym", "awq_gemm_4bit_g64", "gptq_v2_4bit_g64_asym"] {
        let (carried, _) = carried(model, &["--bits", "16"], "mlp.up_proj.weight");
        assert_eq!(carried.as_deref(), Some("dequantized"), "{model}");
    }
}

/// Expects a refusal that contains these words, and no file.
fn check_refused(source: &Path, words: &[&str]) {
    let folder = tempdir().unwrap();
    let output = folder.path().join("set");
    let error = fail(1, &["convert", path(source), "-o", path(&output)]).to_lowercase();
    let error = error.replace(&path(source).to_lowercase(), "");
    for word in words {
        assert!(error.contains(&word.to_lowercase()), "expected {word:?}: {error}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{error}");
}

/// The same with the words that stand beside the checkpoint.
fn check_refused_as_expected(source: &Path) {
    let expected = json(&source.join("expected_error.json"));
    let words = expected["must_mention"].as_array().unwrap();
    let words: Vec<&str> = words.iter().map(|word| word.as_str().unwrap()).collect();
    check_refused(source, &words);
}

#[test]
fn stored_precisions_that_are_not_read_are_refused_before_a_byte_is_written() {
    let sources: Vec<_> = fs::read_dir(data("sources/refused")).unwrap().collect();
    assert!(sources.len() >= 8, "{} sources", sources.len());
    for source in sources {
        check_refused_as_expected(&source.unwrap().path());
    }
}

#[test]
fn pickles_are_refused_and_nothing_of_them_is_run() {
    check_refused_as_expected(&data("sources/pickle_legacy"));
    check_refused_as_expected(&data("sources/pickle_malicious"));
    let words = ["pytorch_model.bin", "pickle", "safetensors", "--allow-pickle", "runs no code"];
    check_refused(&data("sources/pickle_bin"), &words);
    let folder = tempdir().unwrap();
    let allowed = ["--bits", "8", "--allow-pickle"];
    convert("sources/pickle_bin", &folder.path().join("set"), &allowed);
    let refused = data("sources/pickle_malicious");
    let output = folder.path().join("refused");
    let error = fail(1, &["convert", path(&refused), "-o", path(&output), "--allow-pickle"]);
    assert!(error.contains("posix.system") && !output.exists(), "{error}");

    let folder = tempdir().unwrap();
    let malicious = data("sources/pickle_malicious");
    fs::copy(malicious.join("config.json"), folder.path().join("config.json")).unwrap();
    fs::copy(malicious.join("raw_pickle.bin"), folder.path().join("raw_pickle.bin")).unwrap();
    check_refused(folder.path(), &["posix", "system"]);

    let trace = json(&malicious.join("expected_error.json"))["must_not_create"].clone();
    let trace = trace.as_str().unwrap();
    for place in [folder.path(), malicious.as_path(), Path::new(".")] {
        assert!(!place.join(trace).exists(), "code of the pickle was run");
    }
}

#[test]
fn gguf_converts_by_its_keys_and_by_a_config_beside_it() {
    let gguf = data("sources/gguf_q8_0");
    let folder = tempdir().unwrap();
    let output = |name: &str| folder.path().join(name);
    let run = |source: &Path, name: &str| {
        succeed(&["convert", path(source), "-o", path(&output(name)), "--bits", "8"]);
        json(&output(name).join("set.json"))
    };
    let by_keys = run(&gguf.join("model.gguf"), "keys");
    fs::copy(gguf.join("config_of_origin.json"), folder.path().join("config.json")).unwrap();
    fs::copy(gguf.join("model.gguf"), folder.path().join("model.gguf")).unwrap();
    let by_config = run(folder.path(), "config");
    assert_eq!(by_keys["ids"]["weights"], by_config["ids"]["weights"]);
    let files = |set: &Value| {
        let files = set["source"]["files"].as_array().unwrap();
        files.iter().map(|file| file["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(files(&by_keys), ["model.gguf"]);
    assert_eq!(files(&by_config), ["config.json", "model.gguf"]);
}
