//! Loading a package next to the limits of disk and memory, alternately, best of some rounds:
//! `cargo run --release -p shardpack-engine --example loading -- PACKAGE [THREADS] [ROUNDS] [B3SUM]`.
//!
//! A package is loaded in the interleaved layout of the CPU kernels, and as stored, as MLX takes it.
//! From the disk: plain reads of the same files by as many threads, after the system has been told
//! to forget them. From the system's memory: the same, and `b3sum` as a process of its own.
#![expect(clippy::print_stdout, reason = "a measurement prints its numbers")]

use std::{
    env,
    error::Error,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Instant,
};

use shardpack_engine::loading::{OpenOptions, Package};

/// Bytes of one plain read.
const READ: u64 = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let folder = PathBuf::from(arguments.first().ok_or("expected a package")?);
    let number =
        |index: usize, default| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let (threads, rounds): (usize, usize) = (number(1, 2)?, number(2, 3)?);
    let files = weights(&folder)?;
    let bytes = files.iter().map(|file| Ok(fs::metadata(file)?.len())).sum::<io::Result<u64>>()?;
    let mut best: Vec<(&str, f64)> = Vec::new();
    let mut note = |name: &'static str, seconds: f64| match best.iter_mut().find(|it| it.0 == name)
    {
        Some((_, least)) => *least = least.min(seconds),
        None => best.push((name, seconds)),
    };
    let opened = |options: OpenOptions| -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        let package = Package::open(&folder, &options, &|_| {})?;
        let seconds = begun.elapsed().as_secs_f64();
        drop(package);
        Ok(seconds)
    };
    for _ in 0..rounds {
        forget(&files)?;
        note("disk: plain reads", read(&files, threads)?);
        forget(&files)?;
        note("disk: loaded and verified", opened(OpenOptions::fast(threads))?);
        note("memory: plain reads", read(&files, threads)?);
        note("memory: loaded and verified", opened(OpenOptions::fast(threads))?);
        note("memory: and left as stored", opened(OpenOptions::stored(threads))?);
        if let Some(b3sum) = arguments.get(3) {
            let begun = Instant::now();
            let mut command = Command::new(b3sum);
            command.arg(format!("--num-threads={threads}")).args(&files).stdout(Stdio::null());
            if !command.status()?.success() {
                return Err("b3sum failed".into());
            }
            note("memory: b3sum", begun.elapsed().as_secs_f64());
        }
    }
    println!("| {} MB, {threads} threads | s | GB/s |\n|---|---|---|", bytes / 1_000_000);
    for (name, seconds) in &best {
        println!("| {name} | {seconds:.3} | {:.2} |", bytes as f64 / 1e9 / seconds);
    }
    let seconds = |name: &str| best.iter().find(|it| it.0 == name).map(|it| it.1);
    for (limit, ours) in [
        ("disk: plain reads", "disk: loaded and verified"),
        ("memory: b3sum", "memory: loaded and verified"),
    ] {
        if let (Some(limit_seconds), Some(seconds)) = (seconds(limit), seconds(ours)) {
            println!("{ours}: {:.2} of {limit}", limit_seconds / seconds);
        }
    }
    Ok(())
}

/// The files that nearly all of a package's bytes are in.
fn weights(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let all =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    Ok(all
        .into_iter()
        .filter(|path| path.extension().is_some_and(|it| it == "safetensors"))
        .collect())
}

/// Has the system forget what it knows of the files.
fn forget(files: &[PathBuf]) -> io::Result<()> {
    for path in files {
        let file = File::open(path)?;
        file.sync_all()?;
        #[cfg(target_os = "linux")]
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// Seconds in which so many threads read the files, each into memory that it uses again.
fn read(files: &[PathBuf], threads: usize) -> io::Result<f64> {
    let begun = Instant::now();
    for path in files {
        let file = File::open(path)?;
        let (size, next) = (file.metadata()?.len(), AtomicU64::new(0));
        let work = || -> io::Result<()> {
            let mut buffer = vec![0; READ as usize];
            loop {
                let at = next.fetch_add(READ, Ordering::Relaxed);
                if at >= size {
                    return Ok(());
                }
                file.read_exact_at(&mut buffer[..READ.min(size - at) as usize], at)?;
            }
        };
        thread::scope(|scope| {
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            all.into_iter().try_for_each(|one| one.join().expect("reading does not panic"))
        })?;
    }
    Ok(begun.elapsed().as_secs_f64())
}
