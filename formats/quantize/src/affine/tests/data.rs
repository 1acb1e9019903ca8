//! Seeded weights, ordinary and awkward.

use crate::{affine::narrow, dtype::Dtype, simd::Platform};

/// The generator called `SplitMix64`.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between 0 and 1, both excluded.
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    pub(super) fn normal(&mut self) -> f64 {
        let angle = std::f64::consts::TAU * self.uniform();
        (-2.0 * libm::log(self.uniform())).sqrt() * libm::cos(angle)
    }

    fn laplace(&mut self) -> f64 {
        let magnitude = -libm::log(self.uniform());
        if self.next() & 1 == 0 { magnitude } else { -magnitude }
    }

    fn student_t4(&mut self) -> f64 {
        let squares: f64 = (0..4).map(|_| self.normal().powi(2)).sum();
        self.normal() / (squares / 4.0).sqrt()
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Gaussian,
    Laplace,
    StudentT4,
    /// A quarter of the weights are zero.
    Sparse,
}

impl Kind {
    pub(super) const DENSE: [Self; 3] = [Self::Gaussian, Self::Laplace, Self::StudentT4];
}

/// Weights of a spread that models have.
pub(super) fn sample(kind: Kind, count: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng(seed);
    let draw = |_| {
        let x = match kind {
            Kind::Laplace => rng.laplace(),
            Kind::StudentT4 => rng.student_t4(),
            Kind::Sparse if rng.next().is_multiple_of(4) => 0.0,
            Kind::Gaussian | Kind::Sparse => rng.normal(),
        };
        (x * 0.02) as f32
    };
    (0..count).map(draw).collect()
}

/// Groups of all kinds that break quantizers: zeros of both signs, constants, one sign only, a
/// bias far larger than the range, subnormal, huge, outliers, exact grids, two values.
pub(super) fn awkward(groups: usize, group: usize, dtype: Dtype, seed: u64) -> Vec<f32> {
    let mut rng = Rng(seed);
    let huge = if dtype == Dtype::F16 { 1e4 } else { 1e36 };
    let mut values = Vec::with_capacity(groups * group);
    for index in 0..groups {
        let exponent = if dtype == Dtype::F16 { rng.next() % 8 } else { rng.next() % 50 };
        let scale = 10_f64.powi(if dtype == Dtype::F16 { -5 } else { -30 } + exponent as i32);
        for k in 0..group {
            let x = rng.normal();
            let value = match index % 18 {
                0 => 0.0,
                1 => -0.0,
                2 => [0.0, -0.0][k % 2],
                3 => 0.37 * scale,
                4 => 1.0 + x.abs() * 1e-3,
                5 => -1.0 - x.abs() * 1e-2,
                6 => x * scale,
                7 if k == 17 => 3e4,
                8 if k % 2 == 0 => 0.0,
                9 => x * if dtype == Dtype::F16 { 1e-6 } else { 1e-39 },
                10 => k as f64 - 31.5,
                11 => (k % 2) as f64 * 2.0 - 1.0,
                12 => x * huge,
                13 if k != 5 => 0.0,
                14 => -x.abs() * 1e-7,
                15 => 100.0 + x * 1e-2,
                _ => x * 0.02,
            };
            values.push(value as f32);
        }
    }
    values
}

/// The values' bytes as `dtype`.
pub(super) fn bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    narrow(Platform::Portable, dtype, values, &mut bytes);
    bytes
}

/// Column importances with a wide spread (log-normal), some of them zero.
pub(super) fn importance(columns: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng(seed);
    let draw = |column| if column % 50 == 3 { 0.0 } else { libm::exp(rng.normal()) as f32 };
    (0..columns).map(draw).collect()
}
