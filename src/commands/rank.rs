//! `shardpack rank`: the process of one rank. Its first line on standard output is its address.

use std::{
    net::TcpListener,
    panic::resume_unwind,
    path::Path,
    process::ExitCode,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use shardpack_cluster::{
    Announcement, Identity, LoadError, PROTOCOL, Progress, RankOptions, Token, run_rank,
};
use shardpack_engine::loading::{OpenOptions, OpenProgress, Package};
use shardpack_identity::{Credentials, credentials_of_node, is_local};
use shardpack_manifests::Manifest;

use super::{Outcome, draft, package, threads};
use crate::{
    args::RankArgs, engines::say_copies, failure::Failure, progress::result,
    sleep_inhibitor::SleepInhibitor,
};

/// Runs the command.
pub(crate) fn run(args: &RankArgs) -> Outcome {
    let _inhibitor = SleepInhibitor::start();
    let manifest = package::read_manifest(&args.package)?;
    let credentials = args.identity.as_deref().map(credentials).transpose()?;
    if credentials.is_none() && !is_local(args.bind) {
        let error = anyhow!("{} can be reached from other machines", args.bind);
        return Err(
            Failure::from(error).hint("ranks require TLS on such an address: give --identity")
        );
    }
    let listener = TcpListener::bind((args.bind, 0))
        .with_context(|| format!("cannot listen on {}", args.bind))?;
    let token = Token::generate().context("the system gave no random bytes")?;
    let key = credentials.as_ref().map(Credentials::key);
    let announcement = Announcement { address: listener.local_addr()?, token: token.clone(), key };
    result(&announcement.line());
    let (folder, threads) = (args.package.clone(), threads::count(args.threads.count));
    let (choice, place) = (args.engine.clone(), [manifest.rank, manifest.layout.ranks]);
    let identity = identity(&manifest);
    let style = manifest.chat.as_ref().map(|chat| chat.output);
    let options = RankOptions { credentials, ..RankOptions::default() };
    let served = run_rank(listener, token, identity, options, move |progress| {
        choice.check_layout(&manifest.layout)?;
        let opened = choice.open(threads, place)?;
        opened.check_memory(&manifest)?;
        // Only rank 0 samples under constraints and proposes draft tokens; a package without a
        // tokenizer has no constraints.
        let leads = manifest.rank == 0;
        let draft = choice.draft_model.as_deref().filter(|_| leads).map(draft::folder);
        let draft = draft.transpose().map_err(Failure::into_error)?;
        if let Some(draft) = &draft {
            draft::compare(draft, &folder)?;
        }
        let package = read(&folder, choice.opening(threads)?, "reading weights", progress)?;
        let draft = draft.map(|draft| {
            read(&draft, choice.opening(threads)?, "reading the draft model", progress)
        });
        let draft = draft.transpose()?;
        let constraints =
            if leads { shardpack_chat::constraints(&folder, style).ok().flatten() } else { None };
        let (draft, options) = (draft.as_ref(), choice.options());
        Ok(opened.rank_engine(&package, draft, options, constraints, &mut say_copies)?)
    });
    end_for_sure();
    served.map_err(Failure::from)?;
    Ok(ExitCode::SUCCESS)
}

/// The node's certificate and key.
fn credentials(identity: &Path) -> anyhow::Result<Credentials> {
    let found = credentials_of_node(identity)?;
    found.with_context(|| format!("{}: the node is in no cluster", identity.display()))
}

/// Timeout for the process to exit.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends the process even if a library never returns from its exit handler, as MLX's collectives do
/// after a rank was lost.
fn end_for_sure() {
    thread::spawn(|| {
        thread::sleep(END_TIMEOUT);
        std::process::abort();
    });
}

fn identity(manifest: &Manifest) -> Identity {
    Identity {
        model_id: manifest.ids.model.to_string(),
        layout_id: manifest.ids.layout.to_string(),
        rank: manifest.rank,
        ranks: manifest.layout.ranks,
        engine_version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: PROTOCOL,
    }
}

/// Interval between two progress reports.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// Reads and verifies the package.
fn read(
    folder: &Path,
    options: OpenOptions,
    doing: &str,
    progress: &mut dyn FnMut(Progress),
) -> Result<Package, LoadError> {
    // The reading threads send progress to this thread, which reports it.
    let (notes, noted) = mpsc::channel();
    let package = thread::scope(|scope| {
        let opening = scope.spawn(move || {
            let note = |progress| {
                // If nobody receives progress, nobody waits for the package either.
                let _ = notes.send(progress);
            };
            Package::open(folder, &options, &note)
        });
        let mut next = Instant::now();
        while let Ok(OpenProgress { done_bytes, total_bytes }) = noted.recv() {
            if Instant::now() >= next || done_bytes == total_bytes {
                next = Instant::now() + REPORT_EVERY;
                progress(Progress { doing: doing.to_owned(), done_bytes, total_bytes });
            }
        }
        opening.join().unwrap_or_else(|panic| resume_unwind(panic))
    })?;
    Ok(package)
}
