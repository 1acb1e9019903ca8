//! Writes an unsharded tensor into the packages' files, one block of rows at a time.

use shardpack_manifests::{Digest, TensorShard};

use crate::{convert::output::FileRegion, package::WriteError, plan::StoredTensor, shard};

/// What has been written of a stored tensor for each rank that holds some of it.
pub(crate) struct ShardWriter<'a> {
    part: &'a StoredTensor,
    regions: &'a [Option<FileRegion>],
    list: Vec<RankShard>,
    whole: blake3::Hasher,
    rows: u64,
}

/// What has been written of one rank's shard.
#[derive(Default)]
struct RankShard {
    hasher: blake3::Hasher,
    written: u64,
}

impl<'a> ShardWriter<'a> {
    /// Begins with the first row. `regions` has one entry per rank, or a single one for all ranks.
    pub(crate) fn new(part: &'a StoredTensor, regions: &'a [Option<FileRegion>]) -> Self {
        let shards = regions.iter().map(|_| RankShard::default()).collect();
        Self { part, regions, list: shards, whole: blake3::Hasher::new(), rows: 0 }
    }

    /// Writes the next rows, as many as `bytes` has, to every rank that holds some of them.
    /// `gathered` is a buffer.
    pub(crate) fn write(&mut self, bytes: &[u8], gathered: &mut Vec<u8>) -> Result<(), WriteError> {
        let row = self.part.row_bytes();
        let rows = bytes.len() as u64 / row;
        self.whole.update(bytes);
        for (region, shard) in self.regions.iter().zip(&mut self.list) {
            let Some(region) = region else { continue };
            let mine: &[u8] = match &region.shard {
                TensorShard::Replicated | TensorShard::Once => bytes,
                // Sharded by rows: what the shard has of this block.
                TensorShard::Range { dim: 0, start, end, .. } => {
                    let within = |at: u64| at.clamp(self.rows, self.rows + rows) - self.rows;
                    &bytes[(within(*start) * row) as usize..(within(*end) * row) as usize]
                }
                TensorShard::Range { dim, start, end, .. } => {
                    let mut shape = self.part.shape.clone();
                    shape[0] = rows;
                    let (size, dim) = (self.part.dtype.size_bytes(), *dim as usize);
                    gathered.clear();
                    for run in shard::runs(bytes, &shape, size, dim, *start..*end) {
                        gathered.extend_from_slice(run);
                    }
                    gathered
                }
            };
            if mine.is_empty() {
                continue;
            }
            // A whole part has the unsharded tensor's digest; it is not hashed twice.
            if self.part.destination.is_sharded() {
                shard.hasher.update(mine);
            }
            region.file.write(mine, region.offset + shard.written)?;
            shard.written += mine.len() as u64;
        }
        self.rows += rows;
        Ok(())
    }

    /// The digest of the unsharded tensor, and of each rank's shard.
    pub(crate) fn finish(self) -> (Digest, Vec<Option<Digest>>) {
        let digest = |hasher: &blake3::Hasher| Digest(*hasher.finalize().as_bytes());
        let whole = digest(&self.whole);
        let is_sharded = self.part.destination.is_sharded();
        let held = self.regions.iter().zip(&self.list).map(|(region, shard)| {
            let region = region.as_ref()?;
            assert_eq!(shard.written, region.size, "{} is as long as planned", self.part.name);
            Some(if is_sharded { digest(&shard.hasher) } else { whole })
        });
        let held = held.collect();
        (whole, held)
    }
}
