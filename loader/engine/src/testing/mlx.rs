//! The installed MLX runtime, where there is one.

#[path = "../../../../tests/harness/skip.rs"]
mod skip;

use shardpack_mlx::{Device, runtime};

use crate::backend::{Collectives, Mlx};

/// MLX on the processor, one rank; none without a runtime in the folder that `SHARDPACK_ENGINES`
/// names, and the test is skipped.
#[track_caller]
pub(crate) fn mlx() -> Option<Mlx> {
    let folder = skip::mlx_runtime(runtime::FOLDER)?;
    Some(Mlx::open(&folder, Some(Device::Cpu), Collectives::Own, [0, 1]).unwrap())
}
