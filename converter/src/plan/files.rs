//! Which bytes go into which file of which package.

use shardpack_formats::{
    CutRule, Dtype, Role, TensorPlan, container::TensorInfo, rules::EXPERTS_AXIS,
};
use shardpack_manifests::{Cut, Layout, manifest::MatrixFormat};

use super::{Part, Step, module_name};
use crate::package::{FilePlan, PlannedTensor};

/// A file of weights is closed before it grows beyond this: small enough to copy to any file
/// system and to send again, large enough that a trillion-parameter package has some hundred.
const MAX_FILE_BYTES: u64 = 4 << 30;

/// Where an uncut stored tensor goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// Into the shared files, which every package has.
    Shared,
    /// Into rank 0's own files.
    Once,
    /// In parts into the ranks' own files; the cut of each rank.
    Cut(Vec<Cut>),
}

impl Destination {
    /// Whether each rank has a part of its own.
    pub(crate) const fn is_cut(&self) -> bool {
        matches!(self, Self::Cut(_))
    }

    /// The cut that `rank` holds; `None` when it holds nothing.
    pub(crate) fn cut(&self, rank: u32) -> Option<Cut> {
        match self {
            Self::Shared => Some(Cut::Replicated),
            Self::Once => (rank == 0).then_some(Cut::Once),
            Self::Cut(cuts) => match &cuts[rank as usize] {
                Cut::Range { start, end, .. } if start == end => None,
                cut => Some(cut.clone()),
            },
        }
    }
}

/// The weight files of every package, in writing order.
pub(crate) struct PackageFiles {
    /// Files that are the same in every package.
    pub(crate) shared: Vec<FilePlan>,
    /// Files of each rank's own.
    pub(crate) own: Vec<Vec<FilePlan>>,
}

impl PackageFiles {
    pub(crate) fn bytes_per_rank(&self) -> Vec<u64> {
        let sum = |files: &[FilePlan]| {
            files.iter().flat_map(|file| &file.tensors).map(|tensor| tensor.info.size).sum::<u64>()
        };
        let shared = sum(&self.shared);
        self.own.iter().map(|files| shared + sum(files)).collect()
    }
}

/// Bytes of an uncut tensor as stored.
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
            let dtype = if tensor.exact { tensor.dtype } else { dtype };
            vec![(tensor.name.clone(), dtype, tensor.shape.clone())]
        }
        MatrixFormat::Affine { bits, group_size } => {
            let module = module_name(&tensor.name);
            let with_last = |last: u64| {
                let mut shape = tensor.shape.clone();
                if let Some(width) = shape.last_mut() {
                    *width = last;
                }
                shape
            };
            let width = tensor.shape.last().copied().unwrap_or(0);
            let groups = with_last(width / u64::from(group_size));
            vec![
                (format!("{module}.weight"), Dtype::U32, with_last(width * u64::from(bits) / 32)),
                (format!("{module}.scales"), dtype, groups.clone()),
                (format!("{module}.biases"), dtype, groups),
            ]
        }
    }
}

/// The parts of one tensor with their destinations.
pub(super) fn parts(
    tensor: &TensorPlan,
    format: MatrixFormat,
    dtype: Dtype,
    layout: &Layout,
) -> Vec<Part> {
    let stored = stored(tensor, format, dtype);
    stored
        .into_iter()
        .map(|(name, dtype, shape)| {
            let destination = destination(tensor, &shape, layout);
            Part { name, dtype, shape, destination }
        })
        .collect()
}

fn destination(tensor: &TensorPlan, shape: &[u64], layout: &Layout) -> Destination {
    if tensor.cut == CutRule::Once {
        return Destination::Once;
    }
    let whole = tensor.role == Role::Embed && !layout.embedding_cut;
    // Either experts are whole, or there is no such axis in the layout.
    let by_expert =
        tensor.cut.is_expert().then(|| Some((EXPERTS_AXIS, layout.axes.get(EXPERTS_AXIS)?)));
    let (name, axis, dim) = match by_expert.flatten() {
        Some((name, axis)) => (name, axis, 0),
        None if tensor.cut == CutRule::ExpertOnce => return Destination::Once,
        None => {
            let cut = tensor.cut.axis().zip(tensor.cut.dimension(shape.len())).filter(|_| !whole);
            let Some((name, dim)) = cut else { return Destination::Shared };
            (name, &layout.axes[name], dim)
        }
    };
    let (logical, full) = (axis.size * axis.unit, shape[dim]);
    let cuts = (0..layout.ranks).map(|rank| {
        let units = axis.units(rank);
        // Stored elements per unit may be a fraction (words of a packed dimension); the layout
        // has put boundaries where the result is whole.
        let stored = |units: u64| {
            let scaled = units * axis.unit * full;
            assert!(
                scaled.is_multiple_of(logical),
                "a cut of {} falls between groups",
                tensor.name
            );
            scaled / logical
        };
        Cut::Range {
            axis: name.to_owned(),
            dim: dim as u32,
            start: stored(units.start),
            end: stored(units.end),
            full,
        }
    });
    Destination::Cut(cuts.collect())
}

/// Distributes every stored tensor over files.
pub(super) fn plan(steps: &[Step], layout: &Layout) -> PackageFiles {
    let mut shared = Filler::new("model-shared");
    let mut own: Vec<Filler> = (0..layout.ranks).map(|_| Filler::new("model")).collect();
    for part in steps.iter().flat_map(|step| &step.parts) {
        match &part.destination {
            Destination::Shared => shared.add(part, Cut::Replicated),
            Destination::Once => own[0].add(part, Cut::Once),
            Destination::Cut(_) => {
                for (rank, filler) in own.iter_mut().enumerate() {
                    if let Some(cut) = part.destination.cut(rank as u32) {
                        filler.add(part, cut);
                    }
                }
            }
        }
    }
    PackageFiles { shared: shared.finish(), own: own.into_iter().map(Filler::finish).collect() }
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

    fn add(&mut self, part: &Part, cut: Cut) {
        let mut shape = part.shape.clone();
        if let Cut::Range { dim, start, end, .. } = &cut {
            shape[*dim as usize] = end - start;
        }
        let size = shape.iter().product::<u64>() * part.dtype.size_bytes() as u64;
        if self.files.is_empty() || self.size_bytes + size > MAX_FILE_BYTES {
            self.files.push(Vec::new());
            self.size_bytes = 0;
        }
        self.size_bytes += size;
        let info =
            TensorInfo { name: part.name.clone(), dtype: part.dtype, shape, offset: 0, size };
        self.files.last_mut().expect("a file was opened above").push(PlannedTensor { info, cut });
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
