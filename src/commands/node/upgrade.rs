//! The program of a node: which one runs, and another one that the controller sends. Takes it piece by
//! piece beside the present file, checks it, and has the node go over to it ([`super::restart`]).

use std::{
    fs,
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use base64ct::{Base64, Encoding as _};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shardpack_cluster::FrontState;
use shardpack_identity::Guard;
use shardpack_manifests::{Digest, digest::ChunkHasher};
use tempfile::{NamedTempFile, TempPath};

use super::{
    fronts::Fronts,
    restart::{End, Ending, Trial},
};
use crate::{
    commands::{
        node_facts::{RankBook, RankFacts},
        program::{
            BEGIN, CONFIRM, INSTALL, PIECE, Platform, ProgramOffer, STATE, SignedOffer, digest_of,
        },
    },
    leftovers, own_program,
};

/// How long a program may take to say its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two looks at something that ends soon.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Longest wait for ranks, and for the controller.
const MAX_SECONDS: u64 = 24 * 60 * 60;

/// An upgrade that did not come about, until the next one begins.
#[derive(Clone, Debug, Serialize)]
pub(super) struct FailedUpgrade {
    pub digest: Digest,
    pub reason: String,
}

/// What an upgrade needs of its node.
pub(super) struct OfNode {
    pub guard: Option<Arc<Guard>>,
    pub ranks: Arc<RankBook>,
    pub fronts: Arc<Fronts>,
    pub ending: Ending,
    /// Whether this program is on trial.
    pub is_trial: bool,
    pub failed: Option<FailedUpgrade>,
}

/// What the names of programs that are not installed yet begin with.
const PROGRAMS: &str = ".shardpack-";

/// The program of a node.
pub(super) struct Upgrades {
    node: OfNode,
    digest: OnceLock<Result<Digest, String>>,
    failed: Mutex<Option<FailedUpgrade>>,
    incoming: Mutex<Option<Incoming>>,
}

/// A program that is being received.
struct Incoming {
    offer: ProgramOffer,
    program: PathBuf,
    file: NamedTempFile,
    received_bytes: u64,
    hasher: ChunkHasher,
}

#[derive(Deserialize)]
struct Piece {
    digest: Digest,
    offset: u64,
    data: String,
}

#[derive(Deserialize)]
struct Install {
    digest: Digest,
    force: bool,
    wait_seconds: u64,
    confirm_seconds: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Upgrades {
    pub(super) fn new(node: OfNode) -> Self {
        let failed = Mutex::new(node.failed.clone());
        Self { node, digest: OnceLock::new(), failed, incoming: Mutex::default() }
    }

    /// Carries out an operation; `None` of one that is not about the program.
    pub(super) fn operate(&self, name: &str, parameters: &Value) -> Option<Result<Value, String>> {
        let answer = match name {
            STATE => self.state(),
            BEGIN => self.begin(parameters),
            PIECE => self.piece(parameters),
            INSTALL => self.install(parameters),
            CONFIRM => self.confirm(parameters),
            _ => return None,
        };
        Some(answer.map_err(|error| format!("{error:#}")))
    }

    /// Digest of the program that runs.
    fn own_digest(&self) -> anyhow::Result<Digest> {
        let found = self.digest.get_or_init(|| {
            let digest = own_program::path().and_then(|path| digest_of(&path));
            digest.map(|(digest, _)| digest).map_err(|error| format!("{error:#}"))
        });
        found.clone().map_err(|error| anyhow!(error))
    }

    fn state(&self) -> anyhow::Result<Value> {
        Ok(json!({
            "digest": self.own_digest()?,
            "version": env!("CARGO_PKG_VERSION"),
            "build": env!("BUILD_HASH"),
            "platform": Platform::of(&own_program::path()?)?.to_string(),
            "trial": self.node.is_trial,
            "failed": *lock(&self.failed),
        }))
    }

    fn begin(&self, parameters: &Value) -> anyhow::Result<Value> {
        let signed: SignedOffer = Deserialize::deserialize(parameters)
            .context("the controller sent no offer that this program knows")?;
        let credentials = self.node.guard.as_ref().and_then(|guard| guard.credentials());
        let credentials = credentials.context(
            "this node is in no cluster, and takes a program from its cluster's controller alone",
        )?;
        let offer = signed.verify(&credentials)?;
        ensure!(!self.node.is_trial, "this program is on trial itself");
        *lock(&self.failed) = None;
        if offer.digest == self.own_digest()? {
            return Ok(json!({ "state": "current" }));
        }
        let program = present_file()?;
        let folder = program.parent().context("a program in a folder")?;
        let beside = || format!("a new program cannot be written beside {}", program.display());
        let free_bytes = rustix::fs::statvfs(folder)
            .map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize))
            .with_context(beside)?;
        ensure!(
            free_bytes > offer.size_bytes,
            "{}: {free_bytes} bytes are free, {} are needed",
            beside(),
            offer.size_bytes
        );
        // A program that a killed node had received in part.
        leftovers::sweep(folder, PROGRAMS);
        let file =
            tempfile::Builder::new().prefix(&leftovers::prefix(PROGRAMS)).tempfile_in(folder);
        let file = file.with_context(beside)?;
        let hasher = ChunkHasher::new();
        let incoming = Incoming { offer, program, file, received_bytes: 0, hasher };
        *lock(&self.incoming) = Some(incoming);
        Ok(json!({ "state": "awaited" }))
    }

    fn piece(&self, parameters: &Value) -> anyhow::Result<Value> {
        let Piece { digest, offset, data } = Deserialize::deserialize(parameters)
            .context("the controller sent no piece of a program")?;
        let data = Base64::decode_vec(&data).map_err(|_| anyhow!("a piece that is not base64"))?;
        let mut incoming = lock(&self.incoming);
        let incoming = incoming.as_mut().filter(|it| it.offer.digest == digest);
        let incoming =
            incoming.with_context(|| format!("program {} was not begun", digest.short()))?;
        ensure!(
            offset == incoming.received_bytes,
            "a piece at byte {offset}, expected {}",
            incoming.received_bytes
        );
        let after = offset + data.len() as u64;
        ensure!(after <= incoming.offer.size_bytes, "{after} bytes, more than were offered");
        let shown = || format!("could not write {}", incoming.file.path().display());
        incoming.file.as_file().write_all(&data).with_context(shown)?;
        incoming.hasher.update(&data);
        incoming.received_bytes = after;
        Ok(json!({ "received_bytes": after }))
    }

    fn install(&self, parameters: &Value) -> anyhow::Result<Value> {
        let Install { digest, force, wait_seconds, confirm_seconds } =
            Deserialize::deserialize(parameters).context("the controller sent no request")?;
        let incoming = lock(&self.incoming).take().filter(|it| it.offer.digest == digest);
        let incoming =
            incoming.with_context(|| format!("program {} is not here", digest.short()))?;
        let Incoming { offer, program, file, received_bytes, hasher } = incoming;
        ensure!(
            received_bytes == offer.size_bytes,
            "{received_bytes} of {} bytes of the program have come",
            offer.size_bytes
        );
        let found = hasher.finish().digest;
        ensure!(found == digest, "the program's BLAKE3 is {found}, expected {digest}");
        let file = checked(file, &program)?;
        let seconds = |seconds: u64| Duration::from_secs(seconds.min(MAX_SECONDS));
        self.wait_for_ranks(force, seconds(wait_seconds))?;
        let trial = Trial { file, program, digest, confirm: seconds(confirm_seconds) };
        self.node.ending.ask_soon(End::Upgrade(Box::new(trial)))?;
        Ok(json!({ "state": "restarting" }))
    }

    /// Waits until no rank serves, or ends those that do if that is asked for.
    fn wait_for_ranks(&self, force: bool, timeout: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            let ranks = self.node.ranks.facts();
            // One that keeps its weights for the next server serves nobody.
            let mut serving = ranks.iter().filter(|rank| rank.front != FrontState::Gone);
            let Some(RankFacts { name, served_by, .. }) = serving.next() else { return Ok(()) };
            if force {
                // Servers of this node end as `cluster stop` ends them; ranks end with the node.
                self.node.fronts.drain();
                return Ok(());
            }
            if Instant::now() >= deadline {
                let by = served_by.as_deref().unwrap_or("a server");
                bail!(
                    "{name} runs here for {by}: stop that server first, wait for its end with --wait, or end \
                     the rank with --force"
                );
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    fn confirm(&self, parameters: &Value) -> anyhow::Result<Value> {
        ensure!(self.node.is_trial, "no program is on trial here");
        let own = self.own_digest()?;
        ensure!(
            parameters["digest"] == json!(own),
            "program {} is on trial here, and another one is confirmed",
            own.short()
        );
        self.node.ending.ask_soon(End::Confirmed)?;
        Ok(json!({ "state": "confirmed" }))
    }
}

/// The file that this program was started from, which must still be it.
fn present_file() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own file")?;
    let running = own_program::path()?;
    ensure!(
        running == own,
        "{} was replaced or removed since this node started; start the node again first",
        own.display()
    );
    fs::canonicalize(&own).with_context(|| own.display().to_string())
}

/// Makes a received file a program, if it is one for this machine that says what it is.
fn checked(file: NamedTempFile, program: &Path) -> anyhow::Result<TempPath> {
    let shown = || format!("could not write {}", file.path().display());
    let permissions = fs::metadata(program).with_context(shown)?.permissions();
    file.as_file().set_permissions(permissions).with_context(shown)?;
    file.as_file().sync_all().with_context(shown)?;
    // Closed: a file that is open for writing is not executed.
    let file = file.into_temp_path();
    let expected = Platform::of(program)?;
    let found = Platform::of(&file).context("the file sent is no program")?;
    ensure!(found == expected, "the program is {found}, this node needs {expected}");
    let version = version_of(&file)?;
    ensure!(
        version.starts_with("shardpack "),
        "the program says {:?} when asked for its version, and is not shardpack",
        version.lines().next().unwrap_or_default()
    );
    Ok(file)
}

/// What a program answers to `--version`.
fn version_of(program: &Path) -> anyhow::Result<String> {
    let deadline = Instant::now() + VERSION_TIMEOUT;
    let mut child = loop {
        let mut command = Command::new(program);
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        match command.spawn() {
            // A process that another thread has just started may still hold the file open.
            Err(error)
                if error.kind() == io::ErrorKind::ExecutableFileBusy
                    && Instant::now() < deadline =>
            {
                thread::sleep(LOOK_AGAIN);
            }
            started => break started.context("the program cannot be started on this machine")?,
        }
    };
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= deadline {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the program did not say its version within {} s", VERSION_TIMEOUT.as_secs());
        }
        thread::sleep(LOOK_AGAIN);
    };
    ensure!(status.success(), "the program, asked for its version, ended ({status})");
    let mut text = String::new();
    if let Some(output) = child.stdout.take() {
        output
            .take(4 << 10)
            .read_to_string(&mut text)
            .context("the program's version is no text")?;
    }
    Ok(text)
}
