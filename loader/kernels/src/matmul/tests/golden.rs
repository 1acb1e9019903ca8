//! The kernels against what MLX's CPU backend wrote.

use std::path::Path;

use safetensors::SafeTensors;

use super::{bits_of, product};
use crate::{Floats, Matrix};

/// Rows and columns of the golden matrices.
const ROWS: usize = 64;
const COLS: usize = 512;

/// Relative to `Σ |x · w|`; MLX sums in another order.
const TOLERANCE: f64 = 1e-6;

/// Typed tensors of a golden file.
struct Golden(Vec<u8>);

impl Golden {
    fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/mlx_goldens");
        Self(std::fs::read(folder.join(name).with_extension("safetensors")).unwrap())
    }

    fn bytes(&self, name: &str) -> (String, Vec<u8>) {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).unwrap();
        (tensor.dtype().to_string(), tensor.data().to_vec())
    }

    fn words(&self, name: &str) -> Vec<u32> {
        let (_, bytes) = self.bytes(name);
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    fn floats(&self, name: &str) -> OwnedFloats {
        let (dtype, bytes) = self.bytes(name);
        let halves = bytes.as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half));
        match dtype.as_str() {
            "F16" => OwnedFloats::F16(halves.collect()),
            "BF16" => OwnedFloats::BF16(halves.collect()),
            _ => OwnedFloats::F32(self.words(name).into_iter().map(f32::from_bits).collect()),
        }
    }

    fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).is_ok()
    }
}

enum OwnedFloats {
    F32(Vec<f32>),
    F16(Vec<u16>),
    BF16(Vec<u16>),
}

impl OwnedFloats {
    fn view(&self) -> Floats<'_> {
        match self {
            Self::F32(values) => Floats::F32(values),
            Self::F16(bits) => Floats::F16(bits),
            Self::BF16(bits) => Floats::BF16(bits),
        }
    }
}

/// What MLX decodes: rounded to the stored type after the product and after the sum.
fn rounded(like: &OwnedFloats, value: f32) -> f32 {
    match like {
        OwnedFloats::F32(_) => value,
        OwnedFloats::F16(_) => half::f16::from_f32(value).to_f32(),
        OwnedFloats::BF16(_) => half::bf16::from_f32(value).to_f32(),
    }
}

/// Quantized value `index` of a bit stream, one bit at a time.
fn level(words: &[u32], bits: usize, index: usize) -> f32 {
    let bit = |at: usize| words[at / 32] >> (at % 32) & 1;
    (0..bits).map(|n| bit(index * bits + n) << n).sum::<u32>() as f32
}

/// A golden matrix and what the kernel decodes from it, `[64, 512]`.
struct Check {
    name: &'static str,
    golden: Golden,
    words: Vec<u32>,
    scales: OwnedFloats,
    biases: OwnedFloats,
    form: [u32; 2],
    decoded: Vec<f32>,
}

impl Check {
    fn new(name: &'static str, form: [u32; 2]) -> Self {
        let golden = Golden::read(name);
        let (words, scales, biases) =
            (golden.words("weight"), golden.floats("scales"), golden.floats("biases"));
        let mut check = Self { name, golden, words, scales, biases, form, decoded: vec![] };
        let mut decoded = vec![0.0; ROWS * COLS];
        for (row, out) in decoded.chunks_exact_mut(COLS).enumerate() {
            check.matrix().dequantize_row(row, out);
        }
        check.decoded = decoded;
        check
    }

    fn matrix(&self) -> Matrix<'_> {
        let (scales, biases) = (self.scales.view(), self.biases.view());
        Matrix::affine([ROWS, COLS], &self.words, scales, biases, self.form)
    }

    fn decoded_values_are_those_of_mlx(&self) {
        if self.golden.has("dequantized_f32") {
            let theirs = self.golden.floats("dequantized_f32").view().to_vec();
            assert_eq!(bits_of(&self.decoded), bits_of(&theirs), "{}: in f32", self.name);
        }
        let stored = self.golden.floats("dequantized");
        let theirs = stored.view().to_vec();
        let [bits, group] = self.form.map(|n| n as usize);
        for (index, (ours, theirs)) in self.decoded.iter().zip(theirs).enumerate() {
            let scale = self.scales.view().get(index / group);
            let bias = self.biases.view().get(index / group);
            let product = level(&self.words, bits, index) * scale;
            assert_eq!(product + bias, *ours, "{}: element {index}", self.name);
            let mlx = rounded(&stored, rounded(&stored, product) + bias);
            assert_eq!(mlx, theirs, "{}: element {index} as stored", self.name);
        }
    }

    fn products_are_those_of_mlx(&self) {
        let x = Golden::read("input").floats("x").view().to_vec();
        let chosen = self.golden.words("qmm_rows");
        let theirs = self.golden.floats("qmm").view().to_vec();
        let ours = product(&x, &self.matrix());
        let mut worst: f64 = 0.0;
        for (row, x) in x.chunks_exact(COLS).enumerate() {
            for (theirs, chosen) in theirs[row * chosen.len()..].iter().zip(&chosen) {
                let chosen = *chosen as usize;
                let weights = &self.decoded[chosen * COLS..][..COLS];
                let size: f64 = x.iter().zip(weights).map(|(x, w)| f64::from((x * w).abs())).sum();
                let difference = f64::from(ours[row * ROWS + chosen]) - f64::from(*theirs);
                worst = worst.max(difference.abs() / size.max(f64::from(f32::MIN_POSITIVE)));
            }
        }
        assert!(worst < TOLERANCE, "{}: products differ by {worst:e}", self.name);
    }
}

fn check(name: &'static str, bits: u32, group: u32) {
    let check = Check::new(name, [bits, group]);
    check.decoded_values_are_those_of_mlx();
    check.products_are_those_of_mlx();
}

#[test]
fn agrees_with_mlx() {
    check("affine_b4_g64", 4, 64);
    check("affine_b6_g64", 6, 64);
    check("affine_b8_g64", 8, 64);
    check("affine_b4_g32", 4, 32);
    check("affine_b4_g128", 4, 128);
    check("affine_b4_g64_f16", 4, 64);
    check("affine_b4_g64_f32", 4, 64);
}
