//! Which drafts are worth the rows that they are run in.

use shardpack_formats::Spec;

/// Rows up to which a step reads weights and little else, and what each takes of the time of a
/// step of one row. Measured on our kernels at 4 bits, which run up to four rows at once.
const FEW_ROWS: usize = 4;
const FEW: f32 = 0.09;

/// What the first row takes that no longer fits among them, and what each further one does.
const FIRST_OF_MANY: f32 = 0.4;
const MANY: f32 = 0.25;

/// How much more than its cost a draft must promise, since both are estimates.
const MARGIN: f32 = 1.2;

/// What a guess of a draft model may promise before it was asked.
const LIKELIEST: f32 = 0.9;

/// Most drafts of all sequences in a step; bounds what a plan holds.
pub(in crate::engine) const MAX_STEP_DRAFTS: usize = 256;

/// What a row costs, in steps of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) struct Costs {
    /// Part of a row's weights that are experts which another row does not read too.
    fresh: f32,
}

impl Costs {
    /// Of a model: a row of a mixture of experts reads experts of its own.
    pub(in crate::engine) fn of(spec: &Spec) -> Self {
        let Some(moe) = &spec.moe else { return Self { fresh: 0.0 } };
        let [always, chosen] = weights(spec);
        let others = 1.0 - f64::from(moe.top_k) / f64::from(moe.choices());
        Self { fresh: (chosen / (always + chosen) * others) as f32 }
    }

    /// Whether a draft model is worth asking for guesses beside `rows` rows, one of which is that of
    /// each of so many sequences.
    pub(in crate::engine) fn has_room(self, rows: usize, sequences: usize) -> bool {
        let best = vec![vec![LIKELIEST]; sequences];
        self.share(rows, &best).iter().any(|count| *count > 0)
    }

    /// Whether one guess more is worth what it takes, `guess` steps of one row beside its own row,
    /// for a sequence whose guesses so far come true with these chances, each with those before.
    pub(in crate::engine) fn guesses_on(self, guess: f32, chances: &[f32]) -> bool {
        let each = guess + FEW.max(self.fresh);
        let tokens = 1.0 + chances.iter().sum::<f32>();
        let time = 1.0 + each * chances.len() as f32;
        chances.last().unwrap_or(&1.0) * time > MARGIN * each * tokens
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

    /// What a step of so many rows takes.
    fn step(self, rows: usize) -> f32 {
        1.0 + (1..rows).map(|rows| self.next(rows)).sum::<f32>()
    }

    /// How many drafts each sequence gets in a step that has `rows` rows without them. `chances`
    /// says for each sequence that gets a token how likely each draft comes true together with
    /// those before it. A draft is run while it promises more tokens a second.
    pub(in crate::engine) fn share(self, rows: usize, chances: &[Vec<f32>]) -> Vec<usize> {
        let mut counts = vec![0; chances.len()];
        let (mut time, mut tokens) = (self.step(rows), chances.len() as f32);
        for rows in rows..rows + MAX_STEP_DRAFTS {
            let next = |(at, count): (usize, &usize)| {
                let chance = *chances[at].get(*count)?;
                Some((at, chance))
            };
            let best = counts.iter().enumerate().filter_map(next);
            // The first of equal ones.
            let Some((at, chance)) = best.reduce(|a, b| if b.1 > a.1 { b } else { a }) else {
                break;
            };
            let cost = self.next(rows);
            if chance * time <= MARGIN * cost * tokens {
                break;
            }
            counts[at] += 1;
            (time, tokens) = (time + cost, tokens + chance);
        }
        counts
    }
}

/// What one token reads of a model, in weights: always, and as experts that it has chosen.
fn weights(spec: &Spec) -> [f64; 2] {
    let [hidden, heads, kv, dim] =
        [spec.hidden_size, spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim]
            .map(f64::from);
    let attention = hidden * dim * 2.0 * (heads + kv);
    let [mut always, mut chosen] = [hidden * f64::from(spec.vocab_size), 0.0];
    for layer in &spec.layers {
        always += attention;
        match &spec.moe {
            Some(moe) if layer.moe => {
                let shared = moe.shared.as_ref().map_or(0.0, |it| f64::from(it.size));
                always += 3.0 * hidden * shared;
                // Those without weights have nothing to read.
                let read = f64::from(moe.experts) / f64::from(moe.choices());
                chosen += 3.0 * hidden * f64::from(moe.size) * f64::from(moe.top_k) * read;
                if moe.deferred {
                    always += 3.0 * hidden * f64::from(spec.ffn.size);
                }
            }
            _ => always += 3.0 * hidden * f64::from(spec.ffn.size),
        }
    }
    [always, chosen]
}

/// What a guess of a draft model takes before it was measured, in steps of a model that has so many
/// ranks: by what each reads.
pub(in crate::engine) fn guess_cost(draft: &Spec, spec: &Spec, ranks: usize) -> f32 {
    let [draft, model] = [draft, spec].map(|spec| weights(spec).iter().sum::<f64>());
    (draft / (model / ranks as f64)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: Costs = Costs { fresh: 0.0 };

    fn chances(each: f32) -> Vec<f32> {
        (1..=15).map(|power| each.powi(power)).collect()
    }

    #[test]
    fn likely_drafts_are_run_and_unlikely_ones_are_not() {
        let check = |costs: Costs, each: f32, streams: usize, expected: std::ops::Range<usize>| {
            let all = vec![chances(each); streams];
            let counts = costs.share(streams, &all);
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
        let experts = Costs { fresh: 0.7 };
        check(experts, 0.5, 1, 0..1);
        check(experts, 0.98, 1, 1..3);
    }

    #[test]
    fn a_draft_model_is_asked_as_long_as_it_pays() {
        let pays = |guess: f32, chances: &[f32]| DENSE.guesses_on(guess, chances);
        // A twentieth of the model: one guess more as long as the last is likely.
        assert!(pays(0.05, &[]) && pays(0.05, &[0.9]) && pays(0.05, &chances(0.9)[..4]));
        assert!(!pays(0.05, &[0.1]) && !pays(0.05, &[0.9, 0.2]));
        // Nearly as slow as the model itself: never.
        assert!(!pays(0.8, &[]));
        // Beside many rows there is no room for guesses, however likely.
        assert!(DENSE.has_room(1, 1) && DENSE.has_room(2, 2) && !DENSE.has_room(8, 8));
        assert!(!DENSE.has_room(512, 0));
    }

    #[test]
    fn the_likelier_sequence_goes_first_and_no_step_grows_without_end() {
        let counts = DENSE.share(2, &[chances(0.2), chances(0.9), vec![]]);
        assert!(counts[1] > counts[0] && counts[2] == 0, "{counts:?}");
        // A step that reads a prompt has room for many.
        let counts = DENSE.share(600, &vec![chances(1.0); 30]);
        assert_eq!(counts.iter().sum::<usize>(), MAX_STEP_DRAFTS);
    }
}
