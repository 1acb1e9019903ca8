//! Compressed request bodies (`Content-Encoding`): which codings are read, and decompression within the
//! limit of plain bodies.
//!
//! Knows codings; not what bodies mean.

use std::io::{self, Read};

use axum::http::{HeaderMap, header};
use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use ruzstd::decoding::{
    FrameDecoder, StreamingDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

use crate::error::{ACCEPTED_CODINGS, ApiError, ErrorKind};

/// Codings of one body. Each is undone within the limit, so more of them cost only time.
const CODINGS_MOST: usize = 2;
/// Largest window of a frame of zstd: what RFC 9659 allows a content coding.
const WINDOW_BYTES: u64 = 8 << 20;

/// One way in which a body is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Gzip,
    Deflate,
    Zstd,
}

impl Coding {
    const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
            Self::Zstd => "zstd",
        }
    }

    /// The codings of a request's body, in the order in which they were applied.
    pub(super) fn of(headers: &HeaderMap) -> Result<Vec<Self>, ApiError> {
        let mut codings = Vec::new();
        for value in headers.get_all(header::CONTENT_ENCODING) {
            let value = value.to_str().map_err(|_| unsupported("no text"))?;
            for name in value.split(',').map(str::trim).filter(|name| !name.is_empty()) {
                match name.to_ascii_lowercase().as_str() {
                    "identity" => {}
                    "gzip" | "x-gzip" => codings.push(Self::Gzip),
                    "deflate" => codings.push(Self::Deflate),
                    "zstd" => codings.push(Self::Zstd),
                    _ => return Err(unsupported(&format!("{name:?}"))),
                }
            }
        }
        if codings.len() > CODINGS_MOST {
            return Err(unsupported(&format!("{} codings", codings.len())));
        }
        Ok(codings)
    }

    /// Undoes the coding; at most `limit` bytes may come of it.
    fn decompressed(self, body: &[u8], limit: usize) -> Result<Vec<u8>, ApiError> {
        let mut plain = Vec::new();
        let read = match self {
            Self::Gzip => read_within(MultiGzDecoder::new(body), &mut plain, limit),
            // Named after its inside; RFC 9110 means zlib's envelope, and some clients send none.
            Self::Deflate if is_zlib(body) => {
                read_within(ZlibDecoder::new(body), &mut plain, limit)
            }
            Self::Deflate => read_within(DeflateDecoder::new(body), &mut plain, limit),
            Self::Zstd => read_frames(body, &mut plain, limit),
        };
        read.map_err(|error| {
            let name = self.name();
            let message = format!("content-encoding: the body is not valid {name}: {error}");
            ApiError::new(ErrorKind::Invalid, message)
        })?;
        if plain.len() > limit {
            let message = format!("the body is over {limit} bytes when it is decompressed");
            return Err(ApiError::new(ErrorKind::TooLarge, message));
        }
        Ok(plain)
    }
}

/// Undoes all codings of a body. No step may have more than `limit` bytes.
pub(super) fn decompress(
    codings: &[Coding],
    body: Vec<u8>,
    limit: usize,
) -> Result<Vec<u8>, ApiError> {
    if body.is_empty() {
        return Ok(body);
    }
    codings.iter().rev().try_fold(body, |body, coding| coding.decompressed(&body, limit))
}

fn unsupported(found: &str) -> ApiError {
    let message = format!(
        "content-encoding: expected {ACCEPTED_CODINGS} or none, at most {CODINGS_MOST}, found {found}: \
         send the body uncompressed"
    );
    ApiError::new(ErrorKind::UnsupportedCoding, message)
}

/// Whether a body begins as zlib's streams do (RFC 1950, 2.2): a method, and a check of two bytes.
fn is_zlib(body: &[u8]) -> bool {
    let [first, second, ..] = body else { return false };
    first & 0x0f == 8 && u16::from_be_bytes([*first, *second]).is_multiple_of(31)
}

/// Reads to the end, but no further than one byte over the limit.
fn read_within(reader: impl Read, plain: &mut Vec<u8>, limit: usize) -> io::Result<()> {
    let most = (limit + 1).saturating_sub(plain.len()) as u64;
    reader.take(most).read_to_end(plain).map(|_| ())
}

/// Reads frames of zstd, one after another; those that hold nothing for a reader are skipped.
fn read_frames(mut body: &[u8], plain: &mut Vec<u8>, limit: usize) -> io::Result<()> {
    while !body.is_empty() && plain.len() <= limit {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_BYTES);
        match StreamingDecoder::new_with_decoder(&mut body, decoder) {
            Ok(frame) => read_within(frame, plain, limit)?,
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length,
                ..
            })) => {
                body = body.get(length as usize..).ok_or(io::ErrorKind::UnexpectedEof)?;
            }
            Err(error) => return Err(io::Error::other(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::{
        Compression,
        write::{DeflateEncoder, GzEncoder, ZlibEncoder},
    };
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    const TEXT: &[u8] = b"In the beginning God created the heaven and the earth.";

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        compress_to_vec(text, CompressionLevel::Fastest)
    }

    #[test]
    fn every_coding_gives_the_text_back() {
        let check = |codings: &[Coding], body: Vec<u8>| {
            let plain = decompress(codings, body, 1 << 10).unwrap();
            assert_eq!(String::from_utf8_lossy(&plain), String::from_utf8_lossy(TEXT));
        };
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(TEXT).unwrap();
        let mut raw = DeflateEncoder::new(Vec::new(), Compression::default());
        raw.write_all(TEXT).unwrap();
        check(&[], TEXT.to_vec());
        check(&[Coding::Gzip], gzip(TEXT));
        check(&[Coding::Gzip], [gzip(&TEXT[..9]), gzip(&TEXT[9..])].concat());
        check(&[Coding::Deflate], zlib.finish().unwrap());
        check(&[Coding::Deflate], raw.finish().unwrap());
        check(&[Coding::Zstd], zstd(TEXT));
        let skipped = [0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 7, 7];
        check(&[Coding::Zstd], [&skipped[..], &zstd(&TEXT[..9]), &zstd(&TEXT[9..])].concat());
        check(&[Coding::Gzip, Coding::Zstd], zstd(&gzip(TEXT)));
    }

    #[test]
    fn what_is_larger_than_the_limit_or_broken_is_refused() {
        let zeros = vec![0; 1 << 20];
        for (coding, body) in [(Coding::Gzip, gzip(&zeros)), (Coding::Zstd, zstd(&zeros))] {
            let refused = |body: &[u8], limit| {
                decompress(&[coding], body.to_vec(), limit).map(|_| ()).unwrap_err().kind
            };
            assert_eq!(decompress(&[coding], body.clone(), 1 << 20).unwrap(), zeros);
            assert_eq!(refused(&body, (1 << 20) - 1), ErrorKind::TooLarge);
            assert_eq!(refused(&body[..body.len() / 2], 1 << 20), ErrorKind::Invalid);
            assert_eq!(refused(b"{}", 1 << 20), ErrorKind::Invalid);
        }
        // A frame that asks for a window of 1 GiB.
        let wide = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa0, 1, 0, 0];
        let error = decompress(&[Coding::Zstd], wide.to_vec(), 99).unwrap_err();
        assert!(error.kind == ErrorKind::Invalid && error.message.contains("window"), "{error}");
    }

    #[test]
    fn codings_that_are_not_read_are_named() {
        let of = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_ENCODING, value.parse().unwrap());
            Coding::of(&headers)
        };
        assert_eq!(of("identity").unwrap(), []);
        assert_eq!(of("X-GZip, zstd").unwrap(), [Coding::Gzip, Coding::Zstd]);
        for (value, named) in [("br", "\"br\""), ("gzip, gzip, gzip", "3 codings")] {
            let error = of(value).unwrap_err();
            assert_eq!(error.kind, ErrorKind::UnsupportedCoding);
            assert!(
                error.message.contains(named) && error.message.contains(ACCEPTED_CODINGS),
                "{error}"
            );
        }
    }
}
