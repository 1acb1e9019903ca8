//! Gradients of what a graph computes, by MLX's reverse mode.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    array::Array,
    library::{Library, MlxError},
    table::{In, Raw},
};

/// An array and how something that depends on it changes with what it is made of.
pub struct Gradients {
    /// The array.
    pub value: Array,
    /// The gradient of its product with the cotangent by each input, in the shape of that input.
    pub inputs: Vec<Array>,
}

/// What [`build`] is called with.
struct Build<'a> {
    library: Library,
    function: &'a mut dyn FnMut(&[Array]) -> Option<Array>,
}

unsafe extern "C" fn build(
    context: *mut c_void,
    inputs: *const Raw,
    input_count: usize,
    outputs: *mut Raw,
    _: usize,
) -> i32 {
    // SAFETY: `Library::gradients` gives a context that outlives its call and that nobody else uses
    // meanwhile; within that call this one is.
    let context = unsafe { &mut *context.cast::<Build<'_>>() };
    let made = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as many live arrays as said; each copy is a handle of its own.
        let inputs: Vec<Array> = (0..input_count)
            .map(|index| context.library.copy_of(unsafe { *inputs.add(index) }))
            .collect();
        (context.function)(&inputs)
    }));
    let Ok(Some(array)) = made else { return 0 };
    // SAFETY: room for one handle, which the C layer then owns.
    unsafe { *outputs = array.into_raw() };
    1
}

impl Library {
    /// The array that `function` makes of `inputs`, all floats, and its gradients. `cotangent` has the
    /// array's shape: what depends on the array changes by so much with each of its elements. Where
    /// `function` gives nothing, that is an error.
    pub fn gradients(
        &self,
        inputs: &[&Array],
        cotangent: &Array,
        function: &mut dyn FnMut(&[Array]) -> Option<Array>,
    ) -> Result<Gradients, MlxError> {
        let raw: Vec<In> = inputs.iter().map(|array| array.raw()).collect();
        let mut outputs: Vec<Raw> = vec![std::ptr::null_mut(); 1 + inputs.len()];
        let mut context = Build { library: *self, function };
        // SAFETY: live arrays, as many as said, room for the outputs, and a context that outlives
        // the call; the C layer does not keep it.
        let code = unsafe {
            (self.table.sp_gradients)(
                build,
                (&raw mut context).cast(),
                raw.as_ptr(),
                raw.len(),
                cotangent.raw(),
                outputs.as_mut_ptr(),
            )
        };
        self.done(code)?;
        let mut arrays = outputs.into_iter().map(|raw| self.array(raw));
        let value = arrays.next().expect("one more than there are inputs");
        Ok(Gradients { value, inputs: arrays.collect() })
    }
}
