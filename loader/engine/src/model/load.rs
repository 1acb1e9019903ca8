//! From a package's tensors to a rank's weights. Every tensor is checked against architecture
//! and layout before it is used, and every tensor of the package has to be used.

use std::{cell::RefCell, collections::BTreeSet, ops::Range};

use shardpack_formats::{
    Spec,
    spec::{self, LayerPart},
};
use shardpack_kernels::matrix::affine_is_supported;
use shardpack_manifests::{TensorShard, manifest::MatrixFormat};
use shardpack_quantize::Dtype;

use super::{
    LoadError, Model, Projection, Shard, embedding_and_head::EmbeddingAndHead,
    embedding_dense::EmbeddingDense, layer::Layer, shard::CacheSlots,
};
use crate::{
    backend::{Backend, StoredMatrix, StoredWeights},
    loading::{Package, PackageTensor},
};

/// One dimension of a tensor: what this rank holds of how much.
#[derive(Clone)]
pub(super) struct TensorSlice {
    pub(super) held: Range<usize>,
    pub(super) full: usize,
}

impl TensorSlice {
    pub(super) const fn whole(full: usize) -> Self {
        Self { held: 0..full, full }
    }

    /// The slice counted in stored elements, `times / per` for each of ours; `None` where a shard
    /// would begin inside an element.
    fn stored(&self, times: usize, per: usize) -> Option<Self> {
        let scaled = |at: usize| (at * times).is_multiple_of(per).then_some(at * times / per);
        Some(Self {
            held: scaled(self.held.start)?..scaled(self.held.end)?,
            full: scaled(self.full)?,
        })
    }

    /// The slice where every element is two.
    pub(super) const fn doubled(&self) -> Self {
        Self { held: 2 * self.held.start..2 * self.held.end, full: 2 * self.full }
    }

    /// Rows or columns of heads of this width.
    pub(super) const fn heads(held: &Range<usize>, heads: u32, width: u32) -> Self {
        let width = width as usize;
        Self { held: held.start * width..held.end * width, full: heads as usize * width }
    }

    pub(super) fn is_sharded(&self) -> bool {
        self.held.len() != self.full
    }
}

/// A layer as its parts are loaded: its form, its tensors' prefix, and its place in the caches.
pub(super) struct LayerInfo<'a> {
    pub(super) index: usize,
    pub(super) form: &'a spec::Layer,
    pub(super) slots: CacheSlots,
}

/// The parts that a layer has.
#[derive(Clone, Copy)]
pub(super) struct LayerParts {
    pub(super) mixer: bool,
    pub(super) ffn: bool,
}

impl<'a> LayerInfo<'a> {
    pub(super) fn new(spec: &'a Spec, shard: &Shard, index: usize) -> Self {
        Self { index, form: &spec.layers[index], slots: shard.cache_slots(spec, index) }
    }

    /// The full name of one of the layer's modules or tensors.
    pub(super) fn name(&self, name: &str) -> String {
        format!("model.layers.{}.{name}", self.index)
    }

    pub(super) fn parts(&self) -> LayerParts {
        let has = |other| self.form.only != Some(other);
        LayerParts { mixer: has(LayerPart::FeedForward), ffn: has(LayerPart::Attention) }
    }
}

/// A package whose tensors are taken one by one.
pub(super) struct Loader<'a, B> {
    package: &'a Package,
    pub(super) backend: &'a B,
    pub(super) spec: &'a Spec,
    pub(super) shard: Shard,
    used: RefCell<BTreeSet<String>>,
}

impl<B: Backend> Model<B> {
    /// Takes this rank's weights from a package.
    pub fn load(package: &Package, backend: &B) -> Result<Self, LoadError> {
        let manifest = package.manifest();
        let spec = &manifest.architecture;
        let shard = Shard::new(spec, &manifest.layout, manifest.rank)?;
        let loader = Loader::new(package, backend, spec, shard);
        let model = loader.model()?;
        let used = loader.used.into_inner();
        match manifest.tensors.iter().find(|tensor| !used.contains(&tensor.name)) {
            Some(tensor) => {
                Err(LoadError::Unused { tensor: tensor.name.clone(), rank: model.shard.rank })
            }
            None => Ok(model),
        }
    }
}

impl<'a, B: Backend> Loader<'a, B> {
    pub(super) fn new(package: &'a Package, backend: &'a B, spec: &'a Spec, shard: Shard) -> Self {
        Self { package, backend, spec, shard, used: RefCell::default() }
    }
}

impl<B: Backend> Loader<'_, B> {
    fn model(&self) -> Result<Model<B>, LoadError> {
        Ok(Model {
            embedding_and_head: EmbeddingAndHead::load(self)?,
            embedding_dense: EmbeddingDense::load(self)?,
            layers: self
                .shard
                .layers(self.spec)
                .map(|index| Layer::load(self, index))
                .collect::<Result<_, _>>()?,
            spec: self.spec.clone(),
            shard: self.shard.clone(),
        })
    }

    pub(super) fn hidden(&self) -> TensorSlice {
        TensorSlice::whole(self.spec.hidden_size as usize)
    }

    /// A column-parallel projection (sharded by its outputs), with its bias if it has one.
    pub(super) fn column(
        &self,
        module: &str,
        outputs: &TensorSlice,
        has_bias: bool,
    ) -> Result<Option<Projection<B>>, LoadError> {
        let Some(matrix) = self.matrix(module, outputs, &self.hidden())? else { return Ok(None) };
        let name = format!("{module}.bias");
        let bias = has_bias.then(|| self.vector(&name, outputs)).transpose()?;
        Ok(Some(Projection { matrix, bias }))
    }

    /// The bias of a row-parallel projection, which one rank alone adds.
    pub(super) fn bias_once(
        &self,
        module: &str,
        has_bias: bool,
    ) -> Result<Option<B::Vector>, LoadError> {
        let name = format!("{module}.bias");
        let mine = has_bias && self.shard.is_leader;
        mine.then(|| self.vector(&name, &self.hidden())).transpose()
    }

    pub(super) fn vector(&self, name: &str, part: &TensorSlice) -> Result<B::Vector, LoadError> {
        Ok(self.backend.vector(self.floats(name, &[part])?))
    }

    /// A tensor of one element.
    pub(super) fn number(&self, name: &str) -> Result<f32, LoadError> {
        let is_single = |tensor: &PackageTensor| tensor.shape().is_empty();
        if self.package.tensor(name).is_some_and(is_single) {
            return Ok(values(self.floats(name, &[])?)[0]);
        }
        Ok(self.values(name, 1)?[0])
    }

    /// A tensor of so many elements.
    pub(super) fn values(&self, name: &str, count: usize) -> Result<Vec<f32>, LoadError> {
        self.floats(name, &[&TensorSlice::whole(count)]).map(values)
    }

    /// The values of a tensor that is held whole.
    pub(super) fn float_values(
        &self,
        name: &str,
        parts: &[&TensorSlice],
    ) -> Result<Vec<f32>, LoadError> {
        self.floats(name, parts).map(values)
    }

    /// A matrix; none where this rank's slice is empty.
    pub(super) fn matrix(
        &self,
        module: &str,
        outputs: &TensorSlice,
        inputs: &TensorSlice,
    ) -> Result<Option<B::Matrix>, LoadError> {
        if outputs.held.is_empty() || inputs.held.is_empty() {
            return Ok(None);
        }
        let dimensions = [outputs, inputs];
        let weights = self.weights(module, None, dimensions)?;
        let (outputs, inputs) = (outputs.held.len(), inputs.held.len());
        Ok(Some(self.backend.matrix(StoredMatrix { outputs, inputs, weights })))
    }

    /// The LM head, or the embedding that is one: a matrix whose products decide between tokens.
    pub(super) fn head_matrix(
        &self,
        module: &str,
        outputs: &TensorSlice,
    ) -> Result<Option<B::Matrix>, LoadError> {
        let hidden = self.hidden();
        if outputs.held.is_empty() || hidden.held.is_empty() {
            return Ok(None);
        }
        let weights = self.weights(module, None, [outputs, &hidden])?;
        let (outputs, inputs) = (outputs.held.len(), hidden.held.len());
        Ok(Some(self.backend.precise_matrix(StoredMatrix { outputs, inputs, weights })))
    }

    /// A matrix of which this rank holds something.
    pub(super) fn held_matrix(
        &self,
        module: &str,
        outputs: &TensorSlice,
        inputs: &TensorSlice,
    ) -> Result<B::Matrix, LoadError> {
        let empty = || LoadError::Layout {
            what: module.to_owned(),
            expected: "a part of it on a rank with heads".to_owned(),
            found: "none".to_owned(),
        };
        self.matrix(module, outputs, inputs)?.ok_or_else(empty)
    }

    /// A matrix that is never quantized, and held whole.
    pub(super) fn plain_matrix(
        &self,
        module: &str,
        outputs: &TensorSlice,
        inputs: &TensorSlice,
    ) -> Result<B::Matrix, LoadError> {
        self.float_matrix(&format!("{module}.weight"), outputs, inputs)
    }

    /// A router's matrix, whose products decide between experts.
    pub(super) fn router_matrix(
        &self,
        module: &str,
        experts: &TensorSlice,
    ) -> Result<B::Matrix, LoadError> {
        let (name, hidden) = (format!("{module}.weight"), self.hidden());
        let weights = StoredWeights::Plain(self.floats(&name, &[experts, &hidden])?.clone());
        let (outputs, inputs) = (experts.held.len(), hidden.held.len());
        Ok(self.backend.precise_matrix(StoredMatrix { outputs, inputs, weights }))
    }

    /// The same by the name of its tensor.
    pub(super) fn float_matrix(
        &self,
        name: &str,
        outputs: &TensorSlice,
        inputs: &TensorSlice,
    ) -> Result<B::Matrix, LoadError> {
        let weights = self.floats(name, &[outputs, inputs])?.clone();
        let (outputs, inputs) = (outputs.held.len(), inputs.held.len());
        let weights = StoredWeights::Plain(weights);
        Ok(self.backend.matrix(StoredMatrix { outputs, inputs, weights }))
    }

    /// Matrices one after the other `[stack, outputs, inputs]`, as one with all their outputs.
    pub(super) fn stack(
        &self,
        module: &str,
        stack: &TensorSlice,
        outputs: &TensorSlice,
        inputs: &TensorSlice,
    ) -> Result<B::Matrix, LoadError> {
        let weights = self.weights(module, Some(stack), [outputs, inputs])?;
        let (outputs, inputs) = (stack.held.len() * outputs.held.len(), inputs.held.len());
        Ok(self.backend.matrix(StoredMatrix { outputs, inputs, weights }))
    }

    /// A vector for each matrix of a stack.
    pub(super) fn stacked_vector(
        &self,
        name: &str,
        stack: &TensorSlice,
        part: &TensorSlice,
    ) -> Result<B::Vector, LoadError> {
        Ok(self.backend.vector(self.floats(name, &[stack, part])?))
    }

    /// The stored form of a matrix, or of a stack of them.
    fn weights(
        &self,
        module: &str,
        stack: Option<&TensorSlice>,
        [outputs, inputs]: [&TensorSlice; 2],
    ) -> Result<StoredWeights, LoadError> {
        let shape = |last| stack.into_iter().chain([outputs, last]).collect::<Vec<_>>();
        let name = format!("{module}.weight");
        Ok(match self.package.manifest().quantization.format_of(module) {
            MatrixFormat::Plain => {
                StoredWeights::Plain(self.floats(&name, &shape(inputs))?.clone())
            }
            format @ MatrixFormat::Affine { bits, group_size: group } => {
                if !affine_is_supported(bits, group) {
                    let expected = "2 to 6 or 8 bits, groups of 32, 64, 128".to_owned();
                    return Err(self.wrong(&name, expected, format.to_string()));
                }
                let (words, groups) = self.in_groups(&name, format, (bits, group), inputs)?;
                let words = self.words(&name, &shape(&words))?;
                let part = |suffix: &str| {
                    self.floats(&format!("{module}.{suffix}"), &shape(&groups)).cloned()
                };
                let (scales, biases) = (part("scales")?, part("biases")?);
                StoredWeights::Affine { words, scales, biases, bits, group }
            }
            whole @ MatrixFormat::Float(format) => {
                let form = (format.bits(), format.group_size());
                let (words, groups) = self.in_groups(&name, whole, form, inputs)?;
                let words = self.words(&name, &shape(&words))?;
                let scales =
                    self.tensor(&format!("{module}.scales"), &[Dtype::U8], &shape(&groups))?;
                StoredWeights::Float { words, scales: scales.clone(), format }
            }
        })
    }

    /// Inputs counted in words of packed values and in groups, which shards must not divide.
    fn in_groups(
        &self,
        name: &str,
        format: MatrixFormat,
        (bits, group): (u32, u32),
        inputs: &TensorSlice,
    ) -> Result<(TensorSlice, TensorSlice), LoadError> {
        let words = inputs.stored(bits as usize, u32::BITS as usize);
        let groups = inputs.stored(1, group as usize);
        words.zip(groups).ok_or_else(|| {
            let Range { start, end } = inputs.held;
            let slice = format!("inputs {start} to {end} of {}", inputs.full);
            self.wrong(name, format!("groups that divide {slice}"), format.to_string())
        })
    }

    /// Packed values, in an order that the backend reads.
    fn words(&self, name: &str, parts: &[&TensorSlice]) -> Result<PackageTensor, LoadError> {
        let words = self.tensor(name, &[Dtype::U32], parts)?;
        if !self.backend.reads(words.packing()) {
            let found = format!("{:?}", words.packing());
            return Err(self.wrong(name, "values as they are stored".into(), found));
        }
        Ok(words.clone())
    }

    pub(super) fn floats(
        &self,
        name: &str,
        parts: &[&TensorSlice],
    ) -> Result<&PackageTensor, LoadError> {
        self.tensor(name, &[Dtype::BF16, Dtype::F16, Dtype::F32], parts)
    }

    /// The tensor of this name, with one of these element types and these dimensions, of which at
    /// most one is sharded.
    fn tensor(
        &self,
        name: &str,
        dtypes: &[Dtype],
        parts: &[&TensorSlice],
    ) -> Result<&PackageTensor, LoadError> {
        let Some(tensor) = self.package.tensor(name) else {
            return Err(LoadError::Missing { tensor: name.to_owned(), rank: self.shard.rank });
        };
        if !dtypes.contains(&tensor.dtype()) {
            let expected = dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>();
            return Err(self.wrong(name, expected.join(" or "), tensor.dtype().to_string()));
        }
        let shape: Vec<_> = parts.iter().map(|part| part.held.len() as u64).collect();
        if tensor.shape() != shape {
            let found = format!("{:?}", tensor.shape());
            return Err(self.wrong(name, format!("shape {shape:?}"), found));
        }
        self.check_slice(name, tensor.shard(), parts)?;
        self.used.borrow_mut().insert(name.to_owned());
        Ok(tensor)
    }

    /// The right shape may still be the wrong slice. A range that covers everything is no shard.
    fn check_slice(
        &self,
        name: &str,
        shard: &TensorShard,
        parts: &[&TensorSlice],
    ) -> Result<(), LoadError> {
        let expected =
            parts.iter().enumerate().find(|(_, part)| part.is_sharded()).map(|(dim, part)| {
                (dim, part.held.start as u64, part.held.end as u64, part.full as u64)
            });
        let found = match shard {
            TensorShard::Range { dim, start, end, full, .. } if end - start != *full => {
                Some((*dim as usize, *start, *end, *full))
            }
            _ => None,
        };
        let shown = |shard| match shard {
            Some((dim, start, end, full)) => format!("{start}..{end} of {full} in dimension {dim}"),
            None => "the whole tensor".to_owned(),
        };
        if found == expected {
            Ok(())
        } else {
            Err(self.wrong(name, shown(expected), shown(found)))
        }
    }

    pub(super) fn wrong(&self, tensor: &str, expected: String, found: String) -> LoadError {
        LoadError::Tensor { tensor: tensor.to_owned(), rank: self.shard.rank, expected, found }
    }
}

fn values(tensor: &PackageTensor) -> Vec<f32> {
    tensor.floats().expect("its element type has been checked").to_vec()
}
