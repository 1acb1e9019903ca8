//! One module per command.

pub(crate) mod convert;
pub(crate) mod inspect;
mod threads;

use std::process::ExitCode;

use crate::failure::Failure;

/// What a command ends with: an exit code, or a failure to report.
pub(crate) type Outcome = Result<ExitCode, Failure>;
