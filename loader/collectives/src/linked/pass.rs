//! Bytes from one rank to another.
//!
//! The taker says that it is there, and the giver waits for that word: so nobody's memory fills
//! with what it has no time for, and a giver's wait for a taker at work is a wait like any other,
//! which the taker's word prolongs. Where the taker came first, as it does in decoding, the word
//! costs no time.

use super::{LinkedGroup, Scratch, exchange::Exchange};
use crate::{
    frame::{HEADER_BYTES, Op},
    group::{Deadline, GroupError},
};

impl LinkedGroup {
    pub(super) fn give(
        &self,
        scratch: &mut Scratch,
        to: u32,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let sequence = scratch.passes[to as usize][0];
        scratch.passes[to as usize][0] += 1;
        let Scratch { outgoing, incoming, .. } = scratch;
        let ready = Exchange::of_pass(Op::Ready, sequence, deadline);
        self.exchange(ready, &[], incoming, Some(to).into_iter(), |_| Some(0))?;
        // From here on the taker does nothing but take.
        let pass = Exchange::of_pass(Op::Pass, sequence, ready.again());
        let frame = &mut outgoing[0];
        self.frame(pass, frame, bytes.len()).copy_from_slice(bytes);
        self.exchange(pass, &[(to, frame.as_slice())], incoming, None.into_iter(), |_| None)
    }

    pub(super) fn take(
        &self,
        scratch: &mut Scratch,
        from: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let sequence = scratch.passes[from as usize][1];
        scratch.passes[from as usize][1] += 1;
        let Scratch { outgoing, incoming, .. } = scratch;
        let ready = Exchange::of_pass(Op::Ready, sequence, deadline);
        let frame = &mut outgoing[0];
        self.frame(ready, frame, 0);
        self.exchange(ready, &[(from, frame.as_slice())], incoming, None.into_iter(), |_| None)?;
        let pass = Exchange::of_pass(Op::Pass, sequence, deadline);
        self.exchange(pass, &[], incoming, Some(from).into_iter(), |_| None)?;
        bytes.clear();
        bytes.extend_from_slice(&incoming[from as usize][HEADER_BYTES..]);
        Ok(())
    }
}
