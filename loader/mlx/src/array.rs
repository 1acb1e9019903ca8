//! Lazy arrays. Shapes are the caller's to get right: a graph that MLX refuses to build is a bug
//! here, and a panic with MLX's own words; what only an evaluation can tell is an error.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::ffi::{CStr, c_void};

use crate::{
    library::{Library, MlxError},
    table::{In, Raw, Table},
};

/// Element types, as the C layer numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Element {
    /// 32-bit float.
    F32 = 0,
    /// 16-bit float.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
    /// 32-bit unsigned.
    U32 = 3,
    /// 32-bit signed.
    I32 = 4,
    /// Byte.
    U8 = 5,
    /// Truth value.
    Bool = 6,
    /// 64-bit unsigned.
    U64 = 7,
}

impl Element {
    /// Bytes of one.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::U64 => 8,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 | Self::Bool => 1,
        }
    }

    /// The type of a code of the C layer.
    const fn of_code(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Bf16,
            3 => Self::U32,
            4 => Self::I32,
            5 => Self::U8,
            6 => Self::Bool,
            7 => Self::U64,
            _ => return None,
        })
    }
}

/// Functions of one value.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
#[expect(missing_docs, reason = "the field's own names")]
pub enum Unary {
    Negative = 0,
    Exp = 1,
    Log = 2,
    Tanh = 3,
    Sigmoid = 4,
    Sqrt = 5,
    Rsqrt = 6,
    Erf = 7,
    Square = 8,
    Abs = 9,
    Log1p = 10,
    Floor = 11,
}

/// Functions of two values, with broadcasting.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
#[expect(missing_docs, reason = "the field's own names")]
pub enum Binary {
    Add = 0,
    Subtract = 1,
    Multiply = 2,
    Divide = 3,
    Maximum = 4,
    Minimum = 5,
    LogAddExp = 6,
    Less = 7,
    LessEqual = 8,
    Greater = 9,
    GreaterEqual = 10,
    Equal = 11,
    And = 12,
    Or = 13,
    FloorDivide = 14,
}

/// Functions along an axis.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
#[expect(missing_docs, reason = "the field's own names")]
pub enum Reduce {
    Sum = 0,
    Max = 1,
    Mean = 2,
}

/// A matrix in groups of one of MLX's modes.
#[derive(Clone, Copy)]
pub struct Quantized<'a> {
    /// Packed values.
    pub words: &'a Array,
    /// One per group.
    pub scales: &'a Array,
    /// One per group; affine groups alone have them.
    pub biases: Option<&'a Array>,
    /// Inputs per group.
    pub group: u32,
    /// Bits per weight.
    pub bits: u32,
    /// MLX's name of such groups.
    pub mode: &'static CStr,
}

/// A lazy array.
pub struct Array {
    raw: Raw,
    library: Library,
}

// SAFETY: a handle is a C++ shared pointer of atomic count; graphs are built and evaluated by one
// thread at a time, which `&mut`-free sharing through the backend's single thread guarantees.
unsafe impl Send for Array {}
// SAFETY: as above; operations read the shared description only.
unsafe impl Sync for Array {}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: the pointer is ours and is not used again.
        unsafe { (self.library.table.sp_free)(self.raw) }
    }
}

impl Clone for Array {
    fn clone(&self) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_clone)(self.raw) })
    }
}

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Array{:?}", self.shape())
    }
}

/// The pointer to an argument that may be missing.
pub(crate) fn handle(array: Option<&Array>) -> In {
    array.map_or(std::ptr::null(), Array::raw)
}

impl Library {
    pub(crate) fn array(self, raw: Raw) -> Array {
        assert!(!raw.is_null(), "MLX refuses an operation: {}", self.error());
        Array { raw, library: self }
    }

    /// Another handle of an array.
    pub(crate) fn copy_of(self, raw: Raw) -> Array {
        // SAFETY: the caller has a live array.
        self.array(unsafe { (self.table.sp_clone)(raw) })
    }

    /// An array of a copy of `bytes`.
    ///
    /// # Panics
    /// When the shape is of another size.
    #[must_use]
    pub fn copy_in(&self, bytes: &[u8], element: Element, shape: &[usize]) -> Array {
        let len: usize = shape.iter().product();
        assert_eq!(bytes.len(), len * element.size_bytes(), "bytes of {shape:?}");
        let dims = Array::dims(shape);
        // SAFETY: the bytes are as many as the shape says and are copied by the call.
        self.array(unsafe {
            (self.table.sp_copy_in)(
                bytes.as_ptr().cast(),
                element as i32,
                dims.as_ptr(),
                dims.len(),
            )
        })
    }

    /// An array of `values`.
    #[must_use]
    pub fn floats(&self, values: &[f32], shape: &[usize]) -> Array {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.copy_in(&bytes, Element::F32, shape)
    }

    /// An array of `values`.
    #[must_use]
    pub fn indices(&self, values: &[u32], shape: &[usize]) -> Array {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        self.copy_in(&bytes, Element::U32, shape)
    }

    /// An array over memory that `owner` keeps, without a copy where the device allows it (Metal:
    /// start and length must be multiples of its page). Returns whether it was copied all the
    /// same.
    ///
    /// # Panics
    /// When the shape is of another size.
    #[must_use]
    pub fn wrap<O: AsRef<[u8]> + Send + Sync + 'static>(
        &self,
        owner: O,
        element: Element,
        shape: &[usize],
    ) -> (Array, bool) {
        unsafe extern "C" fn release<O>(owner: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below, and released once.
            drop(unsafe { Box::from_raw(owner.cast::<O>()) });
        }
        let owner = Box::new(owner);
        let bytes = (*owner).as_ref();
        let len: usize = shape.iter().product();
        assert_eq!(bytes.len(), len * element.size_bytes(), "bytes of {shape:?}");
        let (data, dims) = (bytes.as_ptr(), Array::dims(shape));
        let mut copied = 0;
        // SAFETY: the bytes stay where they are until MLX calls `release`, once; MLX does not
        // write to arrays that others hold, and every wrapped weight is held by its model.
        let raw = unsafe {
            (self.table.sp_wrap)(
                data.cast_mut().cast(),
                element as i32,
                dims.as_ptr(),
                dims.len(),
                release::<O>,
                Box::into_raw(owner).cast(),
                &raw mut copied,
            )
        };
        (self.array(raw), copied != 0)
    }

    /// An array of one value.
    #[must_use]
    pub fn full(&self, value: f32, element: Element, shape: &[usize]) -> Array {
        let dims = Array::dims(shape);
        // SAFETY: a shape of the given length.
        self.array(unsafe {
            (self.table.sp_full)(value, element as i32, dims.as_ptr(), dims.len())
        })
    }

    /// Arrays one after the other along `axis`.
    #[must_use]
    pub fn concat(&self, arrays: &[&Array], axis: i32) -> Array {
        let raw: Vec<In> = arrays.iter().map(|array| array.raw()).collect();
        // SAFETY: live arrays, as many as said.
        self.array(unsafe { (self.table.sp_concat)(raw.as_ptr(), raw.len(), axis) })
    }

    /// Computes the arrays.
    pub fn eval(&self, arrays: &[&Array]) -> Result<(), MlxError> {
        let raw: Vec<In> = arrays.iter().map(|array| array.raw()).collect();
        // SAFETY: live arrays, as many as said.
        self.done(unsafe { (self.table.sp_eval)(raw.as_ptr(), raw.len()) })
    }
}

/// Bounds of a slice, one per axis.
struct SliceBounds {
    from: Vec<i32>,
    to: Vec<i32>,
}

impl Array {
    pub(crate) const fn raw(&self) -> In {
        self.raw
    }

    /// The handle, which is the caller's to free.
    pub(crate) fn into_raw(self) -> Raw {
        let raw = self.raw;
        std::mem::forget(self);
        raw
    }

    pub(crate) fn dims(shape: &[usize]) -> Vec<i32> {
        shape.iter().map(|&dim| i32::try_from(dim).expect("MLX's shapes are 32-bit")).collect()
    }

    pub(crate) fn make(&self, call: impl FnOnce(&'static Table) -> Raw) -> Self {
        self.library.array(call(self.library.table))
    }

    /// The library that it belongs to.
    #[must_use]
    pub const fn library(&self) -> Library {
        self.library
    }

    /// Lengths of its axes.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        // SAFETY: a live array.
        let axes = unsafe { (self.library.table.sp_ndim)(self.raw) };
        // SAFETY: a live array and one of its axes.
        (0..axes)
            .map(|axis| unsafe { (self.library.table.sp_dim)(self.raw, axis) } as usize)
            .collect()
    }

    /// Bytes of its elements.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        // SAFETY: a live array.
        unsafe { (self.library.table.sp_nbytes)(self.raw) }
    }

    /// Its values, computed now.
    pub fn read(&self) -> Result<Vec<f32>, MlxError> {
        let mut values = vec![0.0; self.shape().iter().product()];
        // SAFETY: a live array and room for the given number of values; the C layer compares.
        let code =
            unsafe { (self.library.table.sp_read)(self.raw, values.as_mut_ptr(), values.len()) };
        self.library.done(code).map(|()| values)
    }

    /// With another element type.
    #[must_use]
    pub fn cast(&self, element: Element) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_astype)(self.raw, element as i32) })
    }

    /// With another shape of the same size.
    #[must_use]
    pub fn reshape(&self, shape: &[usize]) -> Self {
        let dims = Self::dims(shape);
        // SAFETY: a live array and a shape of the given length.
        self.make(|table| unsafe { (table.sp_reshape)(self.raw, dims.as_ptr(), dims.len()) })
    }

    /// With its axes in another order.
    #[must_use]
    pub fn transpose(&self, axes: &[usize]) -> Self {
        let axes = Self::dims(axes);
        // SAFETY: a live array and axes, as many as said.
        self.make(|table| unsafe { (table.sp_transpose)(self.raw, axes.as_ptr(), axes.len()) })
    }

    /// Repeated to `shape`.
    #[must_use]
    pub fn broadcast(&self, shape: &[usize]) -> Self {
        let dims = Self::dims(shape);
        // SAFETY: a live array and a shape of the given length.
        self.make(|table| unsafe { (table.sp_broadcast)(self.raw, dims.as_ptr(), dims.len()) })
    }

    /// The part from `start` to `stop` of one axis.
    #[must_use]
    pub fn slice(&self, axis: usize, start: usize, stop: usize) -> Self {
        let SliceBounds { from, to } = self.bounds(axis, start, stop);
        // SAFETY: a live array and as many bounds as axes.
        self.make(|table| unsafe {
            (table.sp_slice)(self.raw, from.as_ptr(), to.as_ptr(), from.len())
        })
    }

    /// With `part` in place of `start` to `stop` of one axis.
    #[must_use]
    pub fn with_slice(&self, axis: usize, start: usize, stop: usize, part: &Self) -> Self {
        let SliceBounds { from, to } = self.bounds(axis, start, stop);
        // SAFETY: live arrays and as many bounds as axes.
        self.make(|table| unsafe {
            (table.sp_slice_update)(self.raw, part.raw, from.as_ptr(), to.as_ptr(), from.len())
        })
    }

    /// Of `[entries, heads, places, width]` the entries that `at[0]` `[n]` names with their rows of
    /// `rows`, `[n, heads, 1, width]`, at the places that `at[1]` names.
    #[must_use]
    pub fn with_rows(&self, at: [&Self; 2], rows: &Self) -> Self {
        let [entries, places] = at.map(|indices| indices.raw);
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_with_rows)(self.raw, entries, places, rows.raw) })
    }

    fn bounds(&self, axis: usize, start: usize, stop: usize) -> SliceBounds {
        let mut to = self.shape();
        let mut from = vec![0; to.len()];
        (from[axis], to[axis]) = (start, stop);
        SliceBounds { from: Self::dims(&from), to: Self::dims(&to) }
    }

    /// The entries of `axis` that `indices` name.
    #[must_use]
    pub fn take(&self, indices: &Self, axis: i32) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_take)(self.raw, indices.raw, axis) })
    }

    /// For each place of `indices` the entry of `axis` that it names.
    #[must_use]
    pub fn take_along(&self, indices: &Self, axis: i32) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_take_along)(self.raw, indices.raw, axis) })
    }

    /// With `values` at the entries of `axis` that `indices` name.
    #[must_use]
    pub fn put_along(&self, indices: &Self, values: &Self, axis: i32) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_put_along)(self.raw, indices.raw, values.raw, axis) })
    }

    /// Applies a function.
    #[must_use]
    pub fn unary(&self, function: Unary) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_unary)(function as i32, self.raw) })
    }

    /// Applies a function, with broadcasting.
    #[must_use]
    pub fn binary(&self, function: Binary, other: &Self) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_binary)(function as i32, self.raw, other.raw) })
    }

    /// The same with a constant in place of the second array, in this one's type: a 16-bit array
    /// stays one. Truth values become f32.
    #[must_use]
    pub fn with_constant(&self, function: Binary, constant: f32) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_with_scalar)(function as i32, self.raw, constant) })
    }

    /// `a` where this is true, else `b`.
    #[must_use]
    pub fn choose(&self, a: &Self, b: &Self) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_where)(self.raw, a.raw, b.raw) })
    }

    /// Along `axis`, which stays with length one.
    #[must_use]
    pub fn reduce(&self, function: Reduce, axis: i32) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_reduce)(function as i32, self.raw, axis, 1) })
    }

    /// Softmax along `axis`, in f32.
    #[must_use]
    pub fn softmax(&self, axis: i32) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_softmax)(self.raw, axis) })
    }

    /// The order that sorts `axis`, smallest first.
    #[must_use]
    pub fn argsort(&self, axis: i32) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_argsort)(self.raw, axis) })
    }

    /// An order of `axis` in which the `count` smallest come first, in any order.
    #[must_use]
    pub fn argpartition(&self, count: usize, axis: i32) -> Self {
        let kth = Self::dims(&[count.saturating_sub(1)])[0];
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_argpartition)(self.raw, kth, axis) })
    }

    /// The values of `axis` in such an order.
    #[must_use]
    pub fn partition(&self, count: usize, axis: i32) -> Self {
        let kth = Self::dims(&[count.saturating_sub(1)])[0];
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_partition)(self.raw, kth, axis) })
    }

    /// The same values in a buffer of their own. A slice holds on to the whole array.
    #[must_use]
    pub fn contiguous(&self) -> Self {
        // SAFETY: a live array.
        self.make(|table| unsafe { (table.sp_contiguous)(self.raw) })
    }

    /// Type of its elements.
    ///
    /// # Panics
    /// When it is one that this program makes no use of.
    #[must_use]
    pub fn element(&self) -> Element {
        // SAFETY: a live array.
        let code = unsafe { (self.library.table.sp_dtype)(self.raw) };
        Element::of_code(code).expect("a type of ours")
    }

    /// Matrix product.
    #[must_use]
    pub fn matmul(&self, other: &Self) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_matmul)(self.raw, other.raw) })
    }

    /// `self · matrixᵀ` for a quantized `matrix` `[outputs, inputs]`, or `self · matrix`.
    #[must_use]
    pub fn quantized_matmul(&self, matrix: Quantized<'_>, transpose: bool) -> Self {
        // SAFETY: live arrays and a string with its end.
        self.make(|table| unsafe {
            (table.sp_quantized_matmul)(
                self.raw,
                matrix.words.raw,
                matrix.scales.raw,
                handle(matrix.biases),
                i32::from(transpose),
                matrix.group as i32,
                matrix.bits as i32,
                matrix.mode.as_ptr(),
            )
        })
    }

    /// `self · matrix[rhs]ᵀ` for each expert that `rhs` names.
    #[must_use]
    pub fn gather_quantized(
        &self,
        matrix: Quantized<'_>,
        lhs: Option<&Self>,
        rhs: &Self,
        sorted: bool,
    ) -> Self {
        // SAFETY: live arrays and a string with its end.
        self.make(|table| unsafe {
            (table.sp_gather_qmm)(
                self.raw,
                matrix.words.raw,
                matrix.scales.raw,
                handle(matrix.biases),
                handle(lhs),
                rhs.raw,
                matrix.group as i32,
                matrix.bits as i32,
                matrix.mode.as_ptr(),
                i32::from(sorted),
            )
        })
    }

    /// `self · matrix[rhs]` for each expert that `rhs` names.
    #[must_use]
    pub fn gather_matmul(
        &self,
        matrix: &Self,
        lhs: Option<&Self>,
        rhs: &Self,
        sorted: bool,
    ) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe {
            (table.sp_gather_mm)(self.raw, matrix.raw, handle(lhs), rhs.raw, i32::from(sorted))
        })
    }

    /// Root-mean-square norm of the last axis.
    #[must_use]
    pub fn rms_norm(&self, gain: Option<&Self>, eps: f32) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_rms_norm)(self.raw, handle(gain), eps) })
    }

    /// Layer norm of the last axis.
    #[must_use]
    pub fn layer_norm(&self, gain: Option<&Self>, bias: Option<&Self>, eps: f32) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe {
            (table.sp_layer_norm)(self.raw, handle(gain), handle(bias), eps)
        })
    }

    /// Rotary embedding of the first `dims` elements of heads `[rows, heads, 1, head_dim]`, at one
    /// of `positions` `[rows]` each, by angles `position / period`; `periods` is `[dims / 2]`.
    #[must_use]
    pub fn rope(
        &self,
        dims: usize,
        is_interleaved: bool,
        positions: &Self,
        periods: &Self,
    ) -> Self {
        let (dims, style) = (Self::dims(&[dims])[0], i32::from(is_interleaved));
        // SAFETY: live arrays.
        self.make(|table| unsafe {
            (table.sp_rope)(self.raw, dims, style, positions.raw, periods.raw)
        })
    }

    /// Attention of queries `[batch, heads, rows, dim]` over keys and values
    /// `[batch, kv heads, keys, dim]`, causal at the end of the keys without a mask, else with an
    /// added or a boolean one.
    #[must_use]
    pub fn attention(
        &self,
        k: &Self,
        v: &Self,
        scale: f32,
        mask: Option<&Self>,
        sinks: Option<&Self>,
    ) -> Self {
        // One row sees all keys.
        let sees_all = mask.is_some() || self.shape()[2] == 1;
        let mode = if sees_all { c"" } else { c"causal" };
        // SAFETY: live arrays and a string with its end.
        self.make(|table| unsafe {
            (table.sp_attention)(
                self.raw,
                k.raw,
                v.raw,
                scale,
                mode.as_ptr(),
                handle(mask),
                handle(sinks),
            )
        })
    }

    /// The sum over the ranks of MLX's own group; `after` as in [`Array::summed_over_ranks`].
    #[must_use]
    pub fn distributed_sum(&self, after: Option<&Self>) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_dist_sum)(self.raw, handle(after)) })
    }

    /// The ranks' arrays one after the other, by MLX's own group; `after` as above.
    #[must_use]
    pub fn distributed_gather(&self, after: Option<&Self>) -> Self {
        // SAFETY: live arrays.
        self.make(|table| unsafe { (table.sp_dist_gather)(self.raw, handle(after)) })
    }
}

impl Quantized<'_> {
    /// The weights as floats of a type.
    #[must_use]
    pub fn dequantized(self, element: Element) -> Array {
        // SAFETY: live arrays and a string with its end.
        self.words.make(|table| unsafe {
            (table.sp_dequantize)(
                self.words.raw,
                self.scales.raw,
                handle(self.biases),
                self.group as i32,
                self.bits as i32,
                self.mode.as_ptr(),
                element as i32,
            )
        })
    }
}
