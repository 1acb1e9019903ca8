//! Everything of a self-test that computes, reads or sends, in its order: what may leave a GPU in a
//! state that only a restart heals comes last.

use std::path::Path;

use anyhow::Context as _;
use serde_json::json;
use shardpack_engine::bench::read_bandwidth;
use shardpack_mlx::{Device, Library};

use super::{
    disk, mlx_lm,
    numerics::{self, Bundled},
    pair::{self, Pair},
    probes,
    report::{Finding, Report},
    speed::{self, Verse},
};
use crate::{
    args::ProbeName,
    commands::threads,
    engines::{
        self,
        fast_sync::{Machine, Measured},
    },
};

const SYNC: &str = "fast sync";

/// Runs the tests.
pub(super) fn run(report: &mut Report, folder: &Path, has_mlx: bool) -> anyhow::Result<()> {
    let bundled = Bundled::unpack(folder)?;
    disk::check(folder, report);
    let bandwidth = read_bandwidth(threads::count(None)).map(|bytes| {
        let rate = bytes / 1e9;
        Finding::new(format!("{rate:.1} GB/s"), json!({ "gigabytes_per_second": rate }))
    });
    report.add_result("read bandwidth of memory, cpu", bandwidth.map_err(anyhow::Error::from));
    numerics::check_cpu(&bundled, report);
    of_engine("cpu", &["own"], &bundled, report);
    if has_mlx {
        for probe in [ProbeName::Kernels, ProbeName::NoCopy, ProbeName::Bandwidth] {
            probes::check(probe, report);
        }
        numerics::check_mlx(&bundled, report);
        let ours = of_engine("mlx", &["own", "ring"], &bundled, report);
        mlx_lm::check(&bundled, ours, report);
        probes::check(ProbeName::Wiring, report);
        synchronisation(&bundled, report);
        probes::check(ProbeName::Wait, report);
    } else {
        for name in
            ["MLX against cpu", "weights without copies", "all-reduce within MLX's graph", SYNC]
        {
            report.skip(name, "there is no MLX runtime: shardpack engine install mlx");
        }
    }
    report.skip("JACCL", "needs two machines: shardpack doctor SET --nodes … --hostfile FILE");
    Ok(())
}

/// All-reduces and tokens per second. Returns those of one rank.
fn of_engine(
    engine: &str,
    layers: &[&str],
    bundled: &Bundled<'_>,
    report: &mut Report,
) -> Option<f64> {
    for layer in layers {
        let name = format!("all-reduce between two processes, {engine}, {layer}");
        let pair = Pair { engine, collectives: layer, fast_sync: None };
        report.add_result(&name, pair::check(bundled, pair).map(|it| it.finding));
    }
    let speeds = [1, 2].map(|nodes| {
        let served = bundled.set(4, nodes).and_then(|set| {
            let engine = ["--engine", engine].map(str::to_owned);
            speed::check(&set, &[], &engine, Verse::Known)
        });
        let rate = served.as_ref().ok().and_then(|it| it.figures["tokens_per_second"].as_f64());
        report.add_result(&format!("tokens per second, {engine}, ranks: {nodes}"), served);
        rate
    });
    speeds[0]
}

/// What an all-reduce within a GPU's graph costs with events and with fast synchronisation; whether
/// the second is right thousands of times; and what ranks will use from now on.
fn synchronisation(bundled: &Bundled<'_>, report: &mut Report) {
    let measure = |is_fast| {
        let pair = Pair { engine: "mlx", collectives: "own", fast_sync: Some(is_fast) };
        pair::check(bundled, pair)
    };
    let soak = |is_fast, report: &mut Report| {
        let word = if is_fast { "fast sync" } else { "events" };
        let soaked = pair::soak(bundled, is_fast);
        let found = soaked.as_ref().map(|count| {
            let detail = format!("{count} sums in graphs were exact");
            Finding::new(detail, json!({ "sums": count })).expected("every sum exact")
        });
        let found = found.map_err(|error| anyhow::anyhow!("{error:#}"));
        report.add_or_fail(&format!("soak of all-reduces, {word}"), found, SOAK_ADVICE);
        soaked
    };
    // Without a GPU there is one way only, and its soak is a test of the rest.
    let _ = soak(false, report);
    let is_gpu = engines::mlx_folder(None)
        .and_then(|folder| Ok(Library::open(&folder, None)?.device() == Device::Gpu));
    if !is_gpu.unwrap_or(false) {
        let why = "MLX computes on the processor here, and --fast-sync has no effect";
        return report.skip(SYNC, why);
    }
    let events = match measure(false) {
        Ok(measured) => measured.microseconds,
        Err(error) => return report.add_result(SYNC, Err(error)),
    };
    // In processes of their own: what hangs is killed.
    let fast = measure(true).and_then(|it| Ok((it.microseconds, soak(true, report)?)));
    let fast = fast.map_err(|error| format!("{error:#}"));
    report.add_result(SYNC, choose(events, fast));
}

const SOAK_ADVICE: &str = "use --fast-sync off; with events, attach this report to a bug";

fn choose(events: f64, fast: Result<(f64, u64), String>) -> anyhow::Result<Finding> {
    let machine = Machine::this().context("the system does not tell its version and chip")?;
    let chosen = Measured::choose(events, fast, machine);
    chosen.store(&engines::folder(None)?)?;
    let word = if chosen.fast_sync { "on" } else { "off" };
    let detail = format!("--fast-sync auto is {word} from now on: {}", chosen.reason);
    let figures = json!({
        "fast_sync": chosen.fast_sync, "events_us": chosen.events_us, "fast_us": chosen.fast_us,
        "soaked": chosen.soaked,
    });
    Ok(Finding::new(detail, figures))
}
