//! The thread of a node that reads stored packages again, as its arguments say.

use std::{
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use shardpack_transfer::receive::{ScrubOptions, Shutdown, Store, scrub};

use super::display::NodeDisplay;
use crate::args::NodeArgs;

/// Starts it, if it is wanted; it ends soon after `shutdown`.
pub(super) fn start(
    args: &NodeArgs,
    store: &Arc<Store>,
    shutdown: &Shutdown,
    display: &Arc<NodeDisplay>,
) -> io::Result<Option<JoinHandle<()>>> {
    if args.scrub_interval == 0 || args.trial {
        return Ok(None);
    }
    let interval = Duration::from_secs(args.scrub_interval);
    let options = ScrubOptions { bytes_per_second: args.scrub_rate, interval };
    let (store, shutdown, display) = (Arc::clone(store), shutdown.clone(), Arc::clone(display));
    let run = move || scrub(&store, options, &shutdown, &|event| display.show(event));
    thread::Builder::new().name("scrub".to_owned()).spawn(run).map(Some)
}

/// Waits for its end.
pub(super) fn join(scrubbing: Option<JoinHandle<()>>) {
    if let Some(scrubbing) = scrubbing {
        // It holds nothing that a panic could leave half done.
        let _ = scrubbing.join();
    }
}
