//! Linear attention as one kernel for each of its three parts. The C layer's
//! `native/linear_attention.cpp` is their other half; on a processor each is a plain loop.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::ffi::c_void;

use crate::{
    array::{Array, handle},
    table::{In, Raw},
};

/// How the state moves on, as the C layer numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum LinearStateUpdate {
    /// The delta rule, where one factor per head fades the state.
    GatedDeltaNet = 0,
    /// The delta rule, where one factor per channel of a key does.
    KimiDeltaAttention = 1,
    /// Mamba-2.
    Mamba2 = 2,
}

/// Sizes of one layer's part that is held here.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LinearSizes {
    /// How the state moves on.
    pub update: LinearStateUpdate,
    /// Heads of queries and keys.
    pub key_heads: i32,
    /// Heads of values.
    pub value_heads: i32,
    /// Width of a query or key.
    pub key_dim: i32,
    /// Width of a value.
    pub value_dim: i32,
    /// Rows that the short convolution sums over.
    pub kernel: i32,
}

/// What the state of one sequence is moved on by.
#[derive(Clone, Copy, Debug)]
pub struct LinearStep<'a> {
    /// Queries, keys and values after their convolution, `[rows, channels]`.
    pub mixed: &'a Array,
    /// Decay before its function, `[rows, value_heads]`; in Kimi Delta Attention
    /// `[rows, key_heads · key_dim]`.
    pub a: &'a Array,
    /// Strength of the change before its sigmoid, `[rows, value_heads]`; none in Mamba-2.
    pub beta: Option<&'a Array>,
    /// `[value_heads]`, f32.
    pub a_log: &'a Array,
    /// As wide as `a`, f32.
    pub dt_bias: &'a Array,
    /// `D` of Mamba-2, `[value_heads]`, f32.
    pub skip: Option<&'a Array>,
    /// The key head of each value head, U32.
    pub head_keys: &'a Array,
    /// `[value_heads, value_dim, key_dim]`, f32; none before the first row.
    pub state: Option<&'a Array>,
    /// Bound of the decay in Kimi Delta Attention.
    pub limit: Option<f32>,
}

impl LinearSizes {
    const fn raw(&self) -> *const c_void {
        std::ptr::from_ref(self).cast()
    }

    /// The short convolution of one sequence's rows, through `silu`: queries, keys and values side by
    /// side, `[rows, channels]`, and the window of the next step, the last inputs
    /// `[kernel − 1, channels]`, both in the type of the values. `inputs`: queries, keys and values;
    /// `weights`: `[channels, kernel]` of each, f32, and `biases` of each.
    #[must_use]
    pub fn convolution(
        &self,
        inputs: [&Array; 3],
        weights: [&Array; 3],
        biases: Option<[&Array; 3]>,
        window: Option<&Array>,
    ) -> [Array; 2] {
        let all = inputs.into_iter().chain(weights).chain(biases.into_iter().flatten());
        let all: Vec<In> = all.map(Array::raw).collect();
        let library = inputs[0].library();
        let mut outputs: [Raw; 2] = [std::ptr::null_mut(); 2];
        // SAFETY: live arrays, as many as said, sizes in the C layer's layout and room for the two
        // outputs.
        let code = unsafe {
            (library.table.sp_linear_convolution)(
                self.raw(),
                all.as_ptr(),
                all.len(),
                handle(window),
                outputs.as_mut_ptr(),
            )
        };
        assert!(code == 1, "MLX refuses a convolution: {}", library.error());
        outputs.map(|raw| library.array(raw))
    }

    /// The rows' results `[rows, value_heads · value_dim]` and the state after them, both f32.
    #[must_use]
    pub fn update_state(&self, step: &LinearStep<'_>) -> [Array; 2] {
        let library = step.mixed.library();
        let mut outputs: [Raw; 2] = [std::ptr::null_mut(); 2];
        // SAFETY: live arrays or null where the C layer allows it, sizes in its layout and room for
        // the two outputs.
        let code = unsafe {
            (library.table.sp_linear_state_update)(
                self.raw(),
                step.mixed.raw(),
                step.a.raw(),
                handle(step.beta),
                step.a_log.raw(),
                step.dt_bias.raw(),
                handle(step.skip),
                step.head_keys.raw(),
                handle(step.state),
                step.limit.unwrap_or(f32::NAN),
                outputs.as_mut_ptr(),
            )
        };
        assert!(code == 1, "MLX refuses a state update: {}", library.error());
        outputs.map(|raw| library.array(raw))
    }

    /// Results normalised and gated by `z`, in its type: in the delta rule each head is normalised,
    /// then gated; in Mamba-2 each key head's values are gated, then normalised where there is a
    /// `gain`.
    #[must_use]
    pub fn gated_norm(&self, y: &Array, z: &Array, gain: Option<&Array>, eps: f32) -> Array {
        // SAFETY: live arrays or null where the C layer allows it, and sizes in its layout.
        y.make(|table| unsafe {
            (table.sp_linear_gated_norm)(self.raw(), y.raw(), z.raw(), handle(gain), eps)
        })
    }
}
