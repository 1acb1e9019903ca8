//! Evaluation that does not wait, inputs that are written after their graph was built, and the best
//! tokens of rows of logits.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use crate::{
    array::{Array, handle},
    library::{Library, MlxError},
    table::In,
};

/// An array of which operations may be built before its values are known.
#[derive(Debug)]
pub struct LateInput {
    array: Array,
}

impl LateInput {
    /// The array, of zeros until the values are written. Nothing of it may be evaluated before.
    #[must_use]
    pub const fn array(&self) -> &Array {
        &self.array
    }

    /// Writes the values and ends the time in which they can be written.
    pub fn write(self, bytes: &[u8]) -> Result<(), MlxError> {
        let library = self.array.library();
        // SAFETY: an array of `copy_in`, whose buffer is its own and which no evaluation has read;
        // the C layer compares the sizes.
        let code = unsafe {
            (library.table.sp_overwrite)(
                self.array.raw().cast_mut(),
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        };
        library.done(code)
    }
}

/// The noise of some rows' tokens.
#[derive(Clone, Copy)]
pub struct Noise<'a> {
    /// `[rows, 2]` u32: low and high word of each row's key.
    pub keys: &'a Array,
    /// `[rows, 1]` f32.
    pub temperatures: &'a Array,
}

impl Library {
    /// An input of 32-bit values that are written later.
    #[must_use]
    pub fn late_input(&self, element: crate::Element, shape: &[usize]) -> LateInput {
        let bytes = vec![0; shape.iter().product::<usize>() * element.size_bytes()];
        LateInput { array: self.copy_in(&bytes, element, shape) }
    }

    /// Begins to compute the arrays; [`Library::eval`] of them waits.
    pub fn start(&self, arrays: &[&Array]) -> Result<(), MlxError> {
        let raw: Vec<In> = arrays.iter().map(|array| array.raw()).collect();
        // SAFETY: live arrays, as many as said.
        self.done(unsafe { (self.table.sp_async_eval)(raw.as_ptr(), raw.len()) })
    }
}

impl Array {
    /// Of rows of logits the two columns with the highest scores, `[rows, 6]` f32: column, logit
    /// and score of each. The score is the logit, or with noise the logit over the temperature plus
    /// Gumbel noise, approximately; the first column is for token `first`. NaN counts as the lowest
    /// score; ties go to the lower column.
    #[must_use]
    pub fn best_tokens(&self, noise: Option<Noise<'_>>, first: u32) -> Self {
        let keys = handle(noise.map(|noise| noise.keys));
        let temperatures = handle(noise.map(|noise| noise.temperatures));
        // SAFETY: live arrays; null where there is no noise.
        self.make(|table| unsafe { (table.sp_best_tokens)(self.raw(), keys, temperatures, first) })
    }
}
