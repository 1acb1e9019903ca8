//! How the ranks of a group are linked, for status and displays.

use serde::{Deserialize, Serialize};

/// What carries the frames between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// RDMA: verbs over Thunderbolt, or another card. Not encrypted.
    Rdma,
    /// TCP inside mutual TLS.
    Tls,
    /// TCP in the clear, within one machine.
    Tcp,
}

impl Transport {
    /// As messages and JSON name it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Tls => "tls",
            Self::Tcp => "tcp",
        }
    }
}

/// The link between two ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The lower rank and the higher one.
    pub ranks: [u32; 2],
    /// What carries it.
    pub transport: Transport,
    /// Why it is not RDMA, where RDMA was to be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declined: Option<String>,
    /// Microseconds for a small message one way, measured when the group was formed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<f64>,
    /// Bytes per second one way of large messages, measured then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<f64>,
}
