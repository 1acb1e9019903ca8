//! The MLX library: loaded once per process, used from one thread.

#![expect(unsafe_code, reason = "calls into a foreign library")]

use std::{
    ffi::{CStr, CString, c_char},
    path::{Path, PathBuf},
};

use crate::{
    runtime::{self, CheckError},
    table::{ABI, RawContext, Table},
};

/// Why MLX cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The runtime is absent or not what it should be.
    #[error(transparent)]
    Runtime(#[from] CheckError),
    /// The system's loader refused it.
    #[error(
        "{}: cannot be loaded ({reason}); install the engine again on this machine",
        .path.display()
    )]
    Load {
        /// The library.
        path: PathBuf,
        /// The loader's error.
        reason: String,
    },
    /// It is of another version.
    #[error(
        "{}: {what} is {found}, expected {expected}; install the engine again",
        .path.display()
    )]
    Version {
        /// The library.
        path: PathBuf,
        /// What was compared.
        what: &'static str,
        /// What this program needs.
        expected: String,
        /// What was found.
        found: String,
    },
    /// MLX could not begin.
    #[error("MLX cannot start: {0}")]
    Start(#[from] MlxError),
}

/// MLX's error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct MlxError(pub(crate) String);

/// Where MLX computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// The GPU of a Mac, through Metal.
    Gpu,
}

/// MLX on one thread. Copies are the same library: it is never unloaded, since MLX's own threads
/// live as long as the process. Each opening has collectives of its own.
#[derive(Clone, Copy)]
pub struct Library {
    pub(crate) table: &'static Table,
    pub(crate) context: *mut RawContext,
    device: Device,
}

// SAFETY: the context is made of atomic values and is never freed.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Checks the runtime in `folder` and loads it. To be called on the thread that will use it:
    /// MLX's streams belong to the thread that made them. Without `device` the GPU is taken where
    /// there is one.
    pub fn open(folder: &Path, device: Option<Device>) -> Result<Self, OpenError> {
        let checked = runtime::check(folder)?;
        let path = checked.shim;
        let load = |reason: String| OpenError::Load { path: path.clone(), reason };
        // SAFETY: every byte of the folder was just compared with the digests that the installer
        // wrote, so the initialisers that run now are MLX's and the C++ library's.
        let library =
            unsafe { libloading::Library::new(&path) }.map_err(|e| load(e.to_string()))?;
        // SAFETY: `sp_abi` takes nothing and returns an int in every version of the C layer.
        let abi = unsafe { library.get::<unsafe extern "C" fn() -> i32>(b"sp_abi\0").map(|f| f()) }
            .map_err(|e| load(e.to_string()))?;
        let wrong = |what, expected: String, found: String| OpenError::Version {
            path: path.clone(),
            what,
            expected,
            found,
        };
        if abi != ABI {
            return Err(wrong("the C layer's version", ABI.to_string(), abi.to_string()));
        }
        // SAFETY: the C layer has our ABI number, and the library is leaked below.
        let table = unsafe { Table::find(&library) }
            .map_err(|name| load(format!("it has no function {name}")))?;
        std::mem::forget(library);
        let table: &'static Table = Box::leak(Box::new(table));
        // SAFETY: returns a string constant of MLX.
        let version = unsafe { text((table.sp_version)()) };
        if version != runtime::MLX_VERSION {
            return Err(wrong("MLX's version", runtime::MLX_VERSION.to_owned(), version));
        }
        // SAFETY: returns a string of the system's loader.
        let origin = unsafe { text((table.sp_loaded_from)()) };
        if !same_folder(Path::new(&origin), &path) {
            let expected = path.parent().unwrap_or(folder).display().to_string();
            return Err(wrong("the folder that MLX was loaded from", expected, origin));
        }
        // SAFETY: takes nothing.
        let metal = unsafe { (table.sp_metal)() } == 1;
        let device = device.unwrap_or(if metal { Device::Gpu } else { Device::Cpu });
        // SAFETY: takes nothing.
        let context = unsafe { (table.sp_new_context)() };
        let this = Self { table, context, device };
        // SAFETY: takes a number.
        let started = unsafe { (table.sp_start)(i32::from(device == Device::Gpu)) };
        this.done(started)?;
        Ok(this)
    }

    /// Where MLX computes.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.device
    }

    /// The last message of the C layer.
    pub(crate) fn error(&self) -> MlxError {
        // SAFETY: returns a string that stays as it is until the next failure on this thread.
        MlxError(unsafe { text((self.table.sp_error)()) })
    }

    pub(crate) fn done(&self, code: i32) -> Result<(), MlxError> {
        if code == 1 { Ok(()) } else { Err(self.error()) }
    }

    /// Whether MLX's own distributed layer has this backend (`"ring"`, `"jaccl"`).
    #[must_use]
    pub fn has_distributed(&self, backend: &str) -> bool {
        CString::new(backend).is_ok_and(|name| {
            // SAFETY: a string with its end, alive for the call.
            unsafe { (self.table.sp_dist_available)(name.as_ptr()) == 1 }
        })
    }

    /// Joins MLX's own distributed group, strictly: it never falls back to a group of one. The
    /// environment variables that MLX reads must be set before. Returns rank and size.
    pub fn join_distributed(&self, backend: &str) -> Result<(i32, i32), MlxError> {
        let name = CString::new(backend).map_err(|e| MlxError(e.to_string()))?;
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a string with its end and two places for numbers, alive for the call.
        let code =
            unsafe { (self.table.sp_dist_init)(name.as_ptr(), &raw mut rank, &raw mut size) };
        self.done(code).map(|()| (rank, size))
    }

    /// Bytes that MLX's arrays hold.
    #[must_use]
    pub fn active_bytes(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.table.sp_active_memory)() }
    }

    /// Most bytes that MLX's arrays ever held.
    #[must_use]
    pub fn peak_bytes(&self) -> usize {
        // SAFETY: takes nothing.
        unsafe { (self.table.sp_peak_memory)() }
    }

    /// Limits in bytes: what MLX may allocate, what it may keep for reuse, and, on a GPU, what
    /// stays wired.
    pub fn set_limits(
        &self,
        memory: usize,
        cache: usize,
        wired: Option<usize>,
    ) -> Result<(), MlxError> {
        let wired = if self.device == Device::Gpu { wired.unwrap_or(0) } else { 0 };
        // SAFETY: takes numbers.
        self.done(unsafe { (self.table.sp_set_limits)(memory, cache, wired) })
    }

    /// Gives back what MLX keeps for reuse.
    pub fn clear_cache(&self) {
        // SAFETY: takes nothing.
        unsafe { (self.table.sp_clear_cache)() }
    }

    /// A figure of the GPU as Metal names it (`"max_recommended_working_set_size"`); none without
    /// a GPU.
    #[must_use]
    pub fn device_figure(&self, key: &str) -> Option<usize> {
        let key = CString::new(key).ok()?;
        // SAFETY: a string with its end, alive for the call.
        let value = unsafe { (self.table.sp_device_info)(key.as_ptr()) };
        (value != 0).then_some(value)
    }
}

/// Whether both files lie in one folder, whatever links lead there.
fn same_folder(a: &Path, b: &Path) -> bool {
    let folder = |file: &Path| file.parent()?.canonicalize().ok();
    folder(a).is_some_and(|folder_a| Some(folder_a) == folder(b))
}

/// # Safety
/// `pointer` is null or points to a string with its end.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
