//! Against what MLX wrote, and what it cannot.

use std::path::Path;

use safetensors::SafeTensors;

use super::*;
use crate::{
    affine::{CastError, ErrorSums, GROUPS_PER_TASK, narrow},
    dtype::Dtype,
    simd::Platform,
};

/// Packed values, scales, and sums of errors.
type Written = (Vec<u8>, Vec<u8>, ErrorSums);

fn write(
    format: FloatFormat,
    source: Source,
    (dtype, weights): (Dtype, &[u8]),
) -> Result<Written, CastError> {
    let groups = weights.len() / dtype.size_bytes() / format.group_size() as usize;
    let (mut packed, mut scales) = (vec![0; groups * format.group_bytes()], vec![0; groups]);
    let out = (&mut packed[..], &mut scales[..]);
    let sums = quantize_after(ErrorSums::default(), (format, source), (dtype, weights), out)?;
    Ok((packed, scales, sums))
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn read(format: FloatFormat, packed: &[u8], scales: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; scales.len() * format.group_size() as usize];
    dequantize(format, packed, scales, &mut out);
    out
}

/// The tensors of `vectors.safetensors`, which `make.py` beside it has written.
struct Vectors(Vec<u8>);

impl Vectors {
    fn open() -> Self {
        let path = "../../tests/data/float_groups/vectors.safetensors";
        Self(std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap())
    }

    fn tensor(&self, name: &str) -> &[u8] {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}")).data()
    }
}

#[test]
fn every_byte_is_the_one_that_mlx_writes() {
    let vectors = Vectors::open();
    let types = [("bf16", Dtype::BF16), ("f16", Dtype::F16), ("f32", Dtype::F32)];
    for ((name, dtype), format) in types.iter().flat_map(|of| FloatFormat::ALL.map(|it| (of, it))) {
        let weights = (*dtype, vectors.tensor(name));
        let (packed, scales, _) = write(format, Source::Floats, weights).unwrap();
        let [theirs, their_scales] =
            ["weight", "scales"].map(|part| vectors.tensor(&format!("{name}.{format}.{part}")));
        assert!(packed.len() > 3_000, "{name} {format}: {} bytes", packed.len());
        assert_eq!(scales, their_scales, "{name} {format}: scales");
        assert_eq!(packed, theirs, "{name} {format}");
    }
}

#[test]
fn every_number_reads_as_mlx_reads_it() {
    let vectors = Vectors::open();
    for format in FloatFormat::ALL {
        let of = |part: &str| vectors.tensor(&format!("f32.{format}.{part}"));
        // Bit by bit: zeros have signs.
        assert_eq!(bytes(&read(format, of("weight"), of("scales"))), of("floats"), "{format}");
    }
}

#[test]
fn scales_below_the_least_power_are_that_power() {
    // MLX's wrap around to 2¹²⁴ and beyond.
    let weights = bytes(&[[4e-39_f32, -4e-39].as_slice(), &[0.0; 30]].concat());
    for format in [FloatFormat::Mxfp4, FloatFormat::Mxfp8] {
        let (packed, scales, _) = write(format, Source::Floats, (Dtype::F32, &weights)).unwrap();
        assert_eq!(scales, [0], "{format}");
        let found = read(format, &packed, &scales);
        // The nearest value of E2M1 is 2⁻¹²⁸.
        assert!((found[0] - 4e-39).abs() < 2e-39 && found[1] == -found[0], "{found:?}");
    }
}

#[test]
fn what_is_no_finite_number_is_refused_by_its_index() {
    for (format, value) in
        FloatFormat::ALL.into_iter().flat_map(|it| [f32::INFINITY, f32::NAN].map(|bad| (it, bad)))
    {
        let count = (GROUPS_PER_TASK + 3) * format.group_size() as usize;
        let mut weights = vec![1.0; count];
        weights[count - 2] = value;
        let error = write(format, Source::Floats, (Dtype::F32, &bytes(&weights))).unwrap_err();
        let expected = format!("element {} is {value}", count - 2);
        assert_eq!(error.to_string(), expected, "{format}");
    }
}

#[test]
fn what_a_format_holds_is_carried_over_exactly() {
    let mut state = 1_u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    for format in FloatFormat::ALL {
        let groups = 3 * GROUPS_PER_TASK + 5;
        let scales: Vec<u8> = (0..groups)
            .map(
                |_| if format == FloatFormat::Nvfp4 { random() % 127 } else { 80 + random() % 100 },
            )
            .collect();
        let packed: Vec<u8> = (0..groups * format.group_bytes())
            // NaN is no weight.
            .map(|_| random())
            .map(|byte| if format.bits() == 8 && byte & 0x7f == 0x7f { byte ^ 1 } else { byte })
            .collect();
        let weights = read(format, &packed, &scales);
        let written = write(format, Source::Decoded, (Dtype::F32, &bytes(&weights))).unwrap();
        assert_eq!(read(format, &written.0, &written.1), weights, "{format}");
        assert_eq!(written.2.errors, 0.0, "{format}");
    }
}

#[test]
fn pieces_of_whole_tasks_give_the_sums_of_one() {
    let values: Vec<f32> = (0..4 * GROUPS_PER_TASK * 32).map(|at| (at as f32).sin()).collect();
    let mut weights = vec![0; 2 * values.len()];
    narrow(Platform::Portable, Dtype::BF16, &values, &mut weights);
    for format in FloatFormat::ALL {
        let whole = write(format, Source::Floats, (Dtype::BF16, &weights)).unwrap();
        let piece = GROUPS_PER_TASK * format.group_size() as usize * 2;
        let (mut packed, mut scales, mut sums) = (Vec::new(), Vec::new(), ErrorSums::default());
        for weights in weights.chunks(piece) {
            let mut part =
                (vec![0; GROUPS_PER_TASK * format.group_bytes()], vec![0; GROUPS_PER_TASK]);
            let out = (&mut part.0[..], &mut part.1[..]);
            let of = (format, Source::Floats);
            sums = quantize_after(sums, of, (Dtype::BF16, weights), out).unwrap();
            packed.extend(part.0);
            scales.extend(part.1);
        }
        assert_eq!((packed, scales, sums), whole, "{format}");
        assert!(sums.relative_rmse() > 0.01 && sums.relative_rmse() < 0.15, "{format} {sums:?}");
    }
}
