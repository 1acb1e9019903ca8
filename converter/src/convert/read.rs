//! Rows of a normalised tensor, put together from its sources: runs of rows where they stand as
//! they are, whole matrices where those are turned.

use std::{cell::RefCell, ops::Range};

use shardpack_containers::stored::{Logical, Repacked};
use shardpack_formats::{
    TensorPlan,
    normalise::{Run, rows_and_columns},
    rules::Turn,
};
use shardpack_quantize::{AffineFormat, Dtype};

use super::ConvertError;
use crate::{
    adapter::Merge,
    source::{RowBuffers, Source},
};

/// Reads the rows of one tensor.
pub(super) struct Rows<'a> {
    source: &'a Source,
    tensor: &'a TensorPlan,
    /// The source that adapters change and that was read last.
    merge: RefCell<Option<(u64, Merge<'a>)>>,
}

impl<'a> Rows<'a> {
    pub(super) const fn new(source: &'a Source, tensor: &'a TensorPlan) -> Self {
        Self { source, tensor, merge: RefCell::new(None) }
    }

    /// Bytes of one row.
    pub(super) fn row_bytes(&self) -> u64 {
        self.tensor.columns() * self.tensor.dtype.size_bytes() as u64
    }

    /// Rows of a block of at most `block_bytes`, but of one unit of the view at least.
    pub(super) fn per_block(&self, block_bytes: u64) -> u64 {
        let unit = self.tensor.view.unit();
        let units = block_bytes / (unit * self.row_bytes()).max(1);
        (units.max(1) * unit).min(self.tensor.rows())
    }

    /// The source tensor that holds a row.
    pub(super) fn name_of(&self, row: u64) -> &'a str {
        let parts = self.tensor.columns() / self.tensor.view.result()[1];
        let source = row * parts / self.tensor.view.rows_per_source().max(1);
        &self.tensor.sources[(source as usize).min(self.tensor.sources.len() - 1)]
    }

    /// Fills `out` with `rows`, whole units of the view. `stored` is a buffer.
    pub(super) fn read(
        &self,
        rows: Range<u64>,
        out: &mut Vec<u8>,
        stored: &mut Vec<u8>,
        buffers: &mut RowBuffers,
    ) -> Result<(), ConvertError> {
        let row = self.row_bytes() as usize;
        out.resize((rows.end - rows.start) as usize * row, 0);
        if self.tensor.view.turn != Turn::None {
            return self.read_turned(rows, out, stored, buffers);
        }
        // A row may be put together of single elements.
        let parts = self.tensor.columns() / self.tensor.view.result()[1];
        let (rows, row) = (rows.start * parts..rows.end * parts, row / parts as usize);
        let mut at = 0;
        for Run { source, first, step, count } in self.tensor.view.runs(rows) {
            let place = &mut out[at..at + count as usize * row];
            at += place.len();
            if step == 1 {
                self.read_stored(source, first * row as u64, place, buffers)?;
                continue;
            }
            // What lies between is read too: one long read is cheaper than many short ones.
            let span = ((count - 1) * step + 1) as usize * row;
            stored.resize(span, 0);
            self.read_stored(source, first * row as u64, stored, buffers)?;
            for (to, from) in place.chunks_exact_mut(row).zip(stored.chunks(row * step as usize)) {
                to.copy_from_slice(&from[..row]);
            }
        }
        Ok(())
    }

    fn read_turned(
        &self,
        rows: Range<u64>,
        out: &mut [u8],
        stored: &mut Vec<u8>,
        buffers: &mut RowBuffers,
    ) -> Result<(), ConvertError> {
        let view = &self.tensor.view;
        let element = self.tensor.dtype.size_bytes();
        let block_bytes = (view.rows * view.columns) as usize * element;
        let result_bytes = view.result().iter().product::<u64>() as usize * element;
        for (index, place) in out.chunks_exact_mut(result_bytes).enumerate() {
            let row = rows.start + index as u64 * view.result()[0];
            let (source, block) = view.block_of(row);
            stored.resize(block_bytes, 0);
            self.read_stored(source, block * block_bytes as u64, stored, buffers)?;
            view.turn_block(stored, element, place);
        }
        Ok(())
    }

    /// Bytes of one source from `offset` within it, whatever it is stored as.
    fn read_stored(
        &self,
        source: u64,
        offset: u64,
        out: &mut [u8],
        buffers: &mut RowBuffers,
    ) -> Result<(), ConvertError> {
        let name = &self.tensor.sources[source as usize];
        if self.is_changed(name) {
            return self.read_merged(source, offset, out);
        }
        let tensor = self.find(name);
        Ok(self.source.read_bytes(tensor, offset, out, buffers)?)
    }

    /// The same of a source as adapters leave it.
    fn read_merged(&self, source: u64, offset: u64, out: &mut [u8]) -> Result<(), ConvertError> {
        let mut held = self.merge.borrow_mut();
        if held.as_ref().is_none_or(|(index, _)| *index != source) {
            let merge = self.source.merge(&self.tensor.sources[source as usize])?;
            *held = merge.map(|merge| (source, merge));
        }
        let (_, merge) = held.as_ref().expect("the caller has seen that adapters change it");
        let info = merge.info();
        let [rows, _] = rows_and_columns(&info.shape);
        let row_bytes = (info.size / rows.max(1)).max(1);
        let end = offset + out.len() as u64;
        let rows = offset / row_bytes..end.div_ceil(row_bytes);
        let first = (offset - rows.start * row_bytes) as usize;
        let mut bytes = Vec::new();
        self.source.merged_rows(merge, rows, &mut bytes)?;
        out.copy_from_slice(&bytes[first..first + out.len()]);
        Ok(())
    }

    /// Whether adapters change a source.
    fn is_changed(&self, name: &str) -> bool {
        self.source.adapters.info(name).is_some()
    }

    fn find(&self, name: &str) -> &'a Logical {
        self.source.logical(name).expect("the plan names tensors of this source")
    }

    fn sources(&self) -> impl Iterator<Item = &'a Logical> {
        self.tensor.sources.iter().map(|name| self.find(name))
    }

    /// Whether all values are computed and not just read.
    pub(super) fn is_decoded(&self) -> bool {
        self.sources().all(|tensor| tensor.is_decoded() && !self.is_changed(&tensor.name))
    }

    /// What the sources are stored as, when that is not plain floats.
    pub(super) fn format(&self) -> Option<String> {
        self.sources().find_map(|tensor| tensor.format.clone())
    }

    /// Whether the sources' integers may be carried over into a format.
    pub(super) fn may_repack(&self, format: AffineFormat) -> bool {
        let columns = self.tensor.columns();
        self.tensor.view.turn == Turn::None
            && self.tensor.view.step == 1
            && self.sources().all(|tensor| {
                tensor.width() == columns
                    && tensor.may_repack(format)
                    && !self.is_changed(&tensor.name)
            })
    }

    /// Carries `rows` over into integers, scales and biases.
    pub(super) fn repack(
        &self,
        rows: Range<u64>,
        (format, store): (AffineFormat, Dtype),
        [packed, scales, biases]: &mut [Vec<u8>; 3],
        buffers: &mut RowBuffers,
    ) -> Result<Repacked, ConvertError> {
        let per_row = (self.tensor.columns() / u64::from(format.group_size())) as usize;
        let (words, size) = (per_row * format.group_bytes(), per_row * store.size_bytes());
        let count = (rows.end - rows.start) as usize;
        packed.resize(count * words, 0);
        scales.resize(count * size, 0);
        biases.resize(count * size, 0);
        let mut at = 0;
        for Run { source, first, count, .. } in self.tensor.view.runs(rows) {
            let tensor = self.find(&self.tensor.sources[source as usize]);
            let end = at + count as usize;
            let outputs = (
                &mut packed[at * words..end * words],
                &mut scales[at * size..end * size],
                &mut biases[at * size..end * size],
            );
            let rows = first..first + count;
            let repacked =
                self.source.repack_rows(tensor, rows, buffers, (format, store), outputs)?;
            if repacked == Repacked::Not {
                return Ok(repacked);
            }
            at = end;
        }
        Ok(Repacked::Exactly)
    }
}
