//! Selects the token from the candidates of all ranks: top-k, top-p, min-p, then Gumbel-max.

use shardpack_engine_api::{MIN_LOGPROB, TokenId, TokenLogprobs};
use shardpack_kernels::exp::exp;

use super::{
    Row, SampledToken,
    candidates::{Candidate, LogSum, ShardCandidates},
    gumbel::GumbelNoise,
    sampler::SamplingMethod,
};

/// The sampled token, or that the candidates do not suffice.
#[derive(Debug, PartialEq)]
pub(super) enum Selection {
    Token(SampledToken),
    NeedsFullRow,
}

/// Selects a token from the candidates of all ranks.
pub(super) fn select(row: &Row<'_>, parts: &[ShardCandidates]) -> Selection {
    let mut candidates: Vec<Candidate> =
        parts.iter().flat_map(|part| part.candidates.iter().copied()).collect();
    candidates.sort_by(Candidate::order);
    let chosen = match row.sampler.method() {
        // An infinite logit needs no noise.
        _ if candidates.first().is_none_or(|best| best.logit.is_infinite()) => {
            candidates.first().copied()
        }
        SamplingMethod::Greedy => candidates.first().copied(),
        SamplingMethod::Gumbel => gumbel_max(row, &candidates),
        SamplingMethod::Filtered => match filtered(row, parts, &candidates) {
            Some(kept) => gumbel_max(row, kept),
            None => return Selection::NeedsFullRow,
        },
    };
    let token = chosen.map(|chosen| chosen.token);
    let logprobs = chosen.and_then(|chosen| logprobs(row, parts, &chosen));
    Selection::Token(SampledToken { token, logprobs })
}

/// The one with the highest noisy logit; ties go to the lower token.
fn gumbel_max(row: &Row<'_>, candidates: &[Candidate]) -> Option<Candidate> {
    let noise = GumbelNoise::new(row.sampler.params.sampling.seed, row.index);
    let score = |it: &Candidate| noise.score(it.token, it.logit / row.temperature());
    let better = |a: (Candidate, f64), b: (Candidate, f64)| {
        let wins = b.1 > a.1 || (b.1 == a.1 && b.0.token < a.0.token);
        if wins { b } else { a }
    };
    candidates.iter().map(|it| (*it, score(it))).reduce(better).map(|(it, _)| it)
}

/// What the filters leave of `sorted`; `None` where more than the candidates may be left.
fn filtered<'a>(
    row: &Row<'_>,
    parts: &[ShardCandidates],
    sorted: &'a [Candidate],
) -> Option<&'a [Candidate]> {
    let sampling = &row.sampler.params.sampling;
    // Unlisted tokens of a rank come after its last candidate.
    let last = parts.iter().filter(|part| part.more).filter_map(|part| part.candidates.last());
    let unknown = last.min_by(|a, b| a.order(b));
    let known =
        unknown.map_or(sorted.len(), |last| sorted.partition_point(|it| it.order(last).is_le()));
    // Whether everything that may be chosen is among the kept ones.
    let mut closed = unknown.is_none();
    let mut kept = &sorted[..known];
    if sampling.top_k > 0 {
        let top_k = sampling.top_k as usize;
        closed |= kept.len() >= top_k;
        if !closed {
            return None;
        }
        kept = &kept[..kept.len().min(top_k)];
    }
    let best = kept.first()?.logit / row.temperature();
    let weight = |it: &Candidate| f64::from(exp(it.logit / row.temperature() - best));
    if sampling.top_p < 1.0 {
        let total = if closed {
            kept.iter().map(weight).sum()
        } else {
            LogSum::total(parts.iter().filter_map(|part| part.sum), best)
        };
        let goal = f64::from(sampling.top_p) * total;
        let mut sum = 0.0;
        let reached = kept.iter().position(|it| {
            sum += weight(it);
            sum >= goal
        });
        match reached {
            Some(index) => (kept, closed) = (&kept[..=index], true),
            None if !closed => return None,
            None => {}
        }
    }
    if sampling.min_p > 0.0 {
        let least = f64::from(sampling.min_p);
        let count = kept.partition_point(|it| weight(it) >= least).max(1);
        closed |= count < kept.len();
        kept = &kept[..count];
    }
    closed.then_some(kept)
}

fn logprobs(row: &Row<'_>, parts: &[ShardCandidates], chosen: &Candidate) -> Option<TokenLogprobs> {
    let count = row.sampler.params.logprobs? as usize;
    let sums: Vec<LogSum> = parts.iter().filter_map(|part| part.raw_sum).collect();
    let top = parts.iter().flat_map(|part| part.raw_top.iter().copied()).collect();
    Some(report(&sums, top, count, chosen.raw))
}

/// The log probability of a token with this logit, and the first `count` of `top`, in a row whose
/// shards have these sums.
pub(super) fn report(
    sums: &[LogSum],
    mut top: Vec<(u32, f32)>,
    count: usize,
    logit: f32,
) -> TokenLogprobs {
    let maximum = sums.iter().map(|sum| sum.maximum).fold(f32::NEG_INFINITY, f32::max);
    let total = LogSum::total(sums.iter().copied(), maximum);
    let logprob = |logit: f32| {
        let value = f64::from(logit) - f64::from(maximum) - libm::log(total);
        // NaN and infinite values have no probability.
        let value = if value.is_finite() { value as f32 } else { MIN_LOGPROB };
        value.clamp(MIN_LOGPROB, 0.0)
    };
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let top = top.into_iter().take(count);
    TokenLogprobs {
        logprob: logprob(logit),
        top: top.map(|(token, logit)| (TokenId(token), logprob(logit))).collect(),
    }
}
