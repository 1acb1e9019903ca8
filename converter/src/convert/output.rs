//! The open files of all packages, and where every shard of every tensor is written.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use rayon::prelude::*;
use shardpack_manifests::{TensorShard, manifest::FileEntry};

use super::Finished;
use crate::{
    package::{FilePlan, Hashes, OutputFile, WriteError, at, share},
    plan::{Destination, Plan},
};

/// Where one rank's shard of a stored tensor is written.
#[derive(Debug)]
pub(crate) struct FileRegion {
    pub(crate) file: Arc<OutputFile>,
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) shard: TensorShard,
}

/// The weight files of all packages.
pub(crate) struct Output {
    directories: Vec<PathBuf>,
    /// By stage; they lie in the package of its first rank.
    shared: Vec<Opened>,
    own: Vec<Opened>,
    /// Per step, per part: one region per rank, or one per stage for a shared part.
    regions: Vec<Vec<Vec<Option<FileRegion>>>>,
}

/// Entries of finished weight files: each stage's shared ones, and each rank's own.
pub(crate) struct WrittenFiles {
    pub(crate) shared: Vec<Vec<FileEntry>>,
    pub(crate) own: Vec<Vec<FileEntry>>,
    /// SHA-256 of each rank's files, the shared ones among them; empty unless they are signed.
    pub(crate) sha256: Vec<BTreeMap<String, [u8; 32]>>,
}

impl Output {
    /// Creates all files, or takes up those of an earlier run.
    pub(crate) fn open(directory: &Path, plan: &Plan) -> Result<Self, WriteError> {
        let directories: Vec<PathBuf> = (0..plan.packages.own.len())
            .map(|rank| directory.join(super::documents::package_name(rank)))
            .collect();
        for directory in &directories {
            at(directory, fs::create_dir_all(directory))?;
        }
        let open = |directory: &Path, files: &[FilePlan]| {
            let open =
                |file: &FilePlan| Ok((file.clone(), Arc::new(OutputFile::open(directory, file)?)));
            files.iter().map(open).collect::<Result<Vec<_>, WriteError>>()
        };
        let leaders = (0..plan.layout.stage_count()).map(|stage| leader(plan, stage));
        let shared =
            leaders.zip(&plan.packages.shared).map(|(rank, files)| open(&directories[rank], files));
        let shared = shared.collect::<Result<Vec<_>, _>>()?;
        let own = directories
            .iter()
            .zip(&plan.packages.own)
            .map(|(directory, files)| open(directory, files));
        let own = own.collect::<Result<Vec<_>, _>>()?;
        let regions = regions(plan, &shared, &own);
        Ok(Self { directories, shared, own, regions })
    }

    /// Where the shards of a part are written.
    pub(crate) fn regions(&self, step: usize, part: usize) -> &[Option<FileRegion>] {
        &self.regions[step][part]
    }

    /// Of what an earlier run says to have finished, that which is there: every shard is read
    /// back and hashed, because a journal can outlive the data of a machine that lost power.
    pub(crate) fn check(
        &self,
        plan: &Plan,
        earlier: BTreeMap<usize, Finished>,
    ) -> BTreeMap<usize, Finished> {
        let is_there = |(step, finished): &(usize, Finished)| {
            let Some(regions) = self.regions.get(*step) else { return false };
            let parts = plan.steps[*step].parts.len();
            parts == finished.shards.len()
                && regions.iter().zip(&finished.shards).all(|(regions, shards)| {
                    regions.len() == shards.len()
                        && regions.iter().zip(shards).all(|(region, shard)| match (region, shard) {
                            (None, None) => true,
                            (Some(region), Some(shard)) => region
                                .file
                                .digest(region.offset, region.size)
                                .is_ok_and(|found| found == *shard),
                            _ => false,
                        })
                })
        };
        let earlier: Vec<(usize, Finished)> = earlier.into_iter().collect();
        earlier.into_par_iter().filter(is_there).collect::<Vec<_>>().into_iter().collect()
    }

    /// Hashes all files, makes them durable, and shares the shared ones.
    pub(crate) fn finish(&self, plan: &Plan) -> Result<WrittenFiles, WriteError> {
        let signed = plan.options.sign.is_some();
        let hashes = if signed { Hashes::Signed } else { Hashes::Listed };
        let finish = |files: &[(FilePlan, Arc<OutputFile>)]| {
            files
                .par_iter()
                .map(|(plan, file)| file.finish(&plan.name, hashes))
                .collect::<Result<Vec<_>, _>>()
        };
        let finish_all = |all: &[Opened]| {
            all.par_iter().map(|files| finish(files)).collect::<Result<Vec<_>, WriteError>>()
        };
        let (shared, own) = (finish_all(&self.shared)?, finish_all(&self.own)?);
        let sha256 = |(own, stage): (&Vec<Hashed>, &usize)| {
            let files = shared[*stage].iter().chain(own);
            files.filter_map(|(entry, sha256)| Some((entry.name.clone(), (*sha256)?))).collect()
        };
        let sha256 = own.iter().zip(&plan.packages.stages).map(sha256).collect();
        let entries =
            |files: Vec<Hashed>| files.into_iter().map(|(entry, _)| entry).collect::<Vec<_>>();
        let shared = shared.into_iter().map(entries).collect();
        let own = own.into_iter().map(entries).collect();
        for (rank, (directory, stage)) in
            self.directories.iter().zip(&plan.packages.stages).enumerate()
        {
            let leader = leader(plan, *stage);
            for file in plan.packages.shared[*stage].iter().filter(|_| rank != leader) {
                share(&self.directories[leader].join(&file.name), &directory.join(&file.name))?;
            }
        }
        Ok(WrittenFiles { shared, own, sha256 })
    }
}

/// A finished file and its SHA-256.
type Hashed = (FileEntry, Option<[u8; 32]>);

type Opened = Vec<(FilePlan, Arc<OutputFile>)>;

/// The first rank of a stage.
fn leader(plan: &Plan, stage: usize) -> usize {
    plan.layout.stage_ranks(stage).start as usize
}

/// Finds every stored tensor's region by its name.
fn regions<'a>(
    plan: &Plan,
    shared: &'a [Opened],
    own: &'a [Opened],
) -> Vec<Vec<Vec<Option<FileRegion>>>> {
    type Index<'a> = HashMap<&'a str, (&'a FilePlan, usize, &'a Arc<OutputFile>)>;
    fn index(files: &Opened) -> Index<'_> {
        files
            .iter()
            .flat_map(|(plan, file)| {
                plan.tensors
                    .iter()
                    .enumerate()
                    .map(move |(at, tensor)| (tensor.info.name.as_str(), (plan, at, file)))
            })
            .collect()
    }
    let region = |index: &Index, name: &str| {
        index.get(name).map(|(plan, at, file)| {
            let tensor = &plan.tensors[*at];
            FileRegion {
                file: Arc::clone(file),
                offset: tensor.info.offset,
                size: tensor.info.size,
                shard: tensor.shard.clone(),
            }
        })
    };
    let indices =
        |all: &'a [Opened]| all.iter().map(|files| index(files)).collect::<Vec<Index<'a>>>();
    let (shared, own) = (indices(shared), indices(own));
    let part = |part: &crate::plan::StoredTensor| {
        let files = match &part.destination {
            Destination::Shared => &shared,
            Destination::Once | Destination::Sharded(_) => &own,
        };
        files.iter().map(|index| region(index, &part.name)).collect()
    };
    plan.steps.iter().map(|step| step.parts.iter().map(part).collect()).collect()
}
