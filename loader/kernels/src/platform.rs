//! Tasks on an instruction set that the caller chose.

use shardpack_quantize::Platform;

/// Plain Rust that is compiled once for every platform, so that its loops use the widest vectors.
/// The compiler neither fuses nor reorders operations on floats, so the bits are the same.
/// `run` and what it calls in its loops is `#[inline(always)]`: what is compiled apart runs
/// without the instructions, correctly and many times as slowly.
pub(crate) trait Task {
    type Output;

    fn run(self) -> Self::Output;
}

/// Runs a task compiled for a platform.
///
/// # Panics
/// When the platform is not available on this machine.
#[inline]
pub(crate) fn run<T: Task>(platform: Platform, task: T) -> T::Output {
    match platform {
        Platform::Portable => task.run(),
        #[cfg(target_arch = "x86_64")]
        Platform::Avx2 => crate::avx2::run(task),
        #[cfg(target_arch = "x86_64")]
        Platform::Avx512 => crate::avx512::run(task),
        #[cfg(target_arch = "aarch64")]
        Platform::Neon => crate::neon::run(task),
        other => panic!("{other} code was asked for on a machine without it"),
    }
}
