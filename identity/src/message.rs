//! The membership protocol between a controller and a node, after the TLS handshake.
//!
//! A message is four bytes of length, little-endian, and that much JSON, at most
//! [`MAX_MESSAGE_BYTES`]. The controller asks once, the node answers once.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    time::Instant,
};

use base64ct::{Base64, Encoding as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, de::DeserializeOwned};

use crate::{Channel, token::Secret};

/// Largest message: two certificates of some 500 bytes and a few short fields.
pub(crate) const MAX_MESSAGE_BYTES: u32 = 16 << 10;

/// Bytes, in JSON as base64.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&Base64::encode_string(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Base64::decode_vec(&text).map(Self).map_err(|_| de::Error::custom("not base64"))
    }
}

/// A membership, as sent to a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// The cluster's id.
    pub(crate) cluster: String,
    /// The node's name in the cluster.
    pub(crate) name: String,
    /// The authority's certificate.
    pub(crate) authority: Bytes,
    /// The node's own.
    pub(crate) certificate: Bytes,
    /// Its last second, since 1970.
    pub(crate) expires: u64,
}

/// A controller to a node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// Become a member; authenticated by the token's secret.
    Join {
        /// The token's secret.
        secret: Secret,
        /// The membership.
        grant: Grant,
    },
    /// Replace the certificate by a new one of the same cluster; from a controller.
    Renew(Grant),
    /// Leave the cluster; from a controller.
    Leave,
}

/// The node's answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// Done, and written to disk.
    Done,
    /// Refused; the reason, which follows the node's name in messages.
    Refused(String),
}

/// Why a message was not sent or received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MessageError {
    #[error("the connection failed")]
    Io(#[from] std::io::Error),
    #[error("a message of {0} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")]
    TooLarge(u64),
    #[error("not a message of this protocol")]
    Malformed(#[source] serde_json::Error),
}

/// A message's bytes without their length, parsed.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    serde_json::from_slice(bytes).map_err(MessageError::Malformed)
}

/// Reads a message by the deadline, however slowly bytes arrive.
pub(crate) fn read<T: DeserializeOwned>(
    channel: &Channel,
    deadline: Instant,
) -> Result<T, MessageError> {
    let mut size = [0; 4];
    read_exact(channel, &mut size, deadline)?;
    let size = u32::from_le_bytes(size);
    if size > MAX_MESSAGE_BYTES {
        return Err(MessageError::TooLarge(size.into()));
    }
    let mut bytes = vec![0; size as usize];
    read_exact(channel, &mut bytes, deadline)?;
    parse(&bytes)
}

fn read_exact(channel: &Channel, mut into: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    while !into.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        channel.set_read_timeout(Some(left))?;
        match (&mut &*channel).read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = &mut into[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends a message.
pub(crate) fn write(
    channel: &Channel,
    message: &impl Serialize,
    deadline: Instant,
) -> Result<(), MessageError> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message).map_err(MessageError::Malformed)?;
    let size = bytes.len() as u64 - 4;
    let size = u32::try_from(size).ok().filter(|size| *size <= MAX_MESSAGE_BYTES);
    let size = size.ok_or(MessageError::TooLarge(bytes.len() as u64))?;
    bytes[..4].copy_from_slice(&size.to_le_bytes());
    let left = deadline.saturating_duration_since(Instant::now());
    channel.set_write_timeout(Some(left.max(std::time::Duration::from_millis(1))))?;
    // A message fits a fresh socket's buffer.
    Ok((&mut &*channel).write_all(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_stand_as_documented() {
        let grant = r#"{"cluster":"c","name":"n","authority":"AAE=","certificate":"","expires":7}"#;
        let secret = "AAAAAAAAAAAAAAAAAAAAAA";
        let join = format!(r#"{{"join":{{"secret":"{secret}","grant":{grant}}}}}"#);
        for text in [join.as_str(), &format!(r#"{{"renew":{grant}}}"#), r#""leave""#] {
            let request: Request = parse(text.as_bytes()).unwrap();
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
        }
        let long = join.replace(secret, &"A".repeat(23));
        for bad in ["", "{}", r#""join""#, r#"{"join":{}}"#, &long, &join[1..]] {
            let error = parse::<Request>(bad.as_bytes()).unwrap_err();
            assert!(!format!("{error:?}").contains(secret), "secrets stay out of logs");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn whatever_parses_is_written_and_parsed_alike(
            bytes in any::<Vec<u8>>(),
            at in any::<prop::sample::Index>(),
            by in any::<u8>(),
        ) {
            // Neither noise nor a message with one wrong byte makes the parser panic.
            let _ = parse::<Request>(&bytes);
            let message = br#"{"join":{"secret":"AAAAAAAAAAAAAAAAAAAAAA","grant":{"cluster":"c","name":"n","authority":"AAE=","certificate":"","expires":7}}}"#;
            let mut bent = message.to_vec();
            bent[at.index(message.len())] = by;
            if let Ok(request) = parse::<Request>(&bent) {
                let text = serde_json::to_vec(&request).unwrap();
                let again: Request = parse(&text).unwrap();
                prop_assert_eq!(serde_json::to_vec(&again).unwrap(), text);
            }
        }
    }
}
