//! The line by which a rank process announces its address:
//! `{"rank_ready":{"address":"127.0.0.1:49152","token":"<32 hex digits>"}}`, and of a rank that
//! uses TLS its node's `"key"`. Later lines `{"rank_front":true}` and `{"rank_front":false}` say whether
//! it has a front.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use shardpack_identity::PeerKey;

use super::token::Token;

/// Longest announcement; one is about 100 bytes.
pub(super) const MAX_LINE_BYTES: usize = 1024;

/// The address and the token of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Announcement {
    /// Where it accepts its front and its peers.
    pub address: SocketAddr,
    /// What each of them must show.
    pub token: Token,
    /// The key that it shows inside TLS; none without TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<PeerKey>,
}

/// Whether a rank has a front, as a line of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontPresence {
    /// Whether it has one.
    pub rank_front: bool,
}

impl FrontPresence {
    /// The line for standard output, without its end.
    #[must_use]
    pub fn line(self) -> String {
        serde_json::to_string(&self).expect("a flag is always JSON")
    }

    /// Parses a line; `None` of any other.
    pub(super) fn parse(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

/// A line that is no announcement.
#[derive(Debug, thiserror::Error)]
#[error("not a rank's announcement")]
pub struct AnnouncementError(#[source] Option<serde_json::Error>);

#[derive(Serialize, Deserialize)]
struct Line {
    rank_ready: Announcement,
}

impl Announcement {
    /// The line for standard output, without its end.
    #[must_use]
    pub fn line(&self) -> String {
        let line = Line { rank_ready: self.clone() };
        serde_json::to_string(&line).expect("an address and a token are always JSON")
    }

    /// Parses a line.
    pub fn parse(line: &str) -> Result<Self, AnnouncementError> {
        if line.len() > MAX_LINE_BYTES {
            return Err(AnnouncementError(None));
        }
        let line: Line =
            serde_json::from_str(line).map_err(|error| AnnouncementError(Some(error)))?;
        Ok(line.rank_ready)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presence_of_a_front_is_the_documented_line() {
        for (rank_front, line) in
            [(true, r#"{"rank_front":true}"#), (false, r#"{"rank_front":false}"#)]
        {
            let presence = FrontPresence { rank_front };
            assert_eq!(presence.line(), line);
            assert_eq!(FrontPresence::parse(line), Some(presence));
        }
        assert_eq!(FrontPresence::parse("running 1 test"), None);
    }

    #[test]
    fn announcement_is_the_documented_line() {
        let line = r#"{"rank_ready":{"address":"127.0.0.1:49152","token":"00112233445566778899aabbccddeeff"}}"#;
        assert_eq!(Announcement::parse(line).unwrap().line(), line);
        let long = format!("{line}{}", " ".repeat(MAX_LINE_BYTES));
        for bad in ["", "{}", "running 1 test", &line.replace("49152", "x"), &long] {
            Announcement::parse(bad).unwrap_err();
        }
    }
}
