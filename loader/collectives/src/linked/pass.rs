//! Point-to-point messages between two ranks.
//!
//! The receiver sends a ready frame, and the sender waits for it before it sends. So a busy
//! receiver's memory does not fill with messages, and its keep-alives extend the sender's wait as
//! they extend any other. Where the receiver is ready first, as in decoding, the ready frame costs
//! no time.

use super::{
    LinkedGroup, Scratch,
    exchange::{Exchange, Outgoing},
};
use crate::{
    frame::{HEADER_BYTES, Op},
    group::{Deadline, GroupError},
};

impl LinkedGroup {
    pub(super) fn send_to(
        &self,
        scratch: &mut Scratch,
        to: u32,
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let sequence = scratch.passes[to as usize].sent;
        scratch.passes[to as usize].sent += 1;
        let Scratch { outgoing, incoming, .. } = scratch;
        let ready = Exchange::of_pair(Op::Ready, sequence, deadline);
        self.exchange(ready, &[], incoming, Some(to).into_iter(), |_| Some(0))?;
        // From here on the receiver does nothing but receive.
        let pass = Exchange::of_pair(Op::Pass, sequence, ready.restarted());
        let frame = &mut outgoing[0];
        self.frame(pass, frame, bytes.len()).copy_from_slice(bytes);
        self.exchange(
            pass,
            &[Outgoing { to, frame: frame.as_slice() }],
            incoming,
            None.into_iter(),
            |_| None,
        )
    }

    pub(super) fn recv_from(
        &self,
        scratch: &mut Scratch,
        from: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let sequence = scratch.passes[from as usize].received;
        scratch.passes[from as usize].received += 1;
        let Scratch { outgoing, incoming, .. } = scratch;
        let ready = Exchange::of_pair(Op::Ready, sequence, deadline);
        let frame = &mut outgoing[0];
        self.frame(ready, frame, 0);
        self.exchange(
            ready,
            &[Outgoing { to: from, frame: frame.as_slice() }],
            incoming,
            None.into_iter(),
            |_| None,
        )?;
        let pass = Exchange::of_pair(Op::Pass, sequence, deadline);
        self.exchange(pass, &[], incoming, Some(from).into_iter(), |_| None)?;
        bytes.clear();
        bytes.extend_from_slice(&incoming[from as usize][HEADER_BYTES..]);
        Ok(())
    }
}
