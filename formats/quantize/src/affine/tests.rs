//! The quantizer as a whole.

mod data;
mod equal;
mod feedback;
mod mlx;
mod quality;
mod tune;

use super::{AffineFormat, ErrorSums, QuantizeError, QuantizeOptions, quantize, unpack, widen};
use crate::{dtype::Dtype, simd::Platform};

const FLOATS: [Dtype; 3] = [Dtype::BF16, Dtype::F16, Dtype::F32];
const BITS: [u32; 6] = [2, 3, 4, 5, 6, 8];
const GROUP_SIZES: [u32; 3] = [32, 64, 128];

fn formats() -> impl Iterator<Item = AffineFormat> {
    GROUP_SIZES
        .into_iter()
        .flat_map(|size| BITS.map(|bits| AffineFormat::new(bits, size).expect("a known format")))
}

/// What [`quantize`] writes.
#[derive(Clone, PartialEq)]
struct Outputs {
    packed: Vec<u8>,
    scales: Vec<u8>,
    biases: Vec<u8>,
}

impl Outputs {
    fn new(format: AffineFormat, store: Dtype, weights: usize) -> Self {
        let groups = weights / format.group_size() as usize;
        let affine = vec![0; groups * store.size_bytes()];
        let packed = vec![0; groups * format.group_bytes()];
        Self { packed, scales: affine.clone(), biases: affine }
    }

    fn parts(&mut self) -> (&mut [u8], &mut [u8], &mut [u8]) {
        (&mut self.packed, &mut self.scales, &mut self.biases)
    }

    fn group(&self, format: AffineFormat, store: Dtype, group: usize) -> Self {
        let (size, width) = (format.group_bytes(), store.size_bytes());
        Self {
            packed: self.packed[group * size..][..size].to_vec(),
            scales: self.scales[group * width..][..width].to_vec(),
            biases: self.biases[group * width..][..width].to_vec(),
        }
    }

    /// Integers, scale and bias of every group.
    fn groups(&self, format: AffineFormat, store: Dtype) -> Vec<(Vec<u8>, f32, f32)> {
        let count = self.scales.len() / store.size_bytes();
        let mut affine = [vec![0.0; count], vec![0.0; count]];
        widen(Platform::Portable, store, &self.scales, &mut affine[0]);
        widen(Platform::Portable, store, &self.biases, &mut affine[1]);
        let packed = self.packed.chunks_exact(format.group_bytes());
        packed
            .zip(affine[0].iter().zip(&affine[1]))
            .map(|(packed, (scale, bias))| {
                let mut q = vec![0; format.group_size() as usize];
                unpack(format, packed, &mut q);
                (q, *scale, *bias)
            })
            .collect()
    }

    /// Squared error of every group in f64, decoded from the bytes alone.
    fn errors(&self, options: &QuantizeOptions<'_>, (dtype, source): (Dtype, &[u8])) -> Vec<f64> {
        let group = options.format.group_size() as usize;
        let mut values = vec![0.0; source.len() / dtype.size_bytes()];
        widen(Platform::Portable, dtype, source, &mut values);
        let weight = |index: usize| {
            options.importance.map_or(1.0, |columns| f64::from(columns[index % columns.len()]))
        };
        let groups = self.groups(options.format, options.store).into_iter().enumerate();
        groups
            .map(|(index, (q, scale, bias))| {
                let elements = q.iter().enumerate().map(|(k, q)| {
                    let stored = f64::from(scale) * f64::from(*q) + f64::from(bias);
                    let error = f64::from(values[index * group + k]) - stored;
                    weight(index * group + k) * error * error
                });
                elements.sum()
            })
            .collect()
    }
}

fn run(
    options: &QuantizeOptions<'_>,
    (dtype, source): (Dtype, &[u8]),
) -> Result<(Outputs, ErrorSums), QuantizeError> {
    let mut out = Outputs::new(options.format, options.store, source.len() / dtype.size_bytes());
    let sums = quantize(options, (dtype, source), out.parts())?;
    Ok((out, sums))
}
