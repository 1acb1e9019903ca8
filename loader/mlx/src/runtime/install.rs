//! Laying a runtime down: the pinned wheel, checked; its libraries unpacked; our C layer compiled
//! with the machine's C++ compiler; a record of every byte; one rename.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use sha2::{Digest, Sha256};

use super::{
    MLX_VERSION, Platform,
    check::{CheckError, FileDigest, check, digest},
    platform::Wheel,
    record::{self, FileRecord, Record},
};
use crate::table::ABI;

const SOURCE: &str =
    concat!(include_str!("../../native/shim.cpp"), include_str!("../../native/sampling.cpp"));

/// Longest download: 64 MB over a slow line.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_mins(30);

/// Longest compilation; it takes 5 s on a machine of 2020.
const COMPILE_TIMEOUT: Duration = Duration::from_mins(5);

/// Most unpacked bytes of a wheel: the largest has 250 MB.
const MAX_UNPACKED_BYTES: u64 = 1 << 30;

/// How a runtime is made.
#[derive(Clone, Debug)]
pub struct InstallOptions {
    /// The folder that will be the runtime.
    pub folder: PathBuf,
    /// The wheel, where it is already at hand; else pip fetches it.
    pub wheel: Option<PathBuf>,
    /// The Python whose pip fetches the wheel.
    pub python: String,
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
    /// Comparing the wheel's SHA-256.
    Verify(PathBuf),
    /// Unpacking the libraries.
    Unpack,
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

const PIP_HINT: &str =
    "install Python 3 with pip, or give the wheel with --wheel FILE (fetched on another machine)";
const CXX_HINT: &str = "install a C++20 compiler (macOS: xcode-select --install; Debian: apt-get \
                        install g++), or copy the runtime from a machine that has one";

/// Digest of the C layer's source: a runtime that was compiled from another one is not used.
pub(crate) fn source_digest() -> String {
    hex(&Sha256::digest(SOURCE.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

/// Lays the runtime down, or finds it whole already.
pub fn install(
    options: &InstallOptions,
    report: &mut dyn FnMut(Step),
) -> Result<Record, InstallError> {
    let platform = Platform::current().ok_or(CheckError::Platform)?;
    if let Ok(checked) = check(&options.folder) {
        report(Step::Already);
        return Ok(checked.record);
    }
    let parent = options.folder.parent().unwrap_or_else(|| Path::new("."));
    let write = |source| InstallError::Write { path: parent.to_owned(), source };
    fs::create_dir_all(parent).map_err(write)?;
    let staging = tempfile::Builder::new().prefix(".mlx-").tempdir_in(parent).map_err(write)?;
    let ObtainedWheel { wheel, path } = obtain(platform, options, staging.path(), report)?;
    report(Step::Unpack);
    let runtime = staging.path().join("runtime");
    let headers = staging.path().join("headers");
    unpack(&path, &runtime, &headers)?;
    compile(platform, options, &runtime, &headers, report)?;
    let record = Record {
        format: 1,
        mlx: MLX_VERSION.to_owned(),
        abi: ABI,
        platform: platform.name().to_owned(),
        wheel_sha256: wheel.sha256.to_owned(),
        source_sha256: source_digest(),
        files: list(&runtime)?,
    };
    let bytes = serde_json::to_vec_pretty(&record).expect("a record is JSON");
    let place = runtime.join(record::NAME);
    write_new(&place, &bytes).map_err(|source| InstallError::Write { path: place, source })?;
    publish(&runtime, &options.folder, staging.path())?;
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

/// The wheel for this machine, given or downloaded, with its digest verified.
fn obtain(
    platform: Platform,
    options: &InstallOptions,
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
    let file =
        format!("{}-{MLX_VERSION}-py3-none-{}.whl", wheel.project.replace('-', "_"), wheel.tag);
    report(Step::Download(file.clone()));
    let mut command = Command::new(&options.python);
    command.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    command.args(["--only-binary=:all:", "--platform", wheel.tag, "--dest"]).arg(staging);
    command.arg(format!("{}=={MLX_VERSION}", wheel.project));
    run(command, DOWNLOAD_TIMEOUT, PIP_HINT)?;
    let path = staging.join(file);
    report(Step::Verify(path.clone()));
    let found = sha256(&path)?;
    if found == wheel.sha256 {
        return Ok(ObtainedWheel { wheel, path });
    }
    Err(InstallError::Wheel { path, expected: wheel.sha256.to_owned(), found })
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

fn sha256(path: &Path) -> Result<String, InstallError> {
    let problem = |error: io::Error| InstallError::Unpack {
        path: path.to_owned(),
        problem: error.to_string(),
    };
    let mut file = File::open(path).map_err(problem)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(problem)?;
        if read == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
    }
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

fn compile(
    platform: Platform,
    options: &InstallOptions,
    runtime: &Path,
    headers: &Path,
    report: &mut dyn FnMut(Step),
) -> Result<(), InstallError> {
    report(Step::Compile(options.cxx.clone()));
    let source = headers.join("shim.cpp");
    write_new(&source, SOURCE.as_bytes())
        .map_err(|error| InstallError::Write { path: source.clone(), source: error })?;
    let include = headers.join("mlx/include");
    let output = runtime.join(platform.shim());
    let mut command = Command::new(&options.cxx);
    command.args(["-std=c++20", "-O2", "-fPIC", "-fvisibility=default", "-w"]);
    command.arg(format!("-DSP_ABI={ABI}")).arg("-isystem").arg(&include);
    if platform == Platform::Macos {
        command.arg("-isystem").arg(include.join("metal_cpp"));
        command.args(["-arch", "arm64", "-dynamiclib", "-Wl,-rpath,@loader_path"]);
        command.args(["-install_name", "@rpath/libshardpack_mlx.dylib"]);
    } else {
        // The old tag, since the newer one lets LD_LIBRARY_PATH bring in another MLX.
        command.args(["-shared", "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags"]);
        command.args(["-Wl,--no-undefined", "-Wl,--allow-shlib-undefined"]);
    }
    command.arg(&source).arg("-o").arg(&output);
    command.arg("-L").arg(runtime.join("mlx/lib")).arg("-lmlx");
    run(command, COMPILE_TIMEOUT, CXX_HINT)?;
    if platform == Platform::Macos {
        let mut sign = Command::new("codesign");
        sign.args(["--sign", "-", "--force"]).arg(&output);
        run(sign, Duration::from_mins(1), CXX_HINT)?;
    }
    Ok(())
}

/// Runs a program to its end, or ends it; returns what it printed.
fn run(
    mut command: Command,
    timeout: Duration,
    hint: &'static str,
) -> Result<String, InstallError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let problem =
        |problem: String| InstallError::Program { program: program.clone(), problem, hint };
    let output = tempfile::tempfile().map_err(|error| problem(error.to_string()))?;
    let copy = || output.try_clone().map(Stdio::from).map_err(|error| problem(error.to_string()));
    command.stdin(Stdio::null()).stdout(copy()?).stderr(copy()?);
    let mut child = command.spawn().map_err(|error| problem(format!("cannot be run: {error}")))?;
    let deadline = Instant::now() + timeout;
    let status = loop {
        match child.try_wait().map_err(|error| problem(error.to_string()))? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(problem(format!("did not end within {} s", timeout.as_secs())));
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let mut text = String::new();
    let mut output = output;
    io::Seek::rewind(&mut output)
        .and_then(|()| output.read_to_string(&mut text))
        .map_err(|error| problem(error.to_string()))?;
    if status.success() {
        return Ok(text);
    }
    let lines: Vec<_> = text.trim().lines().collect();
    let last = lines[lines.len().saturating_sub(5)..].join("\n");
    Err(problem(format!("failed ({status}): {last}")))
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
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
