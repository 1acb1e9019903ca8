//! Which matrix follows which, so that its beginning is prefetched: the order is the same in every
//! step, so the last step tells.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use shardpack_kernels::{Beginning, Matrix};

/// What is known about the order of products.
#[derive(Default)]
pub(super) struct PrefetchOrder(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// By the address of the matrix before.
    after: HashMap<usize, Following>,
    last: Option<usize>,
}

/// The matrix that followed another.
struct Following {
    address: usize,
    /// Where it is read first.
    beginning: Arc<Beginning>,
}

impl PrefetchOrder {
    /// Takes note of products with these matrices, and returns what came after them the last time.
    pub(super) fn note(&self, matrices: &[Matrix<'_>]) -> Option<Arc<Beginning>> {
        let name = matrices.first()?.address();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = known.last.replace(name) {
            let is_known = known.after.get(&last).is_some_and(|next| next.address == name);
            if !is_known {
                let beginning = Arc::new(Beginning::new(matrices));
                known.after.insert(last, Following { address: name, beginning });
            }
        }
        known.after.get(&name).map(|next| Arc::clone(&next.beginning))
    }
}

#[cfg(test)]
mod tests {
    use shardpack_kernels::Floats;

    use super::*;

    #[test]
    fn what_came_next_is_known_when_it_comes_again() {
        let weights: Vec<Vec<f32>> = (0..3).map(|_| vec![0.0; 6]).collect();
        let matrix = |index: usize| Matrix::plain(2, 3, Floats::F32(&weights[index]));
        let order = PrefetchOrder::default();
        let knows = |index: usize| order.note(&[matrix(index)]).is_some();
        assert_eq!([0, 1, 2].map(knows), [false; 3]);
        // What comes after the last one is learnt with the first.
        assert_eq!([0, 1, 2].map(knows), [true; 3]);
        // Another order takes the place of the one before.
        let first_of = |index: usize| {
            let known = order.0.lock().unwrap();
            known.after[&matrix(index).address()].address
        };
        assert_eq!(first_of(0), matrix(1).address());
        assert_eq!([0, 2].map(knows), [true; 2]);
        assert_eq!(first_of(0), matrix(2).address());
        assert!(order.note(&[]).is_none());
    }
}
