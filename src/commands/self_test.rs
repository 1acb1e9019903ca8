//! `shardpack self-test`: one rank of a self-test, or one of its probes, which `doctor` starts and
//! controls.

mod soak;

use std::{
    fs,
    io::{self, BufRead as _},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::json;
use shardpack_collectives::{Deadline, Group, join_on_loopback};
use shardpack_engine::{
    bench::AllReduceTimes,
    loading::{OpenOptions, Package},
    rank_engine::RankBackend,
};
use shardpack_engine_api::TokenId;
use shardpack_mlx::Device;

use super::{Outcome, doctor};
use crate::{args::SelfTestArgs, failure::Failure, progress::result};

/// Time for all ranks to connect to each other.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);

/// What the ranks compute; sent on standard input.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Task {
    /// Where the ranks listen, in rank order.
    pub addresses: Vec<SocketAddr>,
    /// Sizes of the all-reduces to measure.
    pub sizes_bytes: Vec<usize>,
    /// Rounds of each.
    pub rounds: usize,
    /// The sequence whose logits are computed.
    pub tokens: Vec<TokenId>,
    /// Where they are written, as little-endian f32.
    pub logits: PathBuf,
    /// Evaluations of a soak, which takes the place of everything else if there are any.
    pub soak_evals: usize,
}

/// Runs the command.
pub(crate) fn run(args: &SelfTestArgs) -> Outcome {
    match (&args.probe, &args.package) {
        (Some(probe), _) => doctor::run_probe(*probe)?,
        (None, Some(package)) => rank(package, args)?,
        (None, None) => return Err(anyhow::anyhow!("neither a package nor a probe").into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn rank(folder: &Path, args: &SelfTestArgs) -> Result<(), Failure> {
    let manifest = super::package::read_manifest(folder)?;
    let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen on 127.0.0.1")?;
    result(&json!({ "address": listener.local_addr()? }).to_string());
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let task: Task = serde_json::from_str(&line).context("the task is not JSON")?;
    let deadline = Deadline::after(JOIN_TIMEOUT);
    let group = join_on_loopback(manifest.rank, &listener, &task.addresses, deadline)
        .context("the other ranks did not connect")?;
    let group: Arc<dyn Group> = Arc::new(group);
    if task.soak_evals > 0 {
        let soaked = soak::run(group.as_ref(), task.soak_evals)?;
        result(&json!({ "soaked": soaked }).to_string());
        return Ok(());
    }
    let package =
        Package::open(folder, &OpenOptions::stored(1), &|_| ()).map_err(Failure::wrong)?;
    let place = [manifest.rank, manifest.layout.ranks];
    let opened = args.engine.open(1, place).map_err(|error| anyhow::anyhow!("{error}"))?;
    let is_gpu = match &opened {
        RankBackend::Mlx(mlx) => mlx.library().device() == Device::Gpu,
        RankBackend::Cpu(_) => false,
    };
    let times = compute(&package, opened, &group, &task)?;
    result(&json!({ "sums": times, "is_gpu": is_gpu }).to_string());
    Ok(())
}

fn compute(
    package: &Package,
    backend: RankBackend,
    group: &Arc<dyn Group>,
    task: &Task,
) -> anyhow::Result<Vec<AllReduceTimes>> {
    let measure = |size: &usize| backend.all_reduce_times(group.as_ref(), *size, task.rounds);
    let times = task.sizes_bytes.iter().map(measure).collect::<Result<_, _>>()?;
    let logits = backend.logits(package, Arc::clone(group), &task.tokens)?;
    let bytes: Vec<u8> = logits.iter().flat_map(|value| value.to_le_bytes()).collect();
    fs::write(&task.logits, bytes).with_context(|| task.logits.display().to_string())?;
    Ok(times)
}
