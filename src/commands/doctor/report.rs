//! The results of the checks, as Markdown and as JSON.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Passed,
    Failed,
    /// It cannot run on this machine.
    Skipped,
}

/// One check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Check {
    pub name: String,
    pub state: State,
    /// What was found, or why it was skipped.
    pub detail: String,
    /// The same in numbers.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub figures: Value,
}

/// The result of a check that passed.
pub(super) struct Finding {
    /// What was found, for people.
    pub detail: String,
    /// The same in numbers.
    pub figures: Value,
}

/// The checks of one machine, or of the network between the nodes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Report {
    /// The machine, or `between the nodes`.
    pub of: String,
    pub checks: Vec<Check>,
}

impl Report {
    pub(super) fn new(of: impl Into<String>) -> Self {
        Self { of: of.into(), checks: Vec::new() }
    }

    pub(super) fn pass(&mut self, name: &str, detail: impl Into<String>, figures: Value) {
        self.add(name, State::Passed, detail.into(), figures);
    }

    pub(super) fn skip(&mut self, name: &str, why: impl Into<String>) {
        self.add(name, State::Skipped, why.into(), Value::Null);
    }

    /// Adds a check with its finding, or with the reason why it failed.
    pub(super) fn add_result(&mut self, name: &str, found: anyhow::Result<Finding>) {
        match found {
            Ok(Finding { detail, figures }) => self.pass(name, detail, figures),
            Err(error) => {
                self.add(name, State::Failed, format!("{error:#}"), Value::Null);
            }
        }
    }

    fn add(&mut self, name: &str, state: State, detail: String, figures: Value) {
        crate::progress::say(&format!("doctor: {name}: {detail}"));
        self.checks.push(Check { name: name.to_owned(), state, detail, figures });
    }

    pub(super) fn has_failed(&self) -> bool {
        self.checks.iter().any(|check| check.state == State::Failed)
    }
}

/// All reports as a Markdown page.
pub(super) fn markdown(reports: &[Report]) -> String {
    let mut page = format!("# shardpack {} doctor\n", env!("CARGO_PKG_VERSION"));
    for Report { of, checks } in reports {
        // Writing to a string cannot fail.
        let _ = write!(page, "\n## {}\n\n| check | result | detail |\n|---|---|---|\n", cell(of));
        for Check { name, state, detail, .. } in checks {
            let state = match state {
                State::Passed => "passed",
                State::Failed => "**failed**",
                State::Skipped => "skipped",
            };
            let _ = writeln!(page, "| {} | {state} | {} |", cell(name), cell(detail));
        }
    }
    page
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_shows_every_check() {
        let mut report = Report::new("this machine");
        report.pass("memory", "16 GB", Value::Null);
        report.skip("RDMA", "no device");
        report.add_result("logits", Err(anyhow::anyhow!("a | b\nc")));
        assert!(report.has_failed());
        let page = markdown(&[report]);
        let rows: Vec<_> = page.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "## this machine",
                "",
                "| check | result | detail |",
                "|---|---|---|",
                "| memory | passed | 16 GB |",
                "| RDMA | skipped | no device |",
                "| logits | **failed** | a \\| b c |",
            ]
        );
    }
}
