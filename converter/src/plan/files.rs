//! Which bytes go into which file of which package.

use shardpack_containers::container::TensorInfo;
use shardpack_formats::{
    Normalised, Role, ShardingRule, StoredAs, TensorPlan, rules::EXPERTS_AXIS,
};
use shardpack_manifests::{Layout, TensorShard, manifest::MatrixFormat};
use shardpack_quantize::Dtype;

use super::{StoredTensor, TensorConversion, module_name, stacks::stacks};
use crate::package::{FilePlan, PlannedTensor};

/// A file of weights is closed before it grows beyond this: small enough to copy to any file
/// system and to send again, large enough that a trillion-parameter package has some hundred.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// Where an unsharded stored tensor goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// Into the shared files, which every package of a stage has.
    Shared,
    /// Into the own files of its stage's first rank.
    Once,
    /// Sharded into the ranks' own files; the shard of each rank.
    Sharded(Vec<TensorShard>),
}

impl Destination {
    /// Whether each rank has a part of its own.
    pub(crate) const fn is_sharded(&self) -> bool {
        matches!(self, Self::Sharded(_))
    }
}

impl StoredTensor {
    /// What `rank` holds of it; `None` when it holds nothing.
    fn shard(&self, layout: &Layout, rank: u32) -> Option<TensorShard> {
        let stage = layout.stage_of(rank);
        if !self.stages.contains(&stage) {
            return None;
        }
        match &self.destination {
            Destination::Shared => Some(TensorShard::Replicated),
            Destination::Once => {
                (rank == layout.stage_ranks(stage).start).then_some(TensorShard::Once)
            }
            Destination::Sharded(shards) => match &shards[rank as usize] {
                TensorShard::Range { start, end, .. } if start == end => None,
                shard => Some(shard.clone()),
            },
        }
    }
}

/// The weight files of every package, in writing order.
pub(crate) struct PackageFiles {
    /// For each stage the files that are the same in every package of it.
    pub(crate) shared: Vec<Vec<FilePlan>>,
    /// Files of each rank's own.
    pub(crate) own: Vec<Vec<FilePlan>>,
    /// The stage of each rank.
    pub(crate) stages: Vec<usize>,
}

impl PackageFiles {
    pub(crate) fn bytes_per_rank(&self) -> Vec<u64> {
        let sum = |files: &[FilePlan]| {
            files.iter().flat_map(|file| &file.tensors).map(|tensor| tensor.info.size).sum::<u64>()
        };
        let shared: Vec<u64> = self.shared.iter().map(|files| sum(files)).collect();
        let ranks = self.own.iter().zip(&self.stages);
        ranks.map(|(files, stage)| shared[*stage] + sum(files)).collect()
    }
}

/// Bytes of an unsharded tensor as stored.
pub(super) fn stored_size(tensor: &TensorPlan, format: MatrixFormat, dtype: Dtype) -> u64 {
    stored(tensor, format, dtype)
        .iter()
        .map(|(_, dtype, shape)| shape.iter().product::<u64>() * dtype.size_bytes() as u64)
        .sum()
}

/// Name, type and shape of what is stored for a tensor.
fn stored(
    tensor: &TensorPlan,
    format: MatrixFormat,
    dtype: Dtype,
) -> Vec<(String, Dtype, Vec<u64>)> {
    match format {
        MatrixFormat::Plain => {
            let dtype = match tensor.below {
                Some(_) => Dtype::F32,
                None if tensor.exact => tensor.dtype,
                None => dtype,
            };
            vec![(tensor.name.clone(), dtype, tensor.shape.clone())]
        }
        MatrixFormat::Affine { bits, group_size } => {
            let [weight, scales] = in_groups(tensor, (bits, group_size), dtype);
            let biases = (format!("{}.biases", module_name(&tensor.name)), dtype, scales.2.clone());
            vec![weight, scales, biases]
        }
        MatrixFormat::Float(format) => {
            in_groups(tensor, (format.bits(), format.group_size()), Dtype::U8).into()
        }
    }
}

/// Packed weights, and scales of a type.
fn in_groups(
    tensor: &TensorPlan,
    (bits, group_size): (u32, u32),
    scales: Dtype,
) -> [(String, Dtype, Vec<u64>); 2] {
    let module = module_name(&tensor.name);
    let with_last = |last: u64| {
        let mut shape = tensor.shape.clone();
        if let Some(width) = shape.last_mut() {
            *width = last;
        }
        shape
    };
    let width = tensor.shape.last().copied().unwrap_or(0);
    let words = with_last(width * u64::from(bits) / 32);
    let groups = with_last(width / u64::from(group_size));
    [(format!("{module}.weight"), Dtype::U32, words), (format!("{module}.scales"), scales, groups)]
}

/// The stages that hold a tensor. What belongs to no layer stands before the first or after the
/// last, and an embedding that is the output head too in both places.
fn stages(normalised: &Normalised, tensor: &TensorPlan, layout: &Layout) -> Vec<usize> {
    let last = layout.stage_count() - 1;
    match (tensor.layer, tensor.role) {
        (Some(layer), _) => layout.stages_of_layer(layer).collect(),
        (None, Role::Embed) if normalised.spec.tied_embeddings && last > 0 => vec![0, last],
        (None, Role::Embed) => vec![0],
        (None, _) => vec![last],
    }
}

/// The parts of one tensor with their destinations.
pub(super) fn parts(
    normalised: &Normalised,
    tensor: &TensorPlan,
    format: MatrixFormat,
    dtype: Dtype,
    layout: &Layout,
) -> Vec<StoredTensor> {
    let stored = stored(tensor, format, dtype);
    stored
        .into_iter()
        .map(|(name, dtype, shape)| {
            let destination = destination(tensor, &shape, layout);
            let stages = stages(normalised, tensor, layout);
            StoredTensor { name, dtype, shape, destination, stages }
        })
        .collect()
}

fn destination(tensor: &TensorPlan, shape: &[u64], layout: &Layout) -> Destination {
    if tensor.sharding == ShardingRule::Once {
        return Destination::Once;
    }
    let whole = tensor.role == Role::Embed && !layout.embedding_sharded;
    // Either experts are whole, or there is no such axis in the layout.
    let by_expert =
        tensor.sharding.is_expert().then(|| Some((EXPERTS_AXIS, layout.axes.get(EXPERTS_AXIS)?)));
    let (name, axis, dim) = match by_expert.flatten() {
        Some((name, axis)) => (name, axis, 0),
        None if tensor.sharding == ShardingRule::ExpertOnce => return Destination::Once,
        None => {
            let cut = tensor
                .sharding
                .axis()
                .zip(tensor.sharding.dimension(shape.len()))
                .filter(|_| !whole);
            let Some((name, dim)) = cut else { return Destination::Shared };
            (name, &layout.axes[name], dim)
        }
    };
    let (logical, full) = (axis.size * axis.unit, shape[dim]);
    let shards = (0..layout.ranks).map(|rank| {
        let units = axis.units(rank);
        // Stored elements per unit may be a fraction (u32 elements of a packed dimension); the
        // layout has put boundaries where the result is whole.
        let stored = |units: u64| {
            let scaled = units * axis.unit * full;
            assert!(
                scaled.is_multiple_of(logical),
                "a shard of {} ends between groups",
                tensor.name
            );
            scaled / logical
        };
        TensorShard::Range {
            axis: name.to_owned(),
            dim: dim as u32,
            start: stored(units.start),
            end: stored(units.end),
            full,
        }
    });
    Destination::Sharded(shards.collect())
}

/// Distributes every stored tensor over files.
pub(super) fn plan(steps: &[TensorConversion], layout: &Layout) -> PackageFiles {
    let fillers = |stem, count| (0..count).map(|_| Filler::new(stem)).collect::<Vec<_>>();
    let mut shared = fillers("model-shared", layout.stage_count());
    let mut own = fillers("model", layout.ranks as usize);
    for stack in stacks(steps) {
        for index in 0..stack.steps[0].parts.len() {
            let parts = || stack.steps.iter().map(|step| &step.parts[index]);
            let stored_as = stack.part_stored_as(index);
            let stored_as = stored_as.as_ref();
            let first = &stack.steps[0].parts[index];
            if first.destination == Destination::Shared {
                let held: Vec<_> = parts().map(|part| (part, TensorShard::Replicated)).collect();
                first.stages.iter().for_each(|stage| shared[*stage].add(&held, stored_as));
                continue;
            }
            for (rank, filler) in own.iter_mut().enumerate() {
                let held = |part| Some((part, StoredTensor::shard(part, layout, rank as u32)?));
                filler.add(&parts().filter_map(held).collect::<Vec<_>>(), stored_as);
            }
        }
    }
    let finish = |fillers: Vec<Filler>| fillers.into_iter().map(Filler::finish).collect();
    let stages = (0..layout.ranks).map(|rank| layout.stage_of(rank)).collect();
    PackageFiles { shared: finish(shared), own: finish(own), stages }
}

/// Fills files in order up to [`MAX_FILE_BYTES`].
struct Filler {
    stem: &'static str,
    files: Vec<Vec<PlannedTensor>>,
    size_bytes: u64,
}

impl Filler {
    const fn new(stem: &'static str) -> Self {
        Self { stem, files: Vec::new(), size_bytes: 0 }
    }

    /// Adds what is stored under one name, to one file.
    fn add(&mut self, parts: &[(&StoredTensor, TensorShard)], stored_as: Option<&StoredAs>) {
        let planned = parts.iter().map(|(part, shard)| planned(part, shard.clone(), stored_as));
        let planned: Vec<PlannedTensor> = planned.collect();
        let size: u64 = planned.iter().map(|tensor| tensor.info.size).sum();
        if planned.is_empty() {
            return;
        }
        if self.files.is_empty() || self.size_bytes + size > MAX_FILE_BYTES {
            self.files.push(Vec::new());
            self.size_bytes = 0;
        }
        self.size_bytes += size;
        self.files.last_mut().expect("a file was opened above").extend(planned);
    }

    fn finish(self) -> Vec<FilePlan> {
        let total = self.files.len();
        let name =
            |index: usize| format!("{}-{:05}-of-{total:05}.safetensors", self.stem, index + 1);
        self.files
            .into_iter()
            .enumerate()
            .map(|(index, tensors)| FilePlan::new(name(index), tensors))
            .collect()
    }
}

/// What a rank holds of a part.
fn planned(part: &StoredTensor, shard: TensorShard, stored_as: Option<&StoredAs>) -> PlannedTensor {
    let mut shape = part.shape.clone();
    if let TensorShard::Range { dim, start, end, .. } = &shard {
        shape[*dim as usize] = end - start;
    }
    let size = shape.iter().product::<u64>() * part.dtype.size_bytes() as u64;
    let info = TensorInfo { name: part.name.clone(), dtype: part.dtype, shape, offset: 0, size };
    PlannedTensor { info, shard, stored_as: stored_as.cloned() }
}
