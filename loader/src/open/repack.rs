//! Packed integers rearranged where they lie, once they have been verified: see
//! [`shardpack_kernels::repack`].

use std::{
    sync::{Mutex, PoisonError},
    thread,
};

use shardpack_formats::Dtype;
use shardpack_kernels::{Packing, Repack};
use shardpack_manifests::{
    Manifest,
    manifest::{MatrixFormat, TensorEntry},
};

/// Bytes that a thread takes at once.
const PIECE_BYTES: usize = 1 << 20;

/// How a tensor's integers can be interleaved; none where it has none, or has a form that is read
/// as it is stored.
pub(super) fn repack_of(manifest: &Manifest, tensor: &TensorEntry) -> Option<Repack> {
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
    let repack = Repack::new([rows, cols], [bits as usize, group_size as usize])?;
    tensor.size.is_multiple_of(repack.quad_bytes() as u64).then_some(repack)
}

/// Interleaves tensors, each as it says, on several threads.
pub(super) fn interleave(tensors: Vec<(Repack, &mut [u8])>, threads: usize) {
    let pieces = tensors.into_iter().flat_map(|(repack, bytes)| {
        let length = PIECE_BYTES.next_multiple_of(repack.quad_bytes());
        bytes.chunks_mut(length).map(move |piece| (repack, piece))
    });
    let queue = Mutex::new(pieces);
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((repack, piece)) = next else { return };
                    repack.interleave(piece);
                }
            });
        }
    });
}

/// How the integers of a tensor stand when `wanted` was asked for.
pub(super) fn packing_of(manifest: &Manifest, tensor: &TensorEntry, wanted: Packing) -> Packing {
    match wanted {
        Packing::Interleaved if repack_of(manifest, tensor).is_some() => Packing::Interleaved,
        _ => Packing::Stored,
    }
}
