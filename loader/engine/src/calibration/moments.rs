//! The sums of one layer. Matrices are known by where their weights lie; those that read the same
//! vectors share sums.

use std::{
    collections::HashMap,
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
    /// What has been summed in this step: the vectors' digest, and the matrix of how many.
    summed: HashMap<(Digest, usize, usize), usize>,
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
        self.state().summed.clear();
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
        let place = match self.places.get(&name) {
            Some(place) if self.moments[*place].modules[0] == name => *place,
            // The first of these modules has read, or will read, the same.
            Some(_) => return,
            None => {
                let key = (Digest::of(x.as_bytes()), index, count);
                if let Some(place) = self.summed.get(&key).copied()
                    && self.moments[place].inputs == inputs
                {
                    self.moments[place].modules.push(name.clone());
                    self.places.insert(name, place);
                    return;
                }
                self.begin_module(&name, count, inputs)
            }
        };
        // Only what another module may still be compared with.
        self.summed.insert((Digest::of(x.as_bytes()), index, count), place);
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

    /// The other half of what [`Self::add`] has summed.
    fn mirror(&mut self) {
        let block = self.block;
        for sums in self.sums.iter_mut().flat_map(|sums| sums.chunks_exact_mut(block * block)) {
            for input in 0..block {
                for other in input + 1..block {
                    sums[input * block + other] = sums[other * block + input];
                }
            }
        }
    }
}
