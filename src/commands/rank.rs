//! `shardpack rank`: the process of one rank. Its first line on standard output is its address.

mod load;

use std::{
    net::TcpListener,
    path::Path,
    process::ExitCode,
    sync::mpsc::{SyncSender, sync_channel},
    thread,
    time::Duration,
};

use anyhow::{Context, anyhow};
use shardpack_cluster::{
    Announcement, FrontPresence, Identity, PROTOCOL, RankOptions, Token, run_rank,
};
use shardpack_collectives::rdma;
use shardpack_engine::loading::{WeightStream, WeightStreams};
use shardpack_identity::{Credentials, credentials_of_node, is_local};

use super::{Outcome, package, ranks::StreamedPackage, threads};
use crate::{args::RankArgs, failure::Failure, progress::result, sleep_inhibitor::SleepInhibitor};
use load::{Loading, Source};

/// Runs the command.
pub(crate) fn run(args: &RankArgs) -> Outcome {
    let _inhibitor = SleepInhibitor::start();
    let (source, described, weights) = source(args)?;
    let credentials = args.identity.as_deref().map(credentials).transpose()?;
    if credentials.is_none() && !is_local(args.bind.ip()) {
        let error = anyhow!("{} can be reached from other machines", args.bind);
        return Err(
            Failure::from(error).hint("ranks require TLS on such an address: give --identity")
        );
    }
    let listener = TcpListener::bind(args.bind.at(0))
        .with_context(|| format!("cannot listen on {}", args.bind))?;
    let token = Token::generate().context("the system gave no random bytes")?;
    let key = credentials.as_ref().map(Credentials::key);
    let announcement = Announcement { address: listener.local_addr()?, token: token.clone(), key };
    result(&announcement.line());
    let vector_bytes = described.hidden_size as usize * size_of::<f32>();
    let mut options = RankOptions {
        credentials,
        vector_bytes,
        weights,
        keep: Duration::from_secs(args.keep),
        on_front: |rank_front| result(&FrontPresence { rank_front }.line()),
        ..RankOptions::default()
    };
    if args.keep > 0 {
        // To lose it costs no more than to connect again.
        options.front_silence = KEPT_FRONT_SILENCE;
    }
    // Queue pairs of a process that is ended by a signal stay in some drivers.
    rdma::release_on_signals().context("the system gave no thread")?;
    let loading = Loading {
        source,
        folder: args.package.clone(),
        engine: args.engine.clone(),
        threads: threads::count(args.threads.count),
    };
    let identity = identity(&described);
    let served =
        run_rank(listener, token, identity, options, move |progress| loading.run(progress));
    end_for_sure();
    served.map_err(Failure::from)?;
    Ok(ExitCode::SUCCESS)
}

/// Where the package is, what must be known of it before it is read, and what takes connections on which
/// it comes.
fn source(args: &RankArgs) -> Result<(Source, StreamedPackage, Option<ArrivingWeights>), Failure> {
    let Some(json) = &args.stream else {
        let manifest = package::read_manifest(&args.package)?;
        let described = StreamedPackage::of(&manifest);
        return Ok((Source::Folder(Box::new(manifest)), described, None));
    };
    let described: StreamedPackage = serde_json::from_str(json).context("--stream")?;
    // More than are used: one may come for another before that is found to have ended.
    let (arrive, arriving) = sync_channel(described.streams.clamp(1, MAX_STREAMS));
    let streams = WeightStreams::new(arriving, described.streams.min(MAX_STREAMS));
    Ok((Source::Front(described.clone(), streams), described, Some(arrive)))
}

/// Takes connections on which a package comes.
type ArrivingWeights = SyncSender<Box<dyn WeightStream>>;

/// Most connections on which a package comes, each of which is read by a thread.
const MAX_STREAMS: usize = 64;

/// Silence after which a rank that keeps its weights gives up its front.
const KEPT_FRONT_SILENCE: Duration = Duration::from_secs(5);

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

fn identity(package: &StreamedPackage) -> Identity {
    Identity {
        model_id: package.model.to_string(),
        layout_id: package.layout.to_string(),
        rank: package.rank,
        ranks: package.ranks,
        engine_version: concat!(env!("CARGO_PKG_VERSION"), "+", env!("BUILD_HASH")).to_owned(),
        protocol: PROTOCOL,
    }
}
