//! Which engine computes, where installed ones are kept, and how a rank gets one.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use shardpack_loader::{
    backend::{Arithmetic, Collectives, Cpu, CpuError, CpuOptions, Mlx},
    cluster::LoadError,
    engine::{
        ConstraintFactory, Engine, EngineOptions, LocalModel, RankEngine, TokenId, memory_group,
    },
    model::Model,
    open::Package,
};
use shardpack_mlx::runtime;

use crate::{
    args::{CollectivesName, EngineChoice, EngineName},
    failure::Failure,
    progress::say,
};

/// The folder of MLX's runtime below `given`, or below the user's own place for data.
pub(crate) fn mlx_folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(folder(given)?.join(runtime::FOLDER))
}

/// The folder that holds engines: given, `$SHARDPACK_ENGINES`, or `shardpack/engines` in the
/// user's data folder (XDG's, which macOS has by default too).
fn folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(engines) = set("SHARDPACK_ENGINES") {
        return Ok(engines);
    }
    let data = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
    let data = data.context("no home folder: say where engines are kept with --dir FOLDER")?;
    Ok(data.join("shardpack/engines"))
}

impl EngineChoice {
    /// The same choice for another process of this program.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let engine = match self.engine {
            EngineName::Cpu => "cpu",
            EngineName::Mlx => "mlx",
        };
        let collectives = match self.collectives {
            CollectivesName::Auto => "auto",
            CollectivesName::Own => "own",
            CollectivesName::Ring => "ring",
            CollectivesName::Jaccl => "jaccl",
        };
        let mut arguments = vec!["--engine", engine, "--collectives", collectives];
        if let Some(platform) = &self.platform {
            arguments.extend(["--platform", platform]);
        }
        if self.exact {
            arguments.push("--exact");
        }
        arguments.into_iter().map(str::to_owned).collect()
    }

    /// Whether a lost rank is an error to the others, and not a hang.
    pub(crate) fn has_deadlines(&self) -> bool {
        !matches!(self.collectives, CollectivesName::Ring | CollectivesName::Jaccl)
    }

    /// Our own kernels, as asked for.
    fn cpu(&self, threads: usize) -> Result<Cpu, CpuError> {
        let arithmetic = if self.exact { Arithmetic::Exact } else { Arithmetic::Fast };
        let platform = self.platform.clone();
        Cpu::with_options(&CpuOptions { threads, platform, arithmetic })
    }

    /// Refuses what cannot be, before anything is started.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let of_mlx = matches!(self.collectives, CollectivesName::Ring | CollectivesName::Jaccl);
        anyhow::ensure!(
            self.engine == EngineName::Mlx || !of_mlx,
            "ring and jaccl are MLX's own collectives: they go with --engine mlx"
        );
        let of_cpu = self.exact || self.platform.is_some();
        anyhow::ensure!(
            self.engine == EngineName::Cpu || !of_cpu,
            "--platform and --exact are the cpu engine's: leave them out with --engine mlx"
        );
        if self.engine == EngineName::Cpu {
            // No threads: what is asked for is only checked.
            self.cpu(1)?;
        } else {
            runtime::check(&mlx_folder(None)?)?;
        }
        Ok(())
    }

    /// Who carries the sums of a group of `ranks`, with the reason where we choose.
    fn collectives(&self, ranks: u32) -> Collectives {
        match self.collectives {
            CollectivesName::Own => Collectives::Own,
            CollectivesName::Ring => Collectives::Ring,
            CollectivesName::Jaccl => Collectives::Jaccl,
            CollectivesName::Auto => {
                if ranks > 1 {
                    say("collectives: own, since MLX's ring and JACCL hang when a rank is lost");
                }
                Collectives::Own
            }
        }
    }

    /// This rank's engine over an open package. `rank` and number of ranks are the package's.
    pub(crate) fn rank_engine(
        &self,
        package: &Package,
        threads: usize,
        [rank, ranks]: [u32; 2],
        constraints: Option<Box<dyn ConstraintFactory>>,
    ) -> Result<Box<dyn RankEngine>, LoadError> {
        let options = EngineOptions::STANDARD;
        Ok(match self.engine {
            EngineName::Cpu => {
                let backend = self.cpu(threads)?;
                let engine = Engine::new(Model::load(package, &backend)?, backend, options);
                Box::new(match constraints {
                    Some(factory) => engine.with_constraints(factory),
                    None => engine,
                })
            }
            EngineName::Mlx => {
                let collectives = self.collectives(ranks);
                let backend = Mlx::open(&mlx_folder(None)?, None, collectives, [rank, ranks])?;
                let engine = Engine::new(Model::load(package, &backend)?, backend, options);
                Box::new(match constraints {
                    Some(factory) => engine.with_constraints(factory),
                    None => engine,
                })
            }
        })
    }

    /// Logits after each token, by all ranks in this process.
    pub(crate) fn logits(
        &self,
        packages: &[Package],
        tokens: &[TokenId],
        threads: usize,
    ) -> Result<Vec<f32>, Failure> {
        let groups = memory_group(packages.len() as u32)?;
        if self.engine == EngineName::Cpu {
            let backends = packages.iter().map(|_| self.cpu(threads)).collect::<Result<_, _>>();
            let backends = backends.map_err(anyhow::Error::from)?;
            let model = LocalModel::over(packages, &groups, backends).map_err(Failure::wrong)?;
            return model.logits(tokens).map_err(Failure::wrong);
        }
        if packages.len() > 1 {
            // Ranks that share a process wait for each other in MLX until the group gives up.
            let error = anyhow::anyhow!("MLX computes one rank for each process");
            return Err(Failure::from(error).hint("use --engine cpu, or a set for one node"));
        }
        let folder = mlx_folder(None)?;
        let size = packages.len() as u32;
        let backends = (0..size)
            .map(|rank| Mlx::open(&folder, None, Collectives::Own, [rank, size]))
            .collect::<Result<_, _>>()?;
        let model = LocalModel::over(packages, &groups, backends).map_err(Failure::wrong)?;
        model.logits(tokens).map_err(Failure::wrong)
    }
}
