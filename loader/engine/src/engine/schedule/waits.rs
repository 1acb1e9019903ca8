//! Requests that wait for their constraint, and sequences that wait for a mask.

use std::time::{Duration, Instant};

use shardpack_engine_api::{Event, RequestId};

use super::{
    Schedule,
    constrained::{Constrained, MASKS_WITHIN_STEP},
    sequence::Sequence,
};
use crate::engine::constraints::Done;

/// How long a step waits for masks where nobody else would: the sequences of one tenant then stay in
/// one batch.
const MASK_PATIENCE: Duration = Duration::from_millis(5);

impl Schedule {
    /// Whether requests wait for threads, so that there may be a step soon.
    pub(in crate::engine) fn waits_for_threads(&self) -> bool {
        !self.compiling.is_empty() || self.lacks_masks()
    }

    /// Waits for the next piece of work of the threads.
    pub(in crate::engine) fn wait_for_threads(&mut self, deadline: Instant) {
        let done = self.constraints.as_ref().and_then(|threads| threads.take(Some(deadline)));
        if let Some(done) = done {
            self.take(done, Instant::now());
        }
    }

    /// Takes what the threads have done.
    pub(super) fn take_done(&mut self, now: Instant) {
        while let Some(done) = self.constraints.as_ref().and_then(|threads| threads.take(None)) {
            self.take(done, now);
        }
        self.compile_next();
    }

    /// Waits for masks if nobody waits with their sequences who has none.
    pub(super) fn await_masks(&mut self, now: Instant) {
        let mut tenants = self.running.iter().map(|running| running.sequence.request.tenant.id);
        let first = tenants.next();
        let is_alone = tenants.all(|id| Some(id) == first);
        let deadline = Instant::now() + MASK_PATIENCE;
        while is_alone
            && self.lacks_masks()
            && let Some(done) =
                self.constraints.as_ref().and_then(|threads| threads.take(Some(deadline)))
        {
            self.take(done, now);
        }
    }

    fn lacks_masks(&self) -> bool {
        self.running.iter().any(|running| !running.sequence.is_ready())
    }

    /// Has masks of the next tokens computed.
    pub(super) fn prepare_masks(&mut self) {
        let Some(threads) = &mut self.constraints else { return };
        let mut left = MASKS_WITHIN_STEP;
        for running in &mut self.running {
            if let Some(constraint) = running.sequence.constraint() {
                constraint.prepare(threads, self.limits.vocab_size, &mut left);
            }
        }
    }

    /// Has the next constraint compiled: of the tenant whose turn it is, the one that came first.
    pub(super) fn compile_next(&mut self) {
        let Some(threads) = &mut self.constraints else { return };
        if self.compiles.is_some() {
            return;
        }
        let turn = |sequence: &&Sequence| self.tenants.compiled(sequence.request.tenant.id);
        let Some(sequence) = self.compiling.iter().min_by_key(turn) else { return };
        let Some(source) = sequence.request.constraint.clone() else { return };
        let (id, tenant) = (sequence.id, sequence.request.tenant.id);
        self.tenants.compile(tenant);
        self.compiles = Some((threads.compile(source), id));
    }

    fn take(&mut self, done: Done, now: Instant) {
        match done {
            Done::Compiled { ticket, result, took } => {
                // Requests may have been forgotten, and their ids used again.
                let Some((_, id)) = self.compiles.take_if(|(own, _)| *own == ticket) else {
                    return;
                };
                let place = self.compiling.iter().position(|sequence| sequence.id == id);
                match (place.and_then(|place| self.compiling.remove(place)), result) {
                    // It was cancelled meanwhile.
                    (None, _) => {}
                    (Some(sequence), Err(error)) => {
                        let (request, message) = (sequence.id, error.to_string());
                        self.events.push(Event::Failed { request, message, retryable: false });
                    }
                    (Some(mut sequence), Ok(constraint)) => {
                        sequence.constrain(Constrained::new(constraint), took);
                        self.enqueue(sequence, now);
                        self.prepare_first_mask(id);
                    }
                }
                self.compile_next();
            }
            Done::Masked { ticket, constraint, mask } => {
                let running = self.running.iter_mut().map(|running| &mut running.sequence);
                let mut constraints =
                    self.waiting.iter_mut().chain(running).filter_map(Sequence::constraint);
                if let Some(waiting) = constraints.find(|it| it.waits_for(ticket)) {
                    waiting.come_back(constraint, mask);
                }
            }
        }
    }

    /// The first mask takes longest, and is there when the prompt was read.
    fn prepare_first_mask(&mut self, id: RequestId) {
        let Some(threads) = &mut self.constraints else { return };
        let mut none = Duration::ZERO;
        let queued = self.waiting.iter_mut().rfind(|sequence| sequence.id == id);
        if let Some(constraint) = queued.and_then(Sequence::constraint) {
            constraint.prepare(threads, self.limits.vocab_size, &mut none);
        }
    }
}
