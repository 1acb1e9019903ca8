//! Every checkpoint of `tests/data/sources` against the values that its format's own library
//! reads from it.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use shardpack_formats::{Platform, affine::widen};

use super::*;

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
        widen(Platform::detect(), dtype, bytes, &mut floats);
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
    let source = Source::open(&fixture(name)).unwrap();
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
    let without_output: BTreeSet<String> =
        stored.into_iter().filter(|stored| !wanted.contains_key(stored)).collect();
    assert_eq!(without_output, names(&expected["consumed_without_output"]), "{name}");
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
