//! Lower-case hexadecimal, and `f32` values as the hex of their bits.
//!
//! Canonical JSON holds no floats: two writers must never disagree about a digit.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Lower-case hexadecimal digits of `bytes`.
#[must_use]
pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// Bytes of lower-case hexadecimal digits; `None` for any other character or an odd length.
#[must_use]
pub fn decode(text: &str) -> Option<Vec<u8>> {
    fn digit(byte: u8) -> Option<u8> {
        match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        }
    }
    if !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes()
        .chunks_exact(2)
        .map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?))
        .collect()
}

/// An `f32` that is written as eight hex digits of its bits, most significant first.
#[derive(Clone, Copy, Debug)]
pub struct HexF32(pub f32);

impl PartialEq for HexF32 {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}

impl Eq for HexF32 {}

impl Serialize for HexF32 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(&self.0.to_bits().to_be_bytes()))
    }
}

impl<'de> Deserialize<'de> for HexF32 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes: [u8; 4] =
            decode(&text).and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
                de::Error::custom(format!("expected eight hex digits of an f32, found {text:?}"))
            })?;
        Ok(Self(f32::from_be_bytes(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_round_trips_and_refuses_the_rest() {
        assert_eq!(encode(&[0, 0xab, 0xff]), "00abff");
        assert_eq!(decode("00abff"), Some(vec![0, 0xab, 0xff]));
        for bad in ["0", "0G", "AB"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }

    #[test]
    fn floats_keep_their_bits() {
        for value in [0.0, -0.0, 1.5, f32::MIN_POSITIVE / 2.0, f32::INFINITY] {
            let text = serde_json::to_string(&HexF32(value)).unwrap();
            assert_eq!(serde_json::from_str::<HexF32>(&text).unwrap(), HexF32(value));
        }
        assert!(serde_json::from_str::<HexF32>("\"3f80\"").is_err());
    }
}
