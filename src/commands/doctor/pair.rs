//! Two ranks of the bundled model as processes on this machine: whether their all-reduce is correct,
//! and its latency.

use std::{
    env,
    net::{SocketAddr, TcpListener},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde_json::{Value, json};
use shardpack_mlx::distributed::{Distributed, FOREIGN_VARIABLES};

use super::{
    numerics::{self, Bundled},
    process::Process,
    report::Finding,
};
use crate::{commands::self_test::Task, engines::fast_sync};

const RANKS: u32 = 2;

/// Sizes of all-reduces in decoding, which the latency of a token depends on.
const SIZES_BYTES: [usize; 2] = [16 << 10, 64 << 10];

const ROUNDS: usize = 10;

/// Graphs of a soak, each of 64 all-reduces.
const SOAK_EVALS: usize = 300;

/// Timeout for the whole test; MLX's ring itself has none.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Timeout of a soak: a thousand times what it takes with events would still fit.
const SOAK_TIMEOUT: Duration = Duration::from_secs(90);

/// How two ranks are started.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub engine: &'a str,
    pub collectives: &'a str,
    /// MLX's synchronisation between GPU and processor, if it matters.
    pub fast_sync: Option<bool>,
}

/// What a pair measured.
pub(super) struct Measured {
    pub finding: Finding,
    /// Median microseconds of an all-reduce of the smallest size.
    pub microseconds: f64,
}

/// Sums between two processes with an engine and its collectives.
pub(super) fn check(bundled: &Bundled<'_>, pair: Pair<'_>) -> anyhow::Result<Measured> {
    let folder = bundled.scratch(&format!("pair-{}-{}", pair.engine, pair.collectives))?;
    let logits = |rank: usize| folder.join(format!("logits-{rank}"));
    let task = |rank: usize, addresses: &[SocketAddr]| Task {
        addresses: addresses.to_vec(),
        sizes_bytes: SIZES_BYTES.to_vec(),
        rounds: ROUNDS,
        tokens: numerics::tokens(),
        logits: logits(rank),
        soak_evals: 0,
    };
    let said = run(bundled, pair, &folder, TIMEOUT, &task)?;
    let found = numerics::read_logits(&logits(0))?;
    let is_alike = (1..said.len())
        .map(|rank| Ok(numerics::read_logits(&logits(rank))? == found))
        .collect::<anyhow::Result<Vec<bool>>>()?;
    anyhow::ensure!(is_alike.into_iter().all(|same| same), "the ranks have different logits");
    let expected = numerics::expected(&bundled.package(4)?)?;
    // Sums round differently on two ranks than on one, and in the type that products run in.
    let is_gpu = said[0]["is_gpu"].as_bool().context("a rank did not report its device")?;
    let compared =
        numerics::compare(&expected, &found, numerics::limit_of_ranks(is_gpu, &expected))?;
    let times = &said[0]["sums"];
    let list = times.as_array().context("a rank did not report its times")?;
    let median = |it: &Value| it["median_us"].as_f64().unwrap_or(f64::NAN);
    let shown: Vec<String> = list
        .iter()
        .map(|it| {
            let kib = it["size_bytes"].as_u64().unwrap_or(0) >> 10;
            format!("{kib} KiB in {:.0} µs", median(it))
        })
        .collect();
    let figures = json!({ "sums": times, "logits": compared.figures });
    let detail = format!("all-reduce of {}; {}", shown.join(", "), compared.detail);
    let microseconds = list.first().map_or(f64::NAN, median);
    Ok(Measured {
        finding: Finding::new(detail, figures).expected(compared.expected),
        microseconds,
    })
}

/// Thousands of all-reduces in MLX's graphs, compared exactly. Returns how many.
pub(super) fn soak(bundled: &Bundled<'_>, is_fast: bool) -> anyhow::Result<u64> {
    let pair = Pair { engine: "mlx", collectives: "own", fast_sync: Some(is_fast) };
    let folder = bundled.scratch("soak")?;
    let task = |_: usize, addresses: &[SocketAddr]| Task {
        addresses: addresses.to_vec(),
        sizes_bytes: Vec::new(),
        rounds: 0,
        tokens: Vec::new(),
        logits: folder.clone(),
        soak_evals: SOAK_EVALS,
    };
    let said = run(bundled, pair, &folder, SOAK_TIMEOUT, &task)?;
    said[0]["soaked"].as_u64().context("a rank did not report its soak")
}

/// Starts the ranks, tells each its task and returns what each answers.
fn run(
    bundled: &Bundled<'_>,
    pair: Pair<'_>,
    folder: &Path,
    timeout: Duration,
    task: &dyn Fn(usize, &[SocketAddr]) -> Task,
) -> anyhow::Result<Vec<Value>> {
    let set = bundled.set(4, RANKS)?;
    let group = (pair.collectives == "ring").then(local_ring).transpose()?;
    let deadline = Instant::now() + timeout;
    let mut ranks = Vec::new();
    for rank in 0..RANKS {
        let mut command = Command::new(env::current_exe()?);
        command.arg("self-test").arg(set.join(format!("node-{rank}")));
        command.args(["--engine", pair.engine, "--collectives", pair.collectives]);
        if pair.engine == "cpu" {
            command.arg("--exact");
        }
        for name in FOREIGN_VARIABLES {
            command.env_remove(name);
        }
        if let Some(is_fast) = pair.fast_sync {
            let (value, word) = if is_fast { ("1", "on") } else { ("0", "off") };
            command.env(fast_sync::VARIABLE, value).args(["--fast-sync", word]);
        }
        if let Some(group) = &group {
            command.envs(group.environment(rank, folder)?);
        }
        ranks.push(Process::start(command)?);
    }
    let addresses = ranks
        .iter_mut()
        .map(|rank| {
            let said = rank.hear(deadline)?;
            serde_json::from_value(said["address"].clone())
                .context("a rank did not report its address")
        })
        .collect::<anyhow::Result<Vec<SocketAddr>>>()?;
    for (rank, process) in ranks.iter_mut().enumerate() {
        process.tell(&task(rank, &addresses))?;
    }
    ranks.iter_mut().map(|rank| rank.hear(deadline)).collect()
}

fn local_ring() -> anyhow::Result<Distributed> {
    let free = (0..RANKS)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect::<Result<Vec<_>, _>>()
        .context("no free port on 127.0.0.1")?;
    let hosts = free.iter().map(|it| it.local_addr().map(|address| vec![address]));
    Ok(Distributed::Ring { hosts: hosts.collect::<Result<_, _>>()? })
}
