//! Read speed: from the page cache, and from the disk itself. That the second did come from the
//! disk is not assumed: the system counts what it read from there for this process.

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    path::Path,
    time::Instant,
};

use anyhow::Context as _;
use serde_json::json;
use shardpack_sensors::disk_read_bytes;

use super::report::{Finding, Report};
use crate::progress::size;

/// Large enough for a stable measurement, small enough for any disk.
const FILE_BYTES: usize = 256 << 20;

/// Size of the loader's reads.
const BLOCK_BYTES: usize = 4 << 20;

/// Alignment that every disk accepts for uncached reads.
const ALIGNMENT: usize = 16 << 10;

/// Slower disks make loading a large model a matter of minutes.
const SLOW_GIGABYTES: f64 = 0.5;

/// Share of the file, in percent, that the system must have read from the disk; the rest are pages
/// that it had read ahead or not yet let go.
const FROM_DISK_PERCENT: u64 = 90;

/// Reads a file of its own in `folder` both ways.
pub(super) fn check(folder: &Path, report: &mut Report) {
    let path = folder.join("read-speed");
    // Before anything reads the file into the cache.
    uncached(&path, report);
    let cached = File::open(&path).map_err(anyhow::Error::from);
    // The first read fills the page cache.
    let cached = cached.and_then(|mut file| read(&mut file)).and_then(|_| {
        let mut file = File::open(&path)?;
        read(&mut file)
    });
    report.add_result("read speed, cached", cached.map(finding));
}

fn finding(rate: f64) -> Finding {
    Finding::new(format!("{rate:.2} GB/s"), json!({ "gigabytes_per_second": rate }))
}

/// Writes the file and reads it from the disk.
fn uncached(path: &Path, report: &mut Report) {
    const NAME: &str = "read speed, uncached";
    let mut file = match write(path).map(|()| open_uncached(path)) {
        Ok(Ok(file)) => file,
        Ok(Err(error)) => {
            let why = format!("this file system reads through the cache only ({error})");
            return report.skip(NAME, why);
        }
        Err(error) => return report.add_result(NAME, Err(error)),
    };
    let before = disk_read_bytes();
    let rate = match read(&mut file) {
        Ok(rate) => rate,
        Err(error) => return report.add_result(NAME, Err(error)),
    };
    let from_disk = before.zip(disk_read_bytes()).map(|(before, after)| after - before);
    match from_disk {
        Some(bytes) if bytes * 100 >= FROM_DISK_PERCENT * FILE_BYTES as u64 => {
            let found = finding(rate).expected(format!("at least {SLOW_GIGABYTES} GB/s"));
            let advice = "packages load at this speed: keep them on the internal disk";
            report.find(NAME, found.slow_if(rate < SLOW_GIGABYTES, advice));
        }
        Some(bytes) => {
            let (bytes, all) = (size(bytes), size(FILE_BYTES as u64));
            report
                .skip(NAME, format!("{bytes} of {all} came from the disk, the rest from a cache"));
        }
        None => report.skip(NAME, "this system does not tell what comes from the disk"),
    }
}

fn write(path: &Path) -> anyhow::Result<()> {
    let shown = || path.display().to_string();
    let mut file = File::create(path).with_context(shown)?;
    keep_out_of_the_cache(&file).with_context(shown)?;
    let mut block = vec![0_u8; BLOCK_BYTES];
    for index in 0..FILE_BYTES / BLOCK_BYTES {
        // Every block differs, since file systems may deduplicate equal ones.
        for (place, byte) in block.iter_mut().enumerate().step_by(512) {
            *byte = (place >> 9 ^ index) as u8;
        }
        file.write_all(&block).with_context(shown)?;
    }
    file.sync_all().with_context(shown)?;
    drop_from_the_cache(&file).with_context(shown)
}

/// 10⁹ bytes per second.
fn read(file: &mut File) -> anyhow::Result<f64> {
    let mut storage = vec![0_u8; BLOCK_BYTES + ALIGNMENT];
    let start = storage.as_ptr().align_offset(ALIGNMENT);
    let block = &mut storage[start..start + BLOCK_BYTES];
    let (begun, mut total) = (Instant::now(), 0);
    loop {
        match file.read(block)? {
            0 => break,
            count => total += count,
        }
    }
    anyhow::ensure!(total == FILE_BYTES, "{total} bytes of {FILE_BYTES} were read");
    Ok(total as f64 / 1e9 / begun.elapsed().as_secs_f64().max(1e-9))
}

/// Pages of the write itself would be read from the cache later on, whatever the reader asks for.
#[cfg(target_os = "macos")]
fn keep_out_of_the_cache(file: &File) -> std::io::Result<()> {
    Ok(rustix::fs::fcntl_nocache(file, true)?)
}

#[cfg(not(target_os = "macos"))]
#[expect(clippy::unnecessary_wraps, reason = "it can fail on macOS")]
fn keep_out_of_the_cache(_: &File) -> std::io::Result<()> {
    Ok(())
}

/// Only pages that are on the disk already are dropped.
#[cfg(target_os = "linux")]
fn drop_from_the_cache(file: &File) -> std::io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?)
}

#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "it can fail on Linux")]
fn drop_from_the_cache(_: &File) -> std::io::Result<()> {
    Ok(())
}

#[cfg(target_os = "linux")]
fn open_uncached(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;

    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    OpenOptions::new().read(true).custom_flags(direct).open(path)
}

#[cfg(target_os = "macos")]
fn open_uncached(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().read(true).open(path)?;
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn open_uncached(path: &Path) -> std::io::Result<File> {
    let _ = OpenOptions::new().read(true).open(path)?;
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_not_read_from_the_cache() {
        // The system's folder for temporary files may be in memory; the build's is on a disk.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("file");
        write(&path).unwrap();
        let Some(before) = disk_read_bytes() else { return };
        // Through the cache: what it still held would not come from the disk.
        let mut file = File::open(&path).unwrap();
        read(&mut file).unwrap();
        let first = disk_read_bytes().unwrap() - before;
        let mut file = File::open(&path).unwrap();
        read(&mut file).unwrap();
        let second = disk_read_bytes().unwrap() - before - first;
        assert!(first * 100 >= FROM_DISK_PERCENT * FILE_BYTES as u64, "{first}");
        assert!(second < first / 10, "the cache answers the second reading: {second}");
    }
}
