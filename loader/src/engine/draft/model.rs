//! A draft model: a small model with the tokens of the large one, which rank 0 asks what it would
//! say (speculative decoding, arXiv 2211.17192, with the choice of tokens left to the large model).
//!
//! It has a cache of its own for each sequence. What it has guessed lies there too and is taken
//! back where something else came.

use std::{
    collections::BTreeMap,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use shardpack_collectives::Group;

use super::super::{
    logits::memory_group,
    request::{RequestId, TokenId},
};
use crate::{
    backend::{Backend, Ranks, StepError, TOKENS_PER_PAGE},
    model::{Batch, Model},
};

/// Tokens of prompts that it reads in one step, so that nobody waits long for the next token.
const READ_TOKENS: usize = 256;

/// Longest wait within a group of one, in which there is nobody to wait for.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How much the latest time counts.
const RATE: f64 = 0.1;

/// A time that is not measured because it was too long becomes shorter from step to step, until it is
/// measured once more.
const FADING: f64 = 0.99;

/// Logits that are further below the largest than this add nothing that matters, however many tokens
/// there are: 200 000 of them less than a thousandth.
const UNLIKELY: f32 = -20.0;

/// Rows of a step that takes about as long as one row.
const FEW_ROWS: usize = 4;

/// A next token, and how likely the model holds it to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine) struct Guess {
    pub(in crate::engine) token: u32,
    pub(in crate::engine) chance: f32,
}

/// A sequence as it stands.
pub(in crate::engine) struct Text<'a> {
    pub(in crate::engine) id: RequestId,
    /// Not empty.
    pub(in crate::engine) tokens: &'a [u32],
    /// Tokens that it may have in the end.
    pub(in crate::engine) total: u32,
    /// Guesses that are wanted.
    pub(in crate::engine) most: usize,
    /// Tokens beyond which nothing is guessed.
    pub(in crate::engine) stop: &'a [TokenId],
}

/// Who guesses, as the schedule sees it.
pub(in crate::engine) trait Guesser {
    /// What one more guess for a few sequences takes, in steps of the large model.
    fn cost(&self) -> f32;

    /// It was not asked, since that would not pay.
    fn pass(&mut self);

    /// Guesses for each of the texts, all that are active; none for one that it has not read yet.
    /// It goes on with a sequence while `pays` says so of the guesses that there are.
    fn guess(
        &mut self,
        texts: &[Text<'_>],
        pays: &dyn Fn(&[Guess]) -> bool,
    ) -> Result<Vec<Vec<Guess>>, StepError>;
}

/// A model cannot guess for this engine.
#[derive(Debug, thiserror::Error)]
pub enum DraftModelError {
    /// The large model's backend never runs guesses.
    #[error(
        "this engine runs no guesses, since its results may depend on how many rows are computed \
         together"
    )]
    Backend,
    /// It is one of several parts.
    #[error("the draft model is cut for {0} nodes and has to be whole: convert it for one node")]
    Ranks(usize),
    /// What it has read cannot be taken back.
    #[error(
        "a draft model has to forget wrong guesses, and this one sums up what it reads \
         (recurrent layers or compressed attention)"
    )]
    States,
    /// The system gave no group of one.
    #[error("cannot set up the draft model")]
    Group(#[from] io::Error),
}

/// A small model, with what it has read.
pub(in crate::engine) struct DraftModel<B: Backend> {
    model: Model<B>,
    group: Arc<dyn Group>,
    /// Tokens that both models know.
    vocab_size: usize,
    sequences: BTreeMap<RequestId, Seen<B::Cache>>,
    /// Sequences that have ended, for those that begin alike; the latest last.
    kept: Vec<Seen<B::Cache>>,
    /// Tokens for which there is memory.
    room: usize,
    /// Seconds of a guess and of a step of the large model, once they were seen.
    times: [Option<f64>; 2],
    /// What the first of these by the second is, as long as they were not.
    expected_cost: f32,
    /// Whether times count.
    measures: bool,
}

/// What the model has read of a sequence.
struct Seen<C> {
    cache: C,
    /// The tokens in the cache, guesses among them.
    tokens: Vec<u32>,
    /// How many of them are the sequence's for certain.
    known: usize,
}

/// The next tokens of one sequence.
struct Part {
    /// Which text.
    index: usize,
    tokens: Vec<u32>,
    /// Whether a guess is wanted after them.
    ends: bool,
}

impl<B: Backend> DraftModel<B> {
    /// Takes a model of one rank. `cost` is what a guess is expected to take, in steps of the
    /// large model, whose vocabulary has `vocab_size` tokens.
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

    /// A guess always takes so many steps of the large model.
    #[cfg(test)]
    pub(in crate::engine) const fn set_cost(&mut self, cost: f32) {
        (self.expected_cost, self.measures) = (cost, false);
    }

    /// A step of the large model with so many rows has taken so long.
    pub(in crate::engine) fn saw_step(&mut self, rows: usize, time: Duration) {
        if rows <= FEW_ROWS {
            see(&mut self.times[1], time);
        }
    }

    /// The same model with the means to compute.
    pub(in crate::engine) const fn over<'a>(&'a mut self, backend: &'a B) -> Asked<'a, B> {
        Asked { draft: self, backend }
    }

    /// Sequences that are not among the texts have ended. The oldest of those make room.
    fn keep_ended(&mut self, texts: &[Text<'_>]) {
        let ended: Vec<_> = self
            .sequences
            .keys()
            .filter(|id| texts.iter().all(|text| text.id != **id))
            .copied()
            .collect();
        self.kept.extend(ended.iter().filter_map(|id| self.sequences.remove(id)));
        let active: usize = texts.iter().map(|text| text.tokens.len()).sum();
        let mut held = active + self.kept.iter().map(|seen| seen.tokens.len()).sum::<usize>();
        let too_many = self.kept.iter().take_while(|seen| {
            let is_over = held > self.room;
            held -= seen.tokens.len();
            is_over
        });
        let too_many = too_many.count();
        self.kept.drain(..too_many);
    }

    /// What comes next of each text that can be guessed about: all that is new, as far as the
    /// tokens of a step reach, the shortest first.
    fn next_parts(&mut self, backend: &B, texts: &[Text<'_>]) -> Vec<Part> {
        let spec = self.model.spec();
        let (longest, vocab) = (spec.max_positions as usize, self.vocab_size as u32);
        let mut room = self.room;
        let mut parts = Vec::new();
        for (index, text) in texts.iter().enumerate() {
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
            parts.push(Part { index, tokens: text.tokens[known..].to_vec(), ends: true });
        }
        parts.sort_by_key(|part| part.tokens.len());
        let mut left = READ_TOKENS;
        for part in &mut parts {
            part.ends = part.tokens.len() <= left;
            part.tokens.truncate(left);
            left -= part.tokens.len();
        }
        parts.retain(|part| !part.tokens.is_empty());
        parts
    }

    /// A sequence that begins with what another has in common with it.
    fn begin(&self, backend: &B, tokens: &[u32]) -> Seen<B::Cache> {
        let shape = self.model.cache_shape();
        let ended = self.kept.iter().map(|seen| (seen, seen.tokens.len()));
        // Guesses may still be taken back.
        let active = self.sequences.values().map(|seen| (seen, seen.known));
        let alike = |(seen, len): (&'_ Seen<B::Cache>, usize)| common(&seen.tokens[..len], tokens);
        let best = ended.chain(active).max_by_key(|it| alike(*it));
        let full = best.map_or(0, |it| alike(it).min(tokens.len() - 1) / TOKENS_PER_PAGE);
        let page = |index| best.map(|(seen, _)| backend.page(&seen.cache, index));
        let pages: Vec<_> = (0..full).filter_map(page).collect();
        let known = full * TOKENS_PER_PAGE;
        Seen { cache: backend.cache(&shape, &pages), tokens: tokens[..known].to_vec(), known }
    }

    /// Reads the parts and returns the most likely token after each that ends.
    fn forward(
        &mut self,
        backend: &B,
        texts: &[Text<'_>],
        parts: &[Part],
    ) -> Result<Vec<Guess>, StepError> {
        let longest = self.model.spec().max_positions;
        let mut batch = Batch::default();
        let mut sequences = Vec::with_capacity(parts.len());
        for part in parts {
            let text = &texts[part.index];
            let mut seen = self.sequences.remove(&text.id).expect("begun with its first part");
            let end = (seen.tokens.len() + part.tokens.len()) as u32;
            batch.positions.extend(seen.tokens.len() as u32..end);
            batch.tokens.extend(&part.tokens);
            batch.lengths.push(part.tokens.len());
            batch.totals.push(text.total.min(longest).max(end));
            if part.ends {
                batch.logit_rows.push(batch.tokens.len() - 1);
            }
            seen.tokens.extend(&part.tokens);
            sequences.push(seen);
        }
        let mut caches: Vec<_> = sequences.iter_mut().map(|seen| &mut seen.cache).collect();
        let (model, ranks) = (&self.model, Ranks::all(self.group.as_ref(), TIMEOUT));
        // Sequences that an error leaves behind are begun anew.
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
            self.sequences.insert(texts[part.index].id, seen);
        }
        let rows = logits.chunks_exact(self.model.spec().vocab_size as usize);
        Ok(rows.map(|row| most_likely(&row[..self.vocab_size])).collect())
    }
}

/// A draft model that can be asked.
pub(in crate::engine) struct Asked<'a, B: Backend> {
    draft: &'a mut DraftModel<B>,
    backend: &'a B,
}

impl<B: Backend> Guesser for Asked<'_, B> {
    fn cost(&self) -> f32 {
        match self.draft.times {
            [Some(guess), Some(step)] if self.draft.measures => (guess / step) as f32,
            _ => self.draft.expected_cost,
        }
    }

    fn pass(&mut self) {
        if let Some(time) = &mut self.draft.times[0] {
            *time *= FADING;
        }
    }

    fn guess(
        &mut self,
        texts: &[Text<'_>],
        pays: &dyn Fn(&[Guess]) -> bool,
    ) -> Result<Vec<Vec<Guess>>, StepError> {
        let Self { draft, backend } = self;
        draft.keep_ended(texts);
        let mut guesses = vec![Vec::new(); texts.len()];
        let mut parts = draft.next_parts(backend, texts);
        while !parts.is_empty() {
            let start = Instant::now();
            let found = draft.forward(backend, texts, &parts)?;
            if parts.len() <= FEW_ROWS && parts.iter().all(|part| part.tokens.len() == 1) {
                see(&mut draft.times[0], start.elapsed());
            }
            for part in &parts {
                let text = &texts[part.index];
                let seen = draft.sequences.get_mut(&text.id).expect("it was read just now");
                seen.known = common(&seen.tokens, text.tokens);
            }
            let ended = parts.into_iter().filter(|part| part.ends);
            let mut next = Vec::new();
            for (Part { index, .. }, guess) in ended.zip(found) {
                let (text, guesses) = (&texts[index], &mut guesses[index]);
                if text.stop.contains(&TokenId(guess.token)) {
                    continue;
                }
                guesses.push(guess);
                if guesses.len() < text.most && pays(guesses) {
                    next.push(Part { index, tokens: vec![guess.token], ends: true });
                }
            }
            parts = next;
        }
        Ok(guesses)
    }
}

/// Moves a time towards the latest one.
fn see(known: &mut Option<f64>, time: Duration) {
    let time = time.as_secs_f64();
    *known = Some(known.map_or(time, |known| known + RATE * (time - known)));
}

/// How many tokens two sequences begin with alike.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The token of the largest logit, the first of several, and its chance at a temperature of 1.
fn most_likely(logits: &[f32]) -> Guess {
    let larger = |best: (usize, f32), it: (usize, f32)| if it.1 > best.1 { it } else { best };
    let all = logits.iter().copied().enumerate();
    let (token, largest) = all.fold((0, f32::NEG_INFINITY), larger);
    let likely = logits.iter().map(|logit| logit - largest).filter(|it| *it > UNLIKELY);
    let sum: f32 = likely.map(f32::exp).sum();
    Guess { token: token as u32, chance: 1.0 / sum }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_likely_token_has_its_chance_of_the_softmax() {
        let logits: Vec<f32> = (0..200_000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 16) as f32 / 4096.0)
            .collect();
        let Guess { token, chance } = most_likely(&logits);
        let largest = f64::from(logits[token as usize]);
        assert!(logits.iter().all(|logit| f64::from(*logit) <= largest));
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
        assert!((f64::from(chance) * sum - 1.0).abs() < 1e-3, "{chance} {sum}");
        assert_eq!(most_likely(&[1.0, 3.0, 3.0]).token, 1);
        assert!((most_likely(&[-2.0]).chance - 1.0).abs() < f32::EPSILON);
    }
}
