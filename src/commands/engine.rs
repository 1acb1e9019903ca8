//! `shardpack engine`.

use std::{path::Path, process::ExitCode, time::Instant};

use serde_json::json;
use shardpack_mlx::{
    Device, Library,
    runtime::{self, CheckError, InstallError, InstallOptions, MLX_VERSION, Record, Step},
};

mod download;

use super::Outcome;
use crate::{
    args::{EngineAction, EngineArgs, EngineFolderArgs, EngineInstallArgs},
    engines,
    failure::Failure,
    progress::{Progress, result, say},
};

/// Whether the result is JSON.
pub(crate) const fn json(args: &EngineArgs) -> bool {
    let common = match &args.action {
        EngineAction::Install(args) => &args.common,
        EngineAction::List(args) => args,
        EngineAction::Check(args) => &args.common,
    };
    common.form.json
}

/// Runs the command.
pub(crate) fn run(args: &EngineArgs) -> Outcome {
    match &args.action {
        EngineAction::Install(args) => install(args),
        EngineAction::List(args) => list(args),
        EngineAction::Check(args) => check(&args.common),
    }
}

fn install(args: &EngineInstallArgs) -> Outcome {
    let folder = engines::mlx_folder(args.common.dir.as_deref())?;
    let options = InstallOptions {
        folder: folder.clone(),
        wheel: args.wheel.clone(),
        download: download::options(args.index_url.as_deref()),
        python: args.python.clone(),
        compile: args.compile,
        cxx: args.cxx.clone(),
    };
    let started = Instant::now();
    let mut shown = Shown::default();
    let installed = runtime::install(&options, &mut |step| shown.step(step));
    shown.finish();
    let already = shown.already;
    let record = installed.map_err(|error| match error {
        InstallError::Wheel { .. } | InstallError::Unpack { .. } => Failure::wrong(error),
        error => Failure::from(error),
    })?;
    let (device, seconds) = (load(&folder)?, started.elapsed().as_secs_f64());
    if args.common.form.json {
        let json = json!({
            "ok": true, "engine": "mlx", "version": MLX_VERSION, "folder": folder,
            "already": already, "device": device, "bytes": bytes(&record), "seconds": seconds,
        });
        result(&json.to_string());
    } else {
        let word = if already { "is already installed and verified" } else { "installed" };
        result(&format!(
            "MLX {MLX_VERSION} {word}: {} ({:.0} MB, computes on the {device}, {seconds:.1} s)",
            folder.display(),
            bytes(&record) as f64 / 1e6,
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// What an installation says while it goes on.
#[derive(Default)]
struct Shown {
    already: bool,
    download: Option<(Progress, u64)>,
}

impl Shown {
    fn step(&mut self, step: Step) {
        if let Step::Bytes { done, total } = step {
            return self.bytes(done, total);
        }
        self.finish();
        match step {
            Step::Already => self.already = true,
            Step::Download(file) => say(&format!("downloading {file}")),
            Step::Retry(problem) => say(&problem),
            Step::Pip(problem) => say(&format!("{problem}; trying pip")),
            Step::Verify(path) => say(&format!("verifying {}", path.display())),
            Step::Unpack => say("unpacking the libraries"),
            Step::Layer => say("writing the C layer"),
            Step::Compile(compiler) => say(&format!("compiling the C layer with {compiler}")),
            Step::Bytes { .. } => {}
        }
    }

    fn bytes(&mut self, done: u64, total: u64) {
        let (progress, before) =
            self.download.get_or_insert_with(|| (Progress::bytes("download", total), 0));
        match done.checked_sub(*before) {
            Some(more) => progress.add(more),
            None => progress.take_back(*before - done),
        }
        *before = done;
    }

    fn finish(&mut self) {
        if let Some((progress, _)) = self.download.take() {
            progress.finish();
        }
    }
}

/// Loads the runtime; returns its device.
fn load(folder: &Path) -> Result<&'static str, Failure> {
    let library = Library::open(folder, None).map_err(Failure::wrong)?;
    Ok(match library.device() {
        Device::Cpu => "processor",
        Device::Gpu => "GPU",
    })
}

fn bytes(record: &Record) -> u64 {
    record.files.iter().map(|file| file.size).sum()
}

fn list(args: &EngineFolderArgs) -> Outcome {
    let folder = engines::mlx_folder(args.dir.as_deref())?;
    let (state, found) = match runtime::check(&folder) {
        Ok(checked) => ("installed".to_owned(), Some(bytes(&checked.record))),
        Err(CheckError::Absent(_)) => ("not installed".to_owned(), None),
        Err(error) => (format!("unusable: {error}"), None),
    };
    if args.form.json {
        let json = json!({ "ok": true, "engines": [
            { "engine": "cpu", "version": env!("CARGO_PKG_VERSION"), "state": "built in" },
            { "engine": "mlx", "version": MLX_VERSION, "state": state, "folder": folder, "bytes": found },
        ]});
        result(&json.to_string());
    } else {
        result(&format!("cpu  {:8}  built in", env!("CARGO_PKG_VERSION")));
        result(&format!("mlx  {MLX_VERSION:8}  {state} ({})", folder.display()));
    }
    Ok(ExitCode::SUCCESS)
}

fn check(args: &EngineFolderArgs) -> Outcome {
    let folder = engines::mlx_folder(args.dir.as_deref())?;
    let record = match runtime::check(&folder) {
        Ok(checked) => checked.record,
        Err(error @ (CheckError::Absent(_) | CheckError::Platform)) => return Err(error.into()),
        Err(error) => return Err(Failure::wrong(error)),
    };
    let device = load(&folder)?;
    if args.form.json {
        let files = record.files.len();
        let json = json!({
            "ok": true, "engine": "mlx", "version": record.mlx, "folder": folder,
            "files": files, "bytes": bytes(&record), "device": device, "layer": record.layer,
        });
        result(&json.to_string());
    } else {
        result(&format!(
            "MLX {}: {} files, {:.0} MB, all as installed; computes on the {device}",
            record.mlx,
            record.files.len(),
            bytes(&record) as f64 / 1e6,
        ));
    }
    Ok(ExitCode::SUCCESS)
}
