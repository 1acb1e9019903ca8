//! The runtime: a folder with MLX's libraries and our C layer, which can be copied to other
//! machines of the same kind.
//!
//! | file | content |
//! |---|---|
//! | `runtime.json` | [`Record`]: versions, platform, size and BLAKE3 of every other file; written last |
//! | `mlx/lib/` | MLX's libraries as its wheel has them, and `libshardpack_mlx` |
//! | `mlx_cpu.libs/` | libraries that MLX's CPU build needs (Linux) |
//!
//! The folder appears under its name complete or not at all. Every byte is compared each time it
//! is opened, since what is loaded is executed.

mod check;
mod download;
mod index;
mod install;
mod layer;
mod platform;
mod program;
mod record;

pub use check::{CheckError, Checked, check};
pub use download::{DownloadError, DownloadOptions};
pub use install::{InstallError, InstallOptions, Step, install};
pub use platform::Platform;
pub use record::{LayerOrigin, Record};

/// The version that the C layer is written for. Patch versions of MLX are not ABI compatible.
pub const MLX_VERSION: &str = "0.32.2";

/// Name of the folder within the place where engines are kept.
pub const FOLDER: &str = "mlx-0.32.2-6";
