//! The constraint of one sequence: here, or on a thread that computes the mask of its next token.

use std::time::Duration;

use shardpack_engine_api::{Constraint, TokenId, TokenMask};

use super::super::constraints::{Constraints, ReadyMask, Ticket, timed_mask};

/// How long masks that are computed within a step may take together. A mask usually takes some
/// microseconds, less than handing it to a thread.
pub(super) const MASKS_WITHIN_STEP: Duration = Duration::from_micros(300);

/// A constraint and the mask of the next token.
pub(super) struct Constrained {
    place: Place,
    /// How long its latest mask took; unknown before the first one.
    took: Option<Duration>,
}

enum Place {
    /// Here; with the next token's mask, if a thread has computed it.
    Here(Box<dyn Constraint>, Option<ReadyMask>),
    /// With a thread, which computes that mask.
    Away(Ticket),
    /// Between the two.
    Moving,
}

const HERE: &str = "only sequences whose constraint is here are sampled";

impl Constrained {
    pub(super) const fn new(constraint: Box<dyn Constraint>) -> Self {
        Self { place: Place::Here(constraint, None), took: None }
    }

    pub(super) const fn is_here(&self) -> bool {
        matches!(self.place, Place::Here(..))
    }

    /// Whether the masks after draft tokens can be computed within the step too.
    pub(super) const fn takes_drafts(&self) -> bool {
        matches!(self.place, Place::Here(_, None))
    }

    /// Has the next token's mask computed: within the step where that fits into `left`, else by a
    /// thread.
    pub(super) fn prepare(&mut self, threads: &mut Constraints, vocab: u32, left: &mut Duration) {
        if !matches!(self.place, Place::Here(_, None)) {
            return;
        }
        if let Some(rest) = self.took.and_then(|took| left.checked_sub(took)) {
            *left = rest;
            return;
        }
        if let Place::Here(constraint, _) = std::mem::replace(&mut self.place, Place::Moving) {
            self.place = Place::Away(threads.mask(constraint, vocab));
        }
    }

    /// Whether it waits for the work of this ticket.
    pub(super) fn waits_for(&self, ticket: Ticket) -> bool {
        matches!(&self.place, Place::Away(own) if *own == ticket)
    }

    /// Back from its thread.
    pub(super) fn come_back(&mut self, constraint: Box<dyn Constraint>, mask: ReadyMask) {
        self.took = Some(mask.took);
        self.place = Place::Here(constraint, Some(mask));
    }

    /// Advances by a token.
    pub(super) fn accept(&mut self, token: TokenId) -> Result<(), String> {
        let Place::Here(constraint, mask) = &mut self.place else { panic!("{HERE}") };
        *mask = None;
        constraint.accept(token).map_err(|error| error.to_string())
    }

    /// Whether nothing may follow.
    pub(super) fn must_stop(&mut self) -> bool {
        let Place::Here(constraint, _) = &mut self.place else { panic!("{HERE}") };
        constraint.must_stop()
    }

    /// The token mask at the position of each draft token and of the one after them; `None` allows
    /// every token. Drafts that the constraint forbids are dropped, with all after them.
    pub(super) fn masks(
        &mut self,
        vocab_size: u32,
        drafts: &mut Vec<u32>,
    ) -> Result<Vec<Option<TokenMask>>, String> {
        let Place::Here(constraint, ready) = &mut self.place else { panic!("{HERE}") };
        if let Some(ready) = ready {
            // It stays: a step may fail, and this one is planned again.
            drafts.clear();
            return Ok(vec![ready.mask.clone()?]);
        }
        let first = timed_mask(constraint.as_mut(), vocab_size);
        self.took = Some(first.took);
        let mut masks = vec![first.mask?];
        if drafts.is_empty() {
            return Ok(masks);
        }
        // The constraint itself only ever sees what has come.
        let mut ahead = constraint.fork();
        for (place, draft) in drafts.iter().enumerate() {
            let draft = TokenId(*draft);
            let is_allowed = masks[place].as_ref().is_none_or(|mask| mask.is_allowed(draft));
            let goes_on = is_allowed && ahead.accept(draft).is_ok() && !ahead.must_stop();
            // Should the draft come all the same, the next step finds out what is wrong.
            let next =
                if goes_on { timed_mask(ahead.as_mut(), vocab_size).mask.ok() } else { None };
            let Some(next) = next else { break };
            masks.push(next);
        }
        drafts.truncate(masks.len() - 1);
        Ok(masks)
    }
}
