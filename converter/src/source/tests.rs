//! Every checkpoint of `tests/data/sources` against the values that its format's own library
//! reads from it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use shardpack_formats::{RulePack, resolve};
use shardpack_quantize::{Platform, affine::widen};

use super::*;

mod descriptions;
mod gguf;
mod mlx_lm;
mod mutated;
mod second_copies;
mod texts;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/sources").join(name)
}

/// All values of a tensor, read in blocks of so many rows.
fn values(source: &Source, tensor: &Logical, block: u64) -> Vec<f32> {
    let mut buffers = RowBuffers::default();
    let (mut all, mut row) = (Vec::new(), 0);
    let rows = tensor.row_count();
    while row < rows {
        let end = (row + block).min(rows);
        let (dtype, bytes) = source.read_rows(tensor, row..end, &mut buffers).unwrap();
        let mut floats = vec![0.0; bytes.len() / dtype.size_bytes()];
        widen(Platform::detect_for_quantizing(), dtype, bytes, &mut floats);
        all.extend(floats);
        row = end;
    }
    all
}

fn sha256(values: &[f32]) -> String {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let hex = |text: String, byte: &u8| text + &format!("{byte:02x}");
    Sha256::digest(bytes).iter().fold(String::new(), hex)
}

fn names(value: &Value) -> BTreeSet<String> {
    value.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

fn check(name: &str) {
    let (source, expected) = check_values(name);
    let wanted = expected["tensors"].as_object().unwrap();
    let stored = source.tensors().map(|tensor| tensor.name.clone());
    let without_output: BTreeSet<String> =
        stored.filter(|stored| !wanted.contains_key(stored)).collect();
    assert_eq!(without_output, names(&expected["consumed_without_output"]), "{name}");
}

fn check_values(name: &str) -> (Source, Value) {
    let source = Source::open_as(&fixture(name), Pickles::Read).unwrap();
    let expected = fs::read(fixture(name).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    assert_eq!(expected["bit_exact"], true);
    let wanted = expected["tensors"].as_object().unwrap();
    // In blocks of seven rows too: no border of words, groups or blocks is a multiple of it.
    for block in [7, u64::MAX] {
        for (tensor, wanted) in wanted {
            let logical = source.logical(tensor).unwrap_or_else(|| panic!("{name}: {tensor}"));
            let shape: Vec<u64> = serde_json::from_value(wanted["shape"].clone()).unwrap();
            assert_eq!(logical.shape, shape, "{name}: {tensor}");
            let values = values(&source, logical, block.min(logical.row_count().max(1)));
            assert_eq!(sha256(&values), wanted["f32_sha256"], "{name}: {tensor} by {block} rows");
        }
    }
    let found: BTreeSet<&str> = source.logical_tensors().map(|t| t.name.as_str()).collect();
    assert_eq!(found, wanted.keys().map(String::as_str).collect(), "{name}");
    // Every stored tensor is a part of one, or dropped.
    let parts = source.logical_tensors().flat_map(|tensor| &tensor.parts).cloned();
    let dropped = source.dropped().iter().map(|(name, _)| name.clone());
    let all: BTreeSet<String> = parts.chain(dropped).collect();
    let stored: BTreeSet<String> = source.tensors().map(|tensor| tensor.name.clone()).collect();
    assert_eq!(all, stored, "{name}");
    (source, expected)
}

#[test]
fn floats_are_read_as_they_stand() {
    for name in ["bf16_sharded", "bf16_moe", "f16", "f32"] {
        check(name);
    }
}

#[test]
fn fp8_is_decoded_as_its_writers_do() {
    for name in ["fp8_block_ragged", "fp8_block_ue8m0", "fp8_per_tensor", "modelopt_fp8"] {
        check(name);
    }
}

#[test]
fn compressed_tensors_are_decoded_as_its_library_does() {
    for name in [
        "ct_int4_g32_experts",
        "ct_int4_g128_asym",
        "ct_fp8_channel",
        "ct_int8_channel",
        "ct_nvfp4",
    ] {
        check(name);
    }
}

#[test]
fn gptq_and_awq_are_decoded_as_their_packers_do() {
    for name in [
        "gptq_4bit_g64_sym",
        "gptq_8bit_g64_sym",
        "gptq_4bit_g64_desc_act",
        "gptq_v2_4bit_g64_asym",
        "awq_gemm_4bit_g64",
    ] {
        check(name);
    }
}

#[test]
fn four_bit_floats_and_mlx_are_decoded_as_their_libraries_do() {
    for name in ["modelopt_nvfp4", "mlx_4bit_g64", "mlx_8bit_g32_overrides", "mlx_mxfp4"] {
        check(name);
    }
}

#[test]
fn bitsandbytes_and_hqq_are_decoded_as_their_libraries_do() {
    for name in ["bnb_nf4", "bnb_fp4_nested", "bnb_int8", "hqq_4bit", "hqq_2bit"] {
        check(name);
    }
}

#[test]
fn integers_of_torchao_and_modelopt_are_decoded_as_their_libraries_do() {
    for name in ["torchao_int8", "torchao_int4_g32", "modelopt_int8_sq", "modelopt_int4_awq"] {
        check(name);
    }
}

#[test]
fn gguf_is_decoded_as_its_library_does() {
    for name in GGUF.iter().chain(&["gguf_blocks", "gguf_iq4"]) {
        check_values(name);
    }
}

/// Without `gguf_blocks` and `gguf_iq4`, which were never another file.
const GGUF: [&str; 9] = [
    "gguf_f16",
    "gguf_q8_0",
    "gguf_q4_0",
    "gguf_q4_k_m",
    "gguf_q6_k",
    "gguf_gemma2",
    "gguf_gemma3",
    "gguf_phi3",
    "gguf_gpt_oss",
];

#[test]
fn files_of_torch_are_read_without_running_them() {
    check("pickle_bin");
    // The same, as part of an index.
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "pytorch_model.bin"] {
        fs::copy(fixture("pickle_bin").join(name), folder.path().join(name)).unwrap();
    }
    let names = check_values("pickle_bin").1["tensors"].as_object().unwrap().clone();
    let part = "pytorch_model-00001-of-00001.bin";
    fs::rename(folder.path().join("pytorch_model.bin"), folder.path().join(part)).unwrap();
    let index = |names: Vec<&String>| {
        let map: serde_json::Map<String, Value> =
            names.into_iter().map(|name| (name.clone(), part.into())).collect();
        let index = json!({ "weight_map": map }).to_string();
        fs::write(folder.path().join("pytorch_model.bin.index.json"), index).unwrap();
    };
    index(names.keys().collect());
    let source = Source::open_as(folder.path(), Pickles::Read).unwrap();
    assert_eq!(source.source_tensors().len(), names.len());
    let missing = "model.norm.bias".to_owned();
    index(names.keys().chain([&missing]).collect());
    let error = Source::open_as(folder.path(), Pickles::Read).err().unwrap().to_string();
    assert!(error.contains("model.norm.bias") && error.contains("bin.index.json"), "{error}");
}

/// The whole chain of an error.
fn words(error: &SourceError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[test]
fn pickles_that_do_more_are_refused_though_they_are_allowed() {
    for name in ["pickle_malicious", "pickle_legacy"] {
        let folder = fixture(name);
        let expected = fs::read(folder.join("expected_error.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        let error = Source::open_as(&folder, Pickles::Read).err().unwrap();
        let text = words(&error);
        for word in names(&expected["must_mention"]) {
            assert!(text.contains(&word), "expected {word:?} in: {text}");
        }
        if let Some(trace) = expected["must_not_create"].as_str() {
            assert!(!folder.join(trace).exists() && !Path::new(trace).exists());
        }
    }
}

#[test]
fn gguf_keys_say_what_the_config_said() {
    for name in GGUF {
        let source = Source::open(&fixture(name)).unwrap();
        let origin = fs::read(fixture(name).join("config_of_origin.json")).unwrap();
        let origin: Value = serde_json::from_slice(&origin).unwrap();
        let spec = |config: &Value| {
            let packs = RulePack::builtin();
            resolve(config, &source.source_tensors(), &packs).unwrap().spec
        };
        assert_eq!(spec(&source.config), spec(&origin), "{name}");
        assert_eq!(source.config["model_type"], origin["model_type"], "{name}");
    }
}

#[test]
fn formats_that_are_not_read_are_refused_by_name() {
    for entry in fs::read_dir(fixture("refused")).unwrap() {
        let folder = entry.unwrap().path();
        let expected = fs::read(folder.join("expected_error.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        let error = Source::open(&folder).err().unwrap_or_else(|| panic!("{}", folder.display()));
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        let text = text.replace(folder.to_str().unwrap(), "").to_lowercase();
        for word in names(&expected["must_mention"]) {
            assert!(text.contains(&word.to_lowercase()), "expected {word:?} in: {text}");
        }
    }
}

/// A fine-tune of rank one of the first query projection, and the matrix that it adds.
fn write_adapter(folder: &Path, [rows, columns]: [usize; 2]) -> Vec<f32> {
    let config = json!({
        "peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"],
        "bias": "none", "use_rslora": false, "use_dora": false, "fan_in_fan_out": false,
    });
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    let down: Vec<f32> = (0..columns).map(|column| (column % 3) as f32 - 1.0).collect();
    let up: Vec<f32> = (0..rows).map(|row| (row % 5) as f32 - 2.0).collect();
    let stem = "base_model.model.model.layers.0.self_attn.q_proj";
    let (middle, end) = (4 * columns, 4 * (columns + rows));
    let header = json!({
        format!("{stem}.lora_A.weight"):
            {"dtype": "F32", "shape": [1, columns], "data_offsets": [0, middle]},
        format!("{stem}.lora_B.weight"):
            {"dtype": "F32", "shape": [rows, 1], "data_offsets": [middle, end]},
    });
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(down.iter().chain(&up).flat_map(|value| value.to_le_bytes()));
    fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
    let row = |up: &f32| down.iter().map(|down| 2.0 * up * down).collect::<Vec<f32>>();
    up.iter().flat_map(row).collect()
}

/// Merged values may be summed in another order: what tests/data/sources/README.md allows.
#[track_caller]
fn check_near(bytes: &[u8], expected: &[f32], model: &str) {
    let found = bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four));
    assert_eq!(bytes.len(), 4 * expected.len(), "{model}");
    for (index, (found, expected)) in found.zip(expected).enumerate() {
        let near = (found - expected).abs() <= 1e-5 * expected.abs() + 1e-6;
        assert!(near, "{model}, element {index}: {found}, expected {expected}");
    }
}

#[test]
fn adapters_are_merged_over_decoded_weights() {
    let name = "model.layers.0.self_attn.q_proj.weight";
    for model in ["fp8_per_tensor", "ct_nvfp4", "gptq_4bit_g64_desc_act", "mlx_4bit_g64"] {
        let mut source = Source::open(&fixture(model)).unwrap();
        let tensor = source.logical(name).unwrap().clone();
        assert!(tensor.is_decoded(), "{model}");
        let [rows, columns] = [tensor.shape[0] as usize, tensor.shape[1] as usize];
        let base = values(&source, &tensor, tensor.row_count());
        let folder = tempfile::tempdir().unwrap();
        let added = write_adapter(folder.path(), [rows, columns]);
        source.merge_adapters(&[folder.path().to_owned()]).unwrap();
        let expected: Vec<f32> = base.iter().zip(&added).map(|(w, delta)| w + delta).collect();
        let bytes = source.read_tensor(name).unwrap().unwrap();
        check_near(&bytes, &expected, model);
        // Rows from the middle of the matrix too.
        let merge = source.merge(name).unwrap().unwrap();
        let mut some = Vec::new();
        source.merged_rows(&merge, 5..12, &mut some).unwrap();
        check_near(&some, &expected[5 * columns..12 * columns], model);
    }
}

#[test]
fn experts_of_gpt_oss_are_decoded_with_gate_and_up_apart() {
    let folder = fixture("mxfp4_gpt_oss");
    let source = Source::open(&folder).unwrap();
    let expected = fs::read(folder.join("expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let wanted = expected["tensors"].as_object().unwrap();
    let weights = wanted.iter().filter(|(name, _)| name.ends_with("_proj.weight"));
    for (name, wanted) in weights {
        let tensor = source.logical(name).unwrap_or_else(|| panic!("{name}"));
        let shape: Vec<u64> = serde_json::from_value(wanted["shape"].clone()).unwrap();
        assert_eq!(tensor.shape, shape, "{name}");
        for block in [7, tensor.row_count()] {
            let values = values(&source, tensor, block);
            assert_eq!(sha256(&values), wanted["f32_sha256"], "{name} by {block} rows");
        }
    }
}

#[test]
fn what_is_said_to_be_read_in_order_is_read_so() {
    let folders = fs::read_dir(fixture("")).unwrap().map(|entry| entry.unwrap().path());
    let sources = folders.filter_map(|folder| Source::open_as(&folder, Pickles::Read).ok());
    let (mut plain, mut decoded, mut neither) = (0, 0, 0);
    for source in sources {
        for tensor in source.logical_tensors() {
            if !source.is_read_in_order(&tensor.name) {
                neither += 1;
                continue;
            }
            *(if tensor.is_decoded() { &mut decoded } else { &mut plain }) += 1;
            for block in [1, 7, 64, tensor.row_count()] {
                check_order(&source, tensor, block);
            }
        }
    }
    // Decoded ones of many formats; those whose parts stand by columns or are shared are neither.
    assert!(plain > 100 && decoded > 100 && neither > 10, "{plain}, {decoded}, {neither}");
}

/// Expects every part of a tensor to be read from its first byte to its last, some of it perhaps
/// again, when rows are read in blocks.
#[track_caller]
fn check_order(source: &Source, tensor: &Logical, block: u64) {
    let mut read: Vec<u64> = tensor.parts.iter().map(|_| 0).collect();
    for row in (0..tensor.row_count()).step_by(block as usize) {
        let rows = row..(row + block).min(tensor.row_count());
        for (window, end) in tensor.windows(rows).iter().zip(&mut read) {
            let bytes = window.rows.start * window.row_bytes..window.rows.end * window.row_bytes;
            assert_eq!(window.columns, 0..window.row_bytes, "{}", tensor.name);
            assert!((bytes.start..=bytes.end).contains(end), "{} by {block}", tensor.name);
            *end = bytes.end;
        }
    }
    for (part, end) in tensor.parts.iter().zip(read) {
        let (_, info) = source.weights.find(part).unwrap();
        assert_eq!(end, info.size, "{} by {block}", tensor.name);
    }
}

#[test]
fn what_has_a_program_for_a_template_is_given_the_template() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixture("bf16_moe");
    for entry in fs::read_dir(&from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let template = |model_type: &str| {
        let config = json!({ "model_type": model_type });
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let source = Source::open(folder.path()).unwrap();
        let derived = source.derived.contains("chat_template.jinja");
        let text = source.text.get("chat_template.jinja").cloned();
        text.map(|text| (String::from_utf8(text).unwrap(), derived))
    };
    let published = chat::published("deepseek_v32").unwrap().to_owned();
    assert_eq!(template("deepseek_v32"), Some((published, true)));
    assert_eq!(template("deepseek_v3"), None);
    // A template of its own stays.
    fs::write(folder.path().join("chat_template.jinja"), "own").unwrap();
    assert_eq!(template("deepseek_v32"), Some(("own".to_owned(), false)));
}
