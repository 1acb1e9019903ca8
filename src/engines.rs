//! Which engine computes, where installed ones are kept, and how a rank gets one.

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use shardpack_formats::memory::KvType;
use shardpack_loader::{
    backend::{
        Arithmetic, Backend, Collectives, Cpu, CpuError, CpuOptions, Mlx,
        mlx::{MemoryNeed, MemoryPlan, Taken},
    },
    cluster::LoadError,
    engine::{
        ConstraintFactory, DraftModelError, Engine, EngineOptions, LocalModel, RankEngine,
        Speculate, TokenId, memory_group,
    },
    model::Model,
    open::{OpenOptions, Package, Packing},
};
use shardpack_manifests::{Layout, Manifest};
use shardpack_mlx::{distributed::Distributed, runtime};

use crate::{
    args::{CollectivesName, EngineChoice, EngineName, KvFormat, SpeculateName},
    failure::Failure,
    progress::{say, size},
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

const ONLY_SERVE: &str = "the scripted engine is the server's alone: serve --engine scripted FILE";

impl KvFormat {
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

impl EngineChoice {
    /// The same choice for another process of this program.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let engine = match self.engine {
            EngineName::Cpu => "cpu",
            EngineName::Mlx => "mlx",
            EngineName::Scripted => "scripted",
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
        let kv_memory = self.kv_memory.map(|size| size.0.to_string());
        if let Some(bytes) = &kv_memory {
            arguments.extend(["--kv-memory", bytes]);
        }
        arguments.extend(["--kv-type", self.kv_type.name()]);
        if self.speculate == SpeculateName::Off {
            arguments.extend(["--speculate", "off"]);
        }
        let mut arguments: Vec<OsString> = arguments.into_iter().map(OsString::from).collect();
        if let Some(set) = &self.draft_model {
            arguments.extend(["--draft-model".into(), set.into()]);
        }
        arguments
    }

    /// Whether a lost rank is an error to the others, and not a hang.
    pub(crate) fn has_deadlines(&self) -> bool {
        !matches!(self.collectives, CollectivesName::Ring | CollectivesName::Jaccl)
    }

    /// MLX for a rank, as asked for.
    fn mlx(&self, collectives: Collectives, place: [u32; 2]) -> anyhow::Result<Mlx> {
        let mlx = Mlx::open(&mlx_folder(None)?, None, collectives, place)?;
        Ok(mlx.with_kv(self.kv_type.kv_type())?)
    }

    /// Our own kernels, as asked for.
    fn cpu(&self, threads: usize) -> Result<Cpu, CpuError> {
        Ok(Cpu::with_options(&self.cpu_options(threads))?.with_kv(self.kv_type.kv_type()))
    }

    fn cpu_options(&self, threads: usize) -> CpuOptions {
        let arithmetic = if self.exact { Arithmetic::Exact } else { Arithmetic::Fast };
        CpuOptions { threads, platform: self.platform.clone(), arithmetic }
    }

    /// How a package is opened for this engine, by so many threads.
    pub(crate) fn opening(&self, threads: usize) -> Result<OpenOptions, CpuError> {
        let packing = match self.engine {
            EngineName::Cpu => self.cpu_options(threads).packing()?,
            EngineName::Mlx | EngineName::Scripted => Packing::Stored,
        };
        Ok(OpenOptions { threads, packing })
    }

    /// Refuses what cannot be, before anything is started.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.engine != EngineName::Scripted, "{ONLY_SERVE}");
        self.check_arguments()?;
        if self.engine == EngineName::Cpu {
            // No threads: what is asked for is only checked.
            self.cpu(1)?;
        } else {
            runtime::check(&mlx_folder(None)?)?;
        }
        Ok(())
    }

    /// Refuses what does not go together.
    pub(crate) fn check_arguments(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.engine == EngineName::Mlx || self.has_deadlines(),
            "ring and jaccl are MLX's own collectives: they go with --engine mlx"
        );
        let of_cpu = self.exact || self.platform.is_some();
        anyhow::ensure!(
            self.engine == EngineName::Cpu || !of_cpu,
            "--platform and --exact are the cpu engine's: leave them out with --engine mlx"
        );
        anyhow::ensure!(
            self.engine == EngineName::Cpu || self.kv_type != KvFormat::Q8,
            "--kv-type q8 is the cpu engine's: with --engine mlx it is f32, f16 or bf16"
        );
        anyhow::ensure!(
            self.engine == EngineName::Cpu || self.draft_model.is_none(),
            "--draft-model is the cpu engine's, since MLX's results may depend on how many rows \
             are computed together: leave it out with --engine mlx"
        );
        anyhow::ensure!(
            self.speculate == SpeculateName::Auto || self.draft_model.is_none(),
            "--draft-model guesses, and --speculate off asks for no guesses: leave one of them out"
        );
        Ok(())
    }

    /// Refuses a cut that the collectives cannot serve.
    pub(crate) fn check_layout(&self, layout: &Layout) -> Result<(), LoadError> {
        if layout.stage_count() > 1 && !self.has_deadlines() {
            return Err("MLX's ring and JACCL sum over all ranks, and this set has pipeline \
                        stages: use --collectives own"
                .into());
        }
        Ok(())
    }

    /// What an engine is told beside its standard.
    pub(crate) fn options(&self) -> EngineOptions {
        let kv_bytes = self.kv_memory.map(|size| size.0);
        let speculate = self.speculate.when();
        EngineOptions { kv_bytes, speculate, ..EngineOptions::STANDARD }
    }

    /// The same choice with one of MLX's own layers.
    pub(crate) fn over(&self, distributed: &Distributed) -> Result<Self, String> {
        if self.engine != EngineName::Mlx {
            return Err("ring and jaccl need MLX: start this node with --engine mlx".to_owned());
        }
        let collectives = match distributed {
            Distributed::Ring { .. } => CollectivesName::Ring,
            Distributed::Jaccl { .. } => CollectivesName::Jaccl,
        };
        Ok(Self { collectives, ..self.clone() })
    }

    /// Who carries the sums of a group of `ranks`, with the reason where we choose.
    fn collectives(&self, [rank, ranks]: [u32; 2]) -> Collectives {
        match self.collectives {
            CollectivesName::Own => Collectives::Own,
            CollectivesName::Ring => Collectives::Ring,
            CollectivesName::Jaccl => Collectives::Jaccl,
            CollectivesName::Auto => {
                if ranks > 1 && rank == 0 {
                    say("collectives: own, since MLX's ring and JACCL hang when a rank is lost");
                }
                Collectives::Own
            }
        }
    }

    /// What computes a rank, before its package is read: ranks of one of MLX's own groups wait
    /// here for each other. `place` is rank and number of ranks.
    pub(crate) fn open(&self, threads: usize, place: [u32; 2]) -> Result<Opened, LoadError> {
        Ok(match self.engine {
            EngineName::Cpu => Opened::Cpu(self.cpu(threads)?),
            EngineName::Mlx => {
                let collectives = self.collectives(place);
                Opened::Mlx(self.mlx(collectives, place)?)
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
        let backends = vec![self.mlx(Collectives::Own, [0, 1])?];
        let model = LocalModel::over(packages, &groups, backends).map_err(Failure::wrong)?;
        model.logits(tokens).map_err(Failure::wrong)
    }
}

/// What computes a rank.
pub(crate) enum Opened {
    Cpu(Cpu),
    Mlx(Mlx),
}

impl Opened {
    /// Refuses a package that this machine cannot hold.
    pub(crate) fn check_memory(&self, manifest: &Manifest) -> Result<(), LoadError> {
        if let Self::Mlx(mlx) = self {
            let weight_bytes = manifest.tensors.iter().map(|tensor| tensor.size).sum();
            MemoryPlan::new(
                MemoryNeed { weight_bytes, kv_bytes: 0, least_kv_bytes: 0 },
                mlx.working_set(),
            )?;
        }
        Ok(())
    }

    /// This rank's engine over its open package, and over that of the model that guesses for it.
    pub(crate) fn rank_engine(
        self,
        package: &Package,
        draft: Option<&Package>,
        options: EngineOptions,
        constraints: Option<Box<dyn ConstraintFactory>>,
    ) -> Result<Box<dyn RankEngine>, LoadError> {
        Ok(match self {
            Self::Cpu(backend) => {
                let model = Model::load(package, &backend)?;
                let draft = draft.map(|draft| Model::load(draft, &backend)).transpose()?;
                let engine = Engine::new(model, backend, options);
                let engine = match draft {
                    Some(draft) => engine.with_draft_model(draft)?,
                    None => engine,
                };
                boxed(engine, constraints)
            }
            Self::Mlx(_) if draft.is_some() => return Err(DraftModelError::Backend.into()),
            Self::Mlx(backend) => {
                let model = Model::load(package, &backend)?;
                let taken = backend.taken();
                say_copies(&taken, backend.working_set().is_some());
                let [kv_bytes, least_kv_bytes] = options.kv_bytes_of(&model, &backend);
                let need = MemoryNeed { weight_bytes: taken.bytes, kv_bytes, least_kv_bytes };
                let plan = MemoryPlan::new(need, backend.working_set())?;
                backend.set_limits(&plan)?;
                // Ranks without keys and values leave them to others.
                let kv_bytes = (kv_bytes > 0).then_some(plan.kv_bytes);
                let options = EngineOptions { kv_bytes: kv_bytes.or(options.kv_bytes), ..options };
                boxed(Engine::new(model, backend, options), constraints)
            }
        })
    }
}

fn boxed<B: Backend + 'static>(
    engine: Engine<B>,
    constraints: Option<Box<dyn ConstraintFactory>>,
) -> Box<dyn RankEngine> {
    match constraints {
        Some(factory) => Box::new(engine.with_constraints(factory)),
        None => Box::new(engine),
    }
}

/// One line where weights are in memory twice for a moment, and why.
fn say_copies(taken: &Taken, gpu: bool) {
    if taken.copied_tensors == 0 {
        return;
    }
    let why = if gpu {
        "Metal did not take them where they lie"
    } else {
        "MLX's build for processors always copies"
    };
    say(&format!(
        "mlx: {} of {} tensors ({} of {}) were copied into MLX's memory: {why}",
        taken.copied_tensors,
        taken.tensors,
        size(taken.copied_bytes),
        size(taken.bytes)
    ));
}
