//! One uncut stored tensor on its way into the packages' files, block of rows by block.

use shardpack_manifests::{Cut, Digest};

use crate::{convert::output::Place, package::WriteError, plan::Part, shard};

/// What has been written of a stored tensor for each rank that holds some of it.
pub(crate) struct Pieces<'a> {
    part: &'a Part,
    places: &'a [Option<Place>],
    list: Vec<Piece>,
    whole: blake3::Hasher,
    rows: u64,
}

/// One rank's piece.
#[derive(Default)]
struct Piece {
    hasher: blake3::Hasher,
    written: u64,
}

impl<'a> Pieces<'a> {
    /// Begins with the first row. `places` has one entry per rank, or one alone for all.
    pub(crate) fn new(part: &'a Part, places: &'a [Option<Place>]) -> Self {
        let pieces = places.iter().map(|_| Piece::default()).collect();
        Self { part, places, list: pieces, whole: blake3::Hasher::new(), rows: 0 }
    }

    /// Writes the next rows, as many as `bytes` has, to every rank that holds some of them.
    /// `gathered` is a buffer.
    pub(crate) fn write(&mut self, bytes: &[u8], gathered: &mut Vec<u8>) -> Result<(), WriteError> {
        let row = self.part.row_bytes();
        let rows = bytes.len() as u64 / row;
        self.whole.update(bytes);
        for (place, piece) in self.places.iter().zip(&mut self.list) {
            let Some(place) = place else { continue };
            let mine: &[u8] = match &place.cut {
                Cut::Replicated | Cut::Once => bytes,
                // A cut of rows: the part of this block that lies within.
                Cut::Range { dim: 0, start, end, .. } => {
                    let within = |at: u64| at.clamp(self.rows, self.rows + rows) - self.rows;
                    &bytes[(within(*start) * row) as usize..(within(*end) * row) as usize]
                }
                Cut::Range { dim, start, end, .. } => {
                    let mut shape = self.part.shape.clone();
                    shape[0] = rows;
                    let (size, dim) = (self.part.dtype.size_bytes(), *dim as usize);
                    gathered.clear();
                    for run in shard::pieces(bytes, &shape, size, dim, *start..*end) {
                        gathered.extend_from_slice(run);
                    }
                    gathered
                }
            };
            if mine.is_empty() {
                continue;
            }
            // A whole part has the uncut tensor's digest; it is not hashed twice.
            if self.part.destination.is_cut() {
                piece.hasher.update(mine);
            }
            place.file.write(mine, place.offset + piece.written)?;
            piece.written += mine.len() as u64;
        }
        self.rows += rows;
        Ok(())
    }

    /// The digest of the uncut tensor, and of each rank's piece.
    pub(crate) fn finish(self) -> (Digest, Vec<Option<Digest>>) {
        let digest = |hasher: &blake3::Hasher| Digest(*hasher.finalize().as_bytes());
        let whole = digest(&self.whole);
        let is_cut = self.part.destination.is_cut();
        let held = self.places.iter().zip(&self.list).map(|(place, piece)| {
            let place = place.as_ref()?;
            assert_eq!(piece.written, place.size, "{} is as long as planned", self.part.name);
            Some(if is_cut { digest(&piece.hasher) } else { whole })
        });
        let held = held.collect();
        (whole, held)
    }
}
