//! The change that an adapter makes to one tensor, and its computation.

use std::ops::Range;

use shardpack_containers::container::TensorInfo;
use shardpack_formats::normalise::rows_and_columns;
use shardpack_quantize::{Dtype, Platform, affine, lowrank};

use super::{AdapterError, Rows, file::AdapterFile};

/// One change to one tensor.
#[derive(Clone, Debug)]
pub(super) struct Change {
    /// Index of the adapter that brings it.
    pub(super) adapter: usize,
    pub(super) kind: Kind,
}

/// The kinds of changes.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// The whole tensor is another one (`modules_to_save`, resized embeddings).
    Replace { tensor: String },
    /// Some rows are others (`trainable_token_indices`): row `rows[i]` is row `i` of the tensor.
    ReplaceRows { tensor: String, rows: Vec<u64> },
    /// `scale · (left · right)` is added.
    Delta(Box<Delta>),
    /// The same for each matrix of a stack.
    Stack(Vec<Delta>),
    /// `scale · tensor` is added (`lora_bias`).
    Add { tensor: String, scale: f32 },
}

/// A low-rank change.
#[derive(Clone, Debug)]
pub(super) struct Delta {
    /// `[rows, rank]`.
    pub(super) left: Factor,
    /// `[rank, width]`.
    pub(super) right: Factor,
    pub(super) rank: u64,
    /// Rows and columns that the factors were made for.
    pub(super) shape: [u64; 2],
    pub(super) scale: f32,
    /// Lengths of the rows after the change (`DoRA`).
    pub(super) magnitude: Option<String>,
}

impl Delta {
    /// The right factor, `[rank, width]`.
    fn right_matrix(&self, file: &AdapterFile) -> Result<Vec<f32>, AdapterError> {
        self.right.read(file, 0..self.shape[1], self.rank, Order::RankFirst)
    }
}

/// A factor as it lies in its tensor: element `(i, k)` is at
/// `first + i · outer_stride + k · rank_stride`, where `i` is a row of the left factor or a column of
/// the right one, and `k` counts the rank.
#[derive(Clone, Debug)]
pub(super) struct Factor {
    pub(super) tensor: String,
    pub(super) first: u64,
    pub(super) outer_stride: u64,
    pub(super) rank_stride: u64,
}

impl Factor {
    /// A tensor `[outer, rank]`.
    pub(super) const fn rows(tensor: String, rank: u64) -> Self {
        Self { tensor, first: 0, outer_stride: rank, rank_stride: 1 }
    }

    /// A tensor `[rank, outer]`.
    pub(super) const fn columns(tensor: String, outer: u64) -> Self {
        Self { tensor, first: 0, outer_stride: 1, rank_stride: outer }
    }

    /// Reads what lies at `outer`, as `[outer, rank]` or, with `rank_first`, as `[rank, outer]`.
    fn read(
        &self,
        file: &AdapterFile,
        outer: Range<u64>,
        rank: u64,
        order: Order,
    ) -> Result<Vec<f32>, AdapterError> {
        let count = outer.end - outer.start;
        let start = self.first + outer.start * self.outer_stride;
        let mut out = vec![0.0; (count * rank) as usize];
        let place = |i: u64, k: u64| match order {
            Order::OuterFirst => (i * rank + k) as usize,
            Order::RankFirst => (k * count + i) as usize,
        };
        if self.outer_stride >= self.rank_stride {
            // One run holds all rows that are asked for.
            let span = (count - 1) * self.outer_stride + (rank - 1) * self.rank_stride + 1;
            let mut run = vec![0.0; span as usize];
            file.read(&self.tensor, start, &mut run)?;
            for i in 0..count {
                for k in 0..rank {
                    out[place(i, k)] = run[(i * self.outer_stride + k * self.rank_stride) as usize];
                }
            }
        } else {
            let span = (count - 1) * self.outer_stride + 1;
            let mut run = vec![0.0; span as usize];
            for k in 0..rank {
                file.read(&self.tensor, start + k * self.rank_stride, &mut run)?;
                for i in 0..count {
                    out[place(i, k)] = run[(i * self.outer_stride) as usize];
                }
            }
        }
        Ok(out)
    }
}

/// How a factor is wanted in memory.
#[derive(Clone, Copy)]
enum Order {
    OuterFirst,
    RankFirst,
}

impl Change {
    /// Replacements come first, then rows, then what is added.
    pub(super) const fn order(&self) -> u8 {
        match self.kind {
            Kind::Replace { .. } => 0,
            Kind::ReplaceRows { .. } => 1,
            Kind::Delta(_) | Kind::Stack(_) | Kind::Add { .. } => 2,
        }
    }

    /// Bytes held while the change is made to a tensor of `width` columns.
    pub(super) fn working_bytes(&self, width: u64) -> u64 {
        match &self.kind {
            Kind::Delta(delta) => 3 * 4 * delta.rank * width,
            Kind::Stack(deltas) => {
                let one = |delta: &Delta| 3 * 4 * delta.rank * (delta.shape[0] + delta.shape[1]);
                deltas.first().map_or(0, one)
            }
            Kind::Replace { .. } | Kind::ReplaceRows { .. } | Kind::Add { .. } => 0,
        }
    }
}

impl Kind {
    /// Checks that the change fits a tensor of this shape, and gives the shape that it leaves.
    pub(super) fn apply_shape(
        &self,
        name: &str,
        info: &mut TensorInfo,
        file: &AdapterFile,
    ) -> Result<(), String> {
        let shape = |tensor: &str| file.tensors[tensor].shape.clone();
        let misfit = |tensor: &str, expected: &str| {
            Err(format!(
                "{tensor:?} has the shape {:?}, but {name:?} of the model is {:?}: expected {expected}",
                shape(tensor),
                info.shape
            ))
        };
        match self {
            Self::Replace { tensor } => {
                let found = shape(tensor);
                // A vocabulary may grow; nothing else may change its shape.
                let grows = info.shape.len() == 2
                    && found.len() == 2
                    && found[1] == info.shape[1]
                    && (name.contains("embed") || name.contains("lm_head"));
                if found != info.shape && !grows {
                    return misfit(tensor, "the same shape");
                }
                info.shape = found;
            }
            Self::ReplaceRows { tensor, rows } => {
                let found = shape(tensor);
                let fits = info.shape.len() == 2
                    && found == [rows.len() as u64, info.shape[1]]
                    && rows.iter().all(|row| *row < info.shape[0]);
                if !fits {
                    return misfit(tensor, "one row for each trained token");
                }
            }
            Self::Delta(delta) => {
                if info.shape != delta.shape {
                    return misfit(&delta.left.tensor, "factors of that shape");
                }
                if let Some(magnitude) = &delta.magnitude {
                    let found = shape(magnitude);
                    if found.iter().product::<u64>() != delta.shape[0] {
                        return misfit(magnitude, "one length a row");
                    }
                }
            }
            Self::Stack(deltas) => {
                let matrix = deltas[0].shape;
                if info.shape != [deltas.len() as u64, matrix[0], matrix[1]] {
                    return misfit(&deltas[0].left.tensor, "factors of that shape");
                }
            }
            Self::Add { tensor, .. } => {
                if shape(tensor) != info.shape {
                    return misfit(tensor, "the same shape");
                }
            }
        }
        info.size = info.shape.iter().product::<u64>() * Dtype::F32.size_bytes() as u64;
        Ok(())
    }
}

/// A tensor whose changes are being made.
pub(crate) struct Merge<'a> {
    info: &'a TensorInfo,
    /// Index of the first change that counts: a replacement makes those before it idle.
    steps: Vec<MergeStep<'a>>,
}

struct MergeStep<'a> {
    kind: &'a Kind,
    file: &'a AdapterFile,
    /// `[rank, width]` of a low-rank change to a single matrix.
    right: Vec<f32>,
}

impl<'a> Merge<'a> {
    pub(super) fn new(
        info: &'a TensorInfo,
        changes: &'a [Change],
        files: &'a [AdapterFile],
    ) -> Result<Self, AdapterError> {
        let last = |change: &Change| matches!(change.kind, Kind::Replace { .. });
        let first = changes.iter().rposition(last).unwrap_or(0);
        let step = |change: &'a Change| {
            let file = &files[change.adapter];
            let right = match &change.kind {
                Kind::Delta(delta) => delta.right_matrix(file)?,
                _ => Vec::new(),
            };
            Ok(MergeStep { kind: &change.kind, file, right })
        };
        let steps = changes[first..].iter().map(step).collect::<Result<_, AdapterError>>()?;
        Ok(Self { info, steps })
    }

    /// What the tensor has become.
    pub(crate) const fn info(&self) -> &TensorInfo {
        self.info
    }

    /// Rows of the changed tensor, counted over all dimensions but the last, as little-endian f32.
    /// `base` gives the rows of the model before
    /// any adapter.
    pub(crate) fn rows<E: From<AdapterError>>(
        &self,
        rows: Range<u64>,
        base: Rows<E>,
        out: &mut Vec<u8>,
    ) -> Result<(), E> {
        let [_, width] = rows_and_columns(&self.info.shape);
        let mut block = vec![0.0_f32; ((rows.end - rows.start) * width) as usize];
        if !matches!(self.steps.first(), Some(MergeStep { kind: Kind::Replace { .. }, .. })) {
            base(rows.clone(), &mut block)?;
        }
        for step in &self.steps {
            step.apply(&rows, width, &mut block)?;
        }
        out.resize(block.len() * 4, 0);
        affine::narrow(Platform::detect_for_quantizing(), Dtype::F32, &block, out);
        Ok(())
    }
}

impl MergeStep<'_> {
    fn apply(&self, rows: &Range<u64>, width: u64, block: &mut [f32]) -> Result<(), AdapterError> {
        match self.kind {
            Kind::Replace { tensor } => self.file.read(tensor, rows.start * width, block),
            Kind::ReplaceRows { tensor, rows: places } => {
                for (index, place) in places.iter().enumerate() {
                    if rows.contains(place) {
                        let at = ((place - rows.start) * width) as usize;
                        let row = &mut block[at..at + width as usize];
                        self.file.read(tensor, index as u64 * width, row)?;
                    }
                }
                Ok(())
            }
            Kind::Add { tensor, scale } => {
                let mut values = vec![0.0; block.len()];
                self.file.read(tensor, rows.start * width, &mut values)?;
                for (weight, value) in block.iter_mut().zip(values) {
                    *weight += scale * value;
                }
                Ok(())
            }
            Kind::Delta(delta) => self.add(delta, &self.right, rows, block),
            Kind::Stack(deltas) => {
                let height = deltas[0].shape[0];
                let mut rest = block;
                let mut row = rows.start;
                while row < rows.end {
                    let (index, first) = (row / height, row % height);
                    let count = (height - first).min(rows.end - row);
                    let (matrix, after) =
                        std::mem::take(&mut rest).split_at_mut((count * width) as usize);
                    let delta = &deltas[index as usize];
                    let right = delta.right_matrix(self.file)?;
                    self.add(delta, &right, &(first..first + count), matrix)?;
                    (rest, row) = (after, row + count);
                }
                Ok(())
            }
        }
    }

    fn add(
        &self,
        delta: &Delta,
        right: &[f32],
        rows: &Range<u64>,
        block: &mut [f32],
    ) -> Result<(), AdapterError> {
        let width = delta.shape[1] as usize;
        let left = delta.left.read(self.file, rows.clone(), delta.rank, Order::OuterFirst)?;
        lowrank::add(Platform::detect_for_quantizing(), block, width, &left, right, delta.scale);
        if let Some(magnitude) = &delta.magnitude {
            let mut lengths = vec![0.0; (rows.end - rows.start) as usize];
            self.file.read(magnitude, rows.start, &mut lengths)?;
            lowrank::rescale(block, width, &lengths);
        }
        Ok(())
    }
}
