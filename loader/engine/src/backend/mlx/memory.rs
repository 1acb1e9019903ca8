//! How much of the machine's memory goes to what, and whether a rank fits. Numbers only.

/// For activations, what MLX keeps for reuse, and the system's part of each buffer: a prompt's
/// step of 512 tokens needs 160 MB in a model of 70 billion weights on one machine.
const RESERVE_BYTES: u64 = 1 << 30;

/// The same for steps of [`LONG_PREFILL_TOKENS`]: with 8 experts a token of 7168 elements, the rows
/// in the order of their experts and what experts make of them are 1 GB.
const LONG_RESERVE_BYTES: u64 = 3 << 30;

/// Prefill tokens of a step where memory allows: matrices are read once for as many, as mlx-lm does.
const LONG_PREFILL_TOKENS: usize = 2048;

/// What MLX may keep for reuse: the buffers of one step.
const CACHE_BYTES: u64 = 512 << 20;

/// What a rank needs of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Weights held here.
    pub weight_bytes: u64,
    /// Keys and values that would be kept.
    pub kv_bytes: u64,
    /// Keys and values without which nothing can be served: one page of them.
    pub least_kv_bytes: u64,
}

/// Who gets what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Keys and values.
    pub kv_bytes: u64,
    /// What MLX may allocate.
    pub memory_limit: usize,
    /// What MLX may keep for reuse.
    pub cache_limit: usize,
    /// Prefill tokens of a step that there is memory for; none where that is for others to say.
    pub prefill_tokens: Option<usize>,
    /// What stays wired, so that the GPU need not wait for it; none without a GPU.
    pub wired_limit: Option<usize>,
}

/// A rank that its machine cannot hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this rank does not fit: {} of weights, {} of keys and values at least and {} to work with \
     are {}, and this machine's GPU takes {}; cut the model for more nodes or with fewer bits, or \
     raise the limit (sudo sysctl iogpu.wired_limit_mb=…)",
    size(.need.weight_bytes),
    size(.need.least_kv_bytes),
    size(RESERVE_BYTES),
    size(.need.weight_bytes.saturating_add(.need.least_kv_bytes).saturating_add(RESERVE_BYTES)),
    size(*.limit)
)]
pub struct DoesNotFit {
    /// What it needs.
    pub need: MemoryNeed,
    /// What the device's driver recommends at most.
    pub limit: u64,
}

/// Bytes as people read them.
fn size(bytes: impl std::borrow::Borrow<u64>) -> String {
    let bytes = *bytes.borrow();
    if bytes >= 1 << 30 {
        format!("{:.1} GiB", bytes as f64 / f64::from(1_u32 << 30))
    } else {
        format!("{:.1} MiB", bytes as f64 / f64::from(1_u32 << 20))
    }
}

impl MemoryPlan {
    /// Shares out the device's working set; without a GPU there is no limit but the machine's.
    /// Keys and values get what is left of it, at most what they need.
    pub fn new(need: MemoryNeed, working_set: Option<u64>) -> Result<Self, DoesNotFit> {
        let cache_limit = limit(CACHE_BYTES);
        let Some(working_set) = working_set else {
            let kv_bytes = need.kv_bytes;
            return Ok(Self {
                kv_bytes,
                memory_limit: usize::MAX,
                cache_limit,
                prefill_tokens: None,
                wired_limit: None,
            });
        };
        let all = need.weight_bytes.saturating_add(need.kv_bytes);
        let is_long = all.saturating_add(LONG_RESERVE_BYTES) <= working_set;
        let (reserve, prefill_tokens) = if is_long {
            (LONG_RESERVE_BYTES, Some(LONG_PREFILL_TOKENS))
        } else {
            (RESERVE_BYTES, None)
        };
        let left = working_set
            .checked_sub(RESERVE_BYTES)
            .and_then(|left| left.checked_sub(need.weight_bytes))
            .filter(|left| *left >= need.least_kv_bytes)
            .ok_or(DoesNotFit { need, limit: working_set })?;
        let kv_bytes = need.kv_bytes.min(left);
        let wired = need.weight_bytes + kv_bytes + reserve;
        Ok(Self {
            kv_bytes,
            memory_limit: limit(working_set),
            cache_limit,
            prefill_tokens,
            wired_limit: Some(limit(wired)),
        })
    }
}

fn limit(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn need(weights: u64, kv: u64) -> MemoryNeed {
        MemoryNeed { weight_bytes: weights * GIB, kv_bytes: kv * GIB, least_kv_bytes: GIB / 4 }
    }

    #[test]
    fn what_fits_is_wired_and_no_more() {
        let plan = MemoryPlan::new(need(40, 10), Some(96 * GIB)).unwrap();
        assert_eq!(plan.kv_bytes, 10 * GIB);
        assert_eq!(plan.memory_limit as u64, 96 * GIB);
        assert_eq!((plan.wired_limit, plan.prefill_tokens), (Some(53 << 30), Some(2048)));
        assert_eq!(plan.cache_limit as u64, CACHE_BYTES);
    }

    #[test]
    fn keys_and_values_get_what_is_left() {
        let plan = MemoryPlan::new(need(90, 40), Some(96 * GIB)).unwrap();
        assert_eq!(plan.kv_bytes, 5 * GIB);
        assert_eq!(plan.wired_limit, Some(96 << 30), "all of it");
        assert_eq!(plan.prefill_tokens, None, "short steps");
        let plan = MemoryPlan::new(need(90, 40), None).unwrap();
        assert_eq!((plan.kv_bytes, plan.wired_limit), (40 * GIB, None));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers() {
        let error = MemoryPlan::new(need(95, 10), Some(96 * GIB)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this rank does not fit: 95.0 GiB of weights, 256.0 MiB of keys and values at least \
             and 1.0 GiB to work with are 96.2 GiB, and this machine's GPU takes 96.0 GiB; cut \
             the model for more nodes or with fewer bits, or raise the limit (sudo sysctl \
             iogpu.wired_limit_mb=…)"
        );
        MemoryPlan::new(need(0, 0), Some(GIB / 2)).unwrap_err();
        MemoryPlan::new(MemoryNeed { weight_bytes: u64::MAX, ..need(0, 0) }, Some(1)).unwrap_err();
    }
}
