//! Runs a plan on every rank: the same step on its shard of the model.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt::Display,
};

use shardpack_collectives::GroupError;
use shardpack_engine_api::{PromptOutput, RequestId};
use shardpack_formats::{memory::TOKENS_PER_PAGE, spec::Pooling};

use super::{
    ahead::{ExpectedStep, PreparedStep},
    plan::{NewSequence, PageId, Plan, Publish, ScheduledSequence},
    prompt_rows::{Pooled, PromptResult, PromptRows, RowValues, pooling_of},
    rows::RowReader,
    sample::{Logits, Row, SampledToken, Sampler, sample},
};
use crate::{
    backend::{Backend, Ranks, StepError},
    model::{Batch, Model, StepOutputs},
};

/// The sequences of one rank and the model that they run on.
pub(super) struct Runner<B: Backend> {
    model: Model<B>,
    backend: B,
    sequences: BTreeMap<RequestId, CachedSequence<B::Cache>>,
    /// Pages that sequences share.
    pages: BTreeMap<PageId, B::Page>,
    /// Steps run in this epoch.
    steps: u64,
    /// The step that is likely to come next.
    prepared: Option<PreparedStep<B>>,
    /// Whether such steps are prepared.
    looks_ahead: bool,
    /// Steps that were taken up as they were prepared.
    taken_up: u64,
}

struct CachedSequence<C> {
    cache: C,
    sampler: Sampler,
    /// Tokens that it may have in the end.
    total: u32,
    /// Tokens in the cache.
    len: u32,
    /// The token that was sampled after them, which must be the next input.
    next: Option<u32>,
    /// Hidden vectors of its prompt, where its embedding is wanted.
    pooled: Pooled,
}

/// What a step gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct StepResults {
    /// Of every sequence whose next token was sampled, in the order of the plan.
    pub(super) sampled: Vec<SampledSequence>,
    /// Of prompts of which more is wanted.
    pub(super) prompts: Vec<PromptResult>,
}

/// The new tokens of a sequence: its accepted draft tokens, and the one that was sampled after them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SampledSequence {
    pub(super) id: RequestId,
    /// Not empty.
    pub(super) tokens: Vec<SampledToken>,
}

impl<C> CachedSequence<C> {
    /// These tokens are the next ones of the sequence.
    fn take(&mut self, tokens: &[u32]) {
        self.sampler.take(self.len, tokens);
        self.len += tokens.len() as u32;
    }
}

impl<B: Backend> Runner<B> {
    pub(super) fn new(model: Model<B>, backend: B) -> Self {
        let (sequences, pages) = (BTreeMap::new(), BTreeMap::new());
        Self {
            model,
            backend,
            sequences,
            pages,
            steps: 0,
            prepared: None,
            looks_ahead: true,
            taken_up: 0,
        }
    }

    /// Steps that were taken up as they were prepared.
    #[cfg(test)]
    pub(super) const fn taken_up(&self) -> u64 {
        self.taken_up
    }

    /// Whether the next step is prepared while the device computes this one.
    #[cfg(test)]
    pub(super) const fn look_ahead(&mut self, looks_ahead: bool) {
        self.looks_ahead = looks_ahead;
    }

    pub(super) const fn backend(&self) -> &B {
        &self.backend
    }

    pub(super) const fn model(&self) -> &Model<B> {
        &self.model
    }

    /// Drops all sequences and pages; steps are counted anew.
    pub(super) fn forget(&mut self) {
        self.prepared = None;
        self.sequences.clear();
        self.pages.clear();
        self.steps = 0;
    }

    /// Number of the next step.
    pub(super) const fn next_step(&self) -> u64 {
        self.steps + 1
    }

    /// Carries out a plan. A plan that does not fit the sequences here means that the ranks no
    /// longer agree.
    pub(super) fn run(&mut self, plan: &Plan, ranks: &Ranks<'_>) -> Result<StepResults, StepError> {
        if plan.step != self.next_step() {
            return Err(out_of_step(&format!("step {}", self.next_step()), &plan.step));
        }
        self.steps = plan.step;
        plan.publish.iter().try_for_each(|publish| self.publish(*publish))?;
        for id in &plan.end {
            if self.sequences.remove(id).is_none() {
                return Err(out_of_step(&"the end of a known sequence", &id.0));
            }
        }
        for page in &plan.drop {
            if self.pages.remove(page).is_none() {
                return Err(out_of_step(&"the end of a known page", &page.0));
            }
        }
        if !plan.end.is_empty() || !plan.begin.is_empty() {
            self.prepared = None;
        }
        plan.begin.iter().try_for_each(|begin| self.begin(begin))?;
        if plan.scheduled.is_empty() {
            return Ok(StepResults::default());
        }
        // Sequences leave the map while they are worked on; after an error all are forgotten.
        let mut sequences = Vec::with_capacity(plan.scheduled.len());
        for scheduled in &plan.scheduled {
            let Some(mut sequence) = self.sequences.remove(&scheduled.id) else {
                return Err(out_of_step(&"tokens of a known sequence", &scheduled.id.0));
            };
            self.check(scheduled, &sequence)?;
            sequence.take(scheduled.known());
            sequences.push(sequence);
        }
        let (sampled_tokens, prompts) = self.step(plan, &mut sequences, ranks)?;
        let mut sampled_tokens = sampled_tokens.into_iter();
        let mut sampled = Vec::new();
        for (scheduled, mut sequence) in plan.scheduled.iter().zip(sequences) {
            sequence.next = None;
            if scheduled.sample {
                let rows = sampled_tokens.by_ref().take(scheduled.drafts as usize + 1).collect();
                let sampled_tokens = self.keep(scheduled, &mut sequence, rows);
                sampled.push(SampledSequence { id: scheduled.id, tokens: sampled_tokens });
            }
            self.sequences.insert(scheduled.id, sequence);
        }
        Ok(StepResults { sampled, prompts })
    }

    /// Accepts the draft tokens that sampling gave too, and the token after them. The KV cache is
    /// rolled back to them.
    fn keep(
        &self,
        scheduled: &ScheduledSequence,
        sequence: &mut CachedSequence<B::Cache>,
        mut rows: Vec<SampledToken>,
    ) -> Vec<SampledToken> {
        let drafts = scheduled.drafted();
        let kept = rows.iter().zip(drafts).take_while(|(row, draft)| row.token == Some(**draft));
        let kept = kept.count();
        if !drafts.is_empty() {
            // Work with drafts is refused where they cannot be rolled back.
            if let Some(rollback) = self.backend.kv_rollback() {
                rollback.roll_back(&mut sequence.cache, drafts.len() - kept);
            }
        }
        sequence.take(&drafts[..kept]);
        rows.truncate(kept + 1);
        sequence.next = rows.last().expect("a token for every sampled sequence").token;
        rows
    }

    fn publish(&mut self, Publish { id, index, page }: Publish) -> Result<(), StepError> {
        let full = u64::from(index) + 1;
        let known = self.sequences.get(&id);
        let Some(sequence) = known.filter(|it| u64::from(it.len) >= full * TOKENS_PER_PAGE as u64)
        else {
            return Err(out_of_step(&"a name for a full page of a known sequence", &id.0));
        };
        match self.pages.entry(page) {
            Entry::Occupied(_) => Err(out_of_step(&"a new page", &page.0)),
            Entry::Vacant(entry) => {
                entry.insert(self.backend.page(&sequence.cache, index as usize));
                Ok(())
            }
        }
    }

    fn begin(&mut self, begin: &NewSequence) -> Result<(), StepError> {
        let mut pages = Vec::with_capacity(begin.pages.len());
        for page in &begin.pages {
            let Some(page) = self.pages.get(page) else {
                return Err(out_of_step(&"the name of a known page", &page.0));
            };
            pages.push(page.clone());
        }
        let cached = pages.len() * TOKENS_PER_PAGE;
        if cached >= self.model.spec().max_positions as usize
            || ![0, cached].contains(&begin.history.len())
        {
            let found = format!("{} of {cached} cached", begin.history.len());
            return Err(out_of_step(&"the tokens of the cached pages", &found));
        }
        let mut sampler = Sampler::new(begin.params.clone());
        sampler.take(0, &begin.history);
        let cache = self.backend.cache(&self.model.cache_shape(), &pages);
        let (total, len) = (begin.total, cached as u32);
        let sequence =
            CachedSequence { cache, sampler, total, len, next: None, pooled: Pooled::default() };
        match self.sequences.insert(begin.id, sequence) {
            Some(_) => Err(out_of_step(&"a new sequence", &begin.id.0)),
            None => Ok(()),
        }
    }

    fn check(
        &self,
        scheduled: &ScheduledSequence,
        sequence: &CachedSequence<B::Cache>,
    ) -> Result<(), StepError> {
        let spec = self.model.spec();
        let end = scheduled.position as usize + scheduled.tokens.len();
        if scheduled.position != sequence.len || end > spec.max_positions as usize {
            let expected = format!("position {} of sequence {}", sequence.len, scheduled.id.0);
            return Err(out_of_step(&expected, &scheduled.position));
        }
        if let Some(next) = sequence.next.filter(|next| scheduled.known() != [*next]) {
            return Err(out_of_step(&format!("token {next}"), &format!("{:?}", scheduled.known())));
        }
        if scheduled.drafts > 0 && self.backend.kv_rollback().is_none() {
            return Err(out_of_step(&"no drafts", &scheduled.drafts));
        }
        let mut masks = scheduled.masks.iter().flatten();
        if let Some(mask) = masks.find(|it| it.vocab_size() != spec.vocab_size) {
            let expected = format!("a mask of {} tokens", spec.vocab_size);
            return Err(out_of_step(&expected, &mask.vocab_size()));
        }
        let params = sequence.sampler.params();
        let is_scored = matches!(params.prompt_output, PromptOutput::Logprobs(_));
        if scheduled.next.is_some() && (!is_scored || end >= params.prompt_len as usize) {
            return Err(out_of_step(&"no next token of the prompt", &end));
        }
        let mut tokens = scheduled.tokens.iter().chain(&scheduled.next);
        match tokens.find(|token| **token >= spec.vocab_size) {
            Some(token) => Err(out_of_step(&format!("a token below {}", spec.vocab_size), token)),
            None => Ok(()),
        }
    }

    /// The tokens sampled at the position of each draft token and after the last token, in the
    /// order of the plan, and what prompts gave.
    fn step(
        &mut self,
        plan: &Plan,
        sequences: &mut [CachedSequence<B::Cache>],
        ranks: &Ranks<'_>,
    ) -> Result<(Vec<SampledToken>, Vec<PromptResult>), StepError> {
        let (batch, prompt_rows) = batch(plan, sequences, pooling_of(&self.model));
        let mut pooled: Vec<Pooled> =
            sequences.iter_mut().map(|sequence| std::mem::take(&mut sequence.pooled)).collect();
        let mut rows = Vec::new();
        let mut caches = Vec::with_capacity(sequences.len());
        for (scheduled, sequence) in plan.scheduled.iter().zip(&mut *sequences) {
            if scheduled.sample {
                let (sampler, len, drafts) = (&sequence.sampler, sequence.len, scheduled.drafted());
                rows.extend((0..=drafts.len()).map(|place| Row {
                    sampler,
                    index: len + place as u32,
                    drafts: &drafts[..place],
                    mask: scheduled.masks.get(place).and_then(Option::as_ref),
                }));
            }
            caches.push(&mut sequence.cache);
        }
        let prepared = self.prepared.take().filter(|prepared| prepared.is(plan));
        self.taken_up += u64::from(prepared.is_some());
        let max_positions = self.model.spec().max_positions;
        let expected = (self.looks_ahead && prompt_rows.is_empty())
            .then(|| ExpectedStep::after(plan, &batch.totals, max_positions));
        let work = StepWork { batch: &batch, rows: &rows, prompt_rows: &prompt_rows };
        let (model, backend) = (&self.model, &self.backend);
        let done = backend
            .run(|| work.run(model, backend, prepared, expected.flatten(), &mut caches, ranks))?;
        self.prepared = done.prepared;
        let prompts = if prompt_rows.is_empty() {
            Vec::new()
        } else {
            prompt_rows.results(&done.values, model, &mut pooled, ranks)?
        };
        for (sequence, pooled) in sequences.iter_mut().zip(pooled) {
            sequence.pooled = pooled;
        }
        Ok((done.tokens, prompts))
    }
}

/// What one step computes.
struct StepWork<'a> {
    batch: &'a Batch,
    rows: &'a [Row<'a>],
    prompt_rows: &'a PromptRows,
}

/// What it gave.
struct StepDone<B: Backend> {
    tokens: Vec<SampledToken>,
    values: RowValues,
    /// The step that is likely to come next.
    prepared: Option<PreparedStep<B>>,
}

impl StepWork<'_> {
    fn run<B: Backend>(
        &self,
        model: &Model<B>,
        backend: &B,
        prepared: Option<PreparedStep<B>>,
        mut expected: Option<ExpectedStep>,
        caches: &mut [&mut B::Cache],
        ranks: &Ranks<'_>,
    ) -> Result<StepDone<B>, StepError> {
        // Deferred work is flushed among these ranks.
        let own = model.own_ranks(ranks);
        let outputs = match prepared {
            Some(prepared) => {
                let logits = Some(prepared.take_up(backend, &self.batch.tokens, caches)?);
                StepOutputs { logits, hidden: None }
            }
            None => model.forward_outputs(backend, self.batch, caches, ranks)?,
        };
        let values = self.prompt_rows.read(model, backend, outputs.hidden.as_ref(), &own)?;
        let Some(logits) = outputs.logits else {
            backend.flush(caches, &own)?;
            return Ok(StepDone { tokens: Vec::new(), values, prepared: None });
        };
        let mut next = None;
        let mut ahead = |caches: &[&mut B::Cache]| {
            next = expected.take().and_then(|it| it.prepare(model, backend, caches, ranks));
        };
        let rows_read = RowReader { model, backend, ranks: &own };
        let (read, chosen) = rows_read.read(logits, self.rows, caches, &mut ahead)?;
        let logits = Logits {
            values: &read,
            chosen,
            range: model.held_logits(),
            ranges: model.logit_ranges(),
            vocab_size: model.spec().vocab_size as usize,
        };
        Ok(StepDone { tokens: sample(&logits, self.rows, ranks)?, values, prepared: next })
    }
}

/// The rows of a step, and those of prompts of which more is wanted.
fn batch<C>(plan: &Plan, sequences: &[CachedSequence<C>], pooling: Pooling) -> (Batch, PromptRows) {
    let (mut batch, mut prompt_rows) = (Batch::default(), PromptRows::default());
    for (index, (scheduled, sequence)) in plan.scheduled.iter().zip(sequences).enumerate() {
        let place = [index, batch.tokens.len()];
        prompt_rows.add(scheduled, sequence.sampler.params(), pooling, place, &mut batch);
        batch.tokens.extend(&scheduled.tokens);
        batch
            .positions
            .extend(scheduled.position..scheduled.position + scheduled.tokens.len() as u32);
        batch.lengths.push(scheduled.tokens.len());
        batch.drafts.push(scheduled.drafts as usize);
        batch.totals.push(sequence.total.max(sequence.len));
        if scheduled.sample {
            let end = batch.tokens.len();
            batch.logit_rows.extend(end - 1 - scheduled.drafts as usize..end);
        }
    }
    (batch, prompt_rows)
}

fn out_of_step(expected: &dyn Display, found: &dyn Display) -> StepError {
    let (expected, found) = (expected.to_string(), found.to_string());
    StepError::Group(GroupError::OutOfStep { rank: 0, expected, found })
}
