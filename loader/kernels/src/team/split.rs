//! Results shared out among threads: each task gets a part that no other has.

#![expect(unsafe_code, reason = "parts of one slice go to several threads")]

use std::{marker::PhantomData, ops::Range};

use super::Current;

/// A pointer that tasks share; each makes slices of its own part.
struct Shared<T>(*mut T);

// SAFETY: tasks make slices of disjoint parts, as if the slice had been split before.
unsafe impl<T: Send> Sync for Shared<T> {}

/// Calls `work` with the number and the elements of each run of `length` elements of `data`.
pub(crate) fn chunks<T: Send>(
    on: &Current,
    data: &mut [T],
    length: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    assert!(length > 0, "chunks have elements");
    let (count, total) = (data.len().div_ceil(length), data.len());
    let start = Shared(data.as_mut_ptr());
    let start = &start;
    on.each(count, &|index| {
        let first = index * length;
        let length = length.min(total - first);
        // SAFETY: the task with this number, of which there is one, has these elements; they lie
        // within the slice, which is borrowed until `each` returns.
        let chunk = unsafe { std::slice::from_raw_parts_mut(start.0.add(first), length) };
        work(index, chunk);
    });
}

/// Some columns of all rows of a matrix.
pub(crate) struct Columns<'a> {
    first: *mut f32,
    rows: usize,
    stride: usize,
    range: Range<usize>,
    borrowed: PhantomData<&'a mut [f32]>,
}

impl Columns<'_> {
    /// Which columns.
    pub(crate) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Rows of the matrix.
    pub(crate) const fn rows(&self) -> usize {
        self.rows
    }

    /// These columns of a row.
    #[inline]
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row exists and the columns lie within it; nobody else has them, and one
        // row is borrowed at a time.
        unsafe {
            std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.range.len())
        }
    }
}

/// Calls `work` with the first row and the columns of each part of a matrix `[rows, width]`:
/// `length` rows, or those that are left, of each of `ranges` of columns, which do not overlap.
pub(crate) fn parts(
    on: &Current,
    data: &mut [f32],
    width: usize,
    (length, ranges): (usize, &[Range<usize>]),
    work: impl Fn(usize, Columns<'_>) + Sync,
) {
    assert!(length > 0 && width > 0 && data.len().is_multiple_of(width), "rows of {width}");
    let apart = ranges.windows(2).all(|pair| pair[0].end <= pair[1].start);
    let within = ranges.iter().all(|range| range.start <= range.end && range.end <= width);
    assert!(apart && within, "columns that no other part has: {ranges:?} of {width}");
    let rows = data.len() / width;
    let start = &Shared(data.as_mut_ptr());
    on.each(rows.div_ceil(length) * ranges.len(), &|index| {
        let first_row = index / ranges.len() * length;
        let range = ranges[index % ranges.len()].clone();
        // SAFETY: the row exists, and the column lies within it or at its end.
        let first = unsafe { start.0.add(first_row * width + range.start) };
        let rows = length.min(rows - first_row);
        work(first_row, Columns { first, rows, stride: width, range, borrowed: PhantomData });
    });
}

/// Calls `work` with the number of each matrix `[rows, width]` and each run of `length` of its
/// columns, given `[width, length]` of each. All matrices are shared out together, so that no
/// thread waits between them.
pub(crate) fn columns_of_all(
    on: &Current,
    data: &mut [&mut [f32]],
    sizes: &[[usize; 2]],
    work: impl Fn(usize, Columns<'_>) + Sync,
) {
    assert_eq!(data.len(), sizes.len(), "a size for each matrix");
    let mut tasks = 0;
    let parts: Vec<_> = data
        .iter_mut()
        .zip(sizes)
        .map(|(data, [width, length])| {
            assert!(*length > 0 && *width > 0, "columns");
            assert!(data.len().is_multiple_of(*width), "rows of {width}");
            let first = tasks;
            tasks += width.div_ceil(*length);
            (first, data.len() / width, Shared(data.as_mut_ptr()))
        })
        .collect();
    let parts = &parts;
    on.each(tasks, &|index| {
        let number = parts.partition_point(|(first, ..)| *first <= index) - 1;
        let ((first, rows, start), [width, length]) = (&parts[number], sizes[number]);
        let begin = (index - first) * length;
        let range = begin..(begin + length).min(width);
        // SAFETY: the column lies within the first row, or one past an empty matrix is not used.
        let first = unsafe { start.0.add(if *rows == 0 { 0 } else { range.start }) };
        let columns = Columns { first, rows: *rows, stride: width, range, borrowed: PhantomData };
        work(number, columns);
    });
}
