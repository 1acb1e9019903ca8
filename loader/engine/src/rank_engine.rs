//! The engine of a rank on the backend that was chosen at run time.
//!
//! What is generic over backends is instantiated by this file, and so compiled once, in this crate.
//! Callers choose a [`RankBackend`] and see none of the type parameters.

use std::sync::Arc;

use shardpack_collectives::Group;
use shardpack_engine_api::{ConstraintFactory, TokenId};
use shardpack_formats::Spec;
use shardpack_manifests::Manifest;
use shardpack_mlx::Device;

use crate::{
    backend::{
        Backend, Cpu, KvCache as _, Mlx, StepError,
        mlx::{DoesNotFit, MemoryNeed, MemoryPlan, Taken},
    },
    bench::{AllReduceTimes, all_reduce_in_graph},
    engine::{DraftModelError, Engine, EngineOptions, LocalModel, LogitsError, RankEngine},
    loading::Package,
    model::{LoadError, Model},
};

/// A rank's engine could not be built.
#[derive(Debug, thiserror::Error)]
pub enum RankEngineError {
    /// A package holds no model that can be run.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The draft model does not fit this backend or the model.
    #[error(transparent)]
    Draft(#[from] DraftModelError),
    /// The machine cannot hold the rank.
    #[error(transparent)]
    Memory(#[from] DoesNotFit),
    /// The backend refused its limits.
    #[error(transparent)]
    Limits(#[from] StepError),
}

/// The backend of one rank.
pub enum RankBackend {
    /// The built-in kernels.
    Cpu(Cpu),
    /// Apple's MLX.
    Mlx(Mlx),
}

impl RankBackend {
    /// Refuses a package that this machine cannot hold.
    pub fn check_memory(&self, manifest: &Manifest) -> Result<(), DoesNotFit> {
        if let Self::Mlx(mlx) = self {
            let weight_bytes = manifest.tensors.iter().map(|tensor| tensor.size).sum();
            let need = MemoryNeed { weight_bytes, kv_bytes: 0, least_kv_bytes: 0 };
            MemoryPlan::new(need, mlx.working_set())?;
        }
        Ok(())
    }

    /// This rank's engine over its open package, and over that of its draft model. With MLX,
    /// `note` hears what became of the weights on which device.
    pub fn rank_engine(
        self,
        package: &Package,
        draft: Option<&Package>,
        options: EngineOptions,
        constraints: Option<Box<dyn ConstraintFactory>>,
        note: &mut dyn FnMut(&Taken, Device),
    ) -> Result<Box<dyn RankEngine>, RankEngineError> {
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
                note(&taken, backend.library().device());
                let [kv_bytes, least_kv_bytes] = options.kv_bytes_of(&model, &backend);
                let weight_bytes = taken.bytes + taken.converted_bytes;
                let need = MemoryNeed { weight_bytes, kv_bytes, least_kv_bytes };
                let plan = MemoryPlan::new(need, backend.working_set())?;
                backend.set_limits(&plan)?;
                // Ranks without attention layers need no KV cache.
                let kv_bytes = (kv_bytes > 0).then_some(plan.kv_bytes);
                let options = EngineOptions {
                    kv_bytes: kv_bytes.or(options.kv_bytes),
                    prefill_tokens: plan.prefill_tokens.unwrap_or(options.prefill_tokens),
                    ..options
                };
                boxed(Engine::new(model, backend, options), constraints)
            }
        })
    }

    /// The cost of an all-reduce within this backend's work, as [`all_reduce_in_graph`].
    pub fn all_reduce_times(
        &self,
        group: &dyn Group,
        size_bytes: usize,
        rounds: usize,
    ) -> Result<AllReduceTimes, StepError> {
        match self {
            Self::Cpu(backend) => all_reduce_in_graph(backend, group, size_bytes, rounds),
            Self::Mlx(backend) => all_reduce_in_graph(backend, group, size_bytes, rounds),
        }
    }

    /// Logits `[tokens, vocab_size]` after each token; the other ranks of `group` are in other
    /// processes and make the same call.
    pub fn logits(
        self,
        package: &Package,
        group: Arc<dyn Group>,
        tokens: &[TokenId],
    ) -> Result<Vec<f32>, LogitsError> {
        match self {
            Self::Cpu(backend) => LocalModel::one_rank(package, group, backend)?.logits(tokens),
            Self::Mlx(backend) => LocalModel::one_rank(package, group, backend)?.logits(tokens),
        }
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

/// The backends of all ranks of a set in this process.
pub enum LocalBackends {
    /// The built-in kernels, one for each rank.
    Cpu(Vec<Cpu>),
    /// MLX, which takes one rank per process: two would block each other until the group times out.
    Mlx(Mlx),
}

impl LocalBackends {
    /// Logits `[tokens, vocab_size]` after each token, by the ranks of all packages of a set.
    /// `groups` are the ends of one rank group.
    pub fn logits(
        self,
        packages: &[Package],
        groups: &[Arc<dyn Group>],
        tokens: &[TokenId],
    ) -> Result<Vec<f32>, LogitsError> {
        match self {
            Self::Cpu(backends) => LocalModel::over(packages, groups, backends)?.logits(tokens),
            Self::Mlx(backend) => LocalModel::over(packages, groups, vec![backend])?.logits(tokens),
        }
    }
}

/// A model loaded for the built-in backend, and what its engine is chosen by.
pub struct CpuModel {
    backend: Cpu,
    model: Model<Cpu>,
}

impl CpuModel {
    /// Loads the model of a package.
    pub fn load(package: &Package, backend: Cpu) -> Result<Self, LoadError> {
        let model = Model::load(package, &backend)?;
        Ok(Self { backend, model })
    }

    /// What the model computes.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        self.model.spec()
    }

    /// Bytes of one page of the KV cache.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.backend.page_bytes(&self.model.cache_shape())
    }

    /// KV cache memory that `options` give it.
    #[must_use]
    pub fn kv_bytes(&self, options: &EngineOptions) -> u64 {
        let [bytes, _] = options.kv_bytes_of(&self.model, &self.backend);
        bytes
    }

    /// The engine of this rank, with a draft model on rank 0.
    pub fn engine(
        self,
        draft: Option<Self>,
        options: EngineOptions,
    ) -> Result<Engine<Cpu>, DraftModelError> {
        let engine = Engine::new(self.model, self.backend, options);
        match draft {
            Some(draft) => engine.with_draft_model(draft.model),
            None => Ok(engine),
        }
    }
}

/// What becomes of a package's weights when MLX takes them; the model is dropped again.
pub fn take_weights(package: &Package, backend: &Mlx) -> Result<Taken, LoadError> {
    let model = Model::load(package, backend)?;
    let taken = backend.taken();
    drop(model);
    Ok(taken)
}
