//! Errors of commands: what is printed and which exit code is returned.

use std::{fmt::Display, io, process::ExitCode};

use crate::progress::{is_unread, printable, result, say};

/// Why the command did not succeed, as the exit code tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The given model, package or set was read and is wrong.
    Wrong,
    /// The command could not run.
    CouldNotRun,
}

/// An error with its exit code and a hint.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    error: anyhow::Error,
    hint: Option<String>,
}

impl Failure {
    /// The given input is wrong.
    pub(crate) fn wrong(error: impl Into<anyhow::Error>) -> Self {
        Self { kind: Kind::Wrong, error: error.into(), hint: None }
    }

    /// The error alone, for a report.
    pub(crate) fn into_error(self) -> anyhow::Error {
        self.error
    }

    /// Adds a hint: what to do about it.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// Prints the chain of causes on one line and returns the exit code. With `json`, the same
    /// goes to standard output as JSON. Whose reader has left is no failure.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        let is_pipe = |cause: &(dyn std::error::Error + 'static)| {
            cause
                .downcast_ref::<io::Error>()
                .is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
        };
        if is_unread() && self.error.chain().any(is_pipe) {
            return ExitCode::SUCCESS;
        }
        let mut causes: Vec<String> = Vec::new();
        for cause in self.error.chain() {
            let text = cause.to_string();
            // Transparent errors repeat their source.
            if causes.last() != Some(&text) {
                causes.push(text);
            }
        }
        // Some of the text may come from another machine.
        let message = printable(&causes.join(": "));
        say(&format!("error: {message}"));
        if let Some(hint) = &self.hint {
            say(&format!("hint: {hint}"));
        }
        let code = self.code();
        if json {
            let json = serde_json::json!({ "ok": false, "error": message, "hint": self.hint, "exit_code": code });
            result(&json.to_string());
        }
        ExitCode::from(code)
    }

    const fn code(&self) -> u8 {
        match self.kind {
            Kind::Wrong => 1,
            Kind::CouldNotRun => 2,
        }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { kind: Kind::CouldNotRun, error: error.into(), hint: None }
    }
}
