//! The messages of the protocol, and their encoding.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use shardpack_manifests::{
    digest::{CHUNK_BYTES, Digest},
    manifest::{MAX_MANIFEST_BYTES, Manifest},
    set::MAX_SET_BYTES,
    signature::MAX_SIGNATURE_BYTES,
};

use super::{
    failure::{Failure, FailureCode},
    frame::{FrameError, HEADER_BYTES},
    payload::{FieldError, Fields, clipped, put_bytes},
    version::SPOKEN,
};

/// Most bytes of a program's name and version, and of an operation's name.
const MAX_PROGRAM_BYTES: u64 = 64;
/// Most bytes of a bitmap: one bit per chunk of a manifest of the largest size, whose chunks take
/// at least 67 bytes of text each, rounded up per file.
const MAX_HELD_BYTES: u64 = 4 << 20;
/// Most bytes of a sentence for people.
const MAX_TEXT_BYTES: u64 = 4 << 10;
/// Most bytes of a JSON answer: a thousand packages at 300 bytes.
pub const MAX_JSON_BYTES: u64 = 1 << 20;
/// Bytes of the fields around variable ones, rounded up.
const FIELD_BYTES: u64 = 64;

/// Bytes of a [`ChunkPlace`]: a key and two indices.
const PLACE_BYTES: usize = 32 + 4 + 4 + 4;

/// Names a package on a node: its model, its layout, and its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PackageKey {
    /// Its layout id.
    pub layout: Digest,
    /// Its rank.
    pub rank: u32,
}

impl fmt::Display for PackageKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.layout, self.rank)
    }
}

impl std::str::FromStr for PackageKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("expected a layout id, '-' and a rank, found {text:?}");
        let (layout, rank) = text.split_once('-').ok_or_else(wrong)?;
        let key = Self { layout: layout.parse()?, rank: rank.parse().map_err(|_| wrong())? };
        // One spelling per key: it names a directory.
        if key.to_string() == text { Ok(key) } else { Err(wrong()) }
    }
}

impl Serialize for PackageKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PackageKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Whether an offer is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Chunks follow.
    Send,
    /// Only the answer is wanted; the node changes nothing.
    Ask,
}

/// A package that a node is to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Whether chunks will follow.
    pub intent: Intent,
    /// Bytes of its `manifest.json`, stored as they are.
    pub manifest: Vec<u8>,
    /// Bytes of the set's `set.json`, against which the manifest is checked; empty without one.
    pub set: Vec<u8>,
    /// Bytes of `model.sig`, stored as they are; empty without one.
    pub signature: Vec<u8>,
}

/// Names the package under way that a further stream is to carry chunks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// Where the node keeps the package.
    pub package: PackageKey,
    /// Digest of its manifest.
    pub manifest: Digest,
}

impl Join {
    /// The package with this manifest, whose bytes are these.
    #[must_use]
    pub fn of(manifest: &Manifest, bytes: &[u8]) -> Self {
        let package = PackageKey { layout: manifest.ids.layout, rank: manifest.rank };
        Self { package, manifest: Digest::of(bytes) }
    }
}

/// A request to start the engine of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartRank {
    /// The package to open.
    pub package: PackageKey,
    /// JSON that the node hands to its starter unread.
    pub parameters: String,
}

/// Something that a node is to do, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// What to do, such as `gc`; a node that does not know it refuses.
    pub name: String,
    /// JSON, read by whoever carries it out.
    pub parameters: String,
}

/// Names a chunk of a package on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ChunkPlace {
    /// The package.
    pub package: PackageKey,
    /// Index of the file in its manifest.
    pub file: u32,
    /// Index of the chunk.
    pub chunk: u32,
}

/// What became of a chunk that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The stored one is as its manifest says; nothing was written.
    Intact,
    /// The stored one was damaged and has been replaced.
    Replaced,
}

/// One message.
///
/// | type | message | payload |
/// |---|---|---|
/// | 1 | `Hello` | u16 protocol, text program |
/// | 2 | `Offer` | u8 intent (0 send, 1 ask), bytes manifest, bytes set, bytes signature |
/// | 3 | `Status` | u64 free bytes, u64 reused bytes, bitmap as [`super::ChunkMap`] |
/// | 4 | `Chunk` | u32 file, u32 chunk, the chunk's bytes |
/// | 5 | `ChunkStored` | u32 file, u32 chunk |
/// | 6 | `ChunkRefused` | u32 file, u32 chunk, text reason |
/// | 7 | `Commit` | |
/// | 8 | `Prepared` | |
/// | 9 | `Activate` | key |
/// | 10 | `Activated` | u8 whether there was a previous one, key (zeros without) |
/// | 11 | `Working` | u64 bytes done, u64 bytes in all |
/// | 12 | `List` | |
/// | 13 | `Listing` | text JSON |
/// | 14 | `StartRank` | key, text JSON |
/// | 15 | `RankStarted` | text JSON |
/// | 16 | `Failed` | u16 code, text |
/// | 17 | `Join` | key, 32 bytes BLAKE3 of the manifest |
/// | 18 | `Joined` | |
/// | 19 | `Operate` | text name, text JSON |
/// | 20 | `Operated` | text JSON |
/// | 21 | `Fetch` | key, u32 file, u32 chunk |
/// | 22 | `Fetched` | the chunk's bytes |
/// | 23 | `Put` | key, u32 file, u32 chunk, the chunk's bytes |
/// | 24 | `PutDone` | u8 outcome (0 intact, 1 replaced) |
///
/// `text` and `bytes` are a u32 length and as many bytes; a key is the 32 bytes of a layout id
/// and a u32 rank. Files are numbered in the manifest's order. Types 17 to 24 came later: a node
/// that does not know them answers `Failed`; it is served on one stream, and not repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// First message of each side.
    Hello {
        /// Of a caller the lowest version that it speaks, of a node the version that is used.
        protocol: u16,
        /// Name and version of the program, and the versions that it speaks
        /// ([`super::Versions`]).
        program: String,
    },
    /// A package that the node is to hold.
    Offer(Offer),
    /// What the node has of the offered package.
    Status {
        /// Free bytes of the disk.
        free_bytes: u64,
        /// Bytes that were taken, or could be, from other packages of the node.
        reused_bytes: u64,
        /// Bitmap of the chunks held.
        held: Vec<u8>,
    },
    /// Bytes of one chunk.
    Chunk {
        /// Index of the file.
        file: u32,
        /// Index of the chunk.
        chunk: u32,
        /// All of the chunk.
        bytes: Vec<u8>,
    },
    /// A chunk has been verified and written.
    ChunkStored {
        /// Index of the file.
        file: u32,
        /// Index of the chunk.
        chunk: u32,
    },
    /// A chunk's bytes were not those of the manifest.
    ChunkRefused {
        /// Index of the file.
        file: u32,
        /// Index of the chunk.
        chunk: u32,
        /// Why, for people.
        reason: String,
    },
    /// All chunks are there: verify and keep.
    Commit,
    /// The package is verified and on disk.
    Prepared,
    /// Make a prepared package the current one.
    Activate(PackageKey),
    /// It is the current one.
    Activated {
        /// The one before, kept for rollback.
        previous: Option<PackageKey>,
    },
    /// Keep-alive: the node is still working; resets the other side's idle timeout.
    Working {
        /// Bytes done.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// Which packages are here?
    List,
    /// JSON: held and active packages.
    Listing(String),
    /// Start the engine of a rank.
    StartRank(StartRank),
    /// JSON: what the starter answered.
    RankStarted(String),
    /// The node did not do as asked.
    Failed(Failure),
    /// Chunks of the package under way come on this stream too.
    Join(Join),
    /// They may.
    Joined,
    /// Do something that has a name of its own.
    Operate(Operation),
    /// JSON: what came of it.
    Operated(String),
    /// Read a chunk of a stored package.
    Fetch(ChunkPlace),
    /// Its bytes, which the node has verified.
    Fetched(Vec<u8>),
    /// Replace a damaged chunk of a stored package.
    Put {
        /// Which.
        place: ChunkPlace,
        /// All of the chunk.
        bytes: Vec<u8>,
    },
    /// The stored chunk is as its manifest says, on the disk.
    PutDone(PutOutcome),
}

impl Message {
    /// A caller's greeting in all versions that this program speaks.
    #[must_use]
    pub fn hello() -> Self {
        Self::hello_in(SPOKEN.lowest)
    }

    /// A node's answer to a greeting: `protocol` is used.
    #[must_use]
    pub(super) fn hello_in(protocol: u16) -> Self {
        let program = SPOKEN.named(concat!("shardpack ", env!("CARGO_PKG_VERSION")));
        Self::Hello { protocol, program }
    }

    /// A failure with its sentence.
    #[must_use]
    pub fn failed(code: FailureCode, message: impl Into<String>) -> Self {
        Self::Failed(Failure { code, message: message.into() })
    }

    /// Number of the message's type.
    #[must_use]
    pub fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => 1,
            Self::Offer(_) => 2,
            Self::Status { .. } => 3,
            Self::Chunk { .. } => 4,
            Self::ChunkStored { .. } => 5,
            Self::ChunkRefused { .. } => 6,
            Self::Commit => 7,
            Self::Prepared => 8,
            Self::Activate(_) => 9,
            Self::Activated { .. } => 10,
            Self::Working { .. } => 11,
            Self::List => 12,
            Self::Listing(_) => 13,
            Self::StartRank(_) => 14,
            Self::RankStarted(_) => 15,
            Self::Failed(_) => 16,
            Self::Join(_) => 17,
            Self::Joined => 18,
            Self::Operate(_) => 19,
            Self::Operated(_) => 20,
            Self::Fetch(_) => 21,
            Self::Fetched(_) => 22,
            Self::Put { .. } => 23,
            Self::PutDone(_) => 24,
        }
    }

    /// Most bytes of a payload of type `kind`; `None` for an unknown type.
    pub(super) fn payload_limit(kind: u8) -> Option<u32> {
        let bytes = match kind {
            1 => MAX_PROGRAM_BYTES + FIELD_BYTES,
            2 => MAX_MANIFEST_BYTES + MAX_SET_BYTES + MAX_SIGNATURE_BYTES + FIELD_BYTES,
            3 => MAX_HELD_BYTES + FIELD_BYTES,
            4 => CHUNK_BYTES + 8,
            5 | 7..=12 | 18 | 21 | 24 => FIELD_BYTES,
            22 => CHUNK_BYTES,
            23 => CHUNK_BYTES + PLACE_BYTES as u64,
            17 => 2 * FIELD_BYTES,
            6 | 16 => MAX_TEXT_BYTES + FIELD_BYTES,
            13..=15 | 20 => MAX_JSON_BYTES + FIELD_BYTES,
            19 => MAX_PROGRAM_BYTES + MAX_JSON_BYTES + FIELD_BYTES,
            _ => return None,
        };
        Some(u32::try_from(bytes).expect("the limits add up to less than 4 GiB"))
    }

    /// Space for the header and the fields, and apart from them the bytes that are not worth
    /// copying.
    pub(super) fn payload(&self) -> (Vec<u8>, &[u8]) {
        let mut head = vec![0; HEADER_BYTES];
        let mut bulk: &[u8] = &[];
        match self {
            Self::Hello { protocol, program } => {
                head.extend_from_slice(&protocol.to_le_bytes());
                put_bytes(&mut head, clipped(program, MAX_PROGRAM_BYTES).as_bytes());
            }
            Self::Offer(offer) => {
                head.push(u8::from(offer.intent == Intent::Ask));
                put_bytes(&mut head, &offer.manifest);
                put_bytes(&mut head, &offer.set);
                put_bytes(&mut head, &offer.signature);
            }
            Self::Status { free_bytes, reused_bytes, held } => {
                head.extend_from_slice(&free_bytes.to_le_bytes());
                head.extend_from_slice(&reused_bytes.to_le_bytes());
                bulk = held;
            }
            Self::Chunk { file, chunk, bytes } => {
                put_chunk_index(&mut head, *file, *chunk);
                bulk = bytes;
            }
            Self::ChunkStored { file, chunk } => put_chunk_index(&mut head, *file, *chunk),
            Self::ChunkRefused { file, chunk, reason } => {
                put_chunk_index(&mut head, *file, *chunk);
                put_bytes(&mut head, clipped(reason, MAX_TEXT_BYTES).as_bytes());
            }
            Self::Commit | Self::Prepared | Self::List | Self::Joined => {}
            Self::Join(join) => {
                put_key(&mut head, join.package);
                head.extend_from_slice(&join.manifest.0);
            }
            Self::Activate(key) => put_key(&mut head, *key),
            Self::Activated { previous } => {
                head.push(u8::from(previous.is_some()));
                let nothing = PackageKey { layout: Digest([0; 32]), rank: 0 };
                put_key(&mut head, previous.unwrap_or(nothing));
            }
            Self::Working { done_bytes, total_bytes } => {
                head.extend_from_slice(&done_bytes.to_le_bytes());
                head.extend_from_slice(&total_bytes.to_le_bytes());
            }
            Self::Listing(json) | Self::RankStarted(json) | Self::Operated(json) => {
                put_bytes(&mut head, json.as_bytes());
            }
            Self::Operate(operation) => {
                put_bytes(&mut head, clipped(&operation.name, MAX_PROGRAM_BYTES).as_bytes());
                put_bytes(&mut head, operation.parameters.as_bytes());
            }
            Self::Fetch(place) => put_place(&mut head, *place),
            Self::Fetched(bytes) => bulk = bytes,
            Self::Put { place, bytes } => {
                put_place(&mut head, *place);
                bulk = bytes;
            }
            Self::PutDone(outcome) => head.push(u8::from(*outcome == PutOutcome::Replaced)),
            Self::StartRank(request) => {
                put_key(&mut head, request.package);
                put_bytes(&mut head, request.parameters.as_bytes());
            }
            Self::Failed(failure) => {
                head.extend_from_slice(&failure.code.number().to_le_bytes());
                put_bytes(&mut head, clipped(&failure.message, MAX_TEXT_BYTES).as_bytes());
            }
        }
        (head, bulk)
    }

    /// Parses the payload of a message of type `kind`.
    pub(super) fn parse(kind: u8, payload: Vec<u8>) -> Result<Self, FrameError> {
        Self::parse_fields(kind, payload).map_err(|problem| FrameError::Payload { kind, problem })
    }

    /// Parses a message that ends in a chunk's bytes, which are moved once, in place, and never copied
    /// to new memory.
    fn parse_chunk(kind: u8, mut payload: Vec<u8>) -> Result<Self, FieldError> {
        let mut fields = Fields::new(&payload);
        match kind {
            4 => {
                let (file, chunk) = (fields.u32()?, fields.u32()?);
                payload.drain(..8);
                Ok(Self::Chunk { file, chunk, bytes: payload })
            }
            23 => {
                let place = take_place(&mut fields)?;
                payload.drain(..PLACE_BYTES);
                Ok(Self::Put { place, bytes: payload })
            }
            _ => Ok(Self::Fetched(payload)),
        }
    }

    fn parse_fields(kind: u8, payload: Vec<u8>) -> Result<Self, FieldError> {
        if matches!(kind, 4 | 22 | 23) {
            return Self::parse_chunk(kind, payload);
        }
        let mut fields = Fields::new(&payload);
        let message = match kind {
            1 => Self::Hello { protocol: fields.u16()?, program: fields.text(MAX_PROGRAM_BYTES)? },
            2 => Self::Offer(Offer {
                intent: match fields.u8()? {
                    0 => Intent::Send,
                    1 => Intent::Ask,
                    _ => return Err("the intent is neither 0 nor 1"),
                },
                manifest: fields.bytes(MAX_MANIFEST_BYTES)?,
                set: fields.bytes(MAX_SET_BYTES)?,
                signature: fields.bytes(MAX_SIGNATURE_BYTES)?,
            }),
            3 => {
                let (free_bytes, reused_bytes) = (fields.u64()?, fields.u64()?);
                let held = fields.rest().to_vec();
                return Ok(Self::Status { free_bytes, reused_bytes, held });
            }
            5 => Self::ChunkStored { file: fields.u32()?, chunk: fields.u32()? },
            6 => Self::ChunkRefused {
                file: fields.u32()?,
                chunk: fields.u32()?,
                reason: fields.text(MAX_TEXT_BYTES)?,
            },
            7 => Self::Commit,
            8 => Self::Prepared,
            9 => Self::Activate(take_key(&mut fields)?),
            10 => {
                let known = fields.u8()? != 0;
                let key = take_key(&mut fields)?;
                Self::Activated { previous: known.then_some(key) }
            }
            11 => Self::Working { done_bytes: fields.u64()?, total_bytes: fields.u64()? },
            12 => Self::List,
            13 => Self::Listing(fields.text(MAX_JSON_BYTES)?),
            14 => Self::StartRank(StartRank {
                package: take_key(&mut fields)?,
                parameters: fields.text(MAX_JSON_BYTES)?,
            }),
            15 => Self::RankStarted(fields.text(MAX_JSON_BYTES)?),
            16 => {
                let code = FailureCode::from_number(fields.u16()?);
                Self::Failed(Failure { code, message: fields.text(MAX_TEXT_BYTES)? })
            }
            17 => Self::Join(Join { package: take_key(&mut fields)?, manifest: fields.digest()? }),
            18 => Self::Joined,
            19 => Self::Operate(Operation {
                name: fields.text(MAX_PROGRAM_BYTES)?,
                parameters: fields.text(MAX_JSON_BYTES)?,
            }),
            20 => Self::Operated(fields.text(MAX_JSON_BYTES)?),
            21 => Self::Fetch(take_place(&mut fields)?),
            24 => Self::PutDone(match fields.u8()? {
                0 => PutOutcome::Intact,
                1 => PutOutcome::Replaced,
                _ => return Err("the outcome is neither 0 nor 1"),
            }),
            _ => return Err("its type is unknown"),
        };
        fields.finish()?;
        Ok(message)
    }
}

fn put_chunk_index(head: &mut Vec<u8>, file: u32, chunk: u32) {
    head.extend_from_slice(&file.to_le_bytes());
    head.extend_from_slice(&chunk.to_le_bytes());
}

fn put_key(head: &mut Vec<u8>, key: PackageKey) {
    head.extend_from_slice(&key.layout.0);
    head.extend_from_slice(&key.rank.to_le_bytes());
}

fn take_key(fields: &mut Fields) -> Result<PackageKey, FieldError> {
    Ok(PackageKey { layout: fields.digest()?, rank: fields.u32()? })
}

fn put_place(head: &mut Vec<u8>, place: ChunkPlace) {
    put_key(head, place.package);
    put_chunk_index(head, place.file, place.chunk);
}

fn take_place(fields: &mut Fields) -> Result<ChunkPlace, FieldError> {
    Ok(ChunkPlace { package: take_key(fields)?, file: fields.u32()?, chunk: fields.u32()? })
}
