//! Arguments of `text-worker`.

use clap::Args;

/// `text-worker`.
#[derive(Args)]
pub(crate) struct TextWorkerArgs {}
