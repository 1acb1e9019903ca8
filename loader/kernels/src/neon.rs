//! 64-bit Arm with dot products of bytes.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads")]

use std::arch::is_aarch64_feature_detected;

use crate::platform::Task;

pub(crate) fn is_available() -> bool {
    is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")
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
