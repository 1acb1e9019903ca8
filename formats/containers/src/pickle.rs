//! Weights of `torch.save`: a zip archive with one pickle and the bytes of every storage.
//!
//! A pickle is a program. `machine` knows the few opcodes and the few functions that a
//! dictionary of tensors is written with, builds inert descriptions of tensors by them, and refuses
//! everything else by name; there is nothing in it that could call anything. `zip` finds files in
//! the archive, `tensors` says where the tensors' bytes are. Nothing here reads a file.

mod machine;
mod tensors;
#[cfg(test)]
mod tests;
pub mod zip;

pub use machine::{MAX_PICKLE_BYTES, Saved, parse};
pub use tensors::{PickledTensor, place};

/// Why a pickle or its archive is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PickleError {
    /// The archive is damaged, or of a kind that `torch.save` does not write.
    #[error("not an archive of torch.save: {0}")]
    Archive(String),
    /// The program does what no dictionary of tensors needs.
    #[error(
        "its pickle calls {name}, which no weights need; nothing of it was run: do not load it with other programs, and take the model from another source as .safetensors"
    )]
    Global {
        /// Module and name.
        name: String,
    },
    /// The program is damaged, or describes something else than tensors.
    #[error("its pickle cannot be read: {problem} (at byte {at})")]
    Program {
        /// Where reading stopped.
        at: usize,
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
}
