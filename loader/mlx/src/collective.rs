//! Collectives as primitives of MLX's graph: MLX's stream thread calls them when their inputs are
//! ready.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::{
    cell::RefCell,
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
};

use half::bf16;

use crate::{
    array::Array,
    library::{Library, MlxError},
};

/// The collectives of an evaluation. It is called on MLX's stream thread, must
/// return by its own deadline and must not use MLX.
pub trait Collective: Send {
    /// All-reduce: replaces the values by their sums over the ranks. An error ends the evaluation.
    fn sum(&mut self, values: &mut [f32]) -> bool;

    /// The same for values in bfloat16; by default as f32, rounded once.
    fn sum_bf16(&mut self, values: &mut [bf16]) -> bool {
        let mut floats: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        let done = self.sum(&mut floats);
        for (value, float) in values.iter_mut().zip(floats) {
            *value = bf16::from_f32(float);
        }
        done
    }

    /// All-gather: every rank's values, in rank order, into `all`.
    fn gather(&mut self, mine: &[f32], all: &mut [f32]) -> bool;
}

const SUM: i32 = 0;
const GATHER: i32 = 1;
const SUM_BF16: i32 = 2;

/// The code that the C layer keeps for a failed call; what failed is the [`Collective`]'s to know.
const FAILED: i32 = 1;

/// What the context pointer of the C layer points to during an evaluation.
struct Context<'a>(Mutex<RefCell<&'a mut dyn Collective>>);

unsafe extern "C" fn call(
    context: *mut c_void,
    kind: i32,
    input: *const c_void,
    input_bytes: usize,
    output: *mut c_void,
    output_bytes: usize,
) -> i32 {
    if context.is_null() {
        return FAILED;
    }
    // SAFETY: set by `with_collective`, which outlives the evaluation that calls us.
    let context = unsafe { &*context.cast::<Context<'_>>() };
    let (inputs, outputs) = (input_bytes / 4, output_bytes / 4);
    let done = catch_unwind(AssertUnwindSafe(|| {
        let guard = context.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut collective = guard.borrow_mut();
        match kind {
            SUM | SUM_BF16 => {
                if !std::ptr::eq(input, output.cast_const()) {
                    // SAFETY: MLX gives two distinct buffers of these sizes.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            input.cast::<u8>(),
                            output.cast(),
                            output_bytes,
                        );
                    };
                }
                if kind == SUM_BF16 {
                    let len = output_bytes / 2;
                    // SAFETY: a buffer of bf16 that nobody else touches while the task runs; MLX
                    // aligns its buffers to at least 16 bytes.
                    let values =
                        unsafe { std::slice::from_raw_parts_mut(output.cast::<bf16>(), len) };
                    return collective.sum_bf16(values);
                }
                // SAFETY: the same of f32.
                let values =
                    unsafe { std::slice::from_raw_parts_mut(output.cast::<f32>(), outputs) };
                collective.sum(values)
            }
            GATHER => {
                // SAFETY: as above; the input is not written while the task runs.
                let mine = unsafe { std::slice::from_raw_parts(input.cast::<f32>(), inputs) };
                // SAFETY: as above; a gathered output never shares its input's buffer.
                let all = unsafe { std::slice::from_raw_parts_mut(output.cast::<f32>(), outputs) };
                collective.gather(mine, all)
            }
            _ => false,
        }
    }));
    if matches!(done, Ok(true)) { 0 } else { FAILED }
}

impl Library {
    /// Evaluates with `collective` for the sums and gatherings of the graph. `work` is one or
    /// more evaluations, and waits for what it starts; whatever they return, a failed collective is
    /// an error here.
    pub fn with_collective<R>(
        &self,
        collective: &mut dyn Collective,
        work: impl FnOnce() -> Result<R, MlxError>,
    ) -> Result<R, MlxError> {
        /// Ends the evaluation's collectives, after an unwinding of `work` too: MLX's stream thread
        /// may still be in one of them.
        struct Attached(Library, bool);
        impl Drop for Attached {
            fn drop(&mut self) {
                let Self(library, broken) = self;
                if *broken {
                    // The tasks of a broken evaluation end before the context does.
                    // SAFETY: takes the context.
                    unsafe { (library.table.sp_reset)(library.context) };
                }
                // SAFETY: no function, no context.
                unsafe {
                    (library.table.sp_set_collective)(library.context, None, std::ptr::null_mut());
                };
            }
        }
        let context = Context(Mutex::new(RefCell::new(collective)));
        // SAFETY: the context lives until the guard below takes it back; `work` waits for what it
        // starts, so no task is left then that would use it.
        unsafe {
            (self.table.sp_set_collective)(
                self.context,
                Some(call),
                (&raw const context).cast_mut().cast(),
            );
        };
        let mut attached = Attached(*self, true);
        let result = work();
        // SAFETY: takes the context.
        let failed = unsafe { (self.table.sp_failed)(self.context) };
        attached.1 = failed != 0 || result.is_err();
        drop(attached);
        if failed != 0 {
            return Err(MlxError("an all-reduce failed".to_owned()));
        }
        result
    }
}

impl Array {
    /// The sum over ranks of an array of f32 or bf16, done by the [`Collective`] of the evaluation. It takes
    /// place after `after`, whose evaluation it brings about: collectives that do not depend on
    /// each other would else come in another order on each rank.
    #[must_use]
    pub fn summed_over_ranks(&self, after: Option<&Self>) -> Self {
        let shape = self.shape();
        self.collective(SUM, &shape, after)
    }

    /// Every rank's f32 values in rank order, as a flat array of `len`; `after` as above.
    #[must_use]
    pub fn gathered_over_ranks(&self, len: usize, after: Option<&Self>) -> Self {
        self.collective(GATHER, &[len], after)
    }

    fn collective(&self, kind: i32, shape: &[usize], after: Option<&Self>) -> Self {
        let (shape, context) = (Self::dims(shape), self.library().context);
        let after = crate::array::handle(after);
        // SAFETY: live arrays, a context that is never freed and a shape of the given length.
        self.make(|table| unsafe {
            (table.sp_collective_node)(
                context,
                self.raw(),
                after,
                kind,
                shape.as_ptr(),
                shape.len(),
            )
        })
    }
}
