//! A process of its own for what a package brings and what is executed: its chat template and its
//! tokenizer. A template that overflows its stack, takes all memory or never ends takes that process
//! with it and nothing else.
//!
//! Reading order: [`wire`] (frames, requests, replies), [`worker`] (the process's side), `process`
//! (one such process, with its limits), `turns` (whose request is next), [`pool`] (those of one
//! model), [`error`]. The process confines itself before it reads anything; that is the program's
//! (`text-worker`).

pub mod error;
pub mod pool;
mod process;
mod turns;
pub mod wire;
pub mod worker;

pub use error::{Cause, SandboxError, Work};
pub use pool::Sandbox;
pub use process::SandboxProgram;
pub use turns::for_tenant;
