//! Weights as published checkpoints store them, and the floats that they stand for.
//!
//! A checkpoint's matrix can be one stored tensor of floats, or several: small integers or floats
//! with scales, zero points and shapes beside them. [`group`] puts what belongs together into one
//! [`Logical`] tensor, by the checkpoint's own description ([`StoredConfig`]) and the tensors'
//! names, types and shapes; anything that does not fit is refused by name. A logical tensor says
//! which bytes of its parts some of its rows need ([`Logical::windows`]) and computes those rows
//! from them: as 32-bit floats ([`Logical::decode`]), or, where the integers lie on an affine
//! grid, as they are ([`Logical::repack`]). Nothing here reads a file.

mod adjusted;
mod awq;
mod bitsandbytes;
mod config;
mod elements;
mod fp4;
mod ggml;
mod gguf;
mod gptq;
mod group;
mod hqq;
mod mlx;
mod packed;
mod paired_rows;
mod pickled;
mod repack;
mod scaled;
mod scaled_columns;
mod whole;

use std::{collections::BTreeMap, fmt, ops::Range, sync::Arc};

use zerocopy::IntoBytes;

pub use adjusted::Adjustment;
pub use config::{Documents, StoredConfig};
pub use gguf::group_gguf;
pub use group::{Grouped, are_plain, group};
pub use pickled::group_pickled;
pub use repack::Repacked;
use shardpack_quantize::dtype::Dtype;

/// The bytes of small tensors that say how others are stored, by name; see
/// [`StoredConfig::is_description`].
pub type Descriptions = BTreeMap<String, Vec<u8>>;

/// Why a checkpoint's stored precision is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoredError {
    /// A format that is not read.
    #[error("the weights are stored as {format}, which is not read: {reason}")]
    Refused {
        /// Its name.
        format: String,
        /// What to do instead.
        reason: String,
    },
    /// The description of the stored precision has an unexpected value.
    #[error("{place} is {found}, expected {expected}")]
    Config {
        /// Where: the key with its parents.
        place: String,
        /// Its value.
        found: String,
        /// What would be read.
        expected: String,
    },
    /// Keys of the description that may change what the weights mean.
    #[error("keys of {place} that the reader of {format} does not know: {keys}")]
    Keys {
        /// The object.
        place: String,
        /// The format.
        format: String,
        /// Names and values.
        keys: String,
    },
    /// A stored tensor that does not fit the others or the description.
    #[error("tensor {tensor:?}: {problem}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
}

/// Stored bytes that mean nothing: an index or a shape that points outside.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Damage(pub(crate) String);

/// A part of a stored tensor that is needed: some columns of some rows of it, read as a matrix of
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Rows.
    pub rows: Range<u64>,
    /// Bytes of one whole row.
    pub row_bytes: u64,
    /// Bytes that are needed of each row.
    pub columns: Range<u64>,
}

impl Window {
    /// Whole rows.
    const fn rows(rows: Range<u64>, row_bytes: u64) -> Self {
        Self { rows, row_bytes, columns: 0..row_bytes }
    }

    /// Bytes of the window.
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        (self.rows.end - self.rows.start) * (self.columns.end - self.columns.start)
    }
}

/// How stored bytes become the rows of a matrix. Rows are counted over all dimensions but the
/// last.
trait Layout: fmt::Debug + Send + Sync {
    /// The bytes that rows need, one window for each part.
    fn windows(&self, rows: Range<u64>) -> Vec<Window>;

    /// The rows' values; `parts` are the bytes of the windows.
    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage>;

    /// The affine grid on which all values lie, if they lie on one.
    fn grid(&self) -> Option<Grid> {
        None
    }

    /// The rows' places on the grid. `false` if they have none after all, because of what stands
    /// in the file.
    fn integers(
        &self,
        _rows: Range<u64>,
        _parts: &[&[u8]],
        _out: &mut Integers,
    ) -> Result<bool, Damage> {
        Ok(false)
    }
}

/// An affine grid: `value = scale · q + bias`, with unsigned integers of so many bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Bits that every integer fits.
    pub bits: u32,
    /// Neighbouring columns that share scale and bias.
    pub group_size: u64,
    /// Whether values are `q · scale + bias` by definition, roundings included, and not
    /// `(q − zero) · scale`.
    pub is_affine: bool,
}

/// Rows of a matrix on their [`Grid`], row by row; the last group of a row can be shorter.
#[derive(Debug, Default)]
struct Integers {
    q: Vec<u8>,
    scales: Vec<f32>,
    biases: Vec<f32>,
}

/// A float tensor of the checkpoint, whatever it is stored as.
#[derive(Clone, Debug)]
pub struct Logical {
    /// Its name, as the unquantized checkpoint has it.
    pub name: String,
    /// Its shape, last dimension contiguous.
    pub shape: Vec<u64>,
    /// Element type of what is read of it: its own, or F32 when it is decoded.
    pub dtype: Dtype,
    /// The float type that its publisher computes in: its own, or that of its scales.
    pub native: Dtype,
    /// What it is stored as, in words; absent for plain floats.
    pub format: Option<String>,
    /// The stored tensors that it is made of.
    pub parts: Vec<String>,
    rows: RowMap,
    /// Absent for floats that are taken as they are.
    layout: Option<Arc<dyn Layout>>,
}

/// Where a logical row stands among the stored rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowMap {
    Same,
    /// Every `step`-th row from `first` on.
    Every {
        first: u64,
        step: u64,
    },
    /// See [`rotary_row`].
    Rotary {
        head: u64,
    },
    /// Every matrix of `height` rows stands among `2 · height` rows, `skipped` after their first.
    Half {
        height: u64,
        skipped: u64,
    },
}

/// Where a row stands when of each `head` rows the first half has even places and the second half
/// odd ones.
const fn rotary_row(row: u64, head: u64) -> u64 {
    let (first, within, half) = (row / head * head, row % head, head / 2);
    first + 2 * (within % half) + within / half
}

impl RowMap {
    const fn stored(self, row: u64) -> u64 {
        match self {
            Self::Same => row,
            Self::Every { first, step } => first + row * step,
            Self::Rotary { head } => rotary_row(row, head),
            Self::Half { height, skipped } => row / height * 2 * height + row % height + skipped,
        }
    }

    /// A range of stored rows in which all of `rows` stand.
    const fn span(self, rows: &Range<u64>) -> Range<u64> {
        match self {
            _ if rows.start >= rows.end => rows.start..rows.start,
            Self::Same => rows.start..rows.end,
            Self::Every { .. } | Self::Half { .. } => {
                self.stored(rows.start)..self.stored(rows.end - 1) + 1
            }
            // Whole heads: the halves of one stand all over it.
            Self::Rotary { head } => rows.start / head * head..rows.end.div_ceil(head) * head,
        }
    }
}

impl Logical {
    /// A tensor of floats that stands in the file under its name.
    #[must_use]
    pub fn plain(name: String, dtype: Dtype, shape: Vec<u64>) -> Self {
        let parts = vec![name.clone()];
        Self {
            name,
            shape,
            dtype,
            native: dtype,
            format: None,
            parts,
            rows: RowMap::Same,
            layout: None,
        }
    }

    fn decoded(
        name: String,
        shape: Vec<u64>,
        native: Dtype,
        format: String,
        parts: Vec<String>,
        layout: impl Layout + 'static,
    ) -> Self {
        let native = if native.is_float() { native } else { Dtype::BF16 };
        Self {
            name,
            shape,
            dtype: Dtype::F32,
            native,
            format: Some(format),
            parts,
            rows: RowMap::Same,
            layout: Some(Arc::new(layout)),
        }
    }

    /// Floats that stand in the file in another order.
    fn reordered(
        name: String,
        shape: Vec<u64>,
        native: Dtype,
        parts: Vec<String>,
        layout: impl Layout + 'static,
    ) -> Self {
        Self { format: None, ..Self::decoded(name, shape, native, String::new(), parts, layout) }
    }

    /// Takes every `step`-th row of each matrix, from `first` on.
    fn every(&mut self, first: u64, step: u64) -> Result<(), String> {
        let [.., height, _] = self.shape.as_mut_slice() else {
            return Err("it is no matrix".to_owned());
        };
        if !height.is_multiple_of(step) {
            return Err(format!("{height} rows are not a multiple of {step}"));
        }
        *height /= step;
        self.rows = RowMap::Every { first, step };
        Ok(())
    }

    /// Elements of one row.
    #[must_use]
    pub fn width(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows, counted over all dimensions but the last.
    #[must_use]
    pub fn row_count(&self) -> u64 {
        self.shape.iter().rev().skip(1).product()
    }

    /// Whether its values have to be computed.
    #[must_use]
    pub const fn is_decoded(&self) -> bool {
        self.layout.is_some()
    }

    /// The affine grid that its values are stored on.
    #[must_use]
    pub fn grid(&self) -> Option<Grid> {
        self.layout.as_ref()?.grid()
    }

    /// The bytes that rows need, one window for each of [`Self::parts`].
    #[must_use]
    pub fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        match &self.layout {
            None => vec![Window::rows(rows, self.width() * self.dtype.size_bytes() as u64)],
            Some(layout) => layout.windows(self.rows.span(&rows)),
        }
    }

    /// Decodes rows: `parts` are the bytes of their [`Self::windows`].
    ///
    /// # Panics
    /// For a tensor of plain floats, and when `parts` or `out` have other lengths.
    pub fn decode(
        &self,
        rows: Range<u64>,
        parts: &[&[u8]],
        out: &mut Vec<f32>,
    ) -> Result<(), Damage> {
        let layout = self.layout.as_ref().expect("plain floats are not decoded");
        let width = self.width() as usize;
        let span = self.rows.span(&rows);
        let stored = (span.end - span.start) as usize;
        if self.rows == RowMap::Same {
            out.resize(stored * width, 0.0);
            return layout.decode(span, parts, out);
        }
        let mut whole = vec![0.0; stored * width];
        layout.decode(span.clone(), parts, &mut whole)?;
        out.clear();
        for row in rows {
            let at = (self.rows.stored(row) - span.start) as usize * width;
            out.extend_from_slice(&whole[at..at + width]);
        }
        Ok(())
    }
}

/// Floats as the little-endian bytes that [`shardpack_quantize::affine`] takes.
#[must_use]
pub fn float_bytes(values: &[f32]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little"), "packages are made on little-endian machines") };
    values.as_bytes()
}
