//! Collectives between ranks inside MLX's graph.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use half::bf16;
use shardpack_collectives::GroupError;
use shardpack_mlx::{Array, Collective, Device, Element, Library, MlxError};
use zerocopy::IntoBytes;

use crate::backend::{Ranks, StepError};

/// Who carries out all-reduces and all-gathers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collectives {
    /// Our rank group, called from within the graph: it has deadlines and epochs, so a lost rank
    /// is an error.
    Own,
    /// MLX's ring over TCP. A lost rank is a hang until the process is ended.
    Ring,
    /// MLX's JACCL over RDMA. A lost rank is a hang until the process is ended.
    Jaccl,
}

impl Collectives {
    /// MLX's name of its own layers.
    #[must_use]
    pub const fn of_mlx(self) -> Option<&'static str> {
        match self {
            Self::Own => None,
            Self::Ring => Some("ring"),
            Self::Jaccl => Some("jaccl"),
        }
    }
}

/// The all-reduces of a step, as they are put into the graph.
pub(super) struct AllReduces {
    collectives: Collectives,
    /// The latest of this step. The next one comes after it, although it may not depend on it: a
    /// rank that holds nothing of a layer adds zeros that depend on nothing, and MLX would choose
    /// another order there than on the other ranks.
    last: Mutex<Option<Array>>,
}

impl AllReduces {
    pub(super) const fn new(collectives: Collectives) -> Self {
        Self { collectives, last: Mutex::new(None) }
    }

    fn last(&self) -> MutexGuard<'_, Option<Array>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a step: the latest all-reduce, which must be computed even where nothing asks for it, since
    /// the other ranks wait for it.
    pub(super) fn end(&self) -> Option<Array> {
        self.last().take()
    }

    /// Goes on with a step whose latest all-reduce this is.
    pub(super) fn resume(&self, last: Option<Array>) {
        *self.last() = last;
    }

    pub(super) fn sum(&self, x: &Array) -> Array {
        let mut last = self.last();
        let after = last.as_ref();
        let sum = match self.collectives {
            Collectives::Own => x.summed_over_ranks(after),
            Collectives::Ring | Collectives::Jaccl => x.distributed_sum(after),
        };
        *last = Some(sum.clone());
        sum
    }

    /// The ranks' columns of `rows` side by side.
    pub(super) fn gather(&self, x: &Array, rows: usize, widths: &[usize]) -> Array {
        let (library, x) = (x.library(), &x.cast(Element::F32));
        let mut last = self.last();
        let after = last.as_ref();
        let (all, parts): (Array, Vec<Array>) = match self.collectives {
            Collectives::Own => {
                let flat = x.gathered_over_ranks(rows * widths.iter().sum::<usize>(), after);
                let mut start = 0;
                let slice = |width: &usize| {
                    let part = flat.slice(0, start, start + rows * width);
                    start += rows * width;
                    part.reshape(&[rows, *width])
                };
                let parts = widths.iter().map(slice).collect();
                (flat, parts)
            }
            Collectives::Ring | Collectives::Jaccl => {
                // MLX gathers equal shapes only.
                let widest = widths.iter().copied().max().unwrap_or(0);
                let mine = x.shape()[1];
                let room = library.full(0.0, Element::F32, &[rows, widest - mine]);
                let all = library.concat(&[x, &room], 1).distributed_gather(after);
                let slice = |(rank, width): (usize, &usize)| {
                    all.slice(0, rank * rows, (rank + 1) * rows).slice(1, 0, *width)
                };
                let parts = widths.iter().enumerate().map(slice).collect();
                (all, parts)
            }
        };
        *last = Some(all);
        library.concat(&parts.iter().collect::<Vec<_>>(), 1)
    }
}

/// Our rank group during one evaluation, and its first error.
struct GroupCollective<'a, 'b> {
    ranks: &'a Ranks<'b>,
    error: Option<GroupError>,
}

impl GroupCollective<'_, '_> {
    fn note(&mut self, result: Result<(), GroupError>) -> bool {
        self.error = result.err();
        self.error.is_none()
    }
}

impl Collective for GroupCollective<'_, '_> {
    fn sum(&mut self, values: &mut [f32]) -> bool {
        let result = self.ranks.all_reduce(values);
        self.note(result)
    }

    fn sum_bf16(&mut self, values: &mut [bf16]) -> bool {
        let result = self.ranks.all_reduce_bf16(values);
        self.note(result)
    }

    fn gather(&mut self, mine: &[f32], all: &mut [f32]) -> bool {
        let gathered = self.ranks.group.all_gather(mine.as_bytes(), self.ranks.deadline());
        let result = gathered.and_then(|parts| {
            let found: usize = parts.iter().map(Vec::len).sum();
            let room = all.as_mut_bytes();
            if found != room.len() {
                return Err(GroupError::OutOfStep {
                    rank: self.ranks.group.rank(),
                    expected: format!("{} bytes from all ranks", room.len()),
                    found: format!("{found} bytes"),
                });
            }
            let mut place = room;
            for part in &parts {
                let (head, rest) = place.split_at_mut(part.len());
                head.copy_from_slice(part);
                place = rest;
            }
            Ok(())
        });
        self.note(result)
    }
}

/// Longest wait of an all-reduce within a GPU's work: the system ends GPU work after 5 s, waiting
/// included, and the GPU may refuse all later work of the process then.
const GPU_PATIENCE: Duration = Duration::from_secs(2);

/// Computes, with the rank group at hand for what the graph asks of it; `last` is the graph's latest
/// all-reduce, if it has some.
pub(super) fn evaluate<R>(
    library: &Library,
    ranks: &Ranks<'_>,
    last: Option<&Array>,
    work: impl FnOnce() -> Result<R, MlxError>,
) -> Result<R, StepError> {
    let mut within = *ranks;
    if library.device() == Device::Gpu && ranks.count() > 1 && last.is_some() {
        // Ranks wait for the slowest one here, where no GPU's time is counted.
        ranks.all_reduce(&mut [0.0])?;
        within.timeout = ranks.timeout.min(GPU_PATIENCE);
    }
    let mut called = GroupCollective { ranks: &within, error: None };
    let result = library.with_collective(&mut called, work);
    match (result, called.error) {
        (_, Some(error)) => Err(StepError::Group(error)),
        (Ok(value), None) => Ok(value),
        // A driver that has ended a command buffer may ignore those that follow.
        (Err(error), None) if library.device() == Device::Gpu => {
            Err(StepError::Device(error.to_string()))
        }
        (Err(error), None) => Err(StepError::Backend(error.to_string())),
    }
}
