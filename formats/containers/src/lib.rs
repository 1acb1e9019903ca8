//! Files of weights, ours and other people's: safetensors, GGUF, pickles, tokenizers' models,
//! importance matrices, and the floats that stored elements stand for.
//!
//! Reading order: [`container`] (safetensors), [`gguf`] (llama.cpp's files), [`pickle`] (torch's),
//! [`stored`] (quantized checkpoints as sources), [`imatrix`] (which inputs matter), [`tokenizer`]
//! (other programs' as `tokenizer.json`), [`neutral`] (values of a configuration that switch
//! nothing on). This crate knows no model families, and reads and writes no files itself.

#![forbid(unsafe_code)]

pub mod container;
pub mod gguf;
pub mod imatrix;
pub mod neutral;
pub mod pickle;
pub mod stored;
pub mod tokenizer;

pub use imatrix::Importance;
