//! All logits of one sequence: the means of comparing this engine with others.

use std::{io, sync::Arc, thread};

use shardpack_collectives::{Group, LinkedGroup};
use shardpack_engine_api::TokenId;
use shardpack_formats::Spec;

use super::step::EngineOptions;
use crate::{
    backend::{Backend, Cpu, CpuError, Ranks, StepError},
    loading::Package,
    model::{Batch, LoadError, Model},
};

/// Logits could not be computed.
#[derive(Debug, thiserror::Error)]
pub enum LogitsError {
    /// A package holds no model that can be run.
    #[error("cannot load the package of rank {rank}")]
    Load {
        /// Its rank.
        rank: u32,
        /// Why.
        source: LoadError,
    },
    /// The packages are not those of ranks 0, 1, … of one set.
    #[error("expected the packages of ranks 0 to {last} in order, found {found:?}")]
    Packages {
        /// The last rank.
        last: u32,
        /// The packages' ranks.
        found: Vec<u32>,
    },
    /// A token is not in the vocabulary or the sequence is too long.
    #[error("the model does not take these tokens: {0}")]
    Tokens(String),
    /// There is no backend.
    #[error("cannot compute on this machine")]
    Backend(#[from] CpuError),
    /// A step failed.
    #[error("the step failed")]
    Step(#[from] StepError),
}

/// A rank group of `ranks` ends within this process, in rank order.
pub fn memory_group(ranks: u32) -> io::Result<Vec<Arc<dyn Group>>> {
    let ends = LinkedGroup::in_memory(ranks, 0)?;
    Ok(ends.into_iter().map(|end| Arc::new(end) as Arc<dyn Group>).collect())
}

/// All ranks of a model in this process, each on threads of its own, or one of them; no
/// scheduling.
pub struct LocalModel<B: Backend = Cpu> {
    ranks: Vec<LocalRank<B>>,
}

struct LocalRank<B: Backend> {
    model: Model<B>,
    backend: B,
    group: Arc<dyn Group>,
}

/// A sequence of a [`LocalModel`].
pub struct LocalSequence<B: Backend = Cpu> {
    caches: Vec<B::Cache>,
    len: u32,
    total: u32,
}

impl LocalModel {
    /// Takes the weights of all packages of a set, with `threads` threads for each rank. `groups`
    /// are the ends of one rank group.
    pub fn load(
        packages: &[Package],
        groups: &[Arc<dyn Group>],
        threads: usize,
    ) -> Result<Self, LogitsError> {
        let backends = packages.iter().map(|_| Cpu::new(threads)).collect::<Result<_, _>>()?;
        Self::over(packages, groups, backends)
    }
}

impl<B: Backend> LocalModel<B> {
    /// Takes the weights of all packages of a set, each with its backend. `groups` are the ends
    /// of one rank group.
    pub fn over(
        packages: &[Package],
        groups: &[Arc<dyn Group>],
        backends: Vec<B>,
    ) -> Result<Self, LogitsError> {
        let found: Vec<_> = packages.iter().map(|package| package.manifest().rank).collect();
        let complete = found.iter().copied().eq(0..groups.len() as u32);
        let last = packages.first().map_or(0, |package| package.manifest().layout.ranks - 1);
        if !complete || found.len() as u64 != u64::from(last) + 1 {
            return Err(LogitsError::Packages { last, found });
        }
        let load = |((package, group), backend): ((&Package, &Arc<dyn Group>), B)| {
            let model = Model::load(package, &backend)
                .map_err(|source| LogitsError::Load { rank: package.manifest().rank, source })?;
            Ok(LocalRank { model, backend, group: Arc::clone(group) })
        };
        let ranks = packages
            .iter()
            .zip(groups)
            .zip(backends)
            .map(load)
            .collect::<Result<_, LogitsError>>()?;
        Ok(Self { ranks })
    }

    /// The rank of one package alone; the others of `group` are in other processes, and make the
    /// same calls.
    pub fn one_rank(
        package: &Package,
        group: Arc<dyn Group>,
        backend: B,
    ) -> Result<Self, LogitsError> {
        let manifest = package.manifest();
        if (manifest.rank, manifest.layout.ranks) != (group.rank(), group.size()) {
            let (last, found) = (group.size() - 1, vec![manifest.rank]);
            return Err(LogitsError::Packages { last, found });
        }
        let model = Model::load(package, &backend)
            .map_err(|source| LogitsError::Load { rank: manifest.rank, source })?;
        Ok(Self { ranks: vec![LocalRank { model, backend, group }] })
    }

    /// What the model computes.
    ///
    /// # Panics
    /// Never: a set has at least one package.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        self.ranks.first().expect("a set has at least one package").model.spec()
    }

    /// An empty sequence that will have `total` tokens.
    #[must_use]
    pub fn sequence(&self, total: usize) -> LocalSequence<B> {
        let cache = |rank: &LocalRank<B>| rank.backend.cache(&rank.model.cache_shape(), &[]);
        let caches = self.ranks.iter().map(cache).collect();
        LocalSequence { caches, len: 0, total: total as u32 }
    }

    /// Appends tokens to a sequence and returns the logits `[rows, vocab_size]` after those from
    /// `first` on.
    pub fn extend(
        &self,
        sequence: &mut LocalSequence<B>,
        tokens: &[TokenId],
        first: usize,
    ) -> Result<Vec<f32>, LogitsError> {
        let spec = self.spec();
        if let Some(token) = tokens.iter().find(|token| token.0 >= spec.vocab_size) {
            return Err(LogitsError::Tokens(format!("token {} is unknown", token.0)));
        }
        let end = sequence.len as usize + tokens.len();
        if end > spec.max_positions as usize {
            let why = spec.shortened().map_or_else(String::new, |why| format!(" ({why})"));
            let message = format!("{end} are more than {}{why}", spec.max_positions);
            return Err(LogitsError::Tokens(message));
        }
        let batch = Batch {
            totals: vec![sequence.total.max(end as u32)],
            tokens: tokens.iter().map(|token| token.0).collect(),
            positions: (sequence.len..end as u32).collect(),
            lengths: vec![tokens.len()],
            drafts: Vec::new(),
            logit_rows: (first..tokens.len()).collect(),
            hidden_rows: Vec::new(),
        };
        sequence.len = end as u32;
        if let ([rank], [cache]) = (&self.ranks[..], &mut sequence.caches[..]) {
            return Ok(rank.step(&batch, cache)?);
        }
        let results: Vec<_> = thread::scope(|scope| {
            let ranks = self.ranks.iter().zip(&mut sequence.caches);
            let workers: Vec<_> = ranks
                .map(|(rank, cache)| {
                    let batch = &batch;
                    scope.spawn(move || rank.step(batch, cache))
                })
                .collect();
            let join = |worker: thread::ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().map(join).collect()
        });
        let mut first = None;
        for result in results {
            let logits = result?;
            first.get_or_insert(logits);
        }
        Ok(first.unwrap_or_default())
    }

    /// Logits `[tokens, vocab_size]` after each token of a sequence, in the chunks in which the
    /// engine takes a prompt.
    pub fn logits(&self, tokens: &[TokenId]) -> Result<Vec<f32>, LogitsError> {
        let mut sequence = self.sequence(tokens.len());
        let mut logits = Vec::new();
        for chunk in tokens.chunks(EngineOptions::STANDARD.prefill_tokens) {
            logits.extend(self.extend(&mut sequence, chunk, 0)?);
        }
        Ok(logits)
    }
}

impl<B: Backend> LocalRank<B> {
    fn step(&self, batch: &Batch, cache: &mut B::Cache) -> Result<Vec<f32>, StepError> {
        let Self { model, backend, group } = self;
        let timeout = EngineOptions::STANDARD.collective_timeout;
        let ranks = Ranks::all(group.as_ref(), timeout);
        backend.run(|| {
            let rows = match model.forward(backend, batch, &mut [&mut *cache], &ranks)? {
                Some(part) => {
                    let logits = model.gather_logits(backend, part, &ranks)?;
                    backend.read(logits, &ranks)?
                }
                None => Vec::new(),
            };
            backend.flush(&mut [cache], &model.own_ranks(&ranks))?;
            Ok(rows)
        })
    }
}

/// Logits `[tokens, vocab_size]` after each token, by all ranks at once, each a thread of this
/// process with `threads` threads of its own, in the chunks in which the engine takes a prompt.
/// `groups` are the ends of one rank group.
pub fn logits(
    packages: &[Package],
    groups: &[Arc<dyn Group>],
    tokens: &[TokenId],
    threads: usize,
) -> Result<Vec<f32>, LogitsError> {
    LocalModel::load(packages, groups, threads)?.logits(tokens)
}
