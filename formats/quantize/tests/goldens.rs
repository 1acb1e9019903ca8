//! The quantizer against MLX's own output (MLX 0.32.4, CPU).

#![expect(clippy::unwrap_used, reason = "a test that cannot read its data has failed")]

use std::{fs, path::Path};

use safetensors::SafeTensors;
use shardpack_quantize::{
    AffineFormat, Dtype, Platform, Rounding,
    affine::{QuantizeOptions, error, quantize},
};

fn read(name: &str) -> Vec<u8> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/mlx_goldens");
    let path = data.join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn tensor<'a>(file: &'a [u8], name: &str) -> (Dtype, &'a [u8]) {
    let found = SafeTensors::deserialize(file).unwrap().tensor(name).unwrap();
    (Dtype::from_name(&found.dtype().to_string()).unwrap(), found.data())
}

fn check(bits: u32, group_size: u32, suffix: &str) {
    let input = read(&format!("input{suffix}.safetensors"));
    let golden = read(&format!("affine_b{bits}_g{group_size}{suffix}.safetensors"));
    let format = AffineFormat::new(bits, group_size).unwrap();
    let (dtype, source) = tensor(&input, "w");
    let (_, weight) = tensor(&golden, "weight");
    let (store, scales) = tensor(&golden, "scales");
    let (_, biases) = tensor(&golden, "biases");
    for platform in Platform::available_for_quantizing() {
        let mut ours = (vec![0; weight.len()], vec![0; scales.len()], vec![0; biases.len()]);
        let options =
            QuantizeOptions { platform, ..QuantizeOptions::new(format, Rounding::MlxCpu, store) };
        let outputs = (&mut ours.0[..], &mut ours.1[..], &mut ours.2[..]);
        let sums = quantize(&options, (dtype, source), outputs).unwrap();
        let what = format!("{bits} bits, groups of {group_size}{suffix} on {platform}");
        assert!(ours.0 == weight, "integers differ at {what}");
        assert!(ours.1 == scales, "scales differ at {what}");
        assert!(ours.2 == biases, "biases differ at {what}");
        let apart = error(platform, format, (dtype, source), store, (weight, scales, biases));
        assert_eq!(sums, apart, "{what}");
    }
}

#[test]
fn mlx_cpu_rounding_equals_mlx_bit_for_bit() {
    for bits in [2, 3, 4, 5, 6, 8] {
        for group_size in [32, 64, 128] {
            check(bits, group_size, "");
        }
    }
    check(4, 64, "_f16");
    check(4, 64, "_f32");
}
