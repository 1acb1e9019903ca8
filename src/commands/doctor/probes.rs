//! Checks that run in a process of their own, since they can hang, crash or lock up the GPU: started
//! here with a deadline, and carried out here in the process that was started.

mod kernels;
mod memory;
mod reference;
mod wait;

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use shardpack_mlx::{Device, Library};

use super::{
    process::Process,
    report::{Finding, Report},
};
use crate::{args::ProbeName, engines, progress};

/// How a row of a probe ended.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    Found(Finding),
    Skipped(String),
    /// What was wrong, and what to do.
    Failed(String, String),
}

/// What a probe writes: one line of JSON each.
#[derive(Serialize, Deserialize)]
struct Row {
    name: String,
    outcome: Outcome,
}

impl ProbeName {
    /// The row that says how the probe itself ended, if it did not end well.
    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::Kernels => "kernels of MLX",
            Self::NoCopy => "memory that MLX takes without copies",
            Self::Bandwidth => "read bandwidth of memory, mlx",
            Self::Wiring => "wiring memory for the GPU",
            Self::Wait => "how long the GPU may wait",
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Kernels => "kernels",
            Self::NoCopy => "no-copy",
            Self::Bandwidth => "bandwidth",
            Self::Wiring => "wiring",
            Self::Wait => "wait",
        }
    }

    const fn timeout(self) -> Duration {
        match self {
            // Metal compiles each kernel at its first use.
            Self::Kernels => Duration::from_mins(2),
            Self::NoCopy | Self::Bandwidth | Self::Wiring | Self::Wait => Duration::from_secs(45),
        }
    }
}

/// Runs a probe in a process of its own and adds its rows.
pub(super) fn check(probe: ProbeName, report: &mut Report) {
    const ADVICE: &str = "attach this report to a bug; a GPU that hangs needs a restart of the Mac";
    if let Err(error) = rows(probe, report) {
        report.fail(probe.title(), format!("{error:#}"), ADVICE);
    }
}

fn rows(probe: ProbeName, report: &mut Report) -> anyhow::Result<()> {
    let mut command = Command::new(env::current_exe()?);
    command.args(["self-test", "--probe", probe.word()]);
    let deadline = Instant::now() + probe.timeout();
    let mut process = Process::start(command)?;
    while let Some(line) = process.next(deadline)? {
        let Row { name, outcome } = serde_json::from_value(line)?;
        match outcome {
            Outcome::Found(found) => report.find(&name, found),
            Outcome::Skipped(why) => report.skip(&name, why),
            Outcome::Failed(what, advice) => report.fail(&name, what, &advice),
        }
    }
    Ok(())
}

/// Carries out a probe in this process.
pub(in crate::commands) fn run(probe: ProbeName) -> anyhow::Result<()> {
    let library = Library::open(&engines::mlx_folder(None)?, None)?;
    let mut note = |name: &str, outcome: anyhow::Result<Outcome>| {
        let outcome =
            outcome.unwrap_or_else(|error| Outcome::Failed(format!("{error:#}"), String::new()));
        let row = Row { name: name.to_owned(), outcome };
        progress::result(&serde_json::to_string(&row).expect("a row is plain JSON"));
    };
    match probe {
        ProbeName::Kernels => kernels::run(library, &mut note),
        ProbeName::NoCopy => note(probe.title(), memory::no_copy(library)),
        ProbeName::Bandwidth => note(probe.title(), memory::bandwidth(library)),
        ProbeName::Wiring => note(probe.title(), memory::wiring(library)),
        ProbeName::Wait => wait::run(library, &mut note),
    }
    Ok(())
}

/// Where a probe reports a row.
type Note<'a> = &'a mut dyn FnMut(&str, anyhow::Result<Outcome>);

fn is_gpu(library: Library) -> bool {
    library.device() == Device::Gpu
}
