//! The draft budget: which draft tokens are worth the rows that they are run in.

use shardpack_formats::Spec;

/// Rows up to which a step reads weights and little else, and what each takes of the time of a
/// step of one row. Measured on our kernels at 4 bits, which run up to four rows at once.
const FEW_ROWS: usize = 4;
const FEW: f32 = 0.09;

/// What the first row takes that no longer fits among them, and what each further one does.
const FIRST_OF_MANY: f32 = 0.4;
const MANY: f32 = 0.25;

/// Factor by which the expected gain of a draft token must exceed its cost, since both are
/// estimates.
const MARGIN: f32 = 1.2;

/// Assumed acceptance probability of a draft-model token before the model is asked.
const MAX_PROBABILITY: f32 = 0.9;

/// Most draft tokens of all sequences in a step; bounds the size of a plan.
pub(in crate::engine) const MAX_STEP_DRAFTS: usize = 256;

/// The cost of a row, in steps of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) struct RowCosts {
    /// Part of a row's weights that are experts which another row does not read too.
    fresh: f32,
}

impl RowCosts {
    /// Of a model: a row of a mixture of experts reads experts of its own.
    pub(in crate::engine) fn of(spec: &Spec) -> Self {
        let Some(moe) = &spec.moe else { return Self { fresh: 0.0 } };
        let [always, routed] = weights(spec);
        let others = 1.0 - f64::from(moe.top_k) / f64::from(moe.choices());
        Self { fresh: (routed / (always + routed) * others) as f32 }
    }

    /// Whether a draft model is worth asking beside `rows` rows, one of which is that of
    /// each of so many sequences.
    pub(in crate::engine) fn has_room(self, rows: usize, sequences: usize) -> bool {
        let best = vec![vec![MAX_PROBABILITY]; sequences];
        self.allocate(rows, &best).iter().any(|count| *count > 0)
    }

    /// Whether one more draft token is worth its cost, `draft_cost` steps of one row beside its own
    /// row, for a sequence whose drafts so far are accepted with these probabilities, each with
    /// those before.
    pub(in crate::engine) fn extends_draft(self, draft_cost: f32, probabilities: &[f32]) -> bool {
        let each = draft_cost + FEW.max(self.fresh);
        let tokens = 1.0 + probabilities.iter().sum::<f32>();
        let time = 1.0 + each * probabilities.len() as f32;
        probabilities.last().unwrap_or(&1.0) * time > MARGIN * each * tokens
    }

    /// What one row more than `rows` takes.
    fn next(self, rows: usize) -> f32 {
        let of_rows = match rows {
            ..FEW_ROWS => FEW,
            FEW_ROWS => FIRST_OF_MANY,
            _ => MANY,
        };
        of_rows.max(self.fresh)
    }

    /// The cost of a step of so many rows.
    fn step(self, rows: usize) -> f32 {
        1.0 + (1..rows).map(|rows| self.next(rows)).sum::<f32>()
    }

    /// How many drafts each sequence gets in a step that has `rows` rows without them. `probabilities`
    /// gives for each sequence that gets a token the probability that each draft is accepted
    /// together with those before it. A draft is run while it raises the expected tokens a second.
    pub(in crate::engine) fn allocate(self, rows: usize, probabilities: &[Vec<f32>]) -> Vec<usize> {
        let mut counts = vec![0; probabilities.len()];
        let (mut time, mut tokens) = (self.step(rows), probabilities.len() as f32);
        for rows in rows..rows + MAX_STEP_DRAFTS {
            let next = |(at, count): (usize, &usize)| {
                let probability = *probabilities[at].get(*count)?;
                Some((at, probability))
            };
            let best = counts.iter().enumerate().filter_map(next);
            // The first of equal ones.
            let Some((at, probability)) = best.reduce(|a, b| if b.1 > a.1 { b } else { a }) else {
                break;
            };
            let cost = self.next(rows);
            if probability * time <= MARGIN * cost * tokens {
                break;
            }
            counts[at] += 1;
            (time, tokens) = (time + cost, tokens + probability);
        }
        counts
    }
}

/// What one token reads of a model, in weights: always, and as routed experts.
fn weights(spec: &Spec) -> [f64; 2] {
    let [hidden, heads, kv, dim] =
        [spec.hidden_size, spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim]
            .map(f64::from);
    let attention = hidden * dim * 2.0 * (heads + kv);
    let [mut always, mut routed] = [hidden * f64::from(spec.vocab_size), 0.0];
    for layer in &spec.layers {
        always += attention;
        match &spec.moe {
            Some(moe) if layer.moe => {
                let shared = moe.shared.as_ref().map_or(0.0, |it| f64::from(it.size));
                always += 3.0 * hidden * shared;
                // Those without weights have nothing to read.
                let read = f64::from(moe.experts) / f64::from(moe.choices());
                routed += 3.0 * hidden * f64::from(moe.size) * f64::from(moe.top_k) * read;
                if moe.shortcut {
                    always += 3.0 * hidden * f64::from(spec.ffn.size);
                }
            }
            _ => always += 3.0 * hidden * f64::from(spec.ffn.size),
        }
    }
    [always, routed]
}

/// Estimated cost of a draft-model token before it was measured, in steps of a model that has so
/// many ranks: by the weights that each reads.
pub(in crate::engine) fn draft_token_cost(draft: &Spec, spec: &Spec, ranks: usize) -> f32 {
    let [draft, model] = [draft, spec].map(|spec| weights(spec).iter().sum::<f64>());
    (draft / (model / ranks as f64)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: RowCosts = RowCosts { fresh: 0.0 };

    fn probabilities(each: f32) -> Vec<f32> {
        (1..=15).map(|power| each.powi(power)).collect()
    }

    #[test]
    fn likely_drafts_are_run_and_unlikely_ones_are_not() {
        let check =
            |costs: RowCosts, each: f32, streams: usize, expected: std::ops::Range<usize>| {
                let all = vec![probabilities(each); streams];
                let counts = costs.allocate(streams, &all);
                assert!(expected.contains(&counts[0]), "{each} {streams}: {counts:?}");
            };
        check(DENSE, 0.05, 1, 0..1);
        check(DENSE, 0.1, 1, 0..1);
        check(DENSE, 0.3, 1, 1..2);
        check(DENSE, 0.98, 1, 3..4);
        check(DENSE, 0.98, 2, 1..2);
        check(DENSE, 0.98, 4, 0..1);
        check(DENSE, 0.98, 8, 0..1);
        check(DENSE, 0.98, 32, 0..1);
        // Where most of what is read are experts, only what is as good as certain pays.
        let experts = RowCosts { fresh: 0.7 };
        check(experts, 0.5, 1, 0..1);
        check(experts, 0.98, 1, 1..3);
    }

    #[test]
    fn a_draft_model_is_asked_as_long_as_it_pays() {
        let pays =
            |draft_cost: f32, probabilities: &[f32]| DENSE.extends_draft(draft_cost, probabilities);
        // A twentieth of the model: one more draft token as long as the last is likely.
        assert!(pays(0.05, &[]) && pays(0.05, &[0.9]) && pays(0.05, &probabilities(0.9)[..4]));
        assert!(!pays(0.05, &[0.1]) && !pays(0.05, &[0.9, 0.2]));
        // Nearly as slow as the model itself: never.
        assert!(!pays(0.8, &[]));
        // Beside many rows there is no room for drafts, however likely.
        assert!(DENSE.has_room(1, 1) && DENSE.has_room(2, 2) && !DENSE.has_room(8, 8));
        assert!(!DENSE.has_room(512, 0));
    }

    #[test]
    fn the_likelier_sequence_goes_first_and_no_step_grows_without_end() {
        let counts = DENSE.allocate(2, &[probabilities(0.2), probabilities(0.9), vec![]]);
        assert!(counts[1] > counts[0] && counts[2] == 0, "{counts:?}");
        // A step that reads a prompt has room for many.
        let counts = DENSE.allocate(600, &vec![probabilities(1.0); 30]);
        assert_eq!(counts.iter().sum::<usize>(), MAX_STEP_DRAFTS);
    }
}
