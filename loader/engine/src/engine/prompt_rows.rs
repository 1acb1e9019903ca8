//! What the rows of prompts give besides a sampled token: log probabilities of the tokens that follow
//! them in the prompt, and embeddings.
//!
//! Both begin with the rows' hidden vectors. Logits of scored rows are computed and read
//! [`SCORED_ROWS`] at a time, so that no prompt takes more memory for them than that; an embedding's
//! mean is summed over the steps of its prompt.

use std::ops::Range;

use shardpack_collectives::GroupError;
use shardpack_engine_api::{PromptOutput, RequestId, TokenLogprobs};
use shardpack_formats::spec::{Embedding, Pooling};
use zerocopy::IntoBytes;

use super::{
    plan::ScheduledSequence,
    sample::{SamplingParams, ShardScore, WantedToken, score},
};
use crate::{
    backend::{Backend, Ranks, StepError},
    model::{Batch, Model},
};

/// Rows whose logits are in memory at once: enough for the head's full speed.
const SCORED_ROWS: usize = 64;

/// What a prompt's rows gave in a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PromptResult {
    pub(super) id: RequestId,
    pub(super) values: PromptValues,
}

/// Values of a prompt's rows.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PromptValues {
    /// Of the prompt's tokens from `first` on.
    Logprobs { first: u32, logprobs: Vec<TokenLogprobs> },
    /// Of the whole prompt.
    Embedding(Vec<f32>),
}

/// The hidden vectors of a prompt that were pooled so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Pooled(Vec<f64>);

/// Rows of a step's prompts of which something is wanted.
#[derive(Debug, Default)]
pub(super) struct PromptRows {
    tasks: Vec<PromptTask>,
}

#[derive(Debug)]
struct PromptTask {
    id: RequestId,
    /// The sequence's place in the step.
    sequence: usize,
    /// Among the step's hidden vectors.
    rows: Range<usize>,
    kind: TaskKind,
}

#[derive(Debug)]
enum TaskKind {
    /// Log probabilities of these tokens, the first of them at this index of the prompt.
    Score { first: u32, wanted: Vec<WantedToken> },
    /// A part of an embedding; of how many tokens, where the prompt ends with it.
    Pool { ends: Option<u32> },
}

impl PromptRows {
    /// Adds the rows of a scheduled sequence, of which the batch has `batch.tokens` from `start` on.
    pub(super) fn add(
        &mut self,
        scheduled: &ScheduledSequence,
        params: &SamplingParams,
        pooling: Pooling,
        [sequence, start]: [usize; 2],
        batch: &mut Batch,
    ) {
        let (position, count) = (scheduled.position, scheduled.known().len());
        if position >= params.prompt_len {
            return;
        }
        let in_prompt = count.min((params.prompt_len - position) as usize);
        let ends = position as usize + in_prompt == params.prompt_len as usize;
        let (taken, kind) = match params.prompt_output {
            PromptOutput::Nothing => return,
            PromptOutput::Logprobs(top) => {
                // The last row of the prompt gives the first token of the answer.
                let inside = scheduled.tokens[..in_prompt].iter().skip(1).copied();
                let wanted = inside.chain(scheduled.next);
                let wanted = wanted.map(|token| WantedToken { token, top }).collect::<Vec<_>>();
                (0..wanted.len(), TaskKind::Score { first: position + 1, wanted })
            }
            PromptOutput::Embedding => {
                let taken = match pooling {
                    Pooling::Mean => 0..in_prompt,
                    Pooling::Cls => 0..usize::from(position == 0),
                    Pooling::Last => in_prompt - usize::from(ends)..in_prompt,
                };
                (taken, TaskKind::Pool { ends: ends.then_some(params.prompt_len) })
            }
        };
        if taken.is_empty() && !matches!(kind, TaskKind::Pool { ends: Some(_) }) {
            return;
        }
        let first = batch.hidden_rows.len();
        batch.hidden_rows.extend(taken.map(|row| start + row));
        let rows = first..batch.hidden_rows.len();
        self.tasks.push(PromptTask { id: scheduled.id, sequence, rows, kind });
    }

    /// Whether nothing is wanted.
    pub(super) const fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Reads what the tasks need of the step's hidden vectors; a rank of an earlier stage has none.
    pub(super) fn read<B: Backend>(
        &self,
        model: &Model<B>,
        backend: &B,
        hidden: Option<&B::Tensor>,
        own: &Ranks<'_>,
    ) -> Result<RowValues, StepError> {
        let (mut scores, mut vectors) = (Vec::new(), Vec::new());
        let (mut pool_rows, first) = (Vec::new(), model.held_logits().start as u32);
        let mut scored = Vec::new();
        for task in &self.tasks {
            match &task.kind {
                TaskKind::Pool { .. } => pool_rows.extend(task.rows.clone()),
                TaskKind::Score { wanted, .. } => scored.extend(task.rows.clone().zip(wanted)),
            }
        }
        for block in scored.chunks(SCORED_ROWS) {
            let Some(hidden) = hidden else {
                scores.extend(block.iter().map(|(_, wanted)| ShardScore::of(**wanted, &[], first)));
                continue;
            };
            let rows: Vec<usize> = block.iter().map(|(row, _)| *row).collect();
            let logits = backend.read(model.logits_of(backend, hidden, &rows), own)?;
            let width = model.held_logits().len();
            let row = |place: usize| &logits[place * width..(place + 1) * width];
            let score = |(place, (_, wanted)): (usize, &(usize, &WantedToken))| {
                ShardScore::of(**wanted, row(place), first)
            };
            scores.extend(block.iter().enumerate().map(score));
        }
        if let Some(hidden) = hidden.filter(|_| !pool_rows.is_empty()) {
            vectors = backend.read(backend.select_rows(hidden, &pool_rows), own)?;
        }
        Ok(RowValues { scores, vectors })
    }

    /// The results of the step; `pooled` has, of every sequence, what earlier steps have pooled.
    pub(super) fn results<B: Backend>(
        self,
        values: &RowValues,
        model: &Model<B>,
        pooled: &mut [Pooled],
        ranks: &Ranks<'_>,
    ) -> Result<Vec<PromptResult>, StepError> {
        let wanted: Vec<WantedToken> =
            self.tasks.iter().flat_map(PromptTask::wanted).copied().collect();
        let mut logprobs = if wanted.is_empty() {
            Vec::new().into_iter()
        } else {
            score(&values.scores, &wanted, model.logit_ranges(), ranks)?.into_iter()
        };
        let mut vectors = values.vectors.chunks(model.spec().hidden_size as usize);
        let mut results = Vec::new();
        for PromptTask { id, sequence, rows, kind } in self.tasks {
            let values = match kind {
                TaskKind::Score { first, wanted } => {
                    let logprobs = logprobs.by_ref().take(wanted.len()).collect();
                    PromptValues::Logprobs { first, logprobs }
                }
                TaskKind::Pool { ends } => {
                    let pooled = &mut pooled[sequence];
                    vectors.by_ref().take(rows.len()).for_each(|vector| pooled.add(vector));
                    let Some(tokens) = ends else { continue };
                    let vector = std::mem::take(pooled).vector(pooling_of(model), tokens);
                    let vector = model.embedding_of(vector);
                    PromptValues::Embedding(from_last_stage(model, vector, ranks)?)
                }
            };
            results.push(PromptResult { id, values });
        }
        Ok(results)
    }
}

impl PromptTask {
    fn wanted(&self) -> &[WantedToken] {
        match &self.kind {
            TaskKind::Score { wanted, .. } => wanted,
            TaskKind::Pool { .. } => &[],
        }
    }
}

impl Pooled {
    fn add(&mut self, vector: &[f32]) {
        self.0.resize(vector.len(), 0.0);
        for (sum, value) in self.0.iter_mut().zip(vector) {
            *sum += f64::from(*value);
        }
    }

    /// Of a prompt of so many tokens.
    fn vector(self, pooling: Pooling, tokens: u32) -> Vec<f32> {
        let count = match pooling {
            Pooling::Mean => f64::from(tokens),
            Pooling::Last | Pooling::Cls => 1.0,
        };
        self.0.into_iter().map(|sum| (sum / count) as f32).collect()
    }
}

/// How a model's hidden vectors are pooled.
pub(super) fn pooling_of<B: Backend>(model: &Model<B>) -> Pooling {
    model.spec().embedding.as_ref().map_or(Embedding::UNTRAINED.pooling, |it| it.pooling)
}

/// The vector of the last rank, for every rank, where only ranks of the last stage have it.
fn from_last_stage<B: Backend>(
    model: &Model<B>,
    vector: Vec<f32>,
    ranks: &Ranks<'_>,
) -> Result<Vec<f32>, StepError> {
    if model.shard().stage.is_none() {
        return Ok(vector);
    }
    let mut all = ranks.group.all_gather(vector.as_bytes(), ranks.deadline())?;
    let spec = model.spec();
    let dense = spec.embedding.as_ref().and_then(|it| it.dense.last());
    let width = dense.map_or(spec.hidden_size, |dense| dense.outputs) as usize;
    let (rank, last) = (all.len().saturating_sub(1), all.pop().unwrap_or_default());
    let (floats, rest) = last.as_chunks::<4>();
    if floats.len() != width || !rest.is_empty() {
        return Err(StepError::Group(GroupError::OutOfStep {
            rank: rank as u32,
            expected: format!("an embedding of {} bytes", width * size_of::<f32>()),
            found: format!("{} bytes", last.len()),
        }));
    }
    Ok(floats.iter().map(|four| f32::from_le_bytes(*four)).collect())
}

/// Values of the rows of all tasks, in their order.
#[derive(Debug, Default)]
pub(super) struct RowValues {
    scores: Vec<ShardScore>,
    /// Hidden vectors of pooled rows.
    vectors: Vec<f32>,
}
