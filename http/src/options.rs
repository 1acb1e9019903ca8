//! How a client reaches servers.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

/// Options of a client.
#[derive(Clone)]
pub struct HttpOptions {
    /// HTTP proxy for connections to other machines.
    pub proxy: Option<String>,
    /// Hosts reached without the proxy, separated by commas: the hosts themselves and their
    /// subdomains.
    pub no_proxy: String,
    /// File of PEM certificates to trust in place of Mozilla's authorities.
    pub authorities: Option<PathBuf>,
    /// Value of the `Accept` header; empty for none.
    pub accept: &'static str,
    /// Token, and the only server it is sent to.
    pub bearer: Option<Bearer>,
    /// Where `http` URLs are allowed.
    pub cleartext: Cleartext,
    /// Longest wait for the first byte of an answer, and between two parts of a body.
    pub silence: Duration,
    /// When failed requests are repeated.
    pub retries: Retries,
    /// Whether another thread has asked to stop; `None` if nobody can. Open connections are closed
    /// within [`HttpOptions::CANCEL_POLL`].
    pub cancelled: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

impl HttpOptions {
    /// Between two looks at [`Self::cancelled`].
    pub const CANCEL_POLL: Duration = Duration::from_millis(250);
    /// A [`Self::silence`] for servers on the internet.
    pub const SILENCE: Duration = Duration::from_secs(30);

    /// No proxy, no token, Mozilla's authorities, `https` alone but on this machine.
    #[must_use]
    pub fn new() -> Self {
        Self {
            proxy: None,
            no_proxy: String::new(),
            authorities: None,
            accept: "",
            bearer: None,
            cleartext: Cleartext::Loopback,
            silence: Self::SILENCE,
            retries: Retries::STANDARD,
            cancelled: None,
        }
    }
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for HttpOptions {
    /// Without the token, and without a proxy's password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpOptions")
            .field("no_proxy", &self.no_proxy)
            .field("authorities", &self.authorities)
            .field("cleartext", &self.cleartext)
            .field("silence", &self.silence)
            .finish_non_exhaustive()
    }
}

/// A token and the server that may see it.
#[derive(Clone)]
pub struct Bearer {
    /// URL whose scheme, host and port the token is sent to.
    pub origin: String,
    /// The token: printable ASCII.
    pub token: String,
}

/// Where `http` URLs are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cleartext {
    /// On this machine only.
    Loopback,
    /// Everywhere: what arrives is compared with a digest that the program knows.
    Anywhere,
}

/// When failed requests are repeated.
#[derive(Clone, Copy, Debug)]
pub struct Retries {
    /// Requests in a row that may fail without a byte having arrived.
    pub attempts: u32,
    /// Pause before the second attempt; doubled each time, up to 32-fold.
    pub pause: Duration,
    /// Longest `Retry-After` that is waited for.
    pub max_retry_after: Duration,
    /// How a pause is spent; the function says whether to stop early.
    pub wait: fn(Duration, &dyn Fn() -> bool),
}

impl Retries {
    /// Six attempts with pauses of 1, 2, 4, 8 and 16 s.
    pub const STANDARD: Self = Self {
        attempts: 6,
        pause: Duration::from_secs(1),
        max_retry_after: Duration::from_mins(5),
        wait: sleep,
    };
}

/// Sleeps in steps, so that a cancellation is seen.
fn sleep(pause: Duration, is_cancelled: &dyn Fn() -> bool) {
    let mut left = pause;
    while !left.is_zero() && !is_cancelled() {
        let step = left.min(HttpOptions::CANCEL_POLL);
        std::thread::sleep(step);
        left -= step;
    }
}
