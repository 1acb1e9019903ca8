//! The draft model: a small model with the tokenizer of the target model, run on rank 0
//! (speculative decoding, arXiv 2211.17192, where the target model alone chooses the tokens).
//!
//! It has a KV cache of its own for each sequence. Draft tokens lie there too and are rolled back
//! where they are rejected.

use std::{
    collections::BTreeMap,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use shardpack_collectives::Group;
use shardpack_engine_api::{RequestId, TokenId};
use shardpack_formats::memory::TOKENS_PER_PAGE;

use super::super::logits::memory_group;
use crate::{
    backend::{Backend, Ranks, StepError},
    model::{Batch, Model},
};

/// Prefill token budget of one step, so that no sequence waits long for its next token.
const PREFILL_TOKENS: usize = 256;

/// Longest wait within a group of one, in which there is nobody to wait for.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Weight of the latest time in the moving average.
const RATE: f64 = 0.1;

/// Decay per step of a time that is not measured because it was too long, until it is measured
/// again.
const DECAY: f64 = 0.99;

/// Logits that are further below the largest than this add nothing that matters, however many tokens
/// there are: 200 000 of them less than a thousandth.
const UNLIKELY: f32 = -20.0;

/// Rows of a step that takes about as long as one row.
const FEW_ROWS: usize = 4;

/// A draft token and its probability under the draft model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) struct DraftToken {
    pub(in crate::engine) token: u32,
    pub(in crate::engine) probability: f32,
}

/// A sequence as it stands.
pub(in crate::engine) struct DraftInput<'a> {
    pub(in crate::engine) id: RequestId,
    /// Not empty.
    pub(in crate::engine) tokens: &'a [u32],
    /// Tokens that it may have in the end.
    pub(in crate::engine) total: u32,
    /// Most draft tokens that are wanted.
    pub(in crate::engine) most: usize,
    /// Stop tokens: nothing is drafted beyond them.
    pub(in crate::engine) stop: &'a [TokenId],
}

/// A draft proposer, as the schedule sees it.
pub(in crate::engine) trait DraftProposer {
    /// Cost of one more draft token for a few sequences, in steps of the target model.
    fn cost(&self) -> f32;

    /// It is not asked in this step, since that would not pay.
    fn skip(&mut self);

    /// Draft tokens for each of the inputs, which are all running sequences; none for one whose
    /// prompt is not yet prefilled. Goes on with a sequence while `pays` holds for its drafts.
    fn propose(
        &mut self,
        inputs: &[DraftInput<'_>],
        pays: &dyn Fn(&[DraftToken]) -> bool,
    ) -> Result<Vec<Vec<DraftToken>>, StepError>;
}

/// A model cannot be the draft model of this engine.
#[derive(Debug, thiserror::Error)]
pub enum DraftModelError {
    /// The target model's backend cannot run drafts.
    #[error(
        "this engine does not support speculative decoding: its results may depend on the batch size"
    )]
    Backend,
    /// It is sharded.
    #[error(
        "the draft model is sharded for {0} nodes and must run on one: convert it for one node"
    )]
    Ranks(usize),
    /// Its cache cannot be rolled back.
    #[error(
        "the draft model's KV cache cannot be rolled back: it has recurrent layers or compressed \
         attention"
    )]
    States,
    /// The system gave no group of one.
    #[error("cannot set up the draft model")]
    Group(#[from] io::Error),
}

/// A draft model with its KV caches.
pub(in crate::engine) struct DraftModel<B: Backend> {
    model: Model<B>,
    group: Arc<dyn Group>,
    /// Tokens that both models know.
    vocab_size: usize,
    sequences: BTreeMap<RequestId, DraftSequence<B::Cache>>,
    /// Sequences that have ended, for those that begin alike; the latest last.
    kept: Vec<DraftSequence<B::Cache>>,
    /// Tokens that the KV memory holds.
    room: usize,
    /// Seconds of a draft token and of a step of the target model, once they were measured.
    times: [Option<f64>; 2],
    /// What the first of these by the second is, as long as they were not.
    expected_cost: f32,
    /// Whether times count.
    measures: bool,
}

/// The draft model's KV cache of a sequence.
struct DraftSequence<C> {
    cache: C,
    /// The tokens in the cache, drafts among them.
    tokens: Vec<u32>,
    /// How many of them are the sequence's for certain.
    known: usize,
}

/// The next tokens of one sequence.
struct NewTokens {
    /// Which input.
    index: usize,
    tokens: Vec<u32>,
    /// Whether a draft token is sampled after them.
    samples: bool,
}

impl<B: Backend> DraftModel<B> {
    /// Takes a model of one rank. `cost` is the estimated cost of a draft token, in steps of the
    /// target model, whose vocabulary has `vocab_size` tokens.
    pub(in crate::engine) fn new(
        model: Model<B>,
        vocab_size: u32,
        cost: f32,
    ) -> Result<Self, DraftModelError> {
        let shape = model.cache_shape();
        if shape.states > 0 || !shape.entries.is_empty() {
            return Err(DraftModelError::States);
        }
        if model.shard().logits.len() > 1 {
            return Err(DraftModelError::Ranks(model.shard().logits.len()));
        }
        let group = memory_group(1)?.remove(0);
        let vocab_size = vocab_size.min(model.spec().vocab_size) as usize;
        Ok(Self {
            model,
            group,
            vocab_size,
            sequences: BTreeMap::new(),
            kept: Vec::new(),
            room: 0,
            times: [None; 2],
            expected_cost: cost,
            measures: true,
        })
    }

    /// Forgets all sequences; from now on there is memory for so many tokens.
    pub(in crate::engine) fn begin_anew(&mut self, room: usize) {
        self.sequences.clear();
        self.kept.clear();
        self.room = room;
    }

    /// Fixes the cost of a draft token, in steps of the target model.
    #[cfg(test)]
    pub(in crate::engine) const fn set_cost(&mut self, cost: f32) {
        (self.expected_cost, self.measures) = (cost, false);
    }

    /// Records the time of a step of the target model with so many rows.
    pub(in crate::engine) fn record_step_time(&mut self, rows: usize, time: Duration) {
        if rows <= FEW_ROWS {
            update_average(&mut self.times[1], time);
        }
    }

    /// The draft model with its backend.
    pub(in crate::engine) const fn bind<'a>(
        &'a mut self,
        backend: &'a B,
    ) -> BoundDraftModel<'a, B> {
        BoundDraftModel { draft: self, backend }
    }

    /// Sequences that are not among the inputs have ended. The oldest of those make room.
    fn keep_ended(&mut self, inputs: &[DraftInput<'_>]) {
        let ended: Vec<_> = self
            .sequences
            .keys()
            .filter(|id| inputs.iter().all(|text| text.id != **id))
            .copied()
            .collect();
        self.kept.extend(ended.iter().filter_map(|id| self.sequences.remove(id)));
        let active: usize = inputs.iter().map(|text| text.tokens.len()).sum();
        let mut held = active + self.kept.iter().map(|seen| seen.tokens.len()).sum::<usize>();
        let too_many = self.kept.iter().take_while(|seen| {
            let is_over = held > self.room;
            held -= seen.tokens.len();
            is_over
        });
        let too_many = too_many.count();
        self.kept.drain(..too_many);
    }

    /// The uncached tokens of each input that drafts are wanted for, within the prefill budget, the
    /// shortest first.
    fn next_tokens(&mut self, backend: &B, inputs: &[DraftInput<'_>]) -> Vec<NewTokens> {
        let spec = self.model.spec();
        let (longest, vocab) = (spec.max_positions as usize, self.vocab_size as u32);
        let mut room = self.room;
        let mut parts = Vec::new();
        for (index, text) in inputs.iter().enumerate() {
            let needed = text.tokens.len() + text.most;
            let fits = needed <= longest && needed <= room;
            if !fits || text.tokens.iter().any(|token| *token >= vocab) {
                self.sequences.remove(&text.id);
                continue;
            }
            room -= needed;
            if text.most == 0 {
                continue;
            }
            let mut seen = match self.sequences.remove(&text.id) {
                Some(seen) => seen,
                None => self.begin(backend, text.tokens),
            };
            // Something has to be read, for there to be logits after it.
            let known = common(&seen.tokens, &text.tokens[..text.tokens.len() - 1]);
            if let Some(rollback) = backend.kv_rollback() {
                rollback.roll_back(&mut seen.cache, seen.tokens.len() - known);
            }
            seen.tokens.truncate(known);
            seen.known = known;
            self.sequences.insert(text.id, seen);
            parts.push(NewTokens { index, tokens: text.tokens[known..].to_vec(), samples: true });
        }
        parts.sort_by_key(|part| part.tokens.len());
        let mut left = PREFILL_TOKENS;
        for part in &mut parts {
            part.samples = part.tokens.len() <= left;
            part.tokens.truncate(left);
            left -= part.tokens.len();
        }
        parts.retain(|part| !part.tokens.is_empty());
        parts
    }

    /// A new sequence that shares the longest cached prefix.
    fn begin(&self, backend: &B, tokens: &[u32]) -> DraftSequence<B::Cache> {
        let shape = self.model.cache_shape();
        let ended = self.kept.iter().map(|seen| (seen, seen.tokens.len()));
        // Draft tokens may still be rolled back.
        let active = self.sequences.values().map(|seen| (seen, seen.known));
        let alike =
            |(seen, len): (&'_ DraftSequence<B::Cache>, usize)| common(&seen.tokens[..len], tokens);
        let best = ended.chain(active).max_by_key(|it| alike(*it));
        let full = best.map_or(0, |it| alike(it).min(tokens.len() - 1) / TOKENS_PER_PAGE);
        let page = |index| best.map(|(seen, _)| backend.page(&seen.cache, index));
        let pages: Vec<_> = (0..full).filter_map(page).collect();
        let known = full * TOKENS_PER_PAGE;
        DraftSequence {
            cache: backend.cache(&shape, &pages),
            tokens: tokens[..known].to_vec(),
            known,
        }
    }

    /// Reads the parts and returns the most likely token after each that ends.
    fn forward(
        &mut self,
        backend: &B,
        inputs: &[DraftInput<'_>],
        parts: &[NewTokens],
    ) -> Result<Vec<DraftToken>, StepError> {
        let longest = self.model.spec().max_positions;
        let mut batch = Batch::default();
        let mut sequences = Vec::with_capacity(parts.len());
        for part in parts {
            let text = &inputs[part.index];
            let mut seen = self.sequences.remove(&text.id).expect("begun with its first part");
            let end = (seen.tokens.len() + part.tokens.len()) as u32;
            batch.positions.extend(seen.tokens.len() as u32..end);
            batch.tokens.extend(&part.tokens);
            batch.lengths.push(part.tokens.len());
            batch.totals.push(text.total.min(longest).max(end));
            if part.samples {
                batch.logit_rows.push(batch.tokens.len() - 1);
            }
            seen.tokens.extend(&part.tokens);
            sequences.push(seen);
        }
        let mut caches: Vec<_> = sequences.iter_mut().map(|seen| &mut seen.cache).collect();
        let (model, ranks) = (&self.model, Ranks::all(self.group.as_ref(), TIMEOUT));
        // Sequences that an error leaves behind are recomputed.
        let logits = backend.run(|| {
            let logits = match model.forward(backend, &batch, &mut caches, &ranks)? {
                Some(part) => {
                    let logits = model.gather_logits(backend, part, &ranks)?;
                    backend.read(logits, &ranks)?
                }
                None => Vec::new(),
            };
            backend.flush(&mut caches, &ranks)?;
            Ok::<_, StepError>(logits)
        })?;
        for (part, seen) in parts.iter().zip(sequences) {
            self.sequences.insert(inputs[part.index].id, seen);
        }
        let rows = logits.chunks_exact(self.model.spec().vocab_size as usize);
        Ok(rows.map(|row| argmax(&row[..self.vocab_size])).collect())
    }
}

/// A draft model bound to its backend.
pub(in crate::engine) struct BoundDraftModel<'a, B: Backend> {
    draft: &'a mut DraftModel<B>,
    backend: &'a B,
}

impl<B: Backend> DraftProposer for BoundDraftModel<'_, B> {
    fn cost(&self) -> f32 {
        match self.draft.times {
            [Some(draft), Some(step)] if self.draft.measures => (draft / step) as f32,
            _ => self.draft.expected_cost,
        }
    }

    fn skip(&mut self) {
        if let Some(time) = &mut self.draft.times[0] {
            *time *= DECAY;
        }
    }

    fn propose(
        &mut self,
        inputs: &[DraftInput<'_>],
        pays: &dyn Fn(&[DraftToken]) -> bool,
    ) -> Result<Vec<Vec<DraftToken>>, StepError> {
        let Self { draft, backend } = self;
        draft.keep_ended(inputs);
        let mut drafts = vec![Vec::new(); inputs.len()];
        let mut parts = draft.next_tokens(backend, inputs);
        while !parts.is_empty() {
            let start = Instant::now();
            let found = draft.forward(backend, inputs, &parts)?;
            if parts.len() <= FEW_ROWS && parts.iter().all(|part| part.tokens.len() == 1) {
                update_average(&mut draft.times[0], start.elapsed());
            }
            for part in &parts {
                let text = &inputs[part.index];
                let seen = draft.sequences.get_mut(&text.id).expect("it was read just now");
                seen.known = common(&seen.tokens, text.tokens);
            }
            let ended = parts.into_iter().filter(|part| part.samples);
            let mut next = Vec::new();
            for (NewTokens { index, .. }, token) in ended.zip(found) {
                let (text, drafts) = (&inputs[index], &mut drafts[index]);
                if text.stop.contains(&TokenId(token.token)) {
                    continue;
                }
                drafts.push(token);
                if drafts.len() < text.most && pays(drafts) {
                    next.push(NewTokens { index, tokens: vec![token.token], samples: true });
                }
            }
            parts = next;
        }
        Ok(drafts)
    }
}

/// Moves a time towards the latest one.
fn update_average(known: &mut Option<f64>, time: Duration) {
    let time = time.as_secs_f64();
    *known = Some(known.map_or(time, |known| known + RATE * (time - known)));
}

/// How many tokens two sequences begin with alike.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The token of the largest logit, the first of several, and its probability at a temperature of 1.
fn argmax(logits: &[f32]) -> DraftToken {
    let larger = |best: (usize, f32), it: (usize, f32)| if it.1 > best.1 { it } else { best };
    let all = logits.iter().copied().enumerate();
    let (token, largest) = all.fold((0, f32::NEG_INFINITY), larger);
    let likely = logits.iter().map(|logit| logit - largest).filter(|it| *it > UNLIKELY);
    let sum: f32 = likely.map(f32::exp).sum();
    DraftToken { token: token as u32, probability: 1.0 / sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_likely_token_has_its_chance_of_the_softmax() {
        let logits: Vec<f32> = (0..200_000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 4096.0)
            .collect();
        let DraftToken { token, probability } = argmax(&logits);
        let largest = f64::from(logits[token as usize]);
        assert!(logits.iter().all(|logit| f64::from(*logit) <= largest));
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
        assert!((f64::from(probability) * sum - 1.0).abs() < 1e-3, "{probability} {sum}");
        assert_eq!(argmax(&[1.0, 3.0, 3.0]).token, 1);
        assert!((argmax(&[-2.0]).probability - 1.0).abs() < f32::EPSILON);
    }
}
