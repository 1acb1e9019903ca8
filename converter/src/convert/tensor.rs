//! Converts one tensor from the source into the packages' files, in blocks of rows.

use std::{
    ops::Range,
    sync::Arc,
    sync::atomic::{AtomicU64, Ordering},
};

use shardpack_containers::stored::Repacked;
use shardpack_manifests::{Digest, TensorShard, digest::PIECE_BYTES, manifest::MatrixFormat};
use shardpack_quantize::{
    AffineFormat, Dtype, FloatFormat, Platform,
    affine::{self, CastError, ErrorSums, GROUPS_PER_TASK, Hessian, OutputError, QuantizeOptions},
    float_groups::{self, Source as FloatSource},
};

use super::{ConvertError, Finished, output::Output, read::Rows};
use crate::{
    plan::{BLOCK_BYTES, Plan, StoredTensor, TensorConversion, module_name},
    report::{Carried, TensorReport},
    shard,
    source::{RowBuffers, Source},
};

/// Buffers that a thread keeps from block to block.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) source: Vec<u8>,
    cast: Vec<u8>,
    pub(super) rows: RowBuffers,
    parts: [Vec<u8>; 3],
    shard: Vec<u8>,
    /// Source bytes that are read only to be hashed.
    pub(super) hashed: Vec<u8>,
}

/// What all threads need to convert tensors.
pub(super) struct Converter<'a> {
    pub(super) source: &'a Source,
    pub(super) plan: &'a Plan,
    pub(super) output: &'a Output,
}

/// State of a tensor that is being converted.
struct Progress {
    identities: Vec<blake3::Hasher>,
    shards: Vec<Vec<Option<RankShard>>>,
    sums: Sums,
}

/// Sums over the blocks of a tensor.
#[derive(Clone, Copy, Default)]
struct Sums {
    weights: ErrorSums,
    /// Of rows that were rounded with error feedback.
    outputs: Option<OutputError>,
}

impl Sums {
    fn plus(self, other: Self) -> Self {
        let outputs = match (self.outputs, other.outputs) {
            (Some(a), Some(b)) => Some(a.plus(b)),
            (a, b) => a.or(b),
        };
        Self { weights: self.weights.plus(other.weights), outputs }
    }
}

/// Rows of a block that are quantized alike.
struct RunOfRows<'a> {
    within: [u64; 2],
    importance: Option<&'a [f32]>,
    hessian: Option<Arc<Hessian>>,
}

/// Consecutive innermost rows of one part.
struct Block<'a> {
    first: u64,
    bytes: &'a [u8],
}

/// What has been written of one rank's shard.
struct RankShard {
    hasher: blake3::Hasher,
    written: u64,
}

impl Converter<'_> {
    /// Converts the tensor of step `index`. `done` is told of source bytes as they are written.
    pub(super) fn convert(
        &self,
        index: usize,
        scratch: &mut Scratch,
        done: &dyn Fn(u64),
    ) -> Result<Finished, ConvertError> {
        let reader = Rows::new(self.source, &self.plan.steps[index].tensor);
        let told = AtomicU64::new(0);
        // A second attempt comes by bytes that were told of before.
        let done = |upto: u64| done(upto - told.fetch_max(upto, Ordering::Relaxed).min(upto));
        if let MatrixFormat::Affine { bits, group_size } = self.plan.steps[index].format {
            let format = affine_format(bits, group_size);
            if reader.may_repack(format)
                && let Some(finished) =
                    self.attempt(index, &reader, Some(format), scratch, &done)?
            {
                return Ok(finished);
            }
        }
        let finished = self.attempt(index, &reader, None, scratch, &done)?;
        Ok(finished.expect("only repacking can fail"))
    }

    /// Converts a tensor from its first row to its last, over what may have been written of it
    /// before. With `repack` its integers are carried over as they are; `None` if that would lose
    /// something.
    fn attempt(
        &self,
        index: usize,
        reader: &Rows<'_>,
        repack: Option<AffineFormat>,
        scratch: &mut Scratch,
        done: &dyn Fn(u64),
    ) -> Result<Option<Finished>, ConvertError> {
        let step = &self.plan.steps[index];
        let rows = step.tensor.rows();
        let block_rows = reader.per_block(BLOCK_BYTES);
        let mut progress = self.begin(index, step);
        let mut row = 0;
        while row < rows {
            let count = block_rows.min(rows - row);
            if let Some(format) = repack {
                let Scratch { rows: buffers, parts, .. } = &mut *scratch;
                let store = self.plan.quantization.dtype;
                let repacked = reader.repack(row..row + count, (format, store), parts, buffers)?;
                if repacked == Repacked::Not {
                    return Ok(None);
                }
            } else {
                let sums = self.fill(step, reader, row..row + count, scratch)?;
                progress.sums = progress.sums.plus(sums);
            }
            self.put_learned(step, row..row + count, &mut scratch.parts)?;
            for (part, stored) in step.parts.iter().enumerate() {
                let bytes = &scratch.parts[part];
                progress.identities[part].update(bytes);
                let block = Block { first: row, bytes };
                self.distribute((index, part), stored, &block, &mut scratch.shard, &mut progress)?;
            }
            row += count;
            done(row * reader.row_bytes());
        }
        let mut finished = finish(step, &progress, repack.is_some());
        if let Some(learned) = &self.plan.learned {
            learned.check(module_name(&step.tensor.name), &finished.identities)?;
        }
        finished.report.source = reader.format();
        finished.report.carried = match (&finished.report.source, step.format, repack) {
            (None, ..) => None,
            (Some(_), MatrixFormat::Plain, _) => Some(Carried::Dequantized),
            (Some(_), _, Some(_)) => Some(Carried::Repacked),
            (Some(_), MatrixFormat::Float(_), _) if progress.sums.weights.errors == 0.0 => {
                Some(Carried::Repacked)
            }
            (Some(_), _, None) => Some(Carried::Requantized),
        };
        Ok(Some(finished))
    }

    /// Puts learned scales and biases in the place of a block's own.
    fn put_learned(
        &self,
        step: &TensorConversion,
        rows: Range<u64>,
        [_, scales, biases]: &mut [Vec<u8>; 3],
    ) -> Result<(), ConvertError> {
        let (Some(learned), MatrixFormat::Affine { group_size, .. }) =
            (&self.plan.learned, step.format)
        else {
            return Ok(());
        };
        let per_row = step.tensor.columns() / u64::from(group_size);
        let groups = (rows.start * per_row..rows.end * per_row, self.plan.quantization.dtype);
        learned.replace(module_name(&step.tensor.name), groups, [scales, biases])?;
        Ok(())
    }

    fn begin(&self, index: usize, step: &TensorConversion) -> Progress {
        let shard =
            |held: bool| held.then(|| RankShard { hasher: blake3::Hasher::new(), written: 0 });
        let shards = |part: usize| {
            self.output.regions(index, part).iter().map(|region| shard(region.is_some())).collect()
        };
        Progress {
            identities: step.parts.iter().map(|_| blake3::Hasher::new()).collect(),
            shards: (0..step.parts.len()).map(shards).collect(),
            sums: Sums::default(),
        }
    }

    /// Brings a block of rows into its stored form in `scratch.parts`, piece by piece: what was
    /// just read is still in the core's cache when it is quantized.
    fn fill(
        &self,
        step: &TensorConversion,
        reader: &Rows<'_>,
        block: Range<u64>,
        scratch: &mut Scratch,
    ) -> Result<Sums, ConvertError> {
        let elements = ((block.end - block.start) * step.tensor.columns()) as usize;
        let dtype = self.plan.quantization.dtype;
        match step.format {
            MatrixFormat::Plain => {
                scratch.parts[0].resize(elements * step.parts[0].dtype.size_bytes(), 0);
            }
            MatrixFormat::Affine { bits, group_size } => {
                let format = affine_format(bits, group_size);
                let groups = elements / group_size as usize;
                scratch.parts[0].resize(groups * format.group_bytes(), 0);
                scratch.parts[1].resize(groups * dtype.size_bytes(), 0);
                scratch.parts[2].resize(groups * dtype.size_bytes(), 0);
            }
            MatrixFormat::Float(format) => {
                let groups = elements / format.group_size() as usize;
                scratch.parts[0].resize(groups * format.group_bytes(), 0);
                scratch.parts[1].resize(groups, 0);
            }
        }
        // What is not read in order may be costly to read in smaller pieces.
        let in_order = scratch.rows.follower.is_some();
        let per_piece = in_order.then(|| self.rows_per_piece(step, reader)).flatten();
        let per_piece = per_piece.unwrap_or(block.end - block.start);
        let mut sums = Sums::default();
        let mut row = block.start;
        while row < block.end {
            let end = (row + per_piece).min(block.end);
            let Scratch { source, cast, rows: buffers, .. } = &mut *scratch;
            reader.read(row..end, source, cast, buffers)?;
            sums = self.store(step, reader, (&block, row), sums, scratch)?;
            row = end;
        }
        Ok(sums)
    }

    /// Rows that are quantized at a time without a trace of it in the sums of their block; `None`
    /// for whole blocks.
    fn rows_per_piece(&self, step: &TensorConversion, reader: &Rows<'_>) -> Option<u64> {
        let importance = self.plan.importance.as_ref();
        if importance.is_some_and(|all| all.columns.contains_key(module_name(&step.tensor.name))) {
            return None;
        }
        let moments = self.plan.moments.as_ref();
        if moments.is_some_and(|all| all.has(module_name(&step.tensor.name))) {
            return None;
        }
        let unit = match step.format.groups() {
            None => 1,
            Some((_, group_size)) => {
                // The fewest rows that are whole tasks; the size of a task is a power of two.
                let groups = step.tensor.columns() / u64::from(group_size);
                let task = GROUPS_PER_TASK as u64;
                task >> groups.trailing_zeros().min(task.trailing_zeros())
            }
        };
        let units = PIECE_BYTES / (unit * reader.row_bytes()).max(1);
        (units > 0).then_some(units * unit)
    }

    /// Quantizes or converts some rows of a block, from `row` on, from `scratch.source` into
    /// `scratch.parts`. Continues the error sums of the rows before them.
    fn store(
        &self,
        step: &TensorConversion,
        reader: &Rows<'_>,
        (block, row): (&Range<u64>, u64),
        mut sums: Sums,
        scratch: &mut Scratch,
    ) -> Result<Sums, ConvertError> {
        let dtype = self.plan.quantization.dtype;
        let platform = Platform::detect_for_quantizing();
        let Scratch { source, cast, parts, .. } = scratch;
        let from = step.tensor.dtype;
        let first = row * step.tensor.columns();
        let before = ((row - block.start) * step.tensor.columns()) as usize;
        let error = |problem: String| ConvertError::Weight {
            tensor: reader.name_of(row).to_owned(),
            file: self.source.file_of(reader.name_of(row)).unwrap_or_default().to_owned(),
            problem,
        };
        let elements = source.len() / from.size_bytes();
        let format = match step.format {
            MatrixFormat::Plain => {
                let at = (before, first as usize);
                as_floats(step, (from, source), at, &mut parts[0]).map_err(error)?;
                return Ok(sums);
            }
            MatrixFormat::Affine { bits, group_size } => affine_format(bits, group_size),
            MatrixFormat::Float(format) => {
                let of =
                    if reader.is_decoded() { FloatSource::Decoded } else { FloatSource::Floats };
                let weights = (from, &source[..]);
                let weights = in_float_groups(sums.weights, (format, of), weights, before, parts)
                    .map_err(|bad| error(bad.after(first as usize).to_string()))?;
                return Ok(Sums { weights, ..sums });
            }
        };
        // Weights that were just decoded are rounded once, into their groups.
        let (dtype_in, weights) = if from == dtype || reader.is_decoded() {
            (from, &*source)
        } else {
            cast.resize(elements * dtype.size_bytes(), 0);
            let result = affine::cast(platform, (from, source), (dtype, cast));
            result.map_err(|bad| error(bad.after(first as usize).to_string()))?;
            (dtype, &*cast)
        };
        let [packed, scales, biases] = parts;
        // Each matrix of a stack has figures of its own: its rows are quantized by themselves.
        let count = elements as u64 / step.tensor.columns();
        for rows in self.runs(step, format, row, count)? {
            let mut options = QuantizeOptions::new(format, self.plan.rounding, dtype);
            options.importance = rows.importance;
            let [from, to] = rows.within.map(|row| row as usize * step.tensor.columns() as usize);
            let (size, size_in) = (dtype.size_bytes(), dtype_in.size_bytes());
            let [first_group, last_group] =
                [from, to].map(|at| (before + at) / format.group_size() as usize);
            let scaled = first_group * size..last_group * size;
            let out = (
                &mut packed[first_group * format.group_bytes()..last_group * format.group_bytes()],
                &mut scales[scaled.clone()],
                &mut biases[scaled],
            );
            let weights = &weights[from * size_in..to * size_in];
            let weights = (dtype_in, weights);
            let quantized = if let Some(hessian) = &rows.hessian {
                affine::quantize_with_feedback(&options, hessian, weights, out)
                    .map(|(weights, outputs)| sums.plus(Sums { weights, outputs: Some(outputs) }))
            } else if rows.importance.is_some() {
                affine::quantize(&options, weights, out)
                    .map(|weights| sums.plus(Sums { weights, outputs: None }))
            } else {
                affine::quantize_after(sums.weights, &options, weights, out)
                    .map(|weights| Sums { weights, ..sums })
            };
            sums = quantized.map_err(|bad| error(bad.after(first as usize + from).to_string()))?;
        }
        Ok(sums)
    }

    /// The rows of a block in runs whose inputs are weighed alike: all of them, or those of each
    /// expert.
    fn runs(
        &self,
        step: &TensorConversion,
        format: AffineFormat,
        row: u64,
        rows: u64,
    ) -> Result<Vec<RunOfRows<'_>>, ConvertError> {
        let module = module_name(&step.tensor.name);
        let columns = self.plan.importance.as_ref().and_then(|all| all.columns.get(module));
        let moments = self.plan.moments.as_ref();
        let width = step.tensor.columns() as usize;
        let matrices = match (moments.and_then(|all| all.matrices(module)), columns) {
            (Some(matrices), _) => matrices,
            (None, Some(columns)) => (columns.len() / width).max(1) as u64,
            (None, None) => 1,
        };
        let rows_each = step.tensor.rows() / matrices;
        let mut runs = Vec::new();
        let mut at = row;
        while at < row + rows {
            let matrix = at / rows_each;
            let end = ((matrix + 1) * rows_each).min(row + rows);
            let importance = columns.map(|columns| &columns[matrix as usize * width..][..width]);
            let group = format.group_size() as usize;
            let hessian = match moments {
                Some(all) => all.factor(module, matrix, group)?,
                None => None,
            };
            runs.push(RunOfRows { within: [at - row, end - row], importance, hessian });
            at = end;
        }
        Ok(runs)
    }

    /// Writes a block of rows of one part to every rank that holds some of it.
    fn distribute(
        &self,
        (index, part): (usize, usize),
        stored: &StoredTensor,
        block: &Block<'_>,
        gathered: &mut Vec<u8>,
        progress: &mut Progress,
    ) -> Result<(), ConvertError> {
        let regions = self.output.regions(index, part).iter().zip(&mut progress.shards[part]);
        for (region, held) in regions {
            let (Some(region), Some(held)) = (region, held) else { continue };
            let mine: &[u8] = match &region.shard {
                TensorShard::Replicated | TensorShard::Once => block.bytes,
                TensorShard::Range { dim, start, end, .. } => {
                    let row = stored.inner_row_bytes() as usize;
                    shard::rows(
                        &shard::RowBlock { bytes: block.bytes, first: block.first, row_bytes: row },
                        (&stored.shape, stored.dtype.size_bytes()),
                        (*dim as usize, *start..*end),
                        gathered,
                    );
                    gathered
                }
            };
            if !mine.is_empty() {
                // A whole part has the identity's digest; it is not hashed twice.
                if matches!(region.shard, TensorShard::Range { .. }) {
                    held.hasher.update(mine);
                }
                region.file.write(mine, region.offset + held.written)?;
                held.written += mine.len() as u64;
            }
        }
        Ok(())
    }
}

/// A number that is not what its table has.
struct OutOfRange {
    index: usize,
    value: f32,
    below: u32,
}

impl OutOfRange {
    /// The message; `elements` elements come before the checked block.
    fn message_after(&self, elements: usize) -> String {
        let (at, Self { value, below, .. }) = (self.index + elements, self);
        format!("element {at} is {value}, expected a whole number from 0 to {}", below - 1)
    }
}

/// The first of little-endian F32 values that is not whole or not from 0 on below a bound.
fn find_out_of_range(values_le: &[u8], below: u32) -> Option<OutOfRange> {
    let values =
        values_le.chunks_exact(4).map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]]));
    let is_right = |value: f32| value.fract() == 0.0 && (0.0..below as f32).contains(&value);
    let found = values.enumerate().find(|(_, value)| !is_right(*value));
    found.map(|(index, value)| OutOfRange { index, value, below })
}

/// Converts weights behind the `before` ones of their block and the `first` ones of their tensor.
fn as_floats(
    step: &TensorConversion,
    (from, source): (Dtype, &[u8]),
    (before, first): (usize, usize),
    part: &mut [u8],
) -> Result<(), String> {
    let dtype = step.parts[0].dtype;
    let elements = source.len() / from.size_bytes();
    let [from_byte, to_byte] = [before, before + elements].map(|at| at * dtype.size_bytes());
    let out = &mut part[from_byte..to_byte];
    affine::cast(Platform::detect_for_quantizing(), (from, source), (dtype, out))
        .map_err(|bad| bad.after(first).to_string())?;
    match step.tensor.below.and_then(|below| find_out_of_range(out, below)) {
        Some(bad) => Err(bad.message_after(first)),
        None => Ok(()),
    }
}

/// Quantizes weights, in their own type as MLX does, behind the `before` ones of their block.
fn in_float_groups(
    sums: ErrorSums,
    (format, of): (FloatFormat, FloatSource),
    (dtype, weights): (Dtype, &[u8]),
    before: usize,
    [packed, scales, _]: &mut [Vec<u8>; 3],
) -> Result<ErrorSums, CastError> {
    let group = format.group_size() as usize;
    let groups = before / group..(before + weights.len() / dtype.size_bytes()) / group;
    let bytes = groups.start * format.group_bytes()..groups.end * format.group_bytes();
    let out = (&mut packed[bytes], &mut scales[groups]);
    float_groups::quantize_after(sums, (format, of), (dtype, weights), out)
}

fn affine_format(bits: u32, group_size: u32) -> AffineFormat {
    AffineFormat::new(bits, group_size).expect("the plan chooses formats that exist")
}

fn finish(step: &TensorConversion, progress: &Progress, repacked: bool) -> Finished {
    let digest = |hasher: &blake3::Hasher| Digest(*hasher.finalize().as_bytes());
    let identities: Vec<Digest> = progress.identities.iter().map(digest).collect();
    let shards = progress
        .shards
        .iter()
        .zip(&step.parts)
        .zip(&identities)
        .map(|((shards, part), identity)| {
            let whole = !part.destination.is_sharded();
            let digest_of = |held: &RankShard| if whole { *identity } else { digest(&held.hasher) };
            shards.iter().map(|held| held.as_ref().map(digest_of)).collect()
        })
        .collect();
    let report = match step.format {
        MatrixFormat::Plain => TensorReport::plain(),
        format if repacked => TensorReport::exact(format),
        format @ (MatrixFormat::Affine { .. } | MatrixFormat::Float(_)) => {
            let elements = step.tensor.shape.iter().product();
            TensorReport {
                output_error: progress.sums.outputs.map(|error| error.stored),
                output_error_refined: progress.sums.outputs.map(|error| error.refined),
                ..TensorReport::quantized(format, &progress.sums.weights, elements)
            }
        }
    };
    Finished { identities, shards, report }
}
