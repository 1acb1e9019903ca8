//! Element-wise functions as one kernel each, and the drawing of graphs.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::{
    ffi::{CStr, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
};

use crate::{
    array::Array,
    library::Library,
    table::{In, Raw},
};

/// What [`build`] is called with.
struct Build<'a> {
    library: Library,
    function: &'a dyn Fn(&[Array]) -> Vec<Array>,
}

unsafe extern "C" fn build(
    context: *mut c_void,
    inputs: *const Raw,
    input_count: usize,
    outputs: *mut Raw,
    output_count: usize,
) -> i32 {
    // SAFETY: `Library::fused` gives a context that outlives its call, within which this one is.
    let context = unsafe { &*context.cast::<Build<'_>>() };
    let done = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: as many live arrays as said; each copy is a handle of its own.
        let inputs: Vec<Array> = (0..input_count)
            .map(|index| context.library.copy_of(unsafe { *inputs.add(index) }))
            .collect();
        let made = (context.function)(&inputs);
        if made.len() != output_count {
            return false;
        }
        for (index, array) in made.into_iter().enumerate() {
            // SAFETY: room for as many handles as said, which the C layer then owns.
            unsafe { *outputs.add(index) = array.into_raw() };
        }
        true
    }));
    i32::from(matches!(done, Ok(true)))
}

impl Library {
    /// `count` arrays that `function` makes of `inputs` element by element, in one kernel on a GPU.
    /// What `function` does must depend on nothing but `key` and its arguments: a kernel is traced
    /// once for each key.
    ///
    /// # Panics
    /// When `function` makes another number of arrays.
    #[must_use]
    pub fn fused(
        &self,
        key: u64,
        count: usize,
        inputs: &[&Array],
        function: &dyn Fn(&[Array]) -> Vec<Array>,
    ) -> Vec<Array> {
        let raw: Vec<In> = inputs.iter().map(|array| array.raw()).collect();
        let mut outputs: Vec<Raw> = vec![std::ptr::null_mut(); count];
        let mut context = Build { library: *self, function };
        // SAFETY: live arrays, as many as said, room for the outputs, and a context that outlives
        // the call; the C layer does not keep it.
        let code = unsafe {
            (self.table.sp_fused)(
                key,
                build,
                (&raw mut context).cast(),
                raw.as_ptr(),
                raw.len(),
                outputs.as_mut_ptr(),
                count,
            )
        };
        assert!(code == 1, "MLX refuses a fused function: {}", self.error());
        outputs.into_iter().map(|raw| self.array(raw)).collect()
    }

    /// The graph of what is not computed yet, in the DOT language.
    #[must_use]
    pub fn graph(&self, arrays: &[&Array]) -> String {
        let raw: Vec<In> = arrays.iter().map(|array| array.raw()).collect();
        // SAFETY: live arrays, as many as said.
        let text = unsafe { (self.table.sp_graph)(raw.as_ptr(), raw.len()) };
        assert!(!text.is_null(), "MLX draws no graph: {}", self.error());
        // SAFETY: a string with its end, which stays until the next call on this thread.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// Whether this thread's graphs have one marker for each kernel that a GPU would run, where
    /// MLX spells it out on a processor. Such graphs can be drawn, not computed.
    pub fn mark_kernels(&self, on: bool) {
        // SAFETY: takes a number.
        unsafe { (self.table.sp_mark_kernels)(i32::from(on)) }
    }

    /// Whether fused functions are compiled on a processor too, which takes a C++ compiler at run
    /// time.
    pub fn compile_always(&self, on: bool) {
        // SAFETY: takes a number.
        unsafe { (self.table.sp_compile_always)(i32::from(on)) }
    }
}
