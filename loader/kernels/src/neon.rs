//! 64-bit Arm with dot products of bytes: 16 weights at a time.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads")]

use std::arch::aarch64::{int8x16_t, int32x4_t};

use shardpack_quantize::Platform;

use crate::platform::Task;

mod floats;
mod rows;
mod tile;

pub(crate) use floats::Sixteen;
pub(crate) use rows::rows;
pub(crate) use tile::Tiles;

/// Whether this machine has every instruction that functions here enable: [`Platform::Neon`] asks
/// for them all.
#[inline]
pub(crate) fn is_available() -> bool {
    Platform::Neon.is_available()
}

/// Runs a task inside a function that has the instructions enabled.
pub(crate) fn run<T: Task>(task: T) -> T::Output {
    assert!(is_available(), "the caller chose a platform of this machine");
    // SAFETY: the processor has just been asked.
    unsafe { enabled(task) }
}

#[target_feature(enable = "neon,dotprod")]
fn enabled<T: Task>(task: T) -> T::Output {
    task.run()
}

/// Adds the products of each four bytes to a word. The compiler's own name for it is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: one instruction of the enabled features on the named registers.
    unsafe {
        std::arch::asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}
