//! Limits and timeouts of the server.

use std::time::Duration;

/// Limits and timeouts of the server.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Largest request body in bytes: room for the text of two million tokens.
    pub body_bytes: usize,
    /// Most connections at once, and no more than the process's descriptors allow. Where there are more, idle
    /// ones give way.
    pub connections: usize,
    /// Time for a connection's next request head, and how long it is kept without one.
    pub head_timeout: Duration,
    /// Most answers in progress at once, queued ones included; more requests get a 503.
    pub active_requests: u32,
    /// Time in which a request body must arrive.
    pub body_timeout: Duration,
    /// Longest time without an event from the engine; prefill of a long prompt can take minutes.
    pub event_timeout: Duration,
    /// Longest duration of a request, from its body to its last token.
    pub request_timeout: Duration,
    /// Interval of keep-alive frames to a streaming client. Also how long a stream's status line
    /// waits for the first token, so that an early error still gets an HTTP status.
    pub keep_alive: Duration,
    /// Longest time in which a streaming client may read nothing.
    pub write_timeout: Duration,
    /// Time that running requests get to finish when the server shuts down.
    pub drain_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            body_bytes: 8 << 20,
            connections: 8192,
            head_timeout: Duration::from_mins(1),
            active_requests: 256,
            body_timeout: Duration::from_secs(30),
            event_timeout: Duration::from_mins(10),
            request_timeout: Duration::from_hours(4),
            keep_alive: Duration::from_secs(10),
            write_timeout: Duration::from_mins(1),
            drain_timeout: Duration::from_secs(30),
        }
    }
}
