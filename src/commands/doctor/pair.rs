//! Two ranks of the bundled model as processes on this machine: whether their all-reduce is correct,
//! and its latency.

use std::{
    env,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use serde_json::{Value, json};
use shardpack_mlx::distributed::{Distributed, FOREIGN_VARIABLES};

use super::{
    numerics::{self, Bundled},
    report::Finding,
};
use crate::commands::self_test::Task;

const RANKS: u32 = 2;

/// Sizes of all-reduces in decoding, which the latency of a token depends on.
const SIZES_BYTES: [usize; 2] = [16 << 10, 64 << 10];

const ROUNDS: usize = 10;

/// Timeout for the whole test; MLX's ring itself has none.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Sums between two processes with an engine and its collectives.
pub(super) fn check(
    bundled: &Bundled<'_>,
    folder: &Path,
    engine: &str,
    collectives: &str,
) -> anyhow::Result<Finding> {
    let set = bundled.set(4, RANKS)?;
    let folder = folder.join(format!("pair-{engine}-{collectives}"));
    std::fs::create_dir_all(&folder)?;
    let group = (collectives == "ring").then(local_ring).transpose()?;
    let deadline = Instant::now() + TIMEOUT;
    let mut ranks = Vec::new();
    for rank in 0..RANKS {
        let mut command = Command::new(env::current_exe()?);
        command.arg("self-test").arg(set.join(format!("node-{rank}")));
        command.args(["--engine", engine, "--collectives", collectives]);
        if engine == "cpu" {
            command.arg("--exact");
        }
        for name in FOREIGN_VARIABLES {
            command.env_remove(name);
        }
        if let Some(group) = &group {
            command.envs(group.environment(rank, &folder)?);
        }
        ranks.push(Rank::start(command)?);
    }
    let addresses = ranks
        .iter()
        .map(|rank| {
            let said = rank.hear(deadline)?;
            serde_json::from_value(said["address"].clone())
                .context("a rank did not report its address")
        })
        .collect::<anyhow::Result<Vec<SocketAddr>>>()?;
    let logits = |rank: usize| folder.join(format!("logits-{rank}"));
    for (rank, child) in ranks.iter_mut().enumerate() {
        child.tell(&Task {
            addresses: addresses.clone(),
            sizes_bytes: SIZES_BYTES.to_vec(),
            rounds: ROUNDS,
            tokens: numerics::tokens(),
            logits: logits(rank),
        })?;
    }
    let said = ranks.iter().map(|rank| rank.hear(deadline)).collect::<anyhow::Result<Vec<_>>>()?;
    let found = numerics::read_logits(&logits(0))?;
    let is_alike = (1..ranks.len())
        .map(|rank| Ok(numerics::read_logits(&logits(rank))? == found))
        .collect::<anyhow::Result<Vec<bool>>>()?;
    anyhow::ensure!(is_alike.into_iter().all(|same| same), "the ranks have different logits");
    // Sums round differently on two ranks than on one.
    let compared = numerics::compare(&numerics::expected(&bundled.package(4)?)?, &found, 2e-3)?;
    let times = &said[0]["sums"];
    let shown: Vec<String> = times
        .as_array()
        .context("a rank did not report its times")?
        .iter()
        .map(|it| {
            let kib = it["size_bytes"].as_u64().unwrap_or(0) >> 10;
            format!("{kib} KiB in {:.0} µs", it["median_us"].as_f64().unwrap_or(f64::NAN))
        })
        .collect();
    let figures = json!({ "sums": times, "logits": compared.figures });
    let detail = format!("all-reduce of {}; {}", shown.join(", "), compared.detail);
    Ok(Finding { detail, figures })
}

fn local_ring() -> anyhow::Result<Distributed> {
    let free = (0..RANKS)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect::<Result<Vec<_>, _>>()
        .context("no free port on 127.0.0.1")?;
    let hosts = free.iter().map(|it| it.local_addr().map(|address| vec![address]));
    Ok(Distributed::Ring { hosts: hosts.collect::<Result<_, _>>()? })
}

/// A process of the pair; killed when dropped.
struct Rank {
    child: Child,
    said: mpsc::Receiver<Value>,
    errors: mpsc::Receiver<String>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("a rank cannot be started")?;
        let output = child.stdout.take().context("its output is a pipe")?;
        let error_output = child.stderr.take().context("its errors are a pipe")?;
        let (say, said) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The check may have ended.
                let _ = serde_json::from_str(&line).map(|json: Value| say.send(json));
            }
        });
        let (complain, errors) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(error_output).lines().map_while(Result::ok) {
                let _ = complain.send(line);
            }
        });
        Ok(Self { child, said, errors })
    }

    fn tell(&mut self, task: &Task) -> anyhow::Result<()> {
        let input = self.child.stdin.as_mut().context("its input is a pipe")?;
        let line = serde_json::to_string(task)?;
        writeln!(input, "{line}").map_err(|error| anyhow!("{error}: {}", self.last_words()))
    }

    /// Its next line of JSON.
    fn hear(&self, deadline: Instant) -> anyhow::Result<Value> {
        let left = deadline.saturating_duration_since(Instant::now());
        let json = match self.said.recv_timeout(left) {
            Ok(json) => json,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("a rank did not answer within {} s", TIMEOUT.as_secs())
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                bail!("a rank ended: {}", self.last_words())
            }
        };
        if let Some(error) = json["error"].as_str() {
            bail!("a rank failed: {error}");
        }
        Ok(json)
    }

    fn last_words(&self) -> String {
        // Its pipe closes a moment after its input.
        let first = self.errors.recv_timeout(Duration::from_millis(200));
        let lines: Vec<String> = first.into_iter().chain(self.errors.try_iter()).collect();
        lines.last().cloned().unwrap_or_else(|| "without an error message".to_owned())
    }
}
