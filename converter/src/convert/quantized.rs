//! One tensor as it will be stored, uncut.

use rayon::prelude::*;
use shardpack_formats::{
    AffineFormat, Dtype, Platform,
    affine::{self, QuantizeOptions},
};
use shardpack_manifests::manifest::MatrixFormat;

use super::ConvertError;
use crate::{
    plan::{Plan, Step},
    report::TensorReport,
    source::Source,
};

/// The bytes of a tensor's parts and what became of its weights.
pub(super) struct Stored {
    pub(super) parts: Vec<Vec<u8>>,
    pub(super) report: TensorReport,
}

/// Elements that one task converts.
const ELEMENTS_PER_TASK: usize = 64 << 10;

/// Reads a tensor from the source and brings it into its stored form.
pub(super) fn store(source: &Source, plan: &Plan, step: &Step) -> Result<Stored, ConvertError> {
    let (info, bytes) =
        source.tensor(&step.tensor.sources[0]).expect("the plan names tensors of this source");
    let dtype = plan.quantization.dtype;
    let weight_error = |problem: String| ConvertError::Weight {
        tensor: info.name.clone(),
        file: source.file_of(&info.name).unwrap_or_default().to_owned(),
        problem,
    };
    let cast = cast(info.dtype, bytes, dtype).map_err(weight_error)?;
    let format = match step.format {
        MatrixFormat::Plain => {
            return Ok(Stored { parts: vec![cast], report: TensorReport::plain() });
        }
        MatrixFormat::Affine { bits, group_size } => {
            AffineFormat::new(bits, group_size).expect("the plan chooses formats that exist")
        }
    };
    let sizes: Vec<usize> = step.parts.iter().map(|part| part.size_bytes() as usize).collect();
    let (mut packed, mut scales, mut biases) =
        (vec![0; sizes[0]], vec![0; sizes[1]], vec![0; sizes[2]]);
    let options = QuantizeOptions::new(format, plan.rounding, dtype);
    let outputs = (&mut packed[..], &mut scales[..], &mut biases[..]);
    let sums = affine::quantize(&options, (dtype, &cast), outputs)
        .map_err(|error| weight_error(error.to_string()))?;
    let report = TensorReport::affine(step.format, &sums, step.tensor.shape.iter().product());
    Ok(Stored { parts: vec![packed, scales, biases], report })
}

/// The same numbers as `to`, rounded once. Says which element is not finite or too large.
fn cast(from: Dtype, bytes: &[u8], to: Dtype) -> Result<Vec<u8>, String> {
    let (from_size, to_size) = (from.size_bytes(), to.size_bytes());
    let mut out = vec![0; bytes.len() / from_size * to_size];
    let platform = Platform::detect();
    bytes
        .par_chunks(ELEMENTS_PER_TASK * from_size)
        .zip(out.par_chunks_mut(ELEMENTS_PER_TASK * to_size))
        .enumerate()
        .map(|(task, (bytes, out))| {
            let cast = affine::cast(platform, (from, bytes), (to, out));
            cast.map_err(|error| error.after(task * ELEMENTS_PER_TASK).to_string())
        })
        // The first bad element in order, so that the message does not depend on timing.
        .collect::<Vec<_>>()
        .into_iter()
        .collect::<Result<(), String>>()?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn casting_rounds_once_and_names_what_does_not_fit() {
        let bytes = |values: &[f32]| {
            values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()
        };
        assert_eq!(
            cast(Dtype::F32, &bytes(&[1.0, -2.5]), Dtype::BF16).unwrap(),
            [0x80, 0x3f, 0x20, 0xc0]
        );
        assert_eq!(cast(Dtype::BF16, &[0x80, 0x3f], Dtype::F32).unwrap(), bytes(&[1.0]));
        let long: Vec<f32> =
            (0..70_000).map(|i| if i == 69_999 { f32::NAN } else { 0.0 }).collect();
        assert_eq!(
            cast(Dtype::F32, &bytes(&long), Dtype::BF16).unwrap_err(),
            "element 69999 is NaN"
        );
        assert_eq!(
            cast(Dtype::F32, &bytes(&[1e6]), Dtype::F16).unwrap_err(),
            "element 0 is 1000000, which F16 cannot hold"
        );
    }
}
