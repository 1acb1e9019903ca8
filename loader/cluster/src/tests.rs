//! Whole groups on loopback: ranks in threads where nothing dies, in processes where something
//! does.

mod fake;
mod guarded;
mod processes;
mod recovery;
mod threads;
