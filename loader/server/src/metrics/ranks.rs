//! What ranks say of themselves, as gauges; a rank that has not said something has no such gauge.

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

/// One fact of each rank.
struct Fact {
    gauges: PerRank,
    /// The fact and its units in the gauge's one.
    of: fn(&RankVitals) -> (Option<u64>, f64),
}

/// All facts of all ranks.
pub(super) struct RankGauges(Vec<Fact>);

impl RankGauges {
    /// Registers them without any rank.
    pub(super) fn new(registry: &mut Registry) -> Self {
        let mut facts = Vec::new();
        let mut add = |name: &str, help: &str, of| {
            let gauges = PerRank::default();
            registry.register(format!("shardpack_rank_{name}"), help, gauges.clone());
            facts.push(Fact { gauges, of });
        };
        add("memory_bytes", "Memory of a rank's process", |said| (said.memory_bytes, 1.0));
        add("step_seconds", "A step of late, on average", |said| (said.step_us, 1e6));
        add("allreduce_seconds", "Of a step, in sums between ranks", |said| (said.sums_us, 1e6));
        add("power_watts", "What a rank's machine draws", |said| (said.power_mw, 1e3));
        add("temperature_celsius", "The hottest processor of a rank's machine", |said| {
            (said.temperature_mc, 1e3)
        });
        Self(facts)
    }

    /// Takes over what was last said.
    pub(super) fn set(&self, engine: &EngineStatus) {
        for (rank, said) in (0..).zip(&engine.vitals) {
            for fact in &self.0 {
                if let (Some(value), units) = (fact.of)(said) {
                    fact.gauges.get_or_create(&Rank { rank }).set(value as f64 / units);
                }
            }
        }
    }
}
