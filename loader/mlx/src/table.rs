//! The functions of our C layer (`native/shim.cpp`), found by name in the loaded library. The
//! signatures here and there are the same by hand; [`ABI`] changes with them.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::ffi::{c_char, c_void};

/// Number of this set of functions; the C layer is compiled with it and answers it.
pub(crate) const ABI: i32 = 6;

/// An array of MLX, owned by whoever holds the pointer.
#[repr(C)]
pub(crate) struct RawArray {
    _private: [u8; 0],
}

/// Who carries out the collectives of a rank's graphs; never freed.
#[repr(C)]
pub(crate) struct RawContext {
    _private: [u8; 0],
}

/// A pointer to an array; null after a failure.
pub(crate) type Raw = *mut RawArray;

/// A pointer to an array that stays its owner's; null where an argument is optional.
pub(crate) type In = *const RawArray;

/// What carries out a collective: context, kind, input and its bytes, output and its bytes.
pub(crate) type CollectiveCall =
    unsafe extern "C" fn(*mut c_void, i32, *const c_void, usize, *mut c_void, usize) -> i32;

/// What builds the graph of a function: context, inputs and their number, outputs and their
/// number. 1 = done.
pub(crate) type BuildCall =
    unsafe extern "C" fn(*mut c_void, *const Raw, usize, *mut Raw, usize) -> i32;

macro_rules! table {
    ($($name:ident: $type:ty;)*) => {
        /// The functions.
        pub(crate) struct Table {
            $(pub(crate) $name: $type,)*
        }

        impl Table {
            /// Finds every function in `library`; the error names the one that is missing.
            ///
            /// # Safety
            /// The library must be our C layer of this [`ABI`], and must never be unloaded.
            pub(crate) unsafe fn find(library: &libloading::Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the caller guarantees that the library is our C layer, whose
                        // function of this name has this signature.
                        let symbol = unsafe {
                            library.get::<$type>(concat!(stringify!($name), "\0").as_bytes())
                        };
                        *symbol.map_err(|_| stringify!($name).to_owned())?
                    },)*
                })
            }
        }
    };
}

table! {
    sp_version: unsafe extern "C" fn() -> *const c_char;
    sp_loaded_from: unsafe extern "C" fn() -> *const c_char;
    sp_error: unsafe extern "C" fn() -> *const c_char;
    sp_metal: unsafe extern "C" fn() -> i32;
    sp_start: unsafe extern "C" fn(i32) -> i32;
    sp_new_context: unsafe extern "C" fn() -> *mut RawContext;
    sp_set_collective: unsafe extern "C" fn(*mut RawContext, Option<CollectiveCall>, *mut c_void);
    sp_failed: unsafe extern "C" fn(*const RawContext) -> i32;
    sp_reset: unsafe extern "C" fn(*mut RawContext) -> i32;
    sp_collective_node: unsafe extern "C" fn(*mut RawContext, In, In, i32, *const i32, usize) -> Raw;
    sp_dist_available: unsafe extern "C" fn(*const c_char) -> i32;
    sp_dist_init: unsafe extern "C" fn(*const c_char, *mut i32, *mut i32) -> i32;
    sp_dist_sum: unsafe extern "C" fn(In, In) -> Raw;
    sp_dist_gather: unsafe extern "C" fn(In, In) -> Raw;
    sp_copy_in: unsafe extern "C" fn(*const c_void, i32, *const i32, usize) -> Raw;
    sp_wrap: unsafe extern "C" fn(
        *mut c_void, i32, *const i32, usize, unsafe extern "C" fn(*mut c_void), *mut c_void, *mut i32,
    ) -> Raw;
    sp_clone: unsafe extern "C" fn(In) -> Raw;
    sp_free: unsafe extern "C" fn(Raw);
    sp_ndim: unsafe extern "C" fn(In) -> usize;
    sp_dim: unsafe extern "C" fn(In, usize) -> i32;
    sp_nbytes: unsafe extern "C" fn(In) -> usize;
    sp_dtype: unsafe extern "C" fn(In) -> i32;
    sp_contiguous: unsafe extern "C" fn(In) -> Raw;
    sp_graph: unsafe extern "C" fn(*const In, usize) -> *const c_char;
    sp_mark_kernels: unsafe extern "C" fn(i32);
    sp_compile_always: unsafe extern "C" fn(i32);
    sp_eval: unsafe extern "C" fn(*const In, usize) -> i32;
    sp_read: unsafe extern "C" fn(In, *mut f32, usize) -> i32;
    sp_full: unsafe extern "C" fn(f32, i32, *const i32, usize) -> Raw;
    sp_astype: unsafe extern "C" fn(In, i32) -> Raw;
    sp_reshape: unsafe extern "C" fn(In, *const i32, usize) -> Raw;
    sp_transpose: unsafe extern "C" fn(In, *const i32, usize) -> Raw;
    sp_broadcast: unsafe extern "C" fn(In, *const i32, usize) -> Raw;
    sp_slice: unsafe extern "C" fn(In, *const i32, *const i32, usize) -> Raw;
    sp_slice_update: unsafe extern "C" fn(In, In, *const i32, *const i32, usize) -> Raw;
    sp_concat: unsafe extern "C" fn(*const In, usize, i32) -> Raw;
    sp_take: unsafe extern "C" fn(In, In, i32) -> Raw;
    sp_take_along: unsafe extern "C" fn(In, In, i32) -> Raw;
    sp_put_along: unsafe extern "C" fn(In, In, In, i32) -> Raw;
    sp_unary: unsafe extern "C" fn(i32, In) -> Raw;
    sp_binary: unsafe extern "C" fn(i32, In, In) -> Raw;
    sp_with_scalar: unsafe extern "C" fn(i32, In, f32) -> Raw;
    sp_where: unsafe extern "C" fn(In, In, In) -> Raw;
    sp_reduce: unsafe extern "C" fn(i32, In, i32, i32) -> Raw;
    sp_softmax: unsafe extern "C" fn(In, i32) -> Raw;
    sp_argsort: unsafe extern "C" fn(In, i32) -> Raw;
    sp_argpartition: unsafe extern "C" fn(In, i32, i32) -> Raw;
    sp_partition: unsafe extern "C" fn(In, i32, i32) -> Raw;
    sp_matmul: unsafe extern "C" fn(In, In) -> Raw;
    sp_quantized_matmul: unsafe extern "C" fn(
        In, In, In, In, i32, i32, i32, *const c_char,
    ) -> Raw;
    sp_dequantize: unsafe extern "C" fn(In, In, In, i32, i32, *const c_char, i32) -> Raw;
    sp_gather_qmm: unsafe extern "C" fn(
        In, In, In, In, In, In, i32, i32, *const c_char, i32,
    ) -> Raw;
    sp_gather_mm: unsafe extern "C" fn(In, In, In, In, i32) -> Raw;
    sp_rms_norm: unsafe extern "C" fn(In, In, f32) -> Raw;
    sp_layer_norm: unsafe extern "C" fn(In, In, In, f32) -> Raw;
    sp_rope: unsafe extern "C" fn(In, i32, i32, In, In) -> Raw;
    sp_fused: unsafe extern "C" fn(
        u64, BuildCall, *mut c_void, *const In, usize, *mut Raw, usize,
    ) -> i32;
    sp_gradients: unsafe extern "C" fn(
        BuildCall, *mut c_void, *const In, usize, In, *mut Raw,
    ) -> i32;
    sp_attention: unsafe extern "C" fn(In, In, In, f32, *const c_char, In, In) -> Raw;
    sp_active_memory: unsafe extern "C" fn() -> usize;
    sp_peak_memory: unsafe extern "C" fn() -> usize;
    sp_set_limits: unsafe extern "C" fn(usize, usize, usize) -> i32;
    sp_clear_cache: unsafe extern "C" fn();
    sp_device_info: unsafe extern "C" fn(*const c_char) -> usize;
    sp_linear_convolution: unsafe extern "C" fn(
        *const c_void, *const In, usize, In, *mut Raw,
    ) -> i32;
    sp_linear_state_update: unsafe extern "C" fn(
        *const c_void, In, In, In, In, In, In, In, In, f32, *mut Raw,
    ) -> i32;
    sp_linear_gated_norm: unsafe extern "C" fn(*const c_void, In, In, In, f32) -> Raw;
    sp_async_eval: unsafe extern "C" fn(*const In, usize) -> i32;
    sp_overwrite: unsafe extern "C" fn(Raw, *const c_void, usize) -> i32;
    sp_with_rows: unsafe extern "C" fn(In, In, In, In) -> Raw;
    sp_best_tokens: unsafe extern "C" fn(In, In, In, u32) -> Raw;
}
