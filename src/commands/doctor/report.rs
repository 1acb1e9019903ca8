//! The results of the checks, as Markdown and as JSON.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::private::Private;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Passed,
    /// Right, and slower than this machine should be.
    Slow,
    Failed,
    /// It cannot run on this machine.
    Skipped,
}

impl State {
    const fn word(self) -> &'static str {
        match self {
            Self::Passed => "ok",
            Self::Slow => "**slow**",
            Self::Failed => "**failed**",
            Self::Skipped => "skipped",
        }
    }
}

/// One check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Check {
    pub name: String,
    pub state: State,
    /// What was found, or why it was skipped.
    pub detail: String,
    /// What a healthy machine has; empty if there is nothing to compare with.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub expected: String,
    /// What to do about it; empty if nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub advice: String,
    /// The same in numbers.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub figures: Value,
}

/// The result of a check that passed, or that is only slow.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Finding {
    /// What was found, for people.
    pub detail: String,
    /// As [`Check::expected`].
    #[serde(default)]
    pub expected: String,
    /// Whether it is slower than expected.
    #[serde(default)]
    pub is_slow: bool,
    /// As [`Check::advice`].
    #[serde(default)]
    pub advice: String,
    /// The same in numbers.
    #[serde(default)]
    pub figures: Value,
}

impl Finding {
    pub(super) fn new(detail: impl Into<String>, figures: Value) -> Self {
        Self { detail: detail.into(), figures, ..Self::default() }
    }

    pub(super) fn expected(self, expected: impl Into<String>) -> Self {
        Self { expected: expected.into(), ..self }
    }

    /// Slow, with what to do, if `is_slow`.
    pub(super) fn slow_if(self, is_slow: bool, advice: &str) -> Self {
        let advice = if is_slow { advice.to_owned() } else { self.advice };
        Self { is_slow, advice, ..self }
    }
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
        self.find(name, Finding::new(detail, figures));
    }

    /// Adds what was found.
    pub(super) fn find(&mut self, name: &str, found: Finding) {
        let Finding { detail, expected, is_slow, advice, figures } = found;
        let state = if is_slow { State::Slow } else { State::Passed };
        self.add(Check { name: name.to_owned(), state, detail, expected, advice, figures });
    }

    pub(super) fn skip(&mut self, name: &str, why: impl Into<String>) {
        self.end(name, State::Skipped, why.into(), "");
    }

    /// Adds a check that failed, with what to do about it.
    pub(super) fn fail(&mut self, name: &str, detail: impl Into<String>, advice: &str) {
        self.end(name, State::Failed, detail.into(), advice);
    }

    /// Adds a check with its finding, or with the reason why it failed.
    pub(super) fn add_result(&mut self, name: &str, found: anyhow::Result<Finding>) {
        self.add_or_fail(name, found, "");
    }

    /// The same, with what to do if it failed.
    pub(super) fn add_or_fail(&mut self, name: &str, found: anyhow::Result<Finding>, advice: &str) {
        match found {
            Ok(found) => self.find(name, found),
            Err(error) => self.fail(name, format!("{error:#}"), advice),
        }
    }

    fn end(&mut self, name: &str, state: State, detail: String, advice: &str) {
        let (expected, figures) = (String::new(), Value::Null);
        let (name, advice) = (name.to_owned(), advice.to_owned());
        self.add(Check { name, state, detail, expected, advice, figures });
    }

    fn add(&mut self, check: Check) {
        crate::progress::say(&format!("doctor: {}: {}", check.name, check.detail));
        self.checks.push(check);
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
        let _ = write!(page, "\n## {}\n\n{HEADER}\n", cell(of));
        for check in checks {
            let _ = writeln!(page, "{}", row(check));
        }
    }
    let count = |state| {
        reports.iter().flat_map(|it| &it.checks).filter(|check| check.state == state).count()
    };
    let _ = writeln!(
        page,
        "\n{} ok, {} slow, {} failed, {} skipped.",
        count(State::Passed),
        count(State::Slow),
        count(State::Failed),
        count(State::Skipped)
    );
    page
}

/// The text for a bug report: the same rows, without what tells whose machine it is.
pub(super) fn bug_report(reports: &[Report], private: &Private) -> String {
    let mut page = "\n## Paste this into a bug report\n\n````markdown\n".to_owned();
    let _ = writeln!(page, "shardpack {} doctor\n\n{HEADER}", env!("CARGO_PKG_VERSION"));
    for (index, report) in reports.iter().enumerate() {
        for check in &report.checks {
            let name = match reports.len() {
                1 => check.name.clone(),
                _ => format!("{}: {}", index + 1, check.name),
            };
            let check = Check {
                name,
                detail: private.hide(&check.detail),
                expected: private.hide(&check.expected),
                advice: private.hide(&check.advice),
                ..check.clone()
            };
            let _ = writeln!(page, "{}", row(&check));
        }
    }
    page + "````\n"
}

const HEADER: &str =
    "| check | verdict | measured | expected | what to do |\n|---|---|---|---|---|";

fn row(check: &Check) -> String {
    let Check { name, state, detail, expected, advice, .. } = check;
    let word = state.word();
    let cells = [name, detail, expected, advice].map(|text| cell(text));
    format!("| {} | {word} | {} | {} | {} |", cells[0], cells[1], cells[2], cells[3])
}

/// Escapes text for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("this machine");
        report.pass("memory", "16 GB", Value::Null);
        report.skip("RDMA", "no device");
        let slow = Finding::new("3 GB/s", Value::Null).expected("at least 7 GB/s");
        report.find("disk", slow.slow_if(true, "use another disk"));
        report.add_result("logits", Err(anyhow::anyhow!("a | b\nc")));
        report
    }

    #[test]
    fn a_page_shows_every_check() {
        let report = report();
        assert!(report.has_failed());
        let page = markdown(&[report]);
        let rows: Vec<_> = page.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "## this machine",
                "",
                "| check | verdict | measured | expected | what to do |",
                "|---|---|---|---|---|",
                "| memory | ok | 16 GB |  |  |",
                "| RDMA | skipped | no device |  |  |",
                "| disk | **slow** | 3 GB/s | at least 7 GB/s | use another disk |",
                "| logits | **failed** | a \\| b c |  |  |",
                "",
                "1 ok, 1 slow, 1 failed, 1 skipped.",
            ]
        );
    }

    #[test]
    fn a_report_of_an_older_program_is_read() {
        let json = r#"{"of": "a", "checks": [{"name": "b", "state": "passed", "detail": "c"}]}"#;
        let report: Report = serde_json::from_str(json).unwrap();
        assert_eq!(report.checks[0].advice, "");
    }

    #[test]
    fn what_is_pasted_has_the_rows_and_no_names() {
        let mut first = report();
        first.of = "node studio-of-alice:7420".to_owned();
        first.fail("runtime", "/Users/alice/.local/share: fe80::12:34 on studio-of-alice", "");
        let private = Private::of(Some("/Users/alice"), Some("alice"), Some("studio-of-alice"));
        let page = bug_report(&[first, Report::new("b")], &private);
        assert!(!page.contains("alice") && !page.contains("fe80"), "{page}");
        assert!(page.contains("| 1: disk | **slow** | 3 GB/s |"), "{page}");
        assert!(page.contains("~/.local/share: … on …"), "{page}");
    }
}
