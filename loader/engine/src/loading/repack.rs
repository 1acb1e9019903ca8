//! Packed weights are interleaved in place while they are read: see [`shardpack_kernels::repack`].
//!
//! Bytes are hashed before they are rearranged, and given away only when every chunk was right.

use shardpack_kernels::{Packing, Repack};
use shardpack_manifests::{
    Manifest,
    digest::CHUNK_BYTES,
    manifest::{MatrixFormat, TensorEntry},
};
use shardpack_quantize::Dtype;

use super::chunks::Destination;

/// The interleaved layout of a tensor; none where it is not quantized or its format has none.
pub(super) fn repack_of(
    manifest: &Manifest,
    tensor: &TensorEntry,
    packing: Packing,
) -> Option<Repack> {
    let module = tensor.name.strip_suffix(".weight")?;
    let MatrixFormat::Affine { bits, group_size } = manifest.quantization.format_of(module) else {
        return None;
    };
    let [.., rows, words] = *tensor.shape else { return None };
    let bits_of_row = words.checked_mul(u64::from(u32::BITS))?;
    if tensor.dtype != Dtype::U32 || bits == 0 || !bits_of_row.is_multiple_of(u64::from(bits)) {
        return None;
    }
    let shape = [rows, bits_of_row / u64::from(bits)].map(usize::try_from);
    let [Ok(rows), Ok(cols)] = shape else { return None };
    let repack = Repack::new([rows, cols], [bits as usize, group_size as usize], packing)?;
    tensor.size.is_multiple_of(repack.quad_bytes() as u64).then_some(repack)
}

/// How far the integers of a chunk's part have been interleaved while they arrive.
pub(super) struct Rearranging {
    repack: Option<Repack>,
    /// Where the next four rows begin within the part.
    next: usize,
}

impl Rearranging {
    pub(super) fn of(part: &Destination<'_>) -> Self {
        let next = part.repack.map_or(0, |repack| {
            let quad = repack.quad_bytes() as u64;
            ((part.offset - part.first).next_multiple_of(quad) + part.first - part.offset) as usize
        });
        Self { repack: part.repack, next }
    }

    /// Interleaves the rows that have arrived, four by four; `arrived` begins with the part.
    pub(super) fn interleave_whole(&mut self, arrived: &mut [u8]) {
        let Some(repack) = self.repack else { return };
        let count = arrived.len().saturating_sub(self.next) / repack.quad_bytes();
        if count > 0 {
            let end = self.next + count * repack.quad_bytes();
            repack.interleave(&mut arrived[self.next..end]);
            self.next = end;
        }
    }
}

/// Interleaves the rows of a tensor that chunks have divided between them: all others have been.
/// `offset` is that of the tensor's bytes within their file.
pub(super) fn interleave_divided(repack: Repack, offset: u64, bytes: &mut [u8]) {
    let (quad, size) = (repack.quad_bytes(), bytes.len() as u64);
    let chunks = (offset / CHUNK_BYTES + 1..).map(|chunk| chunk * CHUNK_BYTES - offset);
    let mut last = None;
    for boundary in chunks.take_while(|boundary| *boundary < size) {
        let first = boundary as usize / quad * quad;
        if first as u64 != boundary && last != Some(first) {
            repack.interleave(&mut bytes[first..first + quad]);
            last = Some(first);
        }
    }
}
