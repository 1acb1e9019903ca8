//! Reads the packages of a set as the unsharded model that they hold together.
//!
//! Every byte comes out of a chunk that has its value in the manifest; every tensor is covered by
//! what the packages hold; and what they hold is what the rules make of the package's
//! configuration. Knows packages; does not know what is made of them, and keeps no tensor in
//! memory.

mod chunks;
mod error;
mod logical;
mod open;
mod tensors;

use std::{collections::BTreeMap, path::PathBuf};

use serde::Deserialize;
use serde_json::Value;
use shardpack_formats::Normalised;
use shardpack_manifests::Manifest;
use shardpack_quantize::Rounding;

pub use error::UnshardError;

use crate::{
    plan::{ConvertOptions, MAX_RANKS, Plan, PlanError, check_stages},
    report::TensorReport,
};
use chunks::Chunks;
use tensors::UnshardedTensor;

/// One package.
pub(crate) struct Member {
    pub(crate) directory: PathBuf,
    pub(crate) manifest: Manifest,
}

/// The parts of a set's `report.json` that no package holds.
#[derive(Deserialize)]
pub(crate) struct SetReport {
    /// What the conversion did to each tensor.
    pub(crate) tensors: BTreeMap<String, TensorReport>,
    /// The warnings that it printed.
    pub(crate) warnings: Vec<String>,
}

/// The packages of all ranks, opened as one unsharded model.
pub struct UnshardedModel {
    /// In rank order.
    members: Vec<Member>,
    tensors: BTreeMap<String, UnshardedTensor>,
    chunks: Chunks,
    /// Files of every package that are neither weights nor their index.
    pub(crate) texts: BTreeMap<String, Vec<u8>>,
    /// `config.json` as it was before it stated the quantization.
    pub(crate) config: Value,
    /// What the rules make of that.
    pub(crate) normalised: Normalised,
    /// Absent when packages were given without their set.
    pub(crate) report: Option<SetReport>,
}

/// Buffers that a reader keeps from block to block.
#[derive(Default)]
pub(crate) struct Scratch {
    shard: Vec<u8>,
}

impl UnshardedModel {
    /// Opens the folder of a set, a folder with the packages of one, or packages given one by
    /// one; in any order, but all of them. Reads documents and no weights.
    pub fn open(paths: &[PathBuf]) -> Result<Self, UnshardError> {
        let opened = open::open(paths)?;
        let tensors = tensors::unsharded(&opened.members)?;
        let manifest = &opened.members[0].manifest;
        let texts = open::texts(&opened.members[0])?;
        let (config, normalised) =
            logical::normalised(&opened.members[0].directory, manifest, &texts, &tensors)?;
        let chunks = Chunks::default();
        let (members, report) = (opened.members, opened.report);
        Ok(Self { members, tensors, chunks, texts, config, normalised, report })
    }

    /// What every package says of the whole: the manifest of rank 0.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.members[0].manifest
    }

    /// A plan that writes these weights, as they are stored, for other nodes.
    pub(crate) fn plan(&self, options: ConvertOptions) -> Result<Plan, UnshardError> {
        if !(1..=MAX_RANKS).contains(&options.nodes.count()) {
            let value = options.nodes.count().to_string();
            let possible = "1 to 8 nodes are";
            return Err(PlanError::Option { option: "--nodes", value, possible }.into());
        }
        check_stages(&options, &self.normalised.spec)?;
        let manifest = self.manifest();
        let quantization = manifest.quantization.clone();
        let options = ConvertOptions { name: manifest.name.clone(), ..options };
        let warnings = self.report.as_ref().map_or_else(Vec::new, |report| report.warnings.clone());
        // Nothing is rounded again: any rule will do.
        let rounding = Rounding::MlxCpu;
        let plan = Plan::of(self.normalised.clone(), quantization, options, rounding, warnings);
        self.check_parts(&plan)?;
        Ok(plan)
    }

    /// The packages must hold exactly what such a model stores.
    fn check_parts(&self, plan: &Plan) -> Result<(), UnshardError> {
        let mut expected = 0;
        for part in plan.steps.iter().flat_map(|step| &step.parts) {
            expected += 1;
            let found = self.tensors.get(&part.name);
            let same =
                found.is_some_and(|found| found.dtype == part.dtype && found.shape == part.shape);
            if !same {
                let found = found.map_or_else(
                    || "nothing".to_owned(),
                    |found| format!("{} {:?}", found.dtype, found.shape),
                );
                return Err(UnshardError::Tensor {
                    tensor: part.name.clone(),
                    problem: format!("expected {} {:?}, found {found}", part.dtype, part.shape),
                });
            }
        }
        if expected == self.tensors.len() {
            return Ok(());
        }
        let planned = |name: &String| {
            plan.steps.iter().flat_map(|step| &step.parts).any(|part| part.name == *name)
        };
        let tensor = self.tensors.keys().find(|name| !planned(name)).cloned().unwrap_or_default();
        Err(UnshardError::Tensor { tensor, problem: "no part of this model".to_owned() })
    }

    /// Bytes of all tensors, unsharded.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.tensors.values().map(UnshardedTensor::size_bytes).sum()
    }

    /// Sets how many bytes of checked chunks are kept for the next reader.
    pub(crate) fn keep_bytes(&self, bytes: u64) {
        self.chunks.keep_bytes(bytes);
    }

    /// Fills `out` with rows `first..first + rows` of a stored tensor, unsharded.
    ///
    /// # Panics
    /// When there is no such tensor or row.
    pub(crate) fn rows(
        &self,
        tensor: &str,
        (first, rows): (u64, u64),
        out: &mut Vec<u8>,
        scratch: &mut Scratch,
    ) -> Result<(), UnshardError> {
        let unsharded = &self.tensors[tensor];
        assert!(first + rows <= unsharded.rows(), "rows of the tensor");
        out.resize((rows * unsharded.row_bytes()) as usize, 0);
        for slice in &unsharded.slices {
            let member = &self.members[slice.member];
            let read = |offset, out: &mut [u8]| {
                self.chunks.read(member, (slice.member, slice.file), offset, out)
            };
            let entry = &member.manifest.tensors[slice.tensor];
            slice.rows(unsharded, entry, (first, rows), out, &mut scratch.shard, &read)?;
        }
        Ok(())
    }
}
