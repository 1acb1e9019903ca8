//! The fuzz target of membership: every message that an unauthenticated caller can send.

use std::sync::OnceLock;

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Credentials, JoinToken, PeerKey, Role,
    certificate::generate_key,
    message::{Grant, Reply, Request, parse},
};

/// Parses bytes as a request, an answer, a token and a key. What parses must be the same after it
/// is written and parsed again.
///
/// # Panics
/// If it is not.
pub fn probe_membership(bytes: &[u8]) {
    match round_trip::<Request>(bytes) {
        Some(Request::Join { grant, .. } | Request::Renew(grant)) => probe_grant(&grant),
        Some(Request::Leave) | None => {}
    }
    round_trip::<Reply>(bytes);
    let Ok(text) = str::from_utf8(bytes) else { return };
    if let Ok(token) = text.parse::<JoinToken>() {
        assert_eq!(token.to_string(), text.trim());
    }
    if let Some(key) = PeerKey::parse(text) {
        assert_eq!(key.to_string(), text);
    }
}

fn round_trip<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let message: T = parse(bytes).ok()?;
    let written = serde_json::to_vec(&message).expect("a message is always JSON");
    let read: T = parse(&written).expect("what is written is read");
    assert_eq!(serde_json::to_vec(&read).ok(), Some(written));
    Some(message)
}

/// A certificate sent to a node is accepted or refused; nothing else may happen.
fn probe_grant(grant: &Grant) {
    static KEY: OnceLock<Vec<u8>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        generate_key().expect("the system has random bytes").serialized_der().to_vec()
    });
    if let Ok(credentials) = Credentials::new(&grant.authority.0, &grant.certificate.0, key) {
        // No certificate is for a key that was made just now.
        assert!(credentials.check_own(Role::Node).is_err());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fuzzers_seeds_are_messages() {
        let join = include_bytes!("../../fuzz/corpus/membership/join");
        let Ok(Request::Join { grant, .. }) = parse(join) else { panic!("it is no request") };
        assert_eq!(grant.name, "studio-1");
        probe_membership(join);
        let token = include_str!("../../fuzz/corpus/membership/token");
        token.parse::<JoinToken>().unwrap();
    }
}
