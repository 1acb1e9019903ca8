//! Instruction sets: which there are, and how one is chosen. Results are equal bit for bit on all.

use std::{fmt, str::FromStr};

/// An instruction set that kernels are written or compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Platform {
    /// Plain Rust; runs everywhere.
    Portable,
    /// 64-bit Arm with dot products of bytes.
    Neon,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VBMI and VNNI.
    Avx512,
}

impl Platform {
    /// Every platform there is code for, here or elsewhere, the fastest last.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512];

    /// The fastest platform of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|platform| platform.is_available()).unwrap_or(Self::Portable)
    }

    /// The platforms that run on this machine, the fastest last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|platform| platform.is_available()).collect()
    }

    /// Whether this machine has the instructions.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => crate::avx2::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => crate::avx512::is_available(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => crate::neon::is_available(),
            _ => false,
        }
    }

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Runs a task compiled for this platform.
    ///
    /// # Panics
    /// When the platform is not available on this machine.
    #[inline]
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self {
            Self::Portable => task.run(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => crate::avx2::run(task),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => crate::avx512::run(task),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => crate::neon::run(task),
            other => panic!("{other} code was asked for on a machine without it"),
        }
    }
}

/// Plain Rust that is compiled once for every platform, so that its loops use the widest vectors.
/// The compiler neither fuses nor reorders operations on floats, so the bits are the same.
/// `run` and what it calls in its loops is `#[inline(always)]`: what is compiled apart runs
/// without the instructions, correctly and many times as slowly.
pub(crate) trait Task {
    type Output;

    fn run(self) -> Self::Output;
}

impl fmt::Display for Platform {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|platform| platform.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("unknown platform {name:?}; known: {known}")
        })
    }
}
