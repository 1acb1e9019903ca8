//! Per-rank gauges; a value that a rank did not report has no gauge.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};
use shardpack_engine_api::{EngineStatus, RankVitals};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Rank {
    rank: u32,
}

type PerRank = Family<Rank, Gauge<f64, AtomicU64>>;

/// One gauge for each rank.
struct RankGauge {
    gauges: PerRank,
    /// The reported value, and how many of its units make one of the gauge's.
    of: fn(&RankVitals) -> (Option<u64>, f64),
}

/// The gauges of all ranks.
pub(super) struct RankGauges(Vec<RankGauge>);

impl RankGauges {
    /// Registers the gauges, without values.
    pub(super) fn new(registry: &mut Registry) -> Self {
        let mut list = Vec::new();
        let mut add = |name: &str, help: &str, of| {
            let gauges = PerRank::default();
            registry.register(format!("shardpack_rank_{name}"), help, gauges.clone());
            list.push(RankGauge { gauges, of });
        };
        add("memory_bytes", "Memory of the rank's process", |vitals| (vitals.memory_bytes, 1.0));
        add(
            "step_seconds",
            "Mean duration of an engine step over the last second with steps",
            |vitals| (vitals.step_us, 1e6),
        );
        add("allreduce_seconds", "Mean time per step in all-reduce, waiting included", |vitals| {
            (vitals.sums_us, 1e6)
        });
        add("power_watts", "Power that the rank's machine draws", |vitals| (vitals.power_mw, 1e3));
        add("temperature_celsius", "Hottest processor of the rank's machine", |vitals| {
            (vitals.temperature_mc, 1e3)
        });
        Self(list)
    }

    /// Takes all values away.
    pub(super) fn clear(&self) {
        for gauge in &self.0 {
            gauge.gauges.clear();
        }
    }

    /// Sets the values that ranks reported last.
    pub(super) fn set(&self, engine: &EngineStatus) {
        for (rank, vitals) in (0..).zip(&engine.vitals) {
            for gauge in &self.0 {
                if let (Some(value), units) = (gauge.of)(vitals) {
                    gauge.gauges.get_or_create(&Rank { rank }).set(value as f64 / units);
                }
            }
        }
    }
}
