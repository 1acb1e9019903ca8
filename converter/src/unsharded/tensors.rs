//! Which rank's bytes make up which rows of an unsharded tensor.

use std::{collections::BTreeMap, ops::Range};

use shardpack_manifests::{Manifest, TensorShard, manifest::TensorEntry};
use shardpack_quantize::Dtype;

use super::{Member, UnshardError};

/// A stored tensor before sharding.
#[derive(Debug)]
pub(crate) struct UnshardedTensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Together all of it, each element once.
    pub(super) slices: Vec<ShardSlice>,
}

/// What is read of one rank's shard.
#[derive(Debug)]
pub(super) struct ShardSlice {
    /// Index of the package.
    pub(super) member: usize,
    /// Index of the file in its manifest.
    pub(super) file: usize,
    /// Index of the tensor in its manifest.
    pub(super) tensor: usize,
    /// The sharded dimension.
    dim: usize,
    /// The elements of it that the rank holds.
    held: Range<u64>,
    /// Those that are taken; ranks may hold the same.
    taken: Range<u64>,
}

/// Reads bytes at an offset of a file.
type Read<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<(), UnshardError>;

impl UnshardedTensor {
    /// Bytes of one row: everything below the first dimension.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.shape.iter().skip(1).product::<u64>() * self.dtype.size_bytes() as u64
    }

    /// Of a single number one.
    pub(crate) fn rows(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Bytes of all of it.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.rows() * self.row_bytes()
    }
}

impl ShardSlice {
    /// Fills in what this slice, which `entry` describes, has of rows `first..first + rows` of
    /// `unsharded`.
    pub(super) fn rows(
        &self,
        unsharded: &UnshardedTensor,
        entry: &TensorEntry,
        (first, rows): (u64, u64),
        out: &mut [u8],
        buffer: &mut Vec<u8>,
        read: Read,
    ) -> Result<(), UnshardError> {
        if self.dim == 0 {
            let row = unsharded.row_bytes();
            let from = self.taken.start.max(first);
            let to = self.taken.end.min(first + rows);
            if from < to {
                let place = ((from - first) * row) as usize..((to - first) * row) as usize;
                read(entry.offset + (from - self.held.start) * row, &mut out[place])?;
            }
            return Ok(());
        }
        let row = entry.shape[1..].iter().product::<u64>() * entry.dtype.size_bytes() as u64;
        buffer.resize((rows * row) as usize, 0);
        read(entry.offset + first * row, buffer)?;
        // One run per index of the dimensions before the sharded one.
        let inner = unsharded.shape[self.dim + 1..].iter().product::<u64>() as usize
            * unsharded.dtype.size_bytes();
        let bytes = |range: &Range<u64>| range.start as usize * inner..range.end as usize * inner;
        let from = bytes(&(self.taken.start - self.held.start..self.taken.end - self.held.start));
        let to = bytes(&self.taken);
        let (held, full) = (
            (self.held.end - self.held.start) as usize * inner,
            unsharded.shape[self.dim] as usize * inner,
        );
        for (from_row, to_row) in buffer.chunks_exact(held).zip(out.chunks_exact_mut(full)) {
            to_row[to.clone()].copy_from_slice(&from_row[from.clone()]);
        }
        Ok(())
    }
}

/// Every tensor of the packages, unsharded.
pub(super) fn unsharded(
    members: &[Member],
) -> Result<BTreeMap<String, UnshardedTensor>, UnshardError> {
    let mut held: BTreeMap<&str, Vec<Held>> = BTreeMap::new();
    for (member, Member { manifest, .. }) in members.iter().enumerate() {
        let files: BTreeMap<&str, usize> =
            manifest.files.iter().enumerate().map(|(at, file)| (file.name.as_str(), at)).collect();
        for (tensor, entry) in manifest.tensors.iter().enumerate() {
            let file = files[entry.file.as_str()];
            held.entry(&entry.name).or_default().push(Held { member, file, tensor, entry });
        }
    }
    held.into_iter()
        .map(|(name, held)| {
            let unsharded = join(&held, &|member| stage_size(&members[member].manifest));
            let unsharded = unsharded
                .map_err(|problem| UnshardError::Tensor { tensor: name.to_owned(), problem });
            Ok((name.to_owned(), unsharded?))
        })
        .collect()
}

/// A rank's entry of a tensor and where it stands.
struct Held<'a> {
    member: usize,
    file: usize,
    tensor: usize,
    entry: &'a TensorEntry,
}

impl Held<'_> {
    fn slice(&self, dim: usize, held: Range<u64>, taken: Range<u64>) -> ShardSlice {
        ShardSlice { member: self.member, file: self.file, tensor: self.tensor, dim, held, taken }
    }
}

/// The first rank of a package's stage, and how many there are.
fn stage_size(manifest: &Manifest) -> (u32, usize) {
    let ranks = manifest.layout.stage_ranks(manifest.layout.stage_of(manifest.rank));
    (ranks.start, ranks.len())
}

/// `stage` names each package's stage and says how many packages it has.
fn join(held: &[Held], stage: &dyn Fn(usize) -> (u32, usize)) -> Result<UnshardedTensor, String> {
    let first = held[0].entry;
    let dtype = first.dtype;
    let is_sharded = matches!(first.shard, TensorShard::Range { .. });
    let is_empty = |held: &Held| held.entry.shape.contains(&0);
    if first.shape.is_empty() && is_sharded || held.iter().any(is_empty) {
        return Err(format!("has the shape {:?}", first.shape));
    }
    if held.iter().any(|held| held.entry.dtype != dtype) {
        return Err("has several element types".to_owned());
    }
    let whole = |held: &Held| {
        let rows = 0..first.shape.first().copied().unwrap_or(1);
        vec![held.slice(0, rows.clone(), rows)]
    };
    match &first.shard {
        TensorShard::Replicated => {
            let same = |held: &Held| {
                let entry = held.entry;
                (&entry.shard, &entry.shape, entry.blake3)
                    == (&first.shard, &first.shape, first.blake3)
            };
            // Every package of a stage, or none of it.
            let whole_stages = held.iter().all(|one| {
                let (name, size) = stage(one.member);
                held.iter().filter(|other| stage(other.member).0 == name).count() == size
            });
            if !whole_stages || !held.iter().all(same) {
                return Err("is not the same in every package".to_owned());
            }
            Ok(UnshardedTensor { dtype, shape: first.shape.clone(), slices: whole(&held[0]) })
        }
        TensorShard::Once => match held {
            [only] => {
                Ok(UnshardedTensor { dtype, shape: first.shape.clone(), slices: whole(only) })
            }
            _ => Err("belongs to one package and is in several".to_owned()),
        },
        TensorShard::Range { dim, full, .. } => {
            let mut shape = first.shape.clone();
            shape[*dim as usize] = *full;
            let elements = shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim));
            if elements.and_then(|elements| elements.checked_mul(8)).is_none() {
                return Err(format!("has the impossible shape {shape:?}"));
            }
            let slices = cover(held, &shape)?;
            Ok(UnshardedTensor { dtype, shape, slices })
        }
    }
}

/// Slices that cover the sharded dimension, each element once, in order.
fn cover(held: &[Held], shape: &[u64]) -> Result<Vec<ShardSlice>, String> {
    let TensorShard::Range { axis, dim, full, .. } = &held[0].entry.shard else {
        return Err("is both sharded and replicated".to_owned());
    };
    let mut ranges: Vec<(u64, u64, &Held)> = Vec::new();
    for held in held {
        let mut like = held.entry.shape.clone();
        match &held.entry.shard {
            TensorShard::Range { axis: other, dim: at, start, end, full: all }
                if (other, at, all) == (axis, dim, full) =>
            {
                like[*dim as usize] = *full;
                ranges.push((*start, *end, held));
            }
            _ => return Err("is sharded in different ways".to_owned()),
        }
        if like != shape {
            return Err(format!("has the shapes {shape:?} and {like:?} before sharding"));
        }
    }
    ranges.sort_unstable_by_key(|(start, end, held)| (*start, *end, held.member));
    let mut slices = Vec::new();
    let mut done = 0;
    for (start, end, held) in ranges {
        if start > done {
            return Err(format!("{done}..{start} of {axis} is in no package"));
        }
        if end > done {
            slices.push(held.slice(*dim as usize, start..end, done..end));
            done = end;
        }
    }
    if done < *full {
        return Err(format!("{done}..{full} of {axis} is in no package"));
    }
    Ok(slices)
}

#[cfg(test)]
mod tests {
    use shardpack_manifests::Digest;

    use super::*;

    fn entry(dim: u32, range: Range<u64>, shape: &[u64], full: u64) -> TensorEntry {
        let shard = TensorShard::Range {
            axis: "x".to_owned(),
            dim,
            start: range.start,
            end: range.end,
            full,
        };
        TensorEntry {
            name: "t".to_owned(),
            dtype: Dtype::U8,
            shape: shape.to_vec(),
            file: "f".to_owned(),
            offset: 0,
            size: shape.iter().product(),
            shard,
            blake3: Digest::of(b""),
        }
    }

    fn taken_ranges(entries: &[TensorEntry]) -> Result<Vec<Range<u64>>, String> {
        let held: Vec<Held> = entries
            .iter()
            .enumerate()
            .map(|(member, entry)| Held { member, file: 0, tensor: 0, entry })
            .collect();
        join(&held, &|_| (0, entries.len()))
            .map(|unsharded| unsharded.slices.into_iter().map(|slice| slice.taken).collect())
    }

    #[test]
    fn shared_elements_are_taken_once_and_gaps_are_refused() {
        let shard = |range: Range<u64>| entry(0, range.clone(), &[range.end - range.start, 2], 6);
        assert_eq!(taken_ranges(&[shard(3..6), shard(0..3)]).unwrap(), [0..3, 3..6]);
        assert_eq!(taken_ranges(&[shard(0..4), shard(2..6), shard(1..3)]).unwrap(), [0..4, 4..6]);
        assert_eq!(
            taken_ranges(&[shard(0..6), shard(0..6)]).unwrap().as_slice(),
            std::slice::from_ref(&(0..6))
        );
        assert_eq!(
            taken_ranges(&[shard(0..2), shard(3..6)]).unwrap_err(),
            "2..3 of x is in no package"
        );
        assert_eq!(taken_ranges(&[shard(0..5)]).unwrap_err(), "5..6 of x is in no package");
    }

    #[test]
    fn entries_that_contradict_each_other_are_refused() {
        let check = |other: TensorEntry, word: &str| {
            let problem = taken_ranges(&[entry(0, 0..3, &[3, 2], 6), other]).unwrap_err();
            assert!(problem.contains(word), "{problem}");
        };
        check(entry(1, 3..6, &[3, 3], 6), "different ways");
        check(entry(0, 3..6, &[3, 4], 6), "before sharding");
        check(entry(0, 3..6, &[3, 2], 7), "different ways");
        check(TensorEntry { dtype: Dtype::F32, ..entry(0, 3..6, &[3, 2], 6) }, "element types");
        check(
            TensorEntry { shard: TensorShard::Once, ..entry(0, 3..6, &[3, 2], 6) },
            "different ways",
        );
        check(entry(0, 3..3, &[0, 2], 6), "has the shape");
        let whole = TensorEntry { shard: TensorShard::Once, ..entry(0, 0..6, &[6, 2], 6) };
        assert!(taken_ranges(&[whole.clone(), whole.clone()]).unwrap_err().contains("in several"));
        let shared = TensorEntry { shard: TensorShard::Replicated, ..whole };
        let other = TensorEntry { blake3: Digest::of(b"x"), ..shared.clone() };
        assert!(taken_ranges(&[shared, other]).unwrap_err().contains("not the same"));
        let huge = entry(0, 0..3, &[3, 2], 1 << 62);
        assert!(taken_ranges(&[huge]).unwrap_err().contains("impossible"));
    }

    #[test]
    fn columns_of_two_ranks_are_put_side_by_side() {
        // [2, 2, 3] bytes, of which the ranks hold columns 0..2 and 1..3 of the last dimension.
        let entries = [entry(2, 0..2, &[2, 2, 2], 3), entry(2, 1..3, &[2, 2, 2], 3)];
        let held: Vec<Held> = entries
            .iter()
            .enumerate()
            .map(|(member, entry)| Held { member, file: 0, tensor: 0, entry })
            .collect();
        let unsharded = join(&held, &|_| (0, 2)).unwrap();
        let stored: [Vec<u8>; 2] = [vec![0, 1, 3, 4, 6, 7, 9, 10], vec![1, 2, 4, 5, 7, 8, 10, 11]];
        let mut out = vec![0; 6];
        for (slice, entry) in unsharded.slices.iter().zip(&entries) {
            let read = |offset: u64, out: &mut [u8]| {
                out.copy_from_slice(&stored[slice.member][offset as usize..][..out.len()]);
                Ok(())
            };
            slice.rows(&unsharded, entry, (1, 1), &mut out, &mut Vec::new(), &read).unwrap();
        }
        assert_eq!(out, [6, 7, 8, 9, 10, 11]);
    }
}
