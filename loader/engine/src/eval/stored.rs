//! A file with what a model predicts for texts: the likely tokens of every position that counts,
//! with the texts' tokens, so that another model can be compared with it long after.
//!
//! | part | bytes | content |
//! |---|---|---|
//! | magic | 8 | `SPLOGITS` |
//! | version | 4 | 1 |
//! | length | 4 | of the document |
//! | document | length | JSON, see [`LogitsDocument`] |
//! | tokens | 4 each | ids of all texts, one text after the other |
//! | rows | `8 · top + 8` each | ids, `top` of u32, most likely first; the logarithms of their probabilities, `top` of f32; the logarithm of what all other tokens have together, f32 (−∞ for nothing); the logarithm of the probability of the token that came, f32 |
//! | digest | 32 | BLAKE3 of everything before |
//!
//! Numbers are little-endian. There is a row for each prediction that counts (see the module
//! above), window after window. History: 1 is the first version.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use shardpack_engine_api::TokenId;
use shardpack_manifests::{Digest, digest::ChunkHasher};

use super::EvalOptions;

const MAGIC: [u8; 8] = *b"SPLOGITS";
const VERSION: u32 = 1;

/// Most likely tokens of a position that are kept at most: 65,536 rows of them are 34 GB.
pub const MAX_TOP: usize = 65_536;

/// Longest document: names and digests of some thousand texts.
const MAX_DOCUMENT_BYTES: u32 = 1 << 20;

/// A logarithm of a probability above this is no rounding error.
const MAX_LOG: f32 = 1e-3;

/// What the file is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogitsDocument {
    /// Name of the model, for people.
    pub model: String,
    /// Its weights id.
    pub weights: Digest,
    /// BLAKE3 of its `tokenizer.json`, if it has one.
    pub tokenizer: Option<Digest>,
    /// Tokens that it knows.
    pub vocab_size: u32,
    /// Tokens of a window.
    pub context: u32,
    /// The token that begins every window, if one does.
    pub first: Option<u32>,
    /// Likely tokens of a row.
    pub top: u32,
    /// The texts, in order.
    pub texts: Vec<StoredText>,
}

/// One text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredText {
    /// Its name, for people.
    pub name: String,
    /// BLAKE3 of its bytes.
    pub blake3: Digest,
    /// Its tokens.
    pub tokens: u64,
}

/// A file of logits that cannot be written, read or used.
#[derive(Debug, thiserror::Error)]
pub enum StoredError {
    /// The file system failed.
    #[error("{path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not such a file, or one of a later version.
    #[error("{path}: {problem}; give a file that `eval --save-logits` of this version has written")]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Its bytes are not those that were written.
    #[error("{path} is damaged: {problem}; copy or write it again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found and expected.
        problem: String,
    },
    /// It is of something else.
    #[error("{path} is of {found}, and the set has {expected}: they cannot be compared")]
    Other {
        /// The file.
        path: PathBuf,
        /// What the file says.
        found: String,
        /// What was asked for.
        expected: String,
    },
}

/// Predictions for one token.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Row {
    /// Ids and logarithms of their probabilities, most likely first.
    pub(super) likely: Vec<(u32, f64)>,
    /// The logarithm of what the others have together.
    pub(super) rest: f64,
    /// The logarithm of the probability of the token that came.
    pub(super) next: f64,
}

impl Row {
    pub(super) fn top(&self) -> u32 {
        self.likely.first().map_or(0, |first| first.0)
    }
}

/// Writes such a file.
pub struct LogitsWriter<'a> {
    path: PathBuf,
    out: &'a mut dyn Write,
    hasher: ChunkHasher,
    top: usize,
}

impl<'a> LogitsWriter<'a> {
    /// Writes what comes before the rows. `path` is for messages.
    pub fn new(
        path: &Path,
        out: &'a mut dyn Write,
        document: &LogitsDocument,
        texts: &[Vec<TokenId>],
    ) -> Result<Self, StoredError> {
        let (path, hasher) = (path.to_owned(), ChunkHasher::new());
        let mut writer = Self { path, out, hasher, top: document.top as usize };
        let json = serde_json::to_vec(document)
            .map_err(|source| writer.failed(io::Error::other(source)))?;
        if json.len() as u64 > u64::from(MAX_DOCUMENT_BYTES) {
            return Err(writer.form("too many texts, or too long names of texts".to_owned()));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((json.len() as u32).to_le_bytes());
        bytes.extend(json);
        bytes.extend(texts.iter().flatten().flat_map(|token| token.0.to_le_bytes()));
        writer.write(&bytes)?;
        Ok(writer)
    }

    /// Likely tokens of a row.
    pub(super) const fn top(&self) -> usize {
        self.top
    }

    pub(super) fn row(&mut self, row: &Row) -> Result<(), StoredError> {
        let ids = row.likely.iter().flat_map(|it| it.0.to_le_bytes());
        let logs = row.likely.iter().map(|it| it.1).chain([row.rest, row.next]);
        let bytes: Vec<u8> = ids.chain(logs.flat_map(|log| (log as f32).to_le_bytes())).collect();
        self.write(&bytes)
    }

    /// Writes the digest; without it the file is not read.
    pub fn finish(mut self) -> Result<(), StoredError> {
        let digest = std::mem::take(&mut self.hasher).finish().digest;
        self.write(&digest.0)?;
        self.out.flush().map_err(|source| self.failed(source))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StoredError> {
        self.hasher.update(bytes);
        self.out.write_all(bytes).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> StoredError {
        StoredError::Io { path: self.path.clone(), source }
    }

    fn form(&self, problem: String) -> StoredError {
        StoredError::Form { path: self.path.clone(), problem }
    }
}

/// Reads such a file, row after row.
pub struct LogitsReader {
    path: PathBuf,
    document: LogitsDocument,
    texts: Vec<Vec<TokenId>>,
    file: BufReader<File>,
    first_row: u64,
    bytes: Vec<u8>,
    row: Row,
}

impl LogitsReader {
    /// Opens a file: its form and its digest are checked.
    pub fn open(path: &Path) -> Result<Self, StoredError> {
        let failed = |source| StoredError::Io { path: path.to_owned(), source };
        let form = |problem: &str| {
            Err(StoredError::Form { path: path.to_owned(), problem: problem.to_owned() })
        };
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let len = file.get_ref().metadata().map_err(failed)?.len();
        let mut head = [0; 16];
        if len < head.len() as u64 + 32 {
            return form("it is too short for logits");
        }
        file.read_exact(&mut head).map_err(failed)?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if head[..8] != MAGIC {
            return form("it holds no logits");
        }
        if word(8) != VERSION {
            return form(&format!("version {}, and this program reads {VERSION}", word(8)));
        }
        let document_bytes = word(12);
        if document_bytes > MAX_DOCUMENT_BYTES || u64::from(document_bytes) > len - 48 {
            return form(&format!("a document of {document_bytes} bytes"));
        }
        check_digest(path, &mut file, &head, len)?;
        let mut json = vec![0; document_bytes as usize];
        file.read_exact(&mut json).map_err(failed)?;
        let document: LogitsDocument = match serde_json::from_slice(&json) {
            Ok(document) => document,
            Err(error) => return form(&format!("its document cannot be read: {error}")),
        };
        let begin = head.len() as u64 + u64::from(document_bytes);
        let Some(tokens) = sizes(&document, begin, len) else {
            return form("its document says something impossible");
        };
        let mut ids = vec![0; tokens as usize * 4];
        file.read_exact(&mut ids).map_err(failed)?;
        let mut ids = ids.as_chunks::<4>().0.iter().map(|id| TokenId(u32::from_le_bytes(*id)));
        let texts: Vec<Vec<TokenId>> = document
            .texts
            .iter()
            .map(|text| ids.by_ref().take(text.tokens as usize).collect())
            .collect();
        let reader = Self {
            path: path.to_owned(),
            first_row: begin + tokens * 4,
            bytes: vec![0; row_bytes(&document) as usize],
            document,
            texts,
            file,
            row: Row::default(),
        };
        let known = reader.texts.iter().flatten().all(|it| it.0 < reader.document.vocab_size);
        if !known || len != reader.expected_bytes() {
            return form("its document says something impossible");
        }
        Ok(reader)
    }

    /// What the file is of.
    #[must_use]
    pub const fn document(&self) -> &LogitsDocument {
        &self.document
    }

    /// The tokens of its texts.
    #[must_use]
    pub fn texts(&self) -> &[Vec<TokenId>] {
        &self.texts
    }

    /// How its texts were read.
    #[must_use]
    pub fn options(&self) -> EvalOptions {
        let LogitsDocument { context, first, .. } = &self.document;
        EvalOptions { context: *context as usize, first: first.map(TokenId) }
    }

    fn expected_bytes(&self) -> u64 {
        let options = self.options();
        let rows: u64 = self.texts.iter().map(|text| options.counted(text)).sum();
        self.first_row + rows * row_bytes(&self.document) + 32
    }

    /// Refuses texts, windows and vocabularies that are not those of the rows.
    pub(super) fn check(
        &self,
        vocab_size: u32,
        texts: &[Vec<TokenId>],
        options: &EvalOptions,
    ) -> Result<(), StoredError> {
        let other = |found: String, expected: String| {
            Err(StoredError::Other { path: self.path.clone(), found, expected })
        };
        if vocab_size != self.document.vocab_size {
            let of = |size: u32| format!("a vocabulary of {size} tokens");
            return other(of(self.document.vocab_size), of(vocab_size));
        }
        if *options != self.options() || texts != self.texts {
            return other("other texts or windows".to_owned(), "those that were given".to_owned());
        }
        Ok(())
    }

    /// Goes back to the first row.
    pub(super) fn rewind(&mut self) -> Result<(), StoredError> {
        let sought = self.file.seek(SeekFrom::Start(self.first_row));
        sought.map(|_| ()).map_err(|source| self.failed(source))
    }

    /// The next row.
    pub(super) fn row(&mut self) -> Result<&Row, StoredError> {
        self.file
            .read_exact(&mut self.bytes)
            .map_err(|source| StoredError::Io { path: self.path.clone(), source })?;
        let (ids, logs) = self.bytes.split_at(self.document.top as usize * 4);
        let id = |four: &[u8; 4]| u32::from_le_bytes(*four);
        let log = |four: &[u8; 4]| f32::from_le_bytes(*four);
        let mut logs = logs.as_chunks::<4>().0.iter().map(log);
        let ids = ids.as_chunks::<4>().0.iter().map(id);
        self.row.likely.clear();
        self.row.likely.extend(ids.zip(logs.by_ref().map(f64::from)));
        let [rest, next] = [logs.next(), logs.next()].map(|log| log.unwrap_or(f32::NAN));
        (self.row.rest, self.row.next) = (f64::from(rest), f64::from(next));
        let is_log = |log: f64| log <= f64::from(MAX_LOG);
        let likely = |(id, log): &(u32, f64)| *id < self.document.vocab_size && is_log(*log);
        if !self.row.likely.iter().all(likely) || !is_log(self.row.rest) || !is_log(self.row.next) {
            let problem = "a row has an unknown token, or what is no probability".to_owned();
            return Err(StoredError::Damaged { path: self.path.clone(), problem });
        }
        Ok(&self.row)
    }

    fn failed(&self, source: io::Error) -> StoredError {
        StoredError::Io { path: self.path.clone(), source }
    }
}

fn row_bytes(document: &LogitsDocument) -> u64 {
    8 * u64::from(document.top) + 8
}

/// The tokens of all texts, if the document's numbers are possible in a file of `len` bytes.
fn sizes(document: &LogitsDocument, begin: u64, len: u64) -> Option<u64> {
    let top = document.top as usize;
    let known = document.first.is_none_or(|first| first < document.vocab_size);
    if !(1..=MAX_TOP).contains(&top) || document.top > document.vocab_size || !known {
        return None;
    }
    if document.context < 4 {
        return None;
    }
    let tokens = document.texts.iter().try_fold(0_u64, |sum, text| sum.checked_add(text.tokens))?;
    let end = tokens.checked_mul(4)?.checked_add(begin)?;
    (end <= len).then_some(tokens)
}

/// Hashes the file, whose first bytes `head` are read already, and returns to where it was.
fn check_digest(
    path: &Path,
    file: &mut BufReader<File>,
    head: &[u8],
    len: u64,
) -> Result<(), StoredError> {
    let failed = |source| StoredError::Io { path: path.to_owned(), source };
    let mut hasher = ChunkHasher::new();
    hasher.update(head);
    let mut left = len - 32 - head.len() as u64;
    let mut buffer = vec![0; 1 << 20];
    while left > 0 {
        let count = left.min(buffer.len() as u64) as usize;
        file.read_exact(&mut buffer[..count]).map_err(failed)?;
        hasher.update(&buffer[..count]);
        left -= count as u64;
    }
    let mut expected = [0; 32];
    file.read_exact(&mut expected).map_err(failed)?;
    let (expected, found) = (Digest(expected), hasher.finish().digest);
    if found != expected {
        let problem = format!("its bytes have the digest {found}, {expected} was written");
        return Err(StoredError::Damaged { path: path.to_owned(), problem });
    }
    file.seek(SeekFrom::Start(head.len() as u64)).map(|_| ()).map_err(failed)
}
