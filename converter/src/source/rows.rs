//! Rows of a logical tensor: the bytes that they need are read, and decoded where they are not
//! floats as they stand.

use std::ops::Range;

use shardpack_containers::stored::{Damage, Logical, Repacked, Window, float_bytes};
use shardpack_quantize::{AffineFormat, Dtype};

use super::{Source, SourceError, hashes::Follower};

/// Buffers that a thread keeps from block to block.
#[derive(Default)]
pub(crate) struct RowBuffers {
    parts: Vec<Vec<u8>>,
    decoded: Vec<f32>,
    /// Hashes what is read, where that is wanted.
    pub(crate) follower: Option<Follower>,
}

impl Source {
    /// Reads rows of a tensor, counted over all dimensions but the last: little-endian elements
    /// of the tensor's dtype.
    pub(crate) fn read_rows<'b>(
        &self,
        tensor: &Logical,
        rows: Range<u64>,
        buffers: &'b mut RowBuffers,
    ) -> Result<(Dtype, &'b [u8]), SourceError> {
        self.read_parts(tensor, rows.clone(), buffers)?;
        if !tensor.is_decoded() {
            return Ok((tensor.dtype, &buffers.parts[0]));
        }
        let parts: Vec<&[u8]> = buffers.parts.iter().map(Vec::as_slice).collect();
        tensor
            .decode(rows, &parts, &mut buffers.decoded)
            .map_err(|damage| self.damaged(tensor, damage))?;
        Ok((tensor.dtype, float_bytes(&buffers.decoded)))
    }

    /// Fills `out` with the bytes of a tensor from `offset` on, as they would stand in a file of
    /// its dtype.
    pub(crate) fn read_bytes(
        &self,
        tensor: &Logical,
        offset: u64,
        out: &mut [u8],
        buffers: &mut RowBuffers,
    ) -> Result<(), SourceError> {
        if !tensor.is_decoded() {
            let (file, info) =
                self.weights.find(&tensor.parts[0]).expect("parts are tensors of the source");
            return self.read_at((file, info.offset + offset), out, &mut buffers.follower);
        }
        let row = (tensor.width() * tensor.dtype.size_bytes() as u64).max(1);
        let rows = offset / row..(offset + out.len() as u64).div_ceil(row);
        let skipped = (offset - rows.start * row) as usize;
        let (_, bytes) = self.read_rows(tensor, rows, buffers)?;
        out.copy_from_slice(&bytes[skipped..skipped + out.len()]);
        Ok(())
    }

    /// Reads rows of a tensor and carries their integers over; see [`Logical::repack`].
    pub(crate) fn repack_rows(
        &self,
        tensor: &Logical,
        rows: Range<u64>,
        buffers: &mut RowBuffers,
        (format, store): (AffineFormat, Dtype),
        outputs: (&mut [u8], &mut [u8], &mut [u8]),
    ) -> Result<Repacked, SourceError> {
        self.read_parts(tensor, rows.clone(), buffers)?;
        let parts: Vec<&[u8]> = buffers.parts.iter().map(Vec::as_slice).collect();
        let repacked = tensor.repack(rows, &parts, format, store, outputs);
        repacked.map_err(|damage| self.damaged(tensor, damage))
    }

    fn damaged(&self, tensor: &Logical, damage: Damage) -> SourceError {
        SourceError::Tensor {
            tensor: tensor.name.clone(),
            file: self.file_of(&tensor.parts[0]).unwrap_or_default().to_owned(),
            source: damage,
        }
    }

    fn read_parts(
        &self,
        tensor: &Logical,
        rows: Range<u64>,
        buffers: &mut RowBuffers,
    ) -> Result<(), SourceError> {
        let windows = tensor.windows(rows);
        buffers.parts.resize_with(windows.len().max(buffers.parts.len()), Vec::new);
        buffers.parts.truncate(windows.len());
        let RowBuffers { parts, follower, .. } = buffers;
        for ((part, window), buffer) in tensor.parts.iter().zip(&windows).zip(parts) {
            self.read_window(part, window, buffer, follower)?;
        }
        Ok(())
    }

    /// Fills `out` from an offset in a weight file.
    fn read_at(
        &self,
        (file, offset): (usize, u64),
        out: &mut [u8],
        follower: &mut Option<Follower>,
    ) -> Result<(), SourceError> {
        let weights = &self.weights.files[file];
        let read = |source| SourceError::Read { path: self.path_of(file), source };
        let Some(follower) = follower else { return weights.read(out, offset).map_err(read) };
        let end = offset + out.len() as u64;
        let mut at = offset;
        while at < end {
            let stop = Follower::stop(at, end);
            let piece = &mut out[(at - offset) as usize..(stop - offset) as usize];
            weights.read(piece, at).map_err(read)?;
            follower.follow(file, at, piece);
            at = stop;
        }
        Ok(())
    }

    fn read_window(
        &self,
        part: &str,
        window: &Window,
        buffer: &mut Vec<u8>,
        follower: &mut Option<Follower>,
    ) -> Result<(), SourceError> {
        let (file, info) = self.weights.find(part).expect("parts are tensors of the source");
        buffer.resize(window.size_bytes() as usize, 0);
        let start = info.offset + window.rows.start * window.row_bytes + window.columns.start;
        let columns = window.columns.end - window.columns.start;
        if columns == window.row_bytes {
            return self.read_at((file, start), buffer, follower);
        }
        if columns == 0 {
            return Ok(());
        }
        for (row, piece) in buffer.chunks_exact_mut(columns as usize).enumerate() {
            self.read_at((file, start + row as u64 * window.row_bytes), piece, follower)?;
        }
        Ok(())
    }

    /// Whether a tensor that is read from its first row to its last is read from its first byte to
    /// its last, each of its parts by itself.
    pub(crate) fn is_read_in_order(&self, name: &str) -> bool {
        let Some(tensor) = self.logical(name).filter(|_| self.adapters.info(name).is_none()) else {
            return false;
        };
        // Of a part that is stored by columns a single row is a column.
        let whole_rows = |window: &Window| window.columns == (0..window.row_bytes);
        tensor.windows(0..tensor.row_count().min(1)).iter().all(whole_rows)
            && tensor.parts.iter().zip(tensor.windows(0..tensor.row_count())).all(
                |(part, window)| {
                    let size = self.weights.find(part).map(|(_, info)| info.size);
                    whole_rows(&window) && size == Some(window.size_bytes())
                },
            )
    }

    /// Whether two tensors have the same values.
    pub(crate) fn is_same(&self, left: &str, right: &str) -> Result<bool, SourceError> {
        if self.adapters.info(left).or_else(|| self.adapters.info(right)).is_some() {
            return Ok(self.read_tensor(left)? == self.read_tensor(right)?);
        }
        let (Some(left), Some(right)) = (self.logical(left), self.logical(right)) else {
            return Ok(false);
        };
        if left.shape != right.shape {
            return Ok(false);
        }
        let block = (BLOCK_BYTES / (4 * left.width()).max(1)).max(1);
        let mut buffers = [RowBuffers::default(), RowBuffers::default()];
        let mut row = 0;
        while row < left.row_count() {
            let rows = row..(row + block).min(left.row_count());
            let [first, second] = &mut buffers;
            if self.read_rows(left, rows.clone(), first)? != self.read_rows(right, rows, second)? {
                return Ok(false);
            }
            row += block;
        }
        Ok(true)
    }
}

/// Bytes of floats that are compared at a time.
const BLOCK_BYTES: u64 = 4 << 20;
