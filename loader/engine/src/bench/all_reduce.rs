//! The cost of an all-reduce within a backend's work: for MLX as a node of its graph, with the
//! synchronisation between its streams.

use std::time::{Duration, Instant};

use serde::Serialize;
use shardpack_collectives::{Deadline, Group};

use crate::backend::{Backend, Ranks, StepError};

/// All-reduces in a row, so that one reading of the clock does not matter: about as many as a token of a
/// large model takes.
const CHAIN: usize = 100;

/// Longest wait of one call.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Time that one all-reduce adds, in microseconds, over all rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AllReduceTimes {
    /// Bytes summed.
    pub size_bytes: usize,
    /// Half of the rounds are faster.
    pub median_us: f64,
    /// A tenth of the rounds are faster.
    pub p10_us: f64,
    /// Nine tenths of the rounds are faster.
    pub p90_us: f64,
}

/// Measures an all-reduce of `size_bytes` as one of a hundred in a row, against the same work without
/// sums. All ranks of `group` call it; rank 0's figures count.
pub fn all_reduce_in_graph<B: Backend>(
    backend: &B,
    group: &dyn Group,
    size_bytes: usize,
    rounds: usize,
) -> Result<AllReduceTimes, StepError> {
    let ranks = Ranks::all(group, TIMEOUT);
    let chain = |with_sums: bool| -> Result<f64, StepError> {
        group.barrier(Deadline::after(TIMEOUT))?;
        let begun = Instant::now();
        backend.run(|| {
            let mut x = backend.zeros(1, size_bytes / 4);
            for _ in 0..CHAIN {
                x = backend.scale(x, 0.5);
                if with_sums {
                    x = backend.all_reduce(x, &ranks)?;
                }
            }
            backend.read(x, &ranks).map(drop)
        })?;
        Ok(begun.elapsed().as_secs_f64() * 1e6 / CHAIN as f64)
    };
    // What is set up once is not counted.
    chain(true)?;
    let mut times = Vec::with_capacity(rounds);
    let mut without = Vec::with_capacity(rounds);
    for _ in 0..rounds.max(1) {
        times.push(chain(true)?);
        without.push(chain(false)?);
    }
    times.sort_unstable_by(f64::total_cmp);
    without.sort_unstable_by(f64::total_cmp);
    let base = without[without.len() / 2];
    let at = |share: usize| (times[(times.len() - 1) * share / 100] - base).max(0.0);
    Ok(AllReduceTimes { size_bytes, median_us: at(50), p10_us: at(10), p90_us: at(90) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backend::Cpu, engine::memory_group};

    #[test]
    fn ranks_measure_together() {
        let groups = memory_group(2).unwrap();
        let times: Vec<AllReduceTimes> = std::thread::scope(|scope| {
            let ranks = groups.iter().map(|group| {
                let measure = move || {
                    all_reduce_in_graph(&Cpu::new(1).unwrap(), group.as_ref(), 1024, 3).unwrap()
                };
                scope.spawn(measure)
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for times in times {
            assert!(times.p10_us <= times.median_us && times.median_us <= times.p90_us);
            assert!(times.p90_us > 0.0, "{times:?}");
        }
    }
}
