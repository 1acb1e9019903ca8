//! Memory for large intermediate results, used again by the next ones of about that size.
//!
//! The system takes large pieces back as soon as they are free and clears them when they are asked
//! for again: a step over a long prompt would spend a tenth of its time so.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Bytes from which on a piece is kept; smaller ones the allocator keeps by itself.
const LEAST_BYTES: usize = 64 << 10;

/// Pieces that are kept: a layer's, and not those of layers before.
const MOST_KEPT: usize = 12;

/// How many times as large as needed a piece may be.
const MOST_SPARE: usize = 4;

/// Buffers that are free at the moment.
pub struct Pool<T: 'static> {
    /// The one that was used last stands last.
    free: Mutex<Vec<Vec<T>>>,
}

impl<T: Copy + Default> Pool<T> {
    /// Holds nothing yet.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "pools are statics, made by a constant function"
    )]
    pub const fn new() -> Self {
        Self { free: Mutex::new(Vec::new()) }
    }

    /// `len` elements of any value.
    #[must_use]
    pub fn take(&'static self, len: usize) -> Buffer<T> {
        if len * size_of::<T>() < LEAST_BYTES {
            return Buffer { values: vec![T::default(); len], len, pool: None };
        }
        let mut free = self.free();
        let fits =
            |values: &&Vec<T>| (len..=len.saturating_mul(MOST_SPARE)).contains(&values.len());
        let best = free.iter().filter(fits).map(Vec::len).min();
        let found = best.and_then(|best| free.iter().rposition(|values| values.len() == best));
        let found = found.map(|index| free.remove(index));
        drop(free);
        let values = found.unwrap_or_else(|| vec![T::default(); len]);
        Buffer { values, len, pool: Some(self) }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<T>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Some elements, whose memory goes back to its pool.
pub struct Buffer<T: 'static> {
    // Invariant: at least `len` long.
    values: Vec<T>,
    len: usize,
    pool: Option<&'static Pool<T>>,
}

impl<T> Buffer<T> {
    /// The elements, which do not go back.
    #[must_use]
    pub fn into_vec(mut self) -> Vec<T> {
        let mut values = std::mem::take(&mut self.values);
        values.truncate(self.len);
        self.len = 0;
        self.pool = None;
        values
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let Some(pool) = self.pool else { return };
        let mut free = pool.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(std::mem::take(&mut self.values));
        if free.len() > MOST_KEPT {
            let oldest = free.remove(0);
            drop(free);
            drop(oldest);
        }
    }
}

impl<T> From<Vec<T>> for Buffer<T> {
    fn from(values: Vec<T>) -> Self {
        Self { len: values.len(), values, pool: None }
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values[..self.len]
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[..self.len]
    }
}

impl<T: Clone> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        self.to_vec().into()
    }
}

impl<T: fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = LEAST_BYTES;

    #[test]
    fn a_large_piece_is_used_again_and_a_small_one_is_not_kept() {
        static POOL: Pool<u8> = Pool::new();
        let mut first = POOL.take(LARGE + 1);
        first.fill(7);
        let place = first.as_ptr();
        drop(first);
        drop(POOL.take(8));
        assert_eq!(POOL.free().len(), 1);
        let again = POOL.take(LARGE);
        assert_eq!((again.as_ptr(), again.len()), (place, LARGE));
        assert_eq!(again.into_vec(), vec![7; LARGE]);
        assert!(POOL.free().is_empty());
    }

    #[test]
    fn a_piece_much_too_large_is_left_and_few_are_kept() {
        static POOL: Pool<u8> = Pool::new();
        drop(POOL.take(LARGE * (MOST_SPARE + 1)));
        drop(POOL.take(LARGE));
        assert_eq!(POOL.free().len(), 2);
        let all: Vec<_> = (0..2 * MOST_KEPT).map(|_| POOL.take(LARGE)).collect();
        drop(all);
        assert_eq!(POOL.free().len(), MOST_KEPT);
    }
}
