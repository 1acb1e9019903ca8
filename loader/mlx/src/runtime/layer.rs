//! Our C layer: the source, the layer for macOS that the program may hold, and how one is compiled.

use std::{path::Path, process::Command, time::Duration};

use shardpack_http::Checksum;

use super::{InstallError, LayerOrigin, Platform, Step, install::write_new, program::run};
use crate::table::ABI;

/// The C layer as one file; the kernels for Metal are texts in it (`build.rs`).
const SOURCE: &str = include_str!(concat!(env!("OUT_DIR"), "/layer.cpp"));

/// The layer for macOS, where this program was built with one (`build.rs`): signed ad hoc, and made
/// from this source.
pub(super) const EMBEDDED: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/layer.rs"));

/// Longest compilation; it takes 5 s on a machine of 2020.
const COMPILE_TIMEOUT: Duration = Duration::from_mins(5);

const CXX_HINT: &str = "install a C++20 compiler (macOS: xcode-select --install; Debian: apt-get \
                        install g++), or copy the runtime from a machine that has one";

/// Where MLX was unpacked to.
pub(super) struct Folders<'a> {
    /// The runtime.
    pub(super) runtime: &'a Path,
    /// The headers.
    pub(super) headers: &'a Path,
}

/// Digest of the C layer's source: a runtime that was compiled from another one is not used.
pub(crate) fn source_digest() -> String {
    let (_, checksum) =
        Checksum::sha256_of(&mut SOURCE.as_bytes()).expect("memory can always be read");
    checksum.text()
}

/// Writes the embedded layer, or compiles one.
pub(super) fn lay(
    platform: Platform,
    embedded: Option<&[u8]>,
    cxx: &str,
    folders: &Folders,
    report: &mut dyn FnMut(Step),
) -> Result<LayerOrigin, InstallError> {
    let Some(bytes) = embedded else {
        report(Step::Compile(cxx.to_owned()));
        compile(platform, cxx, folders)?;
        return Ok(LayerOrigin::Compiled);
    };
    report(Step::Layer);
    let path = folders.runtime.join(platform.shim());
    write_new(&path, bytes).map_err(|source| InstallError::Write { path, source })?;
    Ok(LayerOrigin::Embedded)
}

fn compile(platform: Platform, cxx: &str, folders: &Folders) -> Result<(), InstallError> {
    let Folders { runtime, headers } = folders;
    let source = headers.join("shim.cpp");
    write_new(&source, SOURCE.as_bytes())
        .map_err(|error| InstallError::Write { path: source.clone(), source: error })?;
    let include = headers.join("mlx/include");
    let output = runtime.join(platform.shim());
    let mut command = Command::new(cxx);
    command.args(["-std=c++20", "-O2", "-fPIC", "-fvisibility=default", "-w"]);
    command.arg(format!("-DSP_ABI={ABI}")).arg("-isystem").arg(&include);
    if platform == Platform::Macos {
        command.arg("-isystem").arg(include.join("metal_cpp"));
        command.args(["-arch", "arm64", "-dynamiclib", "-Wl,-rpath,@loader_path"]);
        command.args(["-install_name", "@rpath/libshardpack_mlx.dylib"]);
    } else {
        // The old tag, since the newer one lets LD_LIBRARY_PATH bring in another MLX.
        command.args(["-shared", "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags"]);
        command.args(["-Wl,--no-undefined", "-Wl,--allow-shlib-undefined"]);
    }
    command.arg(&source).arg("-o").arg(&output);
    command.arg("-L").arg(runtime.join("mlx/lib")).arg("-lmlx");
    run(command, COMPILE_TIMEOUT, CXX_HINT)?;
    if platform == Platform::Macos {
        let mut sign = Command::new("codesign");
        sign.args(["--sign", "-", "--force"]).arg(&output);
        run(sign, Duration::from_mins(1), CXX_HINT)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_embedded_layer_needs_no_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let (runtime, headers) = (folder.path().join("runtime"), folder.path().join("headers"));
        for path in [runtime.join("mlx/lib"), headers.clone()] {
            fs::create_dir_all(path).unwrap();
        }
        let folders = Folders { runtime: &runtime, headers: &headers };
        let mut steps = Vec::new();
        let lay = |layer, steps: &mut Vec<Step>| {
            super::lay(Platform::Macos, layer, "false", &folders, &mut |step| steps.push(step))
        };
        let origin = lay(Some(b"layer".as_slice()), &mut steps).unwrap();
        assert_eq!((origin, steps.as_slice()), (LayerOrigin::Embedded, &[Step::Layer][..]));
        let path = runtime.join("mlx/lib/libshardpack_mlx.dylib");
        assert_eq!(fs::read(path).unwrap(), b"layer");
        let error = lay(None, &mut steps).unwrap_err().to_string();
        assert!(error.contains("`false` failed") && error.contains("xcode-select"), "{error}");
    }
}
