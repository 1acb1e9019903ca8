//! Apple's MLX, bound at run time.
//!
//! Nothing here is linked: [`runtime`] lays MLX's libraries and our C layer into a directory of
//! their own, and [`Library`] opens them from there after every byte was checked. Without such a
//! directory the rest of the program works as before. [`Array`] is a lazy array of MLX; what a
//! model is made of, and what the ranks are, is not known here.

mod array;
mod collective;
pub mod distributed;
mod fused;
mod gradients;
mod library;
mod linear_attention;
pub mod runtime;
mod sampling;
mod table;

pub use array::{Array, Binary, Element, Quantized, Reduce, Unary};
pub use collective::Collective;
pub use gradients::Gradients;
pub use library::{Device, Library, MlxError, OpenError};
pub use linear_attention::{LinearSizes, LinearStateUpdate, LinearStep};
pub use sampling::{LateInput, Noise};
