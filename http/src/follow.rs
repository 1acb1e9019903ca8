//! Hashes a file while it is written, on a thread of its own: over a fast line the checksum takes
//! longer than the download. It reads what the file holds, so memory does not grow with what has
//! not been hashed, and hands it to the disk, so that little is left to wait for at the end.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

use crate::{Checksum, Hasher};

/// Bytes of one read.
const STEP_BYTES: u64 = 1 << 20;

/// Bytes between two writes to disk.
const SYNC_BYTES: u64 = 64 << 20;

/// A hasher that follows a writer.
pub(crate) struct Follower {
    written: Sender<u64>,
    /// The last size that was told.
    told: u64,
    thread: JoinHandle<io::Result<Hasher>>,
}

impl Follower {
    /// Follows the writer of `file`, whose first `size` bytes are in `hasher`.
    pub(crate) fn start(file: File, hasher: Hasher, size: u64) -> io::Result<Self> {
        let (written, sizes) = channel();
        let follow = move || follow(&file, hasher, size, &sizes);
        let thread = thread::Builder::new().name("checksum".to_owned()).spawn(follow)?;
        Ok(Self { written, told: size, thread })
    }

    /// Says that the file has `size` bytes by now.
    pub(crate) fn tell(&mut self, size: u64) {
        if size - self.told >= STEP_BYTES {
            self.told = size;
            // It has ended if reading failed, which its end says.
            let _ = self.written.send(size);
        }
    }

    /// The checksum of the file's first `size` bytes, which are durable then.
    pub(crate) fn finish(self, size: u64) -> io::Result<Checksum> {
        let _ = self.written.send(size);
        drop(self.written);
        let hasher = self.thread.join().expect("hashing does not panic")?;
        Ok(hasher.finish())
    }
}

fn follow(
    file: &File,
    mut hasher: Hasher,
    mut hashed: u64,
    sizes: &Receiver<u64>,
) -> io::Result<Hasher> {
    let mut buffer = vec![0; STEP_BYTES as usize];
    let mut synced = hashed;
    for size in sizes {
        while hashed < size {
            let step = &mut buffer[..STEP_BYTES.min(size - hashed) as usize];
            file.read_exact_at(step, hashed)?;
            hasher.update(step);
            hashed += step.len() as u64;
        }
        if hashed - synced >= SYNC_BYTES {
            file.sync_data()?;
            synced = hashed;
        }
    }
    file.sync_all()?;
    Ok(hasher)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_is_written_meanwhile_is_hashed_whole() {
        let bytes: Vec<u8> = (0..5_000_003_u32).map(|at| (at * 7 / 3) as u8).collect();
        for begun in [0, 1_000_001] {
            let mut file = tempfile::tempfile().unwrap();
            let hasher = || Checksum::Sha256([0; 32]).hasher(bytes.len() as u64);
            let mut whole = hasher();
            whole.update(&bytes);
            let mut first = hasher();
            first.update(&bytes[..begun]);
            file.write_all(&bytes[..begun]).unwrap();
            let copy = file.try_clone().unwrap();
            let mut follower = Follower::start(copy, first, begun as u64).unwrap();
            let mut size = begun as u64;
            for piece in bytes[begun..].chunks(70_001) {
                file.write_all(piece).unwrap();
                size += piece.len() as u64;
                follower.tell(size);
            }
            assert_eq!(follower.finish(size).unwrap(), whole.finish());
        }
    }

    #[test]
    fn bytes_that_are_not_there_are_an_error() {
        let file = tempfile::tempfile().unwrap();
        let checksum = Checksum::Git([0; 20]);
        let follower = Follower::start(file, checksum.hasher(3), 0).unwrap();
        assert_eq!(follower.finish(3).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
