//! What the fuzzer tries: everything about membership that a stranger can send.

use std::sync::OnceLock;

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Credentials, JoinToken, PeerKey, Role,
    certificate::generate_key,
    message::{Grant, Reply, Request, parse},
};

/// Takes bytes for a request, an answer, a token and a key. Whatever is taken says the same when
/// it is written and read again.
///
/// # Panics
/// When that is not so.
pub fn try_membership(bytes: &[u8]) {
    match again::<Request>(bytes) {
        Some(Request::Join { grant, .. } | Request::Renew(grant)) => try_grant(&grant),
        Some(Request::Leave) | None => {}
    }
    again::<Reply>(bytes);
    let Ok(text) = str::from_utf8(bytes) else { return };
    if let Ok(token) = text.parse::<JoinToken>() {
        assert_eq!(token.to_string(), text.trim());
    }
    if let Some(key) = PeerKey::parse(text) {
        assert_eq!(key.to_string(), text);
    }
}

fn again<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let message: T = parse(bytes).ok()?;
    let written = serde_json::to_vec(&message).expect("a message is always JSON");
    let read: T = parse(&written).expect("what is written is read");
    assert_eq!(serde_json::to_vec(&read).ok(), Some(written));
    Some(message)
}

/// Certificates that somebody hands to a node: taken or refused, nothing else.
fn try_grant(grant: &Grant) {
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
        let join = include_bytes!("../../formats/fuzz/corpus/membership/join");
        let Ok(Request::Join { grant, .. }) = parse(join) else { panic!("it is no request") };
        assert_eq!(grant.name, "studio-1");
        try_membership(join);
        let token = include_str!("../../formats/fuzz/corpus/membership/token");
        token.parse::<JoinToken>().unwrap();
    }
}
