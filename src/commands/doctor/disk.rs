//! Read speed: from the page cache, and from the disk itself.

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Write as _},
    path::Path,
    time::Instant,
};

use anyhow::Context as _;
use serde_json::json;

use super::report::{Finding, Report};

/// Large enough for a stable measurement, small enough for any disk.
const FILE_BYTES: usize = 256 << 20;

/// Size of the loader's reads.
const BLOCK_BYTES: usize = 4 << 20;

/// Alignment that every disk accepts for uncached reads.
const ALIGNMENT: usize = 16 << 10;

/// Reads a file of its own in `folder` both ways.
pub(super) fn check(folder: &Path, report: &mut Report) {
    let path = folder.join("read-speed");
    if let Err(error) = write(&path) {
        return report.add_result("read speed", Err(error));
    }
    let figures = |rate: f64| Finding {
        detail: format!("{rate:.2} GB/s"),
        figures: json!({ "gigabytes_per_second": rate }),
    };
    let cached = File::open(&path).map_err(anyhow::Error::from);
    // The first read fills the page cache.
    let cached = cached.and_then(|mut file| read(&mut file)).and_then(|_| {
        let mut file = File::open(&path)?;
        read(&mut file)
    });
    report.add_result("read speed, cached", cached.map(figures));
    match open_uncached(&path) {
        Ok(mut file) => {
            report.add_result("read speed, uncached", read(&mut file).map(figures));
        }
        Err(error) => report.skip(
            "read speed, uncached",
            format!("this file system reads through the cache only ({error})"),
        ),
    }
}

fn write(path: &Path) -> anyhow::Result<()> {
    let shown = || path.display().to_string();
    let mut file = File::create(path).with_context(shown)?;
    let mut block = vec![0_u8; BLOCK_BYTES];
    for index in 0..FILE_BYTES / BLOCK_BYTES {
        // Every block differs, since file systems may deduplicate equal ones.
        for (place, byte) in block.iter_mut().enumerate().step_by(512) {
            *byte = (place >> 9 ^ index) as u8;
        }
        file.write_all(&block).with_context(shown)?;
    }
    file.sync_all().with_context(shown)
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
