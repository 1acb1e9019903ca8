//! All logits of one sequence: the means of comparing this engine with others.

use std::{io, sync::Arc, thread};

use shardpack_collectives::{Group, LinkedGroup};

use super::{request::TokenId, step::EngineOptions};
use crate::{
    backend::{Backend, Cpu, Ranks, StepError},
    model::{Batch, LoadError, Model},
    open::Package,
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
    /// Threads could not be started.
    #[error("cannot start threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// A step failed.
    #[error("the step failed")]
    Step(#[from] StepError),
}

/// A rank group of `ranks` ends within this process, in rank order.
pub fn memory_group(ranks: u32) -> io::Result<Vec<Arc<dyn Group>>> {
    let ends = LinkedGroup::in_memory(ranks, 0)?;
    Ok(ends.into_iter().map(|end| Arc::new(end) as Arc<dyn Group>).collect())
}

/// Logits `[tokens, vocab_size]` after each token, by all ranks at once, each a thread of this
/// process with `threads` threads of its own. `groups` are the ends of one rank group.
pub fn logits(
    packages: &[Package],
    groups: &[Arc<dyn Group>],
    tokens: &[TokenId],
    threads: usize,
) -> Result<Vec<f32>, LogitsError> {
    let found: Vec<_> = packages.iter().map(|package| package.manifest().rank).collect();
    let complete = found.iter().copied().eq(0..groups.len() as u32);
    let last = packages.first().map_or(0, |package| package.manifest().layout.ranks - 1);
    if !complete || found.len() as u64 != u64::from(last) + 1 {
        return Err(LogitsError::Packages { last, found });
    }
    // All ranks are loaded before one waits for another.
    let mut ranks = Vec::with_capacity(packages.len());
    for (package, group) in packages.iter().zip(groups) {
        let backend = Cpu::new(threads)?;
        let model = Model::load(package, &backend)
            .map_err(|source| LogitsError::Load { rank: package.manifest().rank, source })?;
        ranks.push((model, backend, group));
    }
    for (model, ..) in &ranks {
        let spec = model.spec();
        if let Some(token) = tokens.iter().find(|token| token.0 >= spec.vocab_size) {
            return Err(LogitsError::Tokens(format!("token {} is unknown", token.0)));
        }
        if tokens.len() > spec.max_positions as usize {
            let message = format!("{} are more than {}", tokens.len(), spec.max_positions);
            return Err(LogitsError::Tokens(message));
        }
    }
    let results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = ranks
            .iter()
            .map(|(model, backend, group)| {
                scope.spawn(move || sequence(model, backend, group.as_ref(), tokens))
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

/// One rank's run over the tokens, in the chunks in which the engine takes a prompt.
fn sequence<B: Backend>(
    model: &Model<B>,
    backend: &B,
    group: &dyn Group,
    tokens: &[TokenId],
) -> Result<Vec<f32>, StepError> {
    let options = EngineOptions::STANDARD;
    let ranks = Ranks { group, timeout: options.collective_timeout };
    let mut cache = backend.cache(&model.cache_shape());
    let mut logits = Vec::new();
    let mut position = 0;
    for chunk in tokens.chunks(options.prefill_tokens) {
        let batch = Batch {
            totals: vec![tokens.len() as u32],
            tokens: chunk.iter().map(|token| token.0).collect(),
            positions: (position..position + chunk.len() as u32).collect(),
            lengths: vec![chunk.len()],
            logit_rows: (0..chunk.len()).collect(),
        };
        position += chunk.len() as u32;
        let rows = backend.run(|| {
            let logits = model.forward(backend, &batch, &mut [&mut cache], &ranks)?;
            let rows = logits.map_or(Ok(Vec::new()), |logits| backend.read(logits, &ranks))?;
            backend.settle(&mut [&mut cache], &ranks)?;
            Ok::<_, StepError>(rows)
        })?;
        logits.extend(rows);
    }
    Ok(logits)
}
