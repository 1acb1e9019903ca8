//! Tensors into groups: the door to all roundings.

use std::{fmt, str::FromStr};

use rayon::prelude::*;

use super::{
    AffineFormat, ErrorSums,
    error::{GROUPS_PER_TASK, Tally},
    floats::{all_fit_inline, narrow_inline},
    lanes::{Range, Rows},
    mlx::{self, Backend},
    search::{self, Grid},
    trials::Schedule,
};
use crate::{
    dtype::Dtype,
    simd::{Lanes, MAX_LANES, Platform, Task},
};

/// A rule for scale, bias and integers. All rules write the same format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Searches each group's scale and bias for the smallest squared error; never worse than
    /// what [`Rounding::MlxCpu`] stores.
    Refined,
    /// What MLX's CPU backend computes, bit for bit: the larger end of the range is exact,
    /// integers are rounded (ties to even) against the scale before it is stored.
    MlxCpu,
    /// What MLX's Metal kernels compute: as the CPU backend, but ties round away from zero and
    /// the range of a group of negative numbers ends at zero.
    MlxMetal,
    /// [`Rounding::Refined`] with error feedback where the second moments of a matrix's inputs are
    /// known ([`super::quantize_with_feedback`]); without them the same as [`Rounding::Refined`].
    Gptq,
}

impl Rounding {
    /// Every rule.
    pub const ALL: [Self; 4] = [Self::Refined, Self::MlxCpu, Self::MlxMetal, Self::Gptq];

    /// The name on the command line and in manifests.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Refined => "refined",
            Self::MlxCpu => "mlx-cpu",
            Self::MlxMetal => "mlx-metal",
            Self::Gptq => "gptq",
        }
    }
}

impl fmt::Display for Rounding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Rounding {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|rounding| rounding.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("unknown rounding {name:?}; known: {known}")
        })
    }
}

/// How a tensor is quantized.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOptions<'a> {
    /// Bits and group size.
    pub format: AffineFormat,
    /// The rule.
    pub rounding: Rounding,
    /// Type of scales and biases.
    pub store: Dtype,
    /// What the squared error of each input column weighs, `[in]`: finite and not negative.
    /// Only [`Rounding::Refined`] heeds it.
    pub importance: Option<&'a [f32]>,
    /// The code that runs; it decides the time and nothing else.
    pub platform: Platform,
}

impl QuantizeOptions<'_> {
    /// All columns alike, on this machine's fastest platform.
    #[must_use]
    pub fn new(format: AffineFormat, rounding: Rounding, store: Dtype) -> Self {
        Self {
            format,
            rounding,
            store,
            importance: None,
            platform: Platform::detect_for_quantizing(),
        }
    }
}

/// A weight that has no place in any group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantizeError {
    /// It is NaN or infinite.
    #[error("element {index} is {value}")]
    NotFinite {
        /// Index of the first such element in the tensor's row-major order.
        index: usize,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// Scale or bias of its group would be infinite.
    #[error("the group at element {index} has a range that {dtype} cannot hold")]
    TooWide {
        /// Index of the group's first element.
        index: usize,
        /// Type of scales and biases.
        dtype: Dtype,
    },
}

impl QuantizeError {
    /// The same error in a tensor of which `elements` came before the part that was quantized.
    #[must_use]
    pub fn after(mut self, elements: usize) -> Self {
        let (Self::NotFinite { index, .. } | Self::TooWide { index, .. }) = &mut self;
        *index += elements;
        self
    }
}

/// Quantizes a tensor whose last dimension is a multiple of the group size.
///
/// `source` holds its elements in row-major order as `dtype`; `packed`, `scales` and `biases`
/// receive what [`super`] describes. Runs on all threads of the current pool; neither their
/// number nor the platform changes a byte. Returns the sums that [`super::error`] would.
///
/// # Panics
/// When lengths do not fit each other, an importance is negative or not finite, or the platform
/// is not available.
pub fn quantize(
    options: &QuantizeOptions<'_>,
    source: (Dtype, &[u8]),
    outputs: (&mut [u8], &mut [u8], &mut [u8]),
) -> Result<ErrorSums, QuantizeError> {
    quantize_after(ErrorSums::default(), options, source, outputs)
}

const fn rule(options: &QuantizeOptions<'_>) -> Rule<'static> {
    match options.rounding {
        Rounding::Refined | Rounding::Gptq => Rule::Refined(Schedule::of(options.format)),
        Rounding::MlxCpu => Rule::Mlx(Backend::Cpu),
        Rounding::MlxMetal => Rule::Mlx(Backend::Metal),
    }
}

/// The same for the next part of a tensor: `before` are the sums of the parts before it. The last
/// bits of the sums are those of one call for all parts if every part but the last has a multiple of
/// [`GROUPS_PER_TASK`] groups.
pub fn quantize_after(
    before: ErrorSums,
    options: &QuantizeOptions<'_>,
    source: (Dtype, &[u8]),
    outputs: (&mut [u8], &mut [u8], &mut [u8]),
) -> Result<ErrorSums, QuantizeError> {
    quantize_by(rule(options), before, options, source, outputs)
}

/// [`Rounding`] with its parameters.
#[derive(Clone, Copy)]
pub(super) enum Rule<'a> {
    Mlx(Backend),
    Refined(Schedule<'a>),
}

pub(super) fn quantize_by(
    rule: Rule<'_>,
    before: ErrorSums,
    options: &QuantizeOptions<'_>,
    (dtype, source): (Dtype, &[u8]),
    (packed, scales, biases): (&mut [u8], &mut [u8], &mut [u8]),
) -> Result<ErrorSums, QuantizeError> {
    let QuantizeOptions { format, store, importance, platform, .. } = *options;
    let group = format.group_size() as usize;
    let group_source = group * dtype.size_bytes();
    let groups = source.len() / group_source;
    assert_eq!(source.len(), groups * group_source, "whole groups");
    assert_eq!(packed.len(), groups * format.group_bytes(), "integers of every group");
    let width = store.size_bytes();
    assert_eq!(
        (scales.len(), biases.len()),
        (groups * width, groups * width),
        "a scale and a bias for every group"
    );
    if let Some(columns) = importance {
        assert!(!columns.is_empty() && columns.len().is_multiple_of(group), "whole groups");
        assert!((groups * group).is_multiple_of(columns.len()), "whole rows");
        assert!(columns.iter().all(|c| c.is_finite() && *c >= 0.0), "importances are weights");
    }
    source
        .par_chunks(GROUPS_PER_TASK * group_source)
        .zip(packed.par_chunks_mut(GROUPS_PER_TASK * format.group_bytes()))
        .zip(
            scales
                .par_chunks_mut(GROUPS_PER_TASK * width)
                .zip(biases.par_chunks_mut(GROUPS_PER_TASK * width)),
        )
        .enumerate()
        .map(|(task, ((source, packed), (scales, biases)))| {
            let first_group = task * GROUPS_PER_TASK;
            let outputs = Outputs { packed, scales, biases };
            let task = Quantize { rule, format, dtype, source, store, importance, first_group };
            task.run_on(platform, outputs)
        })
        // The first bad element in order, so that the message does not depend on timing.
        .collect::<Vec<_>>()
        .into_iter()
        .try_fold(before, |sums, task| Ok(sums.plus(task?)))
}

/// Groups of one task.
#[derive(Clone, Copy)]
struct Quantize<'a> {
    rule: Rule<'a>,
    format: AffineFormat,
    dtype: Dtype,
    source: &'a [u8],
    store: Dtype,
    importance: Option<&'a [f32]>,
    first_group: usize,
}

struct Outputs<'a> {
    packed: &'a mut [u8],
    scales: &'a mut [u8],
    biases: &'a mut [u8],
}

/// Constants make functions that the compiler handles one by one.
struct QuantizeInto<'a, const G: usize, const WEIGHTED: bool>(Quantize<'a>, Outputs<'a>);

impl<const G: usize, const WEIGHTED: bool> Task for QuantizeInto<'_, G, WEIGHTED> {
    type Output = Result<ErrorSums, QuantizeError>;

    #[inline(always)]
    fn run<V: Lanes>(self, proof: V::Proof) -> Self::Output {
        self.0.groups::<V, G, WEIGHTED>(proof, self.1)
    }
}

impl Quantize<'_> {
    fn run_on(self, platform: Platform, outputs: Outputs<'_>) -> Result<ErrorSums, QuantizeError> {
        match (self.format.group_size(), self.importance.is_some()) {
            (32, false) => platform.run(QuantizeInto::<32, false>(self, outputs)),
            (64, false) => platform.run(QuantizeInto::<64, false>(self, outputs)),
            (_, false) => platform.run(QuantizeInto::<128, false>(self, outputs)),
            (32, true) => platform.run(QuantizeInto::<32, true>(self, outputs)),
            (64, true) => platform.run(QuantizeInto::<64, true>(self, outputs)),
            (_, true) => platform.run(QuantizeInto::<128, true>(self, outputs)),
        }
    }

    #[inline(always)]
    fn groups<V: Lanes, const G: usize, const WEIGHTED: bool>(
        self,
        proof: V::Proof,
        outputs: Outputs<'_>,
    ) -> Result<ErrorSums, QuantizeError> {
        let mut rows = Rows::new();
        let mut tally = Tally::new();
        let mut affine = [[0.0; GROUPS_PER_TASK + MAX_LANES]; 2];
        let largest = V::splat(proof, self.format.max_q() as f32);
        let mut buffers = ([largest; G], [largest; G], [largest; G]);
        let (values, q, columns) = (&mut buffers.0, &mut buffers.1, &mut buffers.2);
        let size = self.dtype.size_bytes();
        let batches = self
            .source
            .chunks(V::N * G * size)
            .zip(outputs.packed.chunks_mut(V::N * self.format.group_bytes()));
        for (batch, (source, packed)) in batches.enumerate() {
            let first = batch * V::N;
            rows.load(proof, self.dtype, source, values);
            let range = Range::of(values);
            if range.may_have_flaw()
                && let Some(flaw) = self.first_flaw(first * G, source)
            {
                return Err(flaw);
            }
            let grid = match self.rule {
                Rule::Mlx(backend) => {
                    let mlx = mlx::choose(proof, backend, range, largest);
                    mlx::integers(proof, backend, values, &mlx, largest, q);
                    Grid::stored(proof, self.store, mlx.scale, mlx.bias)
                }
                Rule::Refined(schedule) => {
                    let mlx = mlx::choose(proof, Backend::Cpu, range, largest);
                    let ends = (range, mlx, largest);
                    if WEIGHTED {
                        self.columns(proof, &mut rows, first, columns);
                    }
                    let weights = (&*values, WEIGHTED.then_some(&*columns));
                    let grid = search::refine(proof, weights, ends, self.store, &schedule);
                    search::integers(proof, values, grid, largest, q);
                    grid
                }
            };
            rows.pack(proof, self.format.bits(), q, packed);
            let live = source.len() / (G * size);
            tally.add(proof, (values, range), (q, grid, largest), live);
            grid.scale.store(&mut affine[0][first..]);
            grid.bias.store(&mut affine[1][first..]);
        }
        for (values, out) in affine.iter().zip([outputs.scales, outputs.biases]) {
            let values = &values[..out.len() / self.store.size_bytes()];
            if let Some(at) = first_infinite(values) {
                let index = (self.first_group + at) * G;
                return Err(QuantizeError::TooWide { index, dtype: self.store });
            }
            narrow_inline(self.store, values, out);
        }
        Ok(tally.sums())
    }

    /// Importances of a batch's elements.
    #[inline(always)]
    fn columns<V: Lanes, const G: usize>(
        &self,
        proof: V::Proof,
        rows: &mut Rows,
        first: usize,
        out: &mut [V; G],
    ) {
        let importance = self.importance.expect("asked for only when there is one");
        let groups_per_row = importance.len() / G;
        let group = self.first_group + first;
        rows.load_rows(proof, |i| &importance[(group + i) % groups_per_row * G..][..G], out);
    }

    #[cold]
    fn first_flaw(&self, first: usize, source: &[u8]) -> Option<QuantizeError> {
        let mut values = vec![0.0; source.len() / self.dtype.size_bytes()];
        super::widen(Platform::Portable, self.dtype, source, &mut values);
        let at = values.iter().position(|value| !value.is_finite())?;
        let index = self.first_group * self.format.group_size() as usize + first + at;
        Some(QuantizeError::NotFinite { index, value: values[at].to_string() })
    }
}

fn first_infinite(values: &[f32]) -> Option<usize> {
    if all_fit_inline(Dtype::F32, values) {
        return None;
    }
    values.iter().position(|value| !value.is_finite())
}
