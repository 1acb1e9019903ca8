//! AVX2 with FMA.

#![expect(unsafe_code, reason = "instructions of one processor family, and their loads")]

use crate::platform::Task;

pub(crate) fn is_available() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Runs a task inside a function that has the instructions enabled.
pub(crate) fn run<T: Task>(task: T) -> T::Output {
    assert!(is_available(), "the caller chose a platform of this machine");
    // SAFETY: the processor has just been asked.
    unsafe { enabled(task) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enabled<T: Task>(task: T) -> T::Output {
    task.run()
}
