//! Progress: a bar on a terminal, otherwise a line at intervals; nothing within the first second. And
//! what is said besides: whoever reads it may leave at any time, and the program goes on.

use std::{
    fmt::Write as _,
    io::{self, IsTerminal, Write as _},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Interval between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Progress through a known number of bytes or steps. Goes to standard error.
pub(crate) struct Progress {
    label: &'static str,
    unit: Unit,
    total: u64,
    started: Instant,
    shown: Shown,
}

/// What is counted.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Steps,
}

impl Unit {
    const fn template(self) -> &'static str {
        match self {
            Self::Bytes => {
                "{prefix:>10} {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta} {wide_msg}"
            }
            Self::Steps => "{prefix:>10} {bar:32} step {pos}/{len} {eta} {wide_msg}",
        }
    }
}

enum Shown {
    Bar(ProgressBar),
    Lines(Mutex<Lines>),
}

struct Lines {
    done: u64,
    next: Instant,
}

impl Progress {
    /// Begins a stage of `total_bytes`.
    pub(crate) fn bytes(label: &'static str, total_bytes: u64) -> Self {
        Self::new(label, Unit::Bytes, total_bytes)
    }

    /// Begins a stage of `total` steps.
    pub(crate) fn steps(label: &'static str, total: u64) -> Self {
        Self::new(label, Unit::Steps, total)
    }

    fn new(label: &'static str, unit: Unit, total: u64) -> Self {
        let started = Instant::now();
        let shown = if io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(unit.template());
            let bar = ProgressBar::new(total)
                .with_prefix(label)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            Shown::Bar(bar)
        } else {
            Shown::Lines(Mutex::new(Lines { done: 0, next: started + LINE_EVERY }))
        };
        Self { label, unit, total, started, shown }
    }

    /// Names what is being worked on.
    pub(crate) fn message(&self, text: &str) {
        if let Shown::Bar(bar) = &self.shown {
            bar.set_message(text.to_owned());
        }
    }

    /// Adds what is done.
    pub(crate) fn add(&self, done: u64) {
        match &self.shown {
            Shown::Bar(bar) => bar.inc(done),
            Shown::Lines(lines) => {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                lines.done += done;
                if Instant::now() >= lines.next {
                    lines.next = Instant::now() + LINE_EVERY;
                    let share = lines.done as f64 * 100.0 / self.total.max(1) as f64;
                    let of = match self.unit {
                        Unit::Bytes => {
                            format!("{}, {}", size(self.total), rate(lines.done, self.started))
                        }
                        Unit::Steps => format!("{} steps", self.total),
                    };
                    say(&format!("{}: {share:.0} % of {of}", self.label));
                }
            }
        }
    }

    /// Subtracts bytes that have to be done again.
    pub(crate) fn take_back(&self, bytes: u64) {
        match &self.shown {
            Shown::Bar(bar) => bar.set_position(bar.position().saturating_sub(bytes)),
            Shown::Lines(lines) => {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                lines.done = lines.done.saturating_sub(bytes);
            }
        }
    }

    /// Ends the stage; the bar disappears.
    pub(crate) fn finish(&self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

/// A line for people, on standard error. One that cannot be written is for nobody.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{}", printable(text));
}

/// A prompt, on standard error, without a line break.
pub(crate) fn ask(text: &str) {
    let _ = write!(io::stderr(), "{text}");
}

/// Removes control characters from a text, which may come from another machine.
pub(crate) fn printable(text: &str) -> String {
    let shown = |c: char| {
        if c.is_control() && !matches!(c, '\n' | '\t') { char::REPLACEMENT_CHARACTER } else { c }
    };
    text.chars().map(shown).collect()
}

/// Whether the reader of standard output has left, as `head` does.
static IS_UNREAD: AtomicBool = AtomicBool::new(false);
/// Why results could not be written, where somebody reads them.
static UNWRITTEN: OnceLock<io::Error> = OnceLock::new();

/// The result of a command, on standard output.
pub(crate) fn result(text: &str) {
    written(writeln!(io::stdout(), "{text}"));
}

/// A part of a result, on standard output at once. An error ends the command, in silence where
/// nobody reads it.
pub(crate) fn result_part(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let outcome = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if outcome.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
        IS_UNREAD.store(true, Ordering::Relaxed);
    }
    outcome
}

fn written(outcome: io::Result<()>) {
    match outcome {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            IS_UNREAD.store(true, Ordering::Relaxed);
        }
        Err(error) => {
            let _ = UNWRITTEN.set(error);
        }
    }
}

/// Whether nobody reads standard output any more: a command that only prints has done its work.
pub(crate) fn is_unread() -> bool {
    IS_UNREAD.load(Ordering::Relaxed)
}

/// Why results could not be written: a full disk, for instance. That nobody reads them is no error.
pub(crate) fn unwritten() -> Option<&'static io::Error> {
    UNWRITTEN.get()
}

/// Bytes with a unit.
pub(crate) fn size(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// Bytes per second since `started`.
pub(crate) fn rate(bytes: u64, started: Instant) -> String {
    let seconds = started.elapsed().as_secs_f64().max(1e-9);
    format!("{}/s", HumanBytes((bytes as f64 / seconds) as u64))
}

/// Columns of text, left-aligned, two spaces apart; no trailing spaces.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a string cannot fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
