//! Selects an engine, finds installed ones, and opens the engine of a rank.

pub(crate) mod fast_sync;

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use shardpack_cluster::LoadError;
use shardpack_engine::{
    backend::{Arithmetic, Collectives, Cpu, CpuError, CpuOptions, Mlx, mlx::Taken},
    engine::{EngineOptions, Speculate, memory_group},
    loading::{OpenOptions, Package, Packing},
    rank_engine::{LocalBackends, RankBackend},
};
use shardpack_engine_api::TokenId;
use shardpack_formats::memory::KvType;
use shardpack_manifests::Layout;
use shardpack_mlx::{Device, distributed::Distributed, runtime};

use crate::{
    args::{CollectivesName, EngineChoice, EngineName, FastSyncName, KvFormat, SpeculateName},
    failure::Failure,
    progress::{say, size},
};

/// The folder of MLX's runtime below `given`, or below the user's own place for data.
pub(crate) fn mlx_folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(folder(given)?.join(runtime::FOLDER))
}

/// The folder that holds engines: given, `$SHARDPACK_ENGINES`, or `shardpack/engines` in the
/// user's data folder (XDG's, which macOS has by default too).
pub(crate) fn folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(engines) = set("SHARDPACK_ENGINES") {
        return Ok(engines);
    }
    let data = set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")));
    let data = data.context("no home folder: give the folder of engines with --dir FOLDER")?;
    Ok(data.join("shardpack/engines"))
}

const ONLY_SERVE: &str = "the scripted engine works with serve only: serve --engine scripted FILE";

impl KvFormat {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Q8];

    /// As the command line spells it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8 => "q8",
        }
    }

    /// As planner and engine know it.
    pub(crate) const fn kv_type(self) -> KvType {
        match self {
            Self::F32 => KvType::F32,
            Self::F16 => KvType::F16,
            Self::Bf16 => KvType::Bf16,
            Self::Q8 => KvType::Q8,
        }
    }
}

impl SpeculateName {
    /// The engine's.
    pub(crate) const fn when(self) -> Speculate {
        match self {
            Self::Auto => Speculate::Auto,
            Self::Off => Speculate::Off,
        }
    }
}

impl CollectivesName {
    /// Whether they are the built-in ones: with deadlines, so that a lost rank is an error and not a
    /// hang.
    pub(crate) const fn are_own(self) -> bool {
        matches!(self, Self::Auto | Self::Tcp | Self::Rdma)
    }
}

impl EngineChoice {
    /// The same choice as arguments for another process of this program.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let engine = match self.engine {
            EngineName::Cpu => "cpu",
            EngineName::Mlx => "mlx",
            EngineName::Scripted => "scripted",
        };
        let collectives = match self.collectives {
            // The front says what carries the links.
            CollectivesName::Auto | CollectivesName::Tcp | CollectivesName::Rdma => "auto",
            CollectivesName::Ring => "ring",
            CollectivesName::Jaccl => "jaccl",
            CollectivesName::JacclRing => "jaccl-ring",
        };
        let mut arguments = vec!["--engine", engine, "--collectives", collectives];
        if let Some(platform) = &self.platform {
            arguments.extend(["--platform", platform]);
        }
        if self.exact {
            arguments.push("--exact");
        }
        let kv_memory = self.kv_memory.map(|size| size.0.to_string());
        if let Some(bytes) = &kv_memory {
            arguments.extend(["--kv-memory", bytes]);
        }
        if let Some(kv) = self.kv_type {
            arguments.extend(["--kv-type", kv.name()]);
        }
        if self.speculate == SpeculateName::Off {
            arguments.extend(["--speculate", "off"]);
        }
        match self.fast_sync {
            FastSyncName::Auto => {}
            FastSyncName::On => arguments.extend(["--fast-sync", "on"]),
            FastSyncName::Off => arguments.extend(["--fast-sync", "off"]),
        }
        let mut arguments: Vec<OsString> = arguments.into_iter().map(OsString::from).collect();
        if let Some(set) = &self.draft_model {
            arguments.extend(["--draft-model".into(), set.into()]);
        }
        arguments
    }

    /// Whether collectives have timeouts, so that a lost rank is an error and not a hang.
    pub(crate) fn has_deadlines(&self) -> bool {
        self.collectives.are_own()
    }

    /// The MLX backend of a rank.
    fn mlx(&self, collectives: Collectives, place: [u32; 2]) -> anyhow::Result<Mlx> {
        let mlx = Mlx::open(&mlx_folder(None)?, None, collectives, place)?;
        let mlx = if self.exact { mlx.exact() } else { mlx };
        Ok(match self.kv_type {
            Some(kv) => mlx.with_kv(kv.kv_type())?,
            None => mlx,
        })
    }

    /// The built-in backend.
    fn cpu(&self, threads: usize) -> Result<Cpu, CpuError> {
        Ok(Cpu::with_options(&self.cpu_options(threads))?
            .with_kv(self.kv_type.unwrap_or_default().kv_type()))
    }

    fn cpu_options(&self, threads: usize) -> CpuOptions {
        let arithmetic = if self.exact { Arithmetic::Exact } else { Arithmetic::Fast };
        CpuOptions { threads, platform: self.platform.clone(), arithmetic }
    }

    /// Options for opening a package for this engine with `threads`.
    pub(crate) fn opening(&self, threads: usize) -> Result<OpenOptions, CpuError> {
        let packing = match self.engine {
            EngineName::Cpu => self.cpu_options(threads).packing()?,
            EngineName::Mlx | EngineName::Scripted => Packing::Stored,
        };
        Ok(OpenOptions { threads, packing })
    }

    /// Checks the choice before anything is started.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.engine != EngineName::Scripted, "{ONLY_SERVE}");
        self.check_arguments()?;
        if self.engine == EngineName::Cpu {
            // One thread: the backend is only checked.
            self.cpu(1)?;
        } else {
            runtime::check(&mlx_folder(None)?)?;
        }
        Ok(())
    }

    /// Refuses options that exclude each other.
    pub(crate) fn check_arguments(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.engine == EngineName::Mlx || self.has_deadlines(),
            "ring and jaccl are MLX's collectives: they need --engine mlx"
        );
        anyhow::ensure!(
            self.engine == EngineName::Mlx || self.fast_sync == FastSyncName::Auto,
            "--fast-sync is of MLX on a GPU: it needs --engine mlx"
        );
        anyhow::ensure!(
            self.engine == EngineName::Cpu || self.platform.is_none(),
            "--platform needs --engine cpu: remove it"
        );
        anyhow::ensure!(
            self.engine == EngineName::Cpu || self.kv_type != Some(KvFormat::Q8),
            "--kv-type q8 needs --engine cpu: with --engine mlx use f32, f16 or bf16"
        );
        anyhow::ensure!(
            self.engine == EngineName::Cpu || self.draft_model.is_none(),
            "--draft-model needs --engine cpu, since MLX's results may depend on the batch size: \
             remove it with --engine mlx"
        );
        anyhow::ensure!(
            self.speculate == SpeculateName::Auto || self.draft_model.is_none(),
            "--draft-model needs speculative decoding, and --speculate off disables it: remove one of \
             them"
        );
        Ok(())
    }

    /// Refuses a layout that the collectives do not support.
    pub(crate) fn check_layout(&self, layout: &Layout) -> Result<(), LoadError> {
        if layout.stage_count() > 1 && !self.has_deadlines() {
            return Err(
                "MLX's ring and JACCL all-reduce over all ranks, and this set has pipeline \
                        stages: use --collectives auto"
                    .into(),
            );
        }
        Ok(())
    }

    /// The engine's options.
    pub(crate) fn options(&self) -> EngineOptions {
        let kv_bytes = self.kv_memory.map(|size| size.0);
        let speculate = self.speculate.when();
        EngineOptions { kv_bytes, speculate, ..EngineOptions::STANDARD }
    }

    /// The same choice with one of MLX's own collectives.
    pub(crate) fn over(&self, distributed: &Distributed) -> Result<Self, String> {
        if self.engine != EngineName::Mlx {
            return Err("ring and jaccl need MLX: start this node with --engine mlx".to_owned());
        }
        let collectives = match distributed {
            Distributed::Ring { .. } => CollectivesName::Ring,
            Distributed::Jaccl { prefer_ring: true, .. } => CollectivesName::JacclRing,
            Distributed::Jaccl { .. } => CollectivesName::Jaccl,
        };
        Ok(Self { collectives, ..self.clone() })
    }

    /// The collectives of a group.
    const fn collectives(&self) -> Collectives {
        match self.collectives {
            CollectivesName::Auto | CollectivesName::Tcp | CollectivesName::Rdma => {
                Collectives::Own
            }
            CollectivesName::Ring => Collectives::Ring,
            CollectivesName::Jaccl | CollectivesName::JacclRing => Collectives::Jaccl,
        }
    }

    /// Opens the backend of a rank, before its package is read: with MLX's own collectives, ranks
    /// wait here for each other. `place` is rank and number of ranks.
    pub(crate) fn open(&self, threads: usize, place: [u32; 2]) -> Result<RankBackend, LoadError> {
        Ok(match self.engine {
            EngineName::Cpu => RankBackend::Cpu(self.cpu(threads)?),
            EngineName::Mlx => {
                let collectives = self.collectives();
                // Without other ranks nothing is handed over between GPU and processor.
                if place[0] == 0
                    && place[1] > 1
                    && let Some(line) = self.fast_sync_line()?
                {
                    say(&line);
                }
                RankBackend::Mlx(self.mlx(collectives, place)?)
            }
            EngineName::Scripted => return Err(ONLY_SERVE.into()),
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
        let backends = if self.engine == EngineName::Cpu {
            let backends = packages.iter().map(|_| self.cpu(threads)).collect::<Result<_, _>>();
            LocalBackends::Cpu(backends.map_err(anyhow::Error::from)?)
        } else if packages.len() > 1 {
            let error = anyhow::anyhow!("MLX supports one rank per process");
            return Err(Failure::from(error).hint("use --engine cpu, or a set for one node"));
        } else {
            LocalBackends::Mlx(self.mlx(Collectives::Own, [0, 1])?)
        };
        backends.logits(packages, &groups, tokens).map_err(Failure::wrong)
    }
}

/// Prints one line if weights were copied, and why.
pub(crate) fn say_copies(taken: &Taken, device: Device) {
    if taken.copied_tensors == 0 {
        return;
    }
    let why = match device {
        Device::Gpu => "Metal could not use them in place",
        Device::Cpu => "MLX's CPU build always copies",
    };
    say(&format!(
        "mlx: {} of {} tensors ({} of {}) were copied into MLX's memory: {why}",
        taken.copied_tensors,
        taken.tensors,
        size(taken.copied_bytes),
        size(taken.bytes)
    ));
}
