//! GGUF, the file of llama.cpp: keys with values, and tensors in blocks.
//!
//! `header` is the one parser of the format; importance files (`crate::imatrix`) come through
//! it too. [`Kind`] says how many elements and bytes a block has (what is in one:
//! `stored::ggml`). [`Model`] brings a model's tensors back under the names that transformers
//! gives them, `config` and `tokenizer` write the documents that a GGUF file has in its keys.
//! Nothing here reads a file.

pub mod config;
mod cursor;
mod header;
mod kind;
mod model;
#[cfg(test)]
mod tests;
pub mod tokenizer;
mod value;

pub use header::{Header, MAGIC, MAX_HEADER_BYTES, Tensor, parse, parse_start};
pub use kind::Kind;
pub use model::{FREQUENCIES, Half, LONG_FREQUENCIES, Model, Part, Rows, SHORT_FREQUENCIES};
pub use value::Value;

/// Why a GGUF file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// It ends too early, or a field cannot be.
    #[error("not a GGUF file that can be read: {problem} (at byte {at})")]
    Malformed {
        /// Where reading stopped.
        at: u64,
        /// What is wrong there.
        problem: String,
    },
    /// A tensor that cannot be.
    #[error("tensor {tensor:?}: {problem}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A key that is missing, or has a value that is not understood.
    #[error("key {key:?} {problem}")]
    Key {
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A file for something that is not read.
    #[error("{0}")]
    Unread(String),
}

impl GgufError {
    fn key(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Key { key: key.into(), problem: problem.into() }
    }
}
