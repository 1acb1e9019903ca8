//! Gives a rank its package over connections of their own, while it loads.

use std::{
    io::{self, Write as _},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use shardpack_collectives::Deadline;
use shardpack_identity::{Channel, Credentials};

use super::{Announcement, Hello, open, wire};

/// Answers a rank's requests on one connection until the rank closes it.
pub type WeightsSource = Arc<dyn Fn(Channel) -> io::Result<()> + Send + Sync>;

/// Connections on which a package comes: one thread of each side does not fill a fast cable.
pub const WEIGHT_STREAMS: usize = 4;

/// For the rank to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Between a connection that ended and the next in its place.
const AGAIN_INTERVAL: Duration = Duration::from_millis(200);

/// How long the rank may ask for nothing, or take nothing, on a connection.
const IDLE_TIMEOUT: Duration = Duration::from_mins(1);

/// Connections that are kept up until this is dropped.
pub(super) struct Giving {
    is_over: Arc<AtomicBool>,
}

impl Giving {
    /// Connects to the rank. Without a thread there is one connection less; without any the rank says that
    /// none came.
    pub(super) fn start(
        to: &Announcement,
        credentials: Option<&Credentials>,
        source: &WeightsSource,
    ) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        for number in 0..WEIGHT_STREAMS {
            let (to, credentials) = (to.clone(), credentials.cloned());
            let (source, over) = (Arc::clone(source), Arc::clone(&is_over));
            let give = move || {
                while !over.load(Ordering::SeqCst) {
                    // The rank has loaded, or lost the connection and awaits another.
                    let _ = give(&to, credentials.as_ref(), &source);
                    thread::sleep(AGAIN_INTERVAL);
                }
            };
            let _ = thread::Builder::new().name(format!("weights-{number}")).spawn(give);
        }
        Self { is_over }
    }
}

impl Drop for Giving {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

fn give(
    to: &Announcement,
    credentials: Option<&Credentials>,
    source: &WeightsSource,
) -> io::Result<()> {
    let opened = open(to, credentials, Deadline::after(CONNECT_TIMEOUT));
    let mut channel = opened.map_err(io::Error::other)?;
    channel.set_read_timeout(Some(IDLE_TIMEOUT))?;
    channel.set_write_timeout(Some(IDLE_TIMEOUT))?;
    let hello = wire::encode(&Hello::Weights { token: to.token.clone() });
    channel.write_all(&hello.map_err(io::Error::other)?)?;
    source(channel)
}
