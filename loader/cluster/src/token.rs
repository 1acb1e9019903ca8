//! The one-time secret of a rank process: every connection must present it.

use std::{fmt, hint};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use shardpack_formats::hex;

const TOKEN_BYTES: usize = 16;

/// 128 unpredictable bits, written as 32 hex digits.
#[derive(Clone)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// A new token from the system's random source.
    pub fn generate() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The token of 32 lower-case hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        hex::decode(text)?.try_into().ok().map(Self)
    }

    /// Whether both are the same; in constant time.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        let differing = self.0.iter().zip(&other.0).fold(0, |bits, (a, b)| bits | (a ^ b));
        hint::black_box(differing) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Serialize for Token {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The text is not repeated: errors end up in logs.
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| de::Error::custom("a token is 32 hex digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_match_only_themselves_and_stay_out_of_logs() {
        let token = Token::generate().unwrap();
        let text = serde_json::to_string(&token).unwrap();
        assert_eq!(text.len(), 34);
        assert!(token.matches(&serde_json::from_str(&text).unwrap()));
        for at in 0..TOKEN_BYTES {
            let mut other = token.clone();
            other.0[at] ^= 1;
            assert!(!token.matches(&other));
        }
        assert!(!token.matches(&Token::generate().unwrap()));
        assert_eq!(format!("{token:?}"), "Token(…)");
        for bad in ["", "00", "000102030405060708090a0b0c0d0e0f10", "zz"] {
            assert!(Token::parse(bad).is_none());
        }
    }
}
