//! Kinds of machines, and which published build of MLX each takes.

use super::{MLX_VERSION, download::Pinned};

/// A kind of machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// Linux on x86-64.
    LinuxX86,
    /// Linux on aarch64.
    LinuxArm,
    /// macOS on Apple silicon.
    Macos,
}

/// A published build of MLX: a file of the Python package index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wheel {
    /// The project on the index.
    pub(crate) project: &'static str,
    /// The platform part of the file's name.
    pub(crate) tag: &'static str,
    /// SHA-256 of the file, in hex.
    pub(crate) sha256: &'static str,
    /// Size of the file.
    pub(crate) size_bytes: u64,
    /// Oldest macOS that it runs on, 0 elsewhere.
    pub(crate) macos: u32,
}

const LINUX_X86: &[Wheel] = &[Wheel {
    project: "mlx-cpu",
    tag: "manylinux_2_35_x86_64",
    sha256: "fc5d31b90fc4f457b2f9614ed45651a567d22a6a11a03d114a90a4e10bdd8878",
    size_bytes: 10_388_414,
    macos: 0,
}];

const LINUX_ARM: &[Wheel] = &[Wheel {
    project: "mlx-cpu",
    tag: "manylinux_2_35_aarch64",
    sha256: "d0f94625588b51a878786dd51cec5617894ce586cf3c94645ce1b64e24c27c0b",
    size_bytes: 8_822_016,
    macos: 0,
}];

/// Newest first. Only the build for macOS 26 has JACCL (MLX's layer over RDMA).
const MACOS: &[Wheel] = &[
    Wheel {
        project: "mlx-metal",
        tag: "macosx_26_0_arm64",
        sha256: "e6abeac9ac5265830c9c1541b6f96e9be37a85c2446763a46ad466c63a3837ab",
        size_bytes: 64_367_860,
        macos: 26,
    },
    Wheel {
        project: "mlx-metal",
        tag: "macosx_15_0_arm64",
        sha256: "55a369250d220b2cf10213a87a2ac1b1a420608c5b35b1df4e7147ac8e32f121",
        size_bytes: 42_512_323,
        macos: 15,
    },
    Wheel {
        project: "mlx-metal",
        tag: "macosx_14_0_arm64",
        sha256: "3825fff379dbc107dd3413e564a06caeaa24819910ec49c0439e454c06a1b9b8",
        size_bytes: 42_516_623,
        macos: 14,
    },
];

/// Why there is no platform, and what to do.
pub(crate) const ABSENT: &str = if cfg!(target_env = "musl") {
    "this is the static program for Linux, which can load no library; use `--engine cpu`, or build \
     from source for MLX"
} else {
    "MLX has no build for this platform; use `--engine cpu`"
};

impl Wheel {
    /// The file that is fetched, and what it must be.
    pub(super) fn pinned(&self) -> Pinned {
        let project = self.project.replace('-', "_");
        Pinned {
            project: self.project.to_owned(),
            file: format!("{project}-{MLX_VERSION}-py3-none-{}.whl", self.tag),
            sha256: self.sha256.to_owned(),
            size_bytes: self.size_bytes,
        }
    }
}

impl Platform {
    /// The machine that this program was built for; none where MLX has no build.
    #[must_use]
    pub const fn current() -> Option<Self> {
        // A static program has no loader for MLX's libraries.
        if cfg!(target_env = "musl") {
            None
        } else if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            Some(Self::LinuxX86)
        } else if cfg!(all(target_os = "linux", target_arch = "aarch64")) {
            Some(Self::LinuxArm)
        } else if cfg!(all(target_os = "macos", target_arch = "aarch64")) {
            Some(Self::Macos)
        } else {
            None
        }
    }

    /// Its name in records and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::LinuxX86 => "linux-x86_64",
            Self::LinuxArm => "linux-aarch64",
            Self::Macos => "macos-arm64",
        }
    }

    pub(crate) const fn wheels(self) -> &'static [Wheel] {
        match self {
            Self::LinuxX86 => LINUX_X86,
            Self::LinuxArm => LINUX_ARM,
            Self::Macos => MACOS,
        }
    }

    /// File name of our C layer.
    pub(crate) const fn shim(self) -> &'static str {
        match self {
            Self::Macos => "mlx/lib/libshardpack_mlx.dylib",
            Self::LinuxX86 | Self::LinuxArm => "mlx/lib/libshardpack_mlx.so",
        }
    }
}
