//! One tensor from the source into the packages' files, in blocks of rows.

use shardpack_formats::{
    AffineFormat, Platform,
    affine::{self, ErrorSums, QuantizeOptions},
    container::TensorInfo,
};
use shardpack_manifests::{Cut, Digest, manifest::MatrixFormat};

use super::{ConvertError, Finished, output::Output};
use crate::{
    cut,
    plan::{BLOCK_BYTES, Part, Plan, Step, module_name},
    report::TensorReport,
    source::{Source, SourceError},
};

/// Buffers that a thread keeps from block to block.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) source: Vec<u8>,
    cast: Vec<u8>,
    parts: [Vec<u8>; 3],
    piece: Vec<u8>,
}

/// What all threads need to convert tensors.
pub(super) struct Converter<'a> {
    pub(super) source: &'a Source,
    pub(super) plan: &'a Plan,
    pub(super) output: &'a Output,
}

/// A tensor on its way.
struct Progress {
    identities: Vec<blake3::Hasher>,
    pieces: Vec<Vec<Option<Piece>>>,
    sums: ErrorSums,
}

/// One rank's piece of one part.
struct Piece {
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
        let step = &self.plan.steps[index];
        let name = &step.tensor.sources[0];
        let (file, info) =
            self.source.weights.find(name).expect("the plan names tensors of this source");
        let rows = step.tensor.shape.first().copied().unwrap_or(1).max(1);
        let row_bytes = info.size / rows;
        let block_rows = (BLOCK_BYTES / row_bytes.max(1)).clamp(1, rows);
        let mut progress = self.begin(index, step);
        let mut row = 0;
        while row < rows {
            let count = block_rows.min(rows - row);
            scratch.source.resize((count * row_bytes) as usize, 0);
            let read = self.source.weights.files[file]
                .read(&mut scratch.source, info.offset + row * row_bytes);
            read.map_err(|error| SourceError::Read {
                path: self.source.path_of(file),
                source: error,
            })?;
            let first = row * (row_bytes / info.dtype.size_bytes() as u64);
            let sums = self.store(step, info, first, scratch)?;
            progress.sums = progress.sums.plus(sums);
            for (part, stored) in step.parts.iter().enumerate() {
                let bytes = &scratch.parts[part];
                progress.identities[part].update(bytes);
                self.distribute(
                    index,
                    part,
                    stored,
                    count,
                    bytes,
                    &mut scratch.piece,
                    &mut progress,
                )?;
            }
            done(count * row_bytes);
            row += count;
        }
        Ok(finish(step, &progress))
    }

    fn begin(&self, index: usize, step: &Step) -> Progress {
        let piece = |held: bool| held.then(|| Piece { hasher: blake3::Hasher::new(), written: 0 });
        let pieces = |part: usize| {
            self.output.places(index, part).iter().map(|place| piece(place.is_some())).collect()
        };
        Progress {
            identities: step.parts.iter().map(|_| blake3::Hasher::new()).collect(),
            pieces: (0..step.parts.len()).map(pieces).collect(),
            sums: ErrorSums::default(),
        }
    }

    /// Brings a block in `scratch.source` into its stored form in `scratch.parts`. `first` is
    /// the block's first element within the tensor.
    fn store(
        &self,
        step: &Step,
        info: &TensorInfo,
        first: u64,
        scratch: &mut Scratch,
    ) -> Result<ErrorSums, ConvertError> {
        let dtype = self.plan.quantization.dtype;
        let platform = Platform::detect();
        let Scratch { source, cast, parts, .. } = scratch;
        let error = |problem: String| ConvertError::Weight {
            tensor: info.name.clone(),
            file: self.source.file_of(&info.name).unwrap_or_default().to_owned(),
            problem,
        };
        let elements = source.len() / info.dtype.size_bytes();
        let format = match step.format {
            MatrixFormat::Plain => {
                parts[0].resize(elements * dtype.size_bytes(), 0);
                let result = affine::cast(platform, (info.dtype, source), (dtype, &mut parts[0]));
                result.map_err(|bad| error(bad.after(first as usize).to_string()))?;
                return Ok(ErrorSums::default());
            }
            MatrixFormat::Affine { bits, group_size } => {
                AffineFormat::new(bits, group_size).expect("the plan chooses formats that exist")
            }
        };
        let weights = if info.dtype == dtype {
            &*source
        } else {
            cast.resize(elements * dtype.size_bytes(), 0);
            let result = affine::cast(platform, (info.dtype, source), (dtype, cast));
            result.map_err(|bad| error(bad.after(first as usize).to_string()))?;
            &*cast
        };
        let groups = elements / format.group_size() as usize;
        let [packed, scales, biases] = parts;
        packed.resize(groups * format.group_bytes(), 0);
        scales.resize(groups * dtype.size_bytes(), 0);
        biases.resize(groups * dtype.size_bytes(), 0);
        let mut options = QuantizeOptions::new(format, self.plan.rounding, dtype);
        options.importance = self.plan.importance.as_ref().and_then(|importance| {
            importance.columns.get(module_name(&step.tensor.name)).map(Vec::as_slice)
        });
        affine::quantize(&options, (dtype, weights), (packed, scales, biases))
            .map_err(|bad| error(bad.after(first as usize).to_string()))
    }

    /// Writes a block of `rows` rows of one part to every rank that holds some of it.
    #[expect(
        clippy::too_many_arguments,
        reason = "the state of one block; a struct would live for one call"
    )]
    fn distribute(
        &self,
        index: usize,
        part: usize,
        stored: &Part,
        rows: u64,
        bytes: &[u8],
        gathered: &mut Vec<u8>,
        progress: &mut Progress,
    ) -> Result<(), ConvertError> {
        let block_start = progress.identities[part].count() / row_bytes(stored) - rows;
        let places = self.output.places(index, part).iter().zip(&mut progress.pieces[part]);
        for (place, piece) in places {
            let (Some(place), Some(piece)) = (place, piece) else { continue };
            let mine: &[u8] = match &place.cut {
                Cut::Replicated | Cut::Once => bytes,
                // A cut of rows: the part of this block that lies within.
                Cut::Range { dim: 0, start, end, .. } => {
                    let from = (*start).clamp(block_start, block_start + rows) - block_start;
                    let to = (*end).clamp(block_start, block_start + rows) - block_start;
                    let row = row_bytes(stored);
                    &bytes[(from * row) as usize..(to * row) as usize]
                }
                Cut::Range { dim, start, end, .. } => {
                    let mut shape = stored.shape.clone();
                    shape[0] = rows;
                    gathered.clear();
                    for run in cut::pieces(
                        bytes,
                        &shape,
                        stored.dtype.size_bytes(),
                        *dim as usize,
                        *start..*end,
                    ) {
                        gathered.extend_from_slice(run);
                    }
                    gathered
                }
            };
            if !mine.is_empty() {
                // A whole part has the identity's digest; it is not hashed twice.
                if matches!(place.cut, Cut::Range { .. }) {
                    piece.hasher.update(mine);
                }
                place.file.write(mine, place.offset + piece.written)?;
                piece.written += mine.len() as u64;
            }
        }
        Ok(())
    }
}

/// Bytes of one row (everything below the first dimension) of an uncut part.
fn row_bytes(part: &Part) -> u64 {
    part.shape.iter().skip(1).product::<u64>() * part.dtype.size_bytes() as u64
}

fn finish(step: &Step, progress: &Progress) -> Finished {
    let digest = |hasher: &blake3::Hasher| Digest(*hasher.finalize().as_bytes());
    let identities: Vec<Digest> = progress.identities.iter().map(digest).collect();
    let pieces = progress
        .pieces
        .iter()
        .zip(&step.parts)
        .zip(&identities)
        .map(|((pieces, part), identity)| {
            let whole = !part.destination.is_cut();
            let piece = |piece: &Piece| if whole { *identity } else { digest(&piece.hasher) };
            pieces.iter().map(|held| held.as_ref().map(piece)).collect()
        })
        .collect();
    let report = match step.format {
        MatrixFormat::Plain => TensorReport::plain(),
        format @ MatrixFormat::Affine { .. } => TensorReport::affine(format, &progress.sums, step.tensor.shape.iter().product()),
    };
    Finished { identities, pieces, report }
}
