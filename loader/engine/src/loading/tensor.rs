//! One tensor of a package, in memory.

use std::sync::Arc;

use shardpack_kernels::{Floats, Packing};
use shardpack_manifests::{TensorShard, manifest::TensorEntry};
use shardpack_quantize::Dtype;
use zerocopy::{FromBytes, Immutable};

use super::pages::PageBytes;

const _: () =
    assert!(cfg!(target_endian = "little"), "packages are little-endian, as we read them");

/// A tensor whose bytes are shared, so that clones are cheap; verified and on a page boundary.
#[derive(Clone, Debug)]
pub struct PackageTensor {
    dtype: Dtype,
    shape: Arc<[u64]>,
    shard: TensorShard,
    packing: Packing,
    pages: Arc<PageBytes>,
}

impl PackageTensor {
    pub(super) fn new(entry: &TensorEntry, packing: Packing, pages: Arc<PageBytes>) -> Self {
        Self {
            dtype: entry.dtype,
            shape: entry.shape.as_slice().into(),
            shard: entry.shard.clone(),
            packing,
            pages,
        }
    }

    pub(super) fn replace(&mut self, pages: Arc<PageBytes>) {
        self.pages = pages;
    }

    /// Element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Shape of what this package holds.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Which shard of the whole tensor this is.
    #[must_use]
    pub const fn shard(&self) -> &TensorShard {
        &self.shard
    }

    /// Layout of packed weights; all other tensors are as stored.
    #[must_use]
    pub const fn packing(&self) -> Packing {
        self.packing
    }

    /// The bytes, little-endian, last dimension contiguous, unless [`Self::packing`] says
    /// otherwise.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.pages.bytes()
    }

    /// The bytes with the rest of their last page, zeros, for devices that share memory by pages.
    #[must_use]
    pub fn page_bytes(&self) -> &[u8] {
        self.pages.whole_pages()
    }

    /// The elements of a [`Dtype::U32`] tensor, in the order of [`Self::packing`].
    #[must_use]
    pub fn words(&self) -> Option<&[u32]> {
        (self.dtype == Dtype::U32).then(|| self.elements())
    }

    /// The elements of a tensor of floats.
    #[must_use]
    pub fn floats(&self) -> Option<Floats<'_>> {
        match self.dtype {
            Dtype::F32 => Some(Floats::F32(self.elements())),
            Dtype::F16 => Some(Floats::F16(self.elements())),
            Dtype::BF16 => Some(Floats::BF16(self.elements())),
            _ => None,
        }
    }

    fn elements<T: FromBytes + Immutable>(&self) -> &[T] {
        <[T]>::ref_from_bytes(self.bytes())
            .expect("the manifest's sizes are whole elements and pages are aligned for all types")
    }
}
