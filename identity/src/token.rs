//! The one-time token with which a node joins a cluster. The node prints it on its terminal. It
//! contains the node's key, so that no other machine can impersonate the node, and a secret, so that
//! no other caller can add the node to a cluster.

use std::{
    fmt,
    str::FromStr,
    time::{Duration, Instant},
};

use base64ct::{Base64UrlUnpadded, Encoding as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::PeerKey;

/// Begins every token; the number is the version.
const PREFIX: &str = "spj1_";

const SECRET_BYTES: usize = 16;

const KEY_BYTES: usize = 32;

/// 128 random bits: at a million guesses a second, the probability of a hit within the hour of a
/// token is 10^-29. Wrong guesses therefore do not invalidate the token: otherwise anyone who can
/// connect to the port could keep a node from joining.
#[derive(Clone)]
pub(crate) struct Secret([u8; SECRET_BYTES]);

impl Secret {
    fn generate() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; SECRET_BYTES];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// Compares in constant time.
    fn matches(&self, other: &Self) -> bool {
        let differing = self.0.iter().zip(&other.0).fold(0, |bits, (a, b)| bits | (a ^ b));
        std::hint::black_box(differing) == 0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&Base64UrlUnpadded::encode_string(&self.0))
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The text is not repeated: errors end up in logs.
        let text = String::deserialize(deserializer)?;
        let mut bytes = [0; SECRET_BYTES];
        match Base64UrlUnpadded::decode(&text, &mut bytes) {
            Ok(decoded) if decoded.len() == SECRET_BYTES => Ok(Self(bytes)),
            _ => Err(de::Error::custom("a secret is 22 characters of base64")),
        }
    }
}

/// A token: `spj1_` and 64 characters of URL-safe base64, which are the secret's 16 bytes and
/// the node's key.
#[derive(Clone, Debug)]
pub struct JoinToken {
    pub(crate) secret: Secret,
    pub(crate) key: PeerKey,
}

/// Text that is no token. The text is not repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a token: expected the 69 characters that begin with {PREFIX}, which the node printed when it started"
)]
pub struct TokenError;

impl JoinToken {
    /// The key of the node that issued it.
    #[must_use]
    pub const fn key(&self) -> PeerKey {
        self.key
    }

    /// A new token of the node with this key.
    pub(crate) fn generate(key: PeerKey) -> Result<Self, getrandom::Error> {
        Ok(Self { secret: Secret::generate()?, key })
    }
}

impl fmt::Display for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = [self.secret.0.as_slice(), self.key.bytes()].concat();
        write!(f, "{PREFIX}{}", Base64UrlUnpadded::encode_string(&bytes))
    }
}

impl FromStr for JoinToken {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let text = text.trim().strip_prefix(PREFIX).ok_or(TokenError)?;
        let mut bytes = [0; SECRET_BYTES + KEY_BYTES];
        let decoded = Base64UrlUnpadded::decode(text, &mut bytes).map_err(|_| TokenError)?;
        let (secret, key) = decoded.split_first_chunk::<SECRET_BYTES>().ok_or(TokenError)?;
        let key = PeerKey::parse(&Base64UrlUnpadded::encode_string(key)).ok_or(TokenError)?;
        Ok(Self { secret: Secret(*secret), key })
    }
}

/// A node's token and its expiry.
#[derive(Debug)]
pub(crate) struct Invitation {
    pub(crate) token: JoinToken,
    expires: Instant,
}

/// Why a token is refused; the message follows the node's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotInvited {
    #[error("its token has expired: start the node again for a new token")]
    Expired,
    #[error("the token is wrong: use the token that the node printed when it last started")]
    Wrong,
}

impl Invitation {
    pub(crate) const fn new(token: JoinToken, expires: Instant) -> Self {
        Self { token, expires }
    }

    pub(crate) fn left(&self, now: Instant) -> Duration {
        self.expires.saturating_duration_since(now)
    }

    /// Whether the secret is the token's.
    pub(crate) fn check(&self, secret: &Secret, now: Instant) -> Result<(), NotInvited> {
        if now >= self.expires {
            return Err(NotInvited::Expired);
        }
        if self.token.secret.matches(secret) { Ok(()) } else { Err(NotInvited::Wrong) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token() -> JoinToken {
        let pair = crate::certificate::generate_key().unwrap();
        JoinToken::generate(PeerKey::of_pair(&pair)).unwrap()
    }

    #[test]
    fn tokens_round_trip_and_stay_out_of_logs() {
        let token = token();
        let text = token.to_string();
        assert_eq!(text.len(), 69);
        let parsed: JoinToken = format!(" {text}\n").parse().unwrap();
        assert!(parsed.secret.matches(&token.secret));
        assert_eq!(parsed.key, token.key);
        assert!(format!("{token:?}").contains("Secret(…)"));
        let longer = format!("{text}A");
        let other = text.replace("spj1_", "spj2_");
        for bad in ["", "spj1_", &text[..68], &longer, &other, &text[5..], &text.replace('_', "é")]
        {
            assert_eq!(bad.parse::<JoinToken>().unwrap_err(), TokenError, "{bad}");
        }
    }

    #[test]
    fn an_invitation_takes_one_secret_in_time_however_many_wrong_ones_came() {
        let (mine, other) = (token(), token());
        let now = Instant::now();
        let end = now + Duration::from_secs(10);
        let invitation = Invitation::new(mine.clone(), end);
        for _ in 0..1000 {
            assert_eq!(invitation.check(&other.secret, now), Err(NotInvited::Wrong));
        }
        assert_eq!(invitation.check(&mine.secret, now), Ok(()));
        assert_eq!(invitation.check(&mine.secret, end), Err(NotInvited::Expired));
        assert_eq!(invitation.check(&other.secret, end), Err(NotInvited::Expired));
    }

    proptest! {
        #[test]
        fn any_text_is_a_token_or_is_refused(text in "(spj1_)?[A-Za-z0-9_-]{0,70}") {
            if let Ok(token) = text.parse::<JoinToken>() {
                prop_assert_eq!(token.to_string(), text);
            }
        }
    }
}
