//! Weights that small tensors beside them describe: taken when all fits, refused by name when not.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use serde_json::json;
use shardpack_containers::{
    container::TensorInfo,
    stored::{Descriptions, Documents, StoredConfig, group},
};
use shardpack_quantize::dtype::Dtype;

fn tensor(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
    let size = shape.iter().product::<u64>() * dtype.size_bytes() as u64;
    TensorInfo { name: name.to_owned(), dtype, shape: shape.to_vec(), offset: 0, size }
}

/// The error that tensors and descriptions give under a method.
fn refusal(method: &str, tensors: &[TensorInfo], described: &[(&str, &[u8])]) -> Option<String> {
    let config = json!({ "quantization_config": { "quant_method": method } });
    let documents = Documents { config: Some(&config), ..Documents::default() };
    let config = StoredConfig::parse(documents).unwrap().unwrap();
    let descriptions: Descriptions =
        described.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
    for name in descriptions.keys() {
        let tensor = tensors.iter().find(|tensor| tensor.name == *name).unwrap();
        assert!(config.is_description(tensor), "{name}");
    }
    group(Some(&config), tensors, &descriptions).err().map(|error| error.to_string())
}

/// 192 elements: blocks of 64 cross rows of 24.
#[track_caller]
fn check_four_bits(state: &serde_json::Value, absmax: &[u64], expected: Option<&str>) {
    let name = "a.weight.quant_state.bitsandbytes__nf4";
    let bytes = state.to_string().into_bytes();
    let tensors = [
        tensor("a.weight", Dtype::U8, &[96, 1]),
        tensor("a.weight.absmax", Dtype::F32, absmax),
        tensor("a.weight.quant_map", Dtype::F32, &[16]),
        tensor(name, Dtype::U8, &[bytes.len() as u64]),
    ];
    let found = refusal("bitsandbytes", &tensors, &[(name, &bytes)]);
    match (&found, expected) {
        (None, None) => {}
        (Some(found), Some(expected)) => assert!(found.contains(expected), "{found}"),
        _ => panic!("{state}: {found:?}, expected {expected:?}"),
    }
}

#[test]
fn four_bits_fit_their_description_or_are_refused_by_name() {
    let state = |shape: &[u64], blocksize: u64| json!({ "quant_type": "nf4", "blocksize": blocksize, "dtype": "float16", "shape": shape });
    check_four_bits(&state(&[8, 24], 64), &[3], None);
    check_four_bits(&state(&[2, 4, 24], 128), &[2], None);
    check_four_bits(&state(&[8, 24], 128), &[3], Some("F32 [2]"));
    check_four_bits(&state(&[8, 23], 64), &[3], Some("\"a.weight\""));
    check_four_bits(&state(&[0, 24], 64), &[3], Some("\"a.weight\""));
    check_four_bits(&state(&[], 64), &[3], Some("\"a.weight\""));
    check_four_bits(&state(&[1 << 40, 1 << 40], 64), &[3], Some("\"a.weight\""));
    check_four_bits(&state(&[8, 24], 0), &[3], Some("blocksize is 0"));
    check_four_bits(&json!({ "shape": [8, 24] }), &[3], Some("no description"));
    let mut nested = state(&[8, 24], 64);
    nested["nested_blocksize"] = 256.into();
    nested["nested_offset"] = 0.5.into();
    check_four_bits(&nested, &[3], Some("U8 [3]"));
}

#[test]
fn integers_that_nothing_explains_are_refused_by_name() {
    let plain = tensor("a.weight", Dtype::BF16, &[8, 24]);
    for method in ["bitsandbytes", "hqq", "torchao"] {
        assert_eq!(refusal(method, std::slice::from_ref(&plain), &[]), None);
        let packed = [tensor("a.weight", Dtype::U8, &[96, 1])];
        let found = refusal(method, &packed, &[]).unwrap();
        assert!(found.contains("\"a.weight\""), "{found}");
    }
    let rows = [
        tensor("a.SCB", Dtype::F32, &[8]),
        tensor("a.weight", Dtype::I8, &[8, 24]),
        tensor("a.weight_format", Dtype::U8, &[]),
    ];
    assert_eq!(refusal("bitsandbytes", &rows, &[("a.weight_format", &[0])]), None);
    let found = refusal("bitsandbytes", &rows, &[("a.weight_format", &[1])]).unwrap();
    assert!(found.contains("order of a device"), "{found}");
    let packed = [
        tensor("a._weight_qdata", Dtype::U8, &[8, 12]),
        tensor("a._weight_scale", Dtype::BF16, &[1, 8]),
        tensor("a._weight_zero_point", Dtype::BF16, &[1, 8]),
    ];
    let found = refusal("torchao", &packed, &[]).unwrap();
    assert!(found.contains("Int8Tensor") && found.contains("a._weight_qdata"), "{found}");
}

#[test]
fn hqq_without_its_parameters_is_refused_by_name() {
    let number = |value: u64| value.to_le_bytes();
    let shape = [number(8), number(24)].concat();
    let check = |bits: u64, axis: u64, groups: u64, expected: Option<&str>| {
        let tensors = [
            tensor("a.W_q", Dtype::U8, &[96, 1]),
            tensor("a.scale", Dtype::F16, &[groups, 1]),
            tensor("a.zero", Dtype::F16, &[groups, 1]),
            tensor("a.shape", Dtype::I64, &[2]),
            tensor("a.nbits", Dtype::I64, &[]),
            tensor("a.axis", Dtype::I64, &[]),
        ];
        let (bits, axis) = (number(bits), number(axis));
        let described: [(&str, &[u8]); 3] =
            [("a.shape", &shape), ("a.nbits", &bits), ("a.axis", &axis)];
        let found = refusal("hqq", &tensors, &described);
        match (&found, expected) {
            (None, None) => {}
            (Some(found), Some(expected)) => assert!(found.contains(expected), "{found}"),
            _ => panic!("{found:?}, expected {expected:?}"),
        }
        let found = refusal("hqq", &tensors, &described[1..]).unwrap();
        assert!(found.contains("shape, nbits and axis"), "{found}");
    };
    check(4, 1, 3, None);
    check(4, 0, 12, None);
    check(3, 1, 3, Some("3 bits"));
    check(8, 1, 3, Some("8 bits for each"));
    check(4, 2, 3, Some("axis 2"));
    check(4, 1, 5, Some("one for each group"));
}
