//! The fronts that a node runs: kept on disk, started again when they end, stopped when told to.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::{self, File, OpenOptions},
    io::{BufRead as _, BufReader, Read, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shardpack_transfer::receive::Store;

use crate::{
    commands::front::{self, Assignment},
    own_program,
    progress::say,
    sd_notify,
};

/// Between two looks at the fronts.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The pause before a front that ended is started again; it doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// Time in which a front counts as steady: its pauses begin anew.
const STEADY: Duration = Duration::from_mins(1);

/// Lines kept of each front.
const MAX_LINES: usize = 1000;

/// A log is put aside when it is larger; one old one is kept.
const MAX_LOG_BYTES: u64 = 8 << 20;

/// How long a front may take to end after its drain.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// How long fronts may take that end with their node.
const LAST_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether a front is to run, as a file beside its assignment says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Wanted {
    Running,
    Stopped,
}

/// The fronts of a node.
pub(super) struct Fronts {
    folder: PathBuf,
    identity: Option<PathBuf>,
    store: Arc<Store>,
    all: Mutex<BTreeMap<String, Front>>,
}

struct Front {
    assignment: Assignment,
    wanted: Wanted,
    child: Option<RunningFront>,
    /// Ends in a row that were not wanted.
    ends: u32,
    start_at: Instant,
    /// How the last one ended, if that was not wanted.
    fault: Option<String>,
    lines: Lines,
}

struct RunningFront {
    child: Child,
    /// Closed when the node ends, which ends the front.
    _stdin: Option<ChildStdin>,
    started: Instant,
    /// What it said once it served.
    ready: Arc<Mutex<Option<Value>>>,
}

/// The last lines of a front, which go to its log too.
#[derive(Clone)]
struct Lines {
    kept: Arc<Mutex<VecDeque<String>>>,
    log: PathBuf,
}

impl Lines {
    fn new(log: PathBuf) -> Self {
        let mut kept = VecDeque::new();
        if let Ok(file) = File::open(&log) {
            for line in BufReader::new(file).lines().map_while(Result::ok) {
                kept.push_back(line);
                if kept.len() > MAX_LINES {
                    kept.pop_front();
                }
            }
        }
        Self { kept: Arc::new(Mutex::new(kept)), log }
    }

    fn add(&self, line: &str) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= MAX_LINES {
            kept.pop_front();
        }
        kept.push_back(line.to_owned());
        // A full disk stops no front.
        let _ = self.write(line);
    }

    fn write(&self, line: &str) -> std::io::Result<()> {
        if fs::metadata(&self.log).is_ok_and(|log| log.len() > MAX_LOG_BYTES) {
            fs::rename(&self.log, self.log.with_extension("old.log"))?;
        }
        let mut log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        writeln!(log, "{line}")
    }

    fn last(&self, count: usize) -> Vec<String> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().skip(kept.len().saturating_sub(count)).cloned().collect()
    }
}

impl Fronts {
    /// Those of a store; none runs yet.
    pub(super) fn open(
        store: &Arc<Store>,
        root: &Path,
        identity: Option<PathBuf>,
    ) -> anyhow::Result<Arc<Self>> {
        let folder = root.join("fronts");
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let mut all = BTreeMap::new();
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.extension().is_none_or(|it| it != "json") {
                continue;
            }
            match front::read(&path) {
                Ok(assignment) => {
                    let wanted = fs::read(path.with_extension("wanted")).ok();
                    let wanted = wanted.and_then(|bytes| serde_json::from_slice(&bytes).ok());
                    let name = assignment.name.clone();
                    let log = folder.join(format!("{name}.log"));
                    all.insert(
                        name,
                        Front::new(assignment, wanted.unwrap_or(Wanted::Running), log),
                    );
                }
                Err(error) => say(&format!("node: a front is left out: {error:#}")),
            }
        }
        let (store, all) = (Arc::clone(store), Mutex::new(all));
        Ok(Arc::new(Self { folder, identity, store, all }))
    }

    /// Starts those that are to run, now and whenever one has ended.
    pub(super) fn run(self: &Arc<Self>) -> std::io::Result<()> {
        let watched = Arc::downgrade(self);
        thread::Builder::new().name("fronts".to_owned()).spawn(move || {
            while let Some(fronts) = watched.upgrade() {
                fronts.look();
                drop(fronts);
                thread::sleep(LOOK_AGAIN);
            }
        })?;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Front>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out an operation of a controller; `None` of one that is not about fronts.
    pub(super) fn operate(&self, name: &str, parameters: &Value) -> Option<Result<Value, String>> {
        let named = || {
            let name = parameters["name"].as_str();
            name.map(str::to_owned).context("the operation names no front")
        };
        let answer = match name {
            "front.list" => Ok(self.list()),
            "front.start" => match parameters.get("assignment") {
                Some(assignment) => self.assign(assignment),
                None => named().and_then(|name| self.want(&name, Wanted::Running)),
            },
            "front.stop" => named().and_then(|name| self.want(&name, Wanted::Stopped)),
            "front.restart" => named().and_then(|name| {
                self.want(&name, Wanted::Stopped)?;
                self.want(&name, Wanted::Running)
            }),
            "front.remove" => named().and_then(|name| self.remove(&name)),
            "front.logs" => named().and_then(|name| {
                let lines = parameters["lines"].as_u64().unwrap_or(100) as usize;
                let all = self.lock();
                let front = all.get(&name).with_context(|| unknown(&name))?;
                Ok(json!({ "lines": front.lines.last(lines.min(MAX_LINES)) }))
            }),
            _ => return None,
        };
        Some(answer.map_err(|error| format!("{error:#}")))
    }

    fn list(&self) -> Value {
        let all = self.lock();
        let fronts: Vec<Value> = all.values().map(Front::state).collect();
        json!({ "fronts": fronts })
    }

    /// Keeps an assignment and starts its front, or starts it again where it has changed.
    fn assign(&self, assignment: &Value) -> anyhow::Result<Value> {
        let assignment: Assignment = serde_json::from_value(assignment.clone())
            .context("the controller sent no assignment that this program knows")?;
        assignment.check()?;
        let name = assignment.name.clone();
        self.package(&assignment)?;
        front::write(&self.path(&name), &serde_json::to_vec_pretty(&assignment)?)?;
        let mut all = self.lock();
        let log = self.folder.join(format!("{name}.log"));
        match all.get_mut(&name) {
            // The very same runs: nothing is to be done.
            Some(known) if known.assignment.is_like(&assignment) && known.child.is_some() => {
                known.assignment = assignment;
            }
            // It reads its keys again.
            Some(known)
                if known.assignment.is_like_but_for_keys(&assignment) && known.child.is_some() =>
            {
                assignment.write_keys(&self.path(&name).with_extension("files"))?;
                known.assignment = assignment;
            }
            Some(known) => {
                let (ending, timeout) = (known.child.take(), known.end_timeout());
                known.assignment = assignment;
                drop(all);
                end(ending, timeout);
                all = self.lock();
            }
            None => {
                all.insert(name.clone(), Front::new(assignment, Wanted::Running, log));
            }
        }
        drop(all);
        self.want(&name, Wanted::Running)
    }

    fn want(&self, name: &str, wanted: Wanted) -> anyhow::Result<Value> {
        let mut all = self.lock();
        let front = all.get_mut(name).with_context(|| unknown(name))?;
        front::write(&self.path(name).with_extension("wanted"), &serde_json::to_vec(&wanted)?)?;
        front.wanted = wanted;
        front.ends = 0;
        front.start_at = Instant::now();
        let ending = if wanted == Wanted::Stopped { front.child.take() } else { None };
        let timeout = front.end_timeout();
        drop(all);
        end(ending, timeout);
        self.look();
        let all = self.lock();
        Ok(all.get(name).with_context(|| unknown(name))?.state())
    }

    fn remove(&self, name: &str) -> anyhow::Result<Value> {
        let removed = self.lock().remove(name).with_context(|| unknown(name))?;
        let timeout = removed.end_timeout();
        end(removed.child, timeout);
        let path = self.path(name);
        for file in [path.clone(), path.with_extension("wanted"), removed.lines.log] {
            // What is not there is removed.
            let _ = fs::remove_file(file);
        }
        let _ = fs::remove_dir_all(path.with_extension("files"));
        Ok(json!({ "removed": name }))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.json"))
    }

    /// A package of its set, for the text side.
    fn package(&self, assignment: &Assignment) -> anyhow::Result<PathBuf> {
        let packages = self.store.packages()?;
        let of_set = packages.into_iter().find(|package| package.key.layout == assignment.layout);
        let package = of_set.ok_or_else(|| {
            anyhow!(
                "this node holds no package of layout {}: push the set to its nodes first, this one among them",
                assignment.layout.short()
            )
        })?;
        Ok(package.path)
    }

    /// Starts what is to run, and notices what has ended.
    fn look(&self) {
        let now = Instant::now();
        for (name, front) in &mut *self.lock() {
            let ended =
                front.child.as_mut().and_then(|running| running.child.try_wait().ok().flatten());
            if let (Some(status), Some(running)) = (ended, front.child.take_if(|_| ended.is_some()))
            {
                if running.started.elapsed() >= STEADY {
                    front.ends = 0;
                }
                let factor = 1_u32.checked_shl(front.ends).unwrap_or(u32::MAX);
                let pause = FIRST_PAUSE.saturating_mul(factor).min(LONGEST_PAUSE);
                front.ends += 1;
                front.start_at = now + pause;
                let last = front.lines.last(1).pop().unwrap_or_default();
                let fault = format!("ended ({status}): {last}");
                say(&format!("node: front {name} {fault}"));
                front.fault = Some(fault);
            }
            if front.wanted == Wanted::Running && front.child.is_none() && now >= front.start_at {
                let package = self.package(&front.assignment);
                let started = package.and_then(|package| self.start(name, &package, &front.lines));
                match started {
                    Ok(running) => {
                        say(&format!("node: front {name} started"));
                        front.child = Some(running);
                    }
                    Err(error) => {
                        front.start_at = now + LONGEST_PAUSE;
                        front.fault = Some(format!("cannot be started: {error:#}"));
                    }
                }
            }
        }
    }

    fn start(&self, name: &str, package: &Path, lines: &Lines) -> anyhow::Result<RunningFront> {
        let mut command = Command::new(own_program::path()?);
        command.arg("front").arg(self.path(name)).arg("--package").arg(package);
        if let Some(identity) = &self.identity {
            command.arg("--identity").arg(identity);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for variable in sd_notify::VARIABLES {
            command.env_remove(variable);
        }
        #[cfg(unix)]
        {
            use std::os::unix::process::CommandExt;
            // Ctrl-C goes to a terminal's whole process group; fronts end with their node.
            command.process_group(0);
        }
        let mut child = command.spawn().context("the front cannot be started")?;
        let ready = Arc::<Mutex<Option<Value>>>::default();
        let told = Arc::clone(&ready);
        let serving = move |line: &str| {
            if let Ok(json @ Value::Object(_)) = serde_json::from_str(line) {
                *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(json);
            }
        };
        if let Some(output) = child.stdout.take() {
            read_lines(output, lines.clone(), serving)?;
        }
        if let Some(errors) = child.stderr.take() {
            read_lines(errors, lines.clone(), |_| ())?;
        }
        let stdin = child.stdin.take();
        Ok(RunningFront { child, _stdin: stdin, started: Instant::now(), ready })
    }

    /// Ends all as [`Self::want`] ends one, within its drain; they are started again with the node.
    pub(super) fn drain(&self) {
        let all = std::mem::take(&mut *self.lock());
        thread::scope(|scope| {
            for front in all.into_values() {
                scope.spawn(|| {
                    let timeout = front.end_timeout();
                    end(front.child, timeout);
                });
            }
        });
    }

    /// Ends all with the node; they are started again with it.
    pub(super) fn end(&self) {
        let all = std::mem::take(&mut *self.lock());
        let ending: Vec<_> = all.into_values().filter_map(|front| front.child).collect();
        thread::scope(|scope| {
            for running in ending {
                scope.spawn(|| end(Some(running), LAST_TIMEOUT));
            }
        });
    }
}

impl Front {
    fn new(assignment: Assignment, wanted: Wanted, log: PathBuf) -> Self {
        let lines = Lines::new(log);
        let start_at = Instant::now();
        Self { assignment, wanted, child: None, ends: 0, start_at, fault: None, lines }
    }

    /// How long it may take to end.
    fn end_timeout(&self) -> Duration {
        self.assignment.drain_timeout() + END_TIMEOUT
    }

    fn state(&self) -> Value {
        let running = self.child.as_ref();
        let ready = running.and_then(|running| {
            running.ready.lock().unwrap_or_else(PoisonError::into_inner).clone()
        });
        let state = match (self.wanted, running, &ready) {
            (Wanted::Stopped, _, _) => "stopped",
            (_, Some(_), Some(_)) => "serving",
            (_, Some(_), None) => "starting",
            (_, None, _) => "waiting",
        };
        json!({
            "name": self.assignment.name,
            "state": state,
            "url": ready.as_ref().map(|ready| ready["url"].clone()),
            "ranks": self.assignment.ranks.len(),
            "layout": self.assignment.layout,
            "process": running.map(|running| running.child.id()),
            "seconds": running.map(|running| running.started.elapsed().as_secs()),
            "fault": self.fault,
            "last": self.lines.last(1).pop(),
        })
    }
}

fn unknown(name: &str) -> String {
    format!("this node has no front {name:?}")
}

/// Asks a front to end, which it does when its requests are done, and waits.
fn end(running: Option<RunningFront>, timeout: Duration) {
    let Some(mut running) = running else { return };
    let pid = i32::try_from(running.child.id()).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        // It may have ended by itself.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    let deadline = Instant::now() + timeout;
    while Instant::now() < deadline {
        if running.child.try_wait().is_ok_and(|status| status.is_some()) {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let _ = running.child.kill();
    let _ = running.child.wait();
}

fn read_lines(
    from: impl Read + Send + 'static,
    lines: Lines,
    take: impl Fn(&str) + Send + 'static,
) -> std::io::Result<()> {
    let read = move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            take(&line);
            lines.add(&line);
        }
    };
    thread::Builder::new().name("front-log".to_owned()).spawn(read).map(drop)
}
