//! Base 64 in its usual alphabet, with padding.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The bytes of a text; `None` for anything that no encoder writes.
pub(super) fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let (blocks, []) = text.as_chunks::<4>() else { return None };
    let mut out = Vec::with_capacity(blocks.len() * 3);
    for (index, block) in blocks.iter().enumerate() {
        let is_last = index + 1 == blocks.len();
        let padding = block.iter().rev().take_while(|byte| **byte == b'=').count();
        if padding > 2 || padding > 0 && !is_last {
            return None;
        }
        let mut bits = 0_u32;
        for byte in &block[..4 - padding] {
            bits = bits << 6 | value(*byte)?;
        }
        bits <<= 6 * padding;
        let bytes = bits.to_be_bytes();
        // What the padding cuts off must be nothing.
        if bytes[4 - padding..].iter().any(|byte| *byte != 0) {
            return None;
        }
        out.extend_from_slice(&bytes[1..4 - padding]);
    }
    Some(out)
}

/// The text of some bytes.
pub(super) fn encode(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for block in bytes.chunks(3) {
        let mut bits = 0_u32;
        for index in 0..3 {
            bits = bits << 8 | u32::from(block.get(index).copied().unwrap_or(0));
        }
        for index in 0..4 {
            let is_data = index <= block.len();
            let six = (bits >> (18 - 6 * index) & 63) as usize;
            out.push(if is_data { char::from(ALPHABET[six]) } else { '=' });
        }
    }
    out
}

fn value(byte: u8) -> Option<u32> {
    Some(match byte {
        b'A'..=b'Z' => u32::from(byte - b'A'),
        b'a'..=b'z' => u32::from(byte - b'a') + 26,
        b'0'..=b'9' => u32::from(byte - b'0') + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}
