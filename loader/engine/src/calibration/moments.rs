//! The sums of one layer. Matrices are known by where their weights lie; those that read the same
//! vectors share sums.

use std::{
    borrow::Cow,
    collections::HashMap,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use shardpack_formats::calibration::block_of;
use shardpack_kernels::add_second_moments;
use shardpack_manifests::Digest;
use zerocopy::IntoBytes as _;

use crate::{
    backend::{StoredMatrix, cpu::InputObserver},
    loading::Package,
};

/// Rows and columns of moments that are mirrored at once.
const SQUARE: usize = 32;

/// Second moments of the inputs of some modules.
#[derive(Debug, PartialEq)]
pub struct Moments {
    /// Modules that read these inputs.
    pub modules: Vec<String>,
    /// Inputs of a matrix.
    pub inputs: usize,
    /// Consecutive inputs whose moments with each other were summed.
    pub block: usize,
    /// Vectors that each matrix of the stack has read.
    pub tokens: Vec<u64>,
    /// `Σ x xᵀ`, `[matrices, inputs / block, block, block]`, by matrix; empty where it has read none.
    pub sums: Vec<Vec<f32>>,
}

/// Sums of the layer that is being run.
#[derive(Default)]
pub(super) struct MomentSums(Mutex<State>);

#[derive(Default)]
struct State {
    /// Modules by the address of their weights.
    names: HashMap<usize, String>,
    /// Whose sums a module shares: an index into `moments`.
    places: HashMap<String, usize>,
    moments: Vec<Moments>,
    /// What has been summed in the first step: the vectors' digest, and the matrix of how many.
    summed: HashMap<(Digest, usize, usize), usize>,
    /// Whether this is a later step: who shares whose sums is known.
    is_later: bool,
}

impl MomentSums {
    /// Learns the names of a package's matrices, which stay where they are while it is run.
    pub(super) fn name(&self, package: &Package) {
        let mut state = self.state();
        for tensor in &package.manifest().tensors {
            let Some(module) = tensor.name.strip_suffix(".weight") else { continue };
            if let Some(held) = package.tensor(&tensor.name) {
                state.names.insert(held.bytes().as_ptr().addr(), module.to_owned());
            }
        }
    }

    /// A step begins.
    pub(super) fn begin(&self) {
        let mut state = self.state();
        state.summed.clear();
        state.is_later = !state.moments.is_empty();
    }

    /// Adds what the one matrix of a module reads, `[rows, inputs]`.
    pub(super) fn add(&self, module: &str, inputs: usize, x: &[f32]) {
        self.state().add(module.to_owned(), (0, 1), inputs, x);
    }

    /// What has been summed since it was taken last, in the order in which matrices were read first.
    pub(super) fn take(&self) -> Vec<Moments> {
        let mut state = self.state();
        state.places.clear();
        let mut moments = std::mem::take(&mut state.moments);
        moments.iter_mut().for_each(Moments::mirror);
        moments
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InputObserver for MomentSums {
    fn observe(&self, matrix: &StoredMatrix, index: usize, count: usize, x: &[f32]) {
        let weights = matrix.weights.main();
        let mut state = self.state();
        let Some(name) = state.names.get(&weights.bytes().as_ptr().addr()).cloned() else { return };
        state.add(name, (index, count), matrix.inputs, x);
    }
}

impl State {
    fn add(&mut self, name: String, (index, count): (usize, usize), inputs: usize, x: &[f32]) {
        if x.is_empty() {
            return;
        }
        let known = self.places.get(&name).copied();
        let key = (!self.is_later).then(|| (Digest::of(x.as_bytes()), index, count));
        let place = match known {
            Some(place) if self.moments[place].modules[0] == name => place,
            // The first of these modules has read, or will read, the same.
            Some(_) => return,
            None => {
                let same = key.and_then(|key| self.summed.get(&key).copied());
                if let Some(place) = same.filter(|place| self.moments[*place].inputs == inputs) {
                    self.moments[place].modules.push(name.clone());
                    self.places.insert(name, place);
                    return;
                }
                self.begin_module(&name, count, inputs)
            }
        };
        if let Some(key) = key {
            self.summed.insert(key, place);
        }
        self.moments[place].add(index, x);
    }

    fn begin_module(&mut self, name: &str, count: usize, inputs: usize) -> usize {
        let place = self.moments.len();
        self.moments.push(Moments {
            modules: vec![name.to_owned()],
            inputs,
            block: block_of(count as u64, inputs as u64) as usize,
            tokens: vec![0; count],
            sums: vec![Vec::new(); count],
        });
        self.places.insert(name.to_owned(), place);
        place
    }
}

impl Moments {
    fn add(&mut self, index: usize, x: &[f32]) {
        self.tokens[index] += (x.len() / self.inputs) as u64;
        let sums = &mut self.sums[index];
        sums.resize(self.inputs * self.block, 0.0);
        add_second_moments(x, self.inputs, self.block, sums);
    }

    /// The bytes of a matrix's sums as files have them; zeros for one that has read nothing.
    #[must_use]
    pub fn bytes(&self, matrix: usize) -> Cow<'_, [u8]> {
        match &self.sums[matrix][..] {
            [] => Cow::Owned(vec![0; self.inputs * self.block * size_of::<f32>()]),
            sums => Cow::Borrowed(float_bytes(sums)),
        }
    }

    /// The other half of what [`Self::add`] has summed, a square of it at a time, so that lines that are read
    /// across are read once.
    fn mirror(&mut self) {
        let block = self.block;
        for sums in self.sums.iter_mut().flat_map(|sums| sums.chunks_exact_mut(block * block)) {
            for (first, second) in squares(block) {
                for input in first.clone() {
                    for other in second.start.max(input + 1)..second.end {
                        sums[input * block + other] = sums[other * block + input];
                    }
                }
            }
        }
    }
}

/// Squares at and above the diagonal: their rows and columns.
fn squares(block: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let parts = move |from: usize| {
        (from..block).step_by(SQUARE).map(move |first| first..block.min(first + SQUARE))
    };
    parts(0).flat_map(move |rows| parts(rows.start).map(move |columns| (rows.clone(), columns)))
}

/// The bytes of floats as files have them.
#[must_use]
pub fn float_bytes(values: &[f32]) -> &[u8] {
    const { assert!(cfg!(target_endian = "little"), "floats of files are little-endian") };
    values.as_bytes()
}

/// The same, to be read from a file.
#[must_use]
pub fn float_bytes_mut(values: &mut [f32]) -> &mut [u8] {
    const { assert!(cfg!(target_endian = "little"), "floats of files are little-endian") };
    values.as_mut_bytes()
}
