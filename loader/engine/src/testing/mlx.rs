//! The installed MLX runtime, where there is one.

use std::{env, path::PathBuf};

use shardpack_mlx::{Device, runtime};

use crate::backend::{Collectives, Mlx};

/// MLX on the processor, one rank; none without a runtime in the folder that `SHARDPACK_ENGINES`
/// names, and the test is skipped.
pub(crate) fn mlx() -> Option<Mlx> {
    let engines = PathBuf::from(env::var_os("SHARDPACK_ENGINES")?);
    let folder = Some(engines.join(runtime::FOLDER)).filter(|folder| folder.is_dir())?;
    Some(Mlx::open(&folder, Some(Device::Cpu), Collectives::Own, [0, 1]).unwrap())
}
