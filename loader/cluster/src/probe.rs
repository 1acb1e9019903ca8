//! The entry point of the fuzz target: all messages between fronts and ranks.

use serde::{Serialize, de::DeserializeOwned};

use super::{
    announce::Announcement,
    identity::{Identity, check_group},
    message::{FromRank, Hello, PeerReply, ToRank},
    wire::{self, MAX_HELLO_BYTES, MAX_MESSAGE_BYTES},
};

/// Takes bytes for a stream of each kind of message, and for the line by which a rank is found.
///
/// # Panics
/// When what was taken is not written and read alike.
pub fn probe_messages(bytes: &[u8]) {
    stream::<Hello>(bytes, MAX_HELLO_BYTES);
    stream::<PeerReply>(bytes, MAX_HELLO_BYTES);
    stream::<ToRank>(bytes, MAX_MESSAGE_BYTES);
    let mut identities: Vec<Identity> = Vec::new();
    for message in stream::<FromRank>(bytes, MAX_MESSAGE_BYTES) {
        if let FromRank::Identity(identity) = message {
            identities.push(identity);
        }
    }
    let named: Vec<(&str, &Identity)> = identities.iter().map(|it| ("a node", it)).collect();
    if let Ok(order) = check_group(&named) {
        assert_eq!(order.len(), identities.len());
        for (rank, node) in order.iter().enumerate() {
            assert_eq!(identities[*node].rank as usize, rank);
        }
    }
    let Ok(line) = str::from_utf8(bytes) else { return };
    if let Ok(announcement) = Announcement::parse(line) {
        let again = Announcement::parse(&announcement.line()).expect("what is written is read");
        assert!(again.token.matches(&announcement.token));
        assert_eq!((again.address, again.key), (announcement.address, announcement.key));
    }
}

fn stream<T: Serialize + DeserializeOwned>(mut bytes: &[u8], most: u32) -> Vec<T> {
    let mut messages = Vec::new();
    while let Ok(message) = wire::read::<T>(&mut bytes, most) {
        // Numbers too large for their type become infinite, which JSON has no word for: such a
        // message cannot be passed on, and nobody does.
        let written = wire::encode(&message).expect("no larger than what was read");
        if let Ok(again) = wire::read::<T>(&mut written.as_slice(), MAX_MESSAGE_BYTES) {
            assert_eq!(wire::encode(&again).ok(), Some(written));
        }
        messages.push(message);
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fuzzers_seeds_are_messages() {
        let orders = include_bytes!("../../../fuzz/corpus/cluster/orders");
        assert_eq!(stream::<ToRank>(orders, MAX_MESSAGE_BYTES).len(), 4);
        let reports = include_bytes!("../../../fuzz/corpus/cluster/reports");
        assert_eq!(stream::<FromRank>(reports, MAX_MESSAGE_BYTES).len(), 9);
        let peer = include_bytes!("../../../fuzz/corpus/cluster/peer");
        assert_eq!(stream::<Hello>(peer, MAX_HELLO_BYTES).len(), 2);
        let line = include_str!("../../../fuzz/corpus/cluster/line-tls");
        Announcement::parse(line).unwrap();
    }
}
