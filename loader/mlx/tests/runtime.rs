//! The installed runtime, for real: what is damaged is refused, what is whole computes. Without
//! one (`SHARDPACK_ENGINES` names the folder; `tests/mlx.sh` installs it) there is nothing to
//! test, and each test says so.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

#[path = "../../../tests/harness/skip.rs"]
mod skip;

use std::{
    fs,
    path::{Path, PathBuf},
};

use shardpack_mlx::{
    Array, Binary, Collective, Device, Element, Library, OpenError, Quantized, Unary,
    runtime::{self, CheckError, DownloadOptions, FOLDER, InstallError, InstallOptions, Step},
};

/// Files are links to the installed ones, so that a test can put its own in their place.
fn copy(folder: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let mut folders = vec![PathBuf::new()];
    while let Some(within) = folders.pop() {
        fs::create_dir_all(copy.path().join(&within)).unwrap();
        for entry in fs::read_dir(folder.join(&within)).unwrap() {
            let entry = entry.unwrap();
            let name = within.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                folders.push(name);
            } else {
                fs::copy(entry.path(), copy.path().join(name)).unwrap();
            }
        }
    }
    copy
}

#[track_caller]
fn check(damage: impl FnOnce(&Path), words: &[&str]) {
    let Some(folder) = skip::mlx_runtime(FOLDER) else { return };
    let copy = copy(&folder);
    damage(copy.path());
    let error = runtime::check(copy.path()).unwrap_err();
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text}");
    }
    assert!(text.contains("engine install mlx"), "says what to do: {text}");
}

fn edit_record(folder: &Path, from: &str, to: &str) {
    let path = folder.join("runtime.json");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replace(from, to)).unwrap();
}

fn library_of(folder: &Path) -> PathBuf {
    folder.join("mlx/lib").join(if cfg!(target_os = "macos") {
        "libmlx.dylib"
    } else {
        "libmlx.so"
    })
}

#[test]
fn missing_runtime_is_a_plain_sentence() {
    let empty = tempfile::tempdir().unwrap();
    let error = runtime::check(&empty.path().join("none")).unwrap_err();
    assert!(matches!(error, CheckError::Absent(_)), "{error}");
    assert!(error.to_string().contains("--engine cpu"), "{error}");
}

#[test]
fn half_copied_runtime_is_refused() {
    check(|folder| fs::remove_file(library_of(folder)).unwrap(), &["libmlx"]);
    check(|folder| fs::remove_file(folder.join("runtime.json")).unwrap(), &["no MLX runtime"]);
    let cut = |folder: &Path| {
        let file = fs::OpenOptions::new().write(true).open(library_of(folder)).unwrap();
        file.set_len(1000).unwrap();
    };
    check(cut, &["1000 bytes, expected"]);
}

#[test]
fn tampered_runtime_is_refused() {
    let flip = |folder: &Path| {
        let path = library_of(folder);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    check(flip, &["content was changed"]);
    let stranger = |folder: &Path| {
        fs::write(library_of(folder).with_file_name("libstdc++.so.6"), "mine").unwrap();
    };
    check(stranger, &["libstdc++.so.6", "does not belong"]);
    check(|folder| edit_record(folder, "mlx/lib/", "../lib/"), &["leaves the folder"]);
}

#[test]
fn runtime_of_another_version_or_machine_is_refused() {
    check(|folder| edit_record(folder, "\"0.32.2\"", "\"0.32.4\""), &["0.32.4", "0.32.2"]);
    check(|folder| edit_record(folder, "\"abi\": ", "\"abi\": 9"), &["C layer's version"]);
    let platform = runtime::Platform::current().unwrap().name();
    check(|folder| edit_record(folder, platform, "plan9-mips"), &["plan9-mips"]);
    check(|folder| fs::write(folder.join("runtime.json"), "{").unwrap(), &["not a runtime record"]);
}

#[test]
fn a_runtime_with_files_that_copying_leaves_behind_is_whole() {
    let Some(folder) = skip::mlx_runtime(FOLDER) else { return };
    let copy = copy(&folder);
    fs::write(copy.path().join("mlx/.DS_Store"), "").unwrap();
    runtime::check(copy.path()).unwrap();
}

#[test]
fn a_wheel_that_is_not_the_published_one_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let wheel = folder.path().join("mlx_cpu-0.32.2.whl");
    fs::write(&wheel, "PK").unwrap();
    let options = InstallOptions {
        folder: folder.path().join("engines").join(FOLDER),
        wheel: Some(wheel),
        download: DownloadOptions {
            index_url: folder.path().display().to_string(),
            proxy: None,
            no_proxy: String::new(),
            authorities: None,
        },
        python: "false".to_owned(),
        compile: false,
        cxx: "false".to_owned(),
    };
    let error = runtime::install(&options, &mut |_| ()).unwrap_err();
    assert!(matches!(error, InstallError::Wheel { .. }), "{error}");
    assert!(error.to_string().contains("not the published file of MLX 0.32.2"), "{error}");
    assert_eq!(fs::read_dir(folder.path().join("engines")).unwrap().count(), 0);
    // No index, no Python, no wheel: what to do is said, and that pip was tried.
    let options = InstallOptions { wheel: None, ..options };
    let mut tried_pip = false;
    let error = runtime::install(&options, &mut |step| tried_pip |= matches!(step, Step::Pip(_)));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("only URLs with http") || error.contains("not a URL"), "{error}");
    assert!(error.contains("--wheel FILE") && tried_pip, "{error}");
    assert_eq!(fs::read_dir(folder.path().join("engines")).unwrap().count(), 0);
}

#[test]
fn a_runtime_takes_limits_of_memory() {
    let Some(folder) = skip::mlx_runtime(FOLDER) else { return };
    let library = Library::open(&folder, Some(Device::Cpu)).unwrap();
    library.set_limits(usize::MAX, 512 << 20, None).unwrap();
    assert_eq!(library.device_figure("max_recommended_working_set_size"), None);
    let x = library.floats(&[1.0; 1024], &[32, 32]);
    assert_eq!(x.matmul(&x).read().unwrap(), [32.0; 1024]);
}

/// As on a GPU, where each fused function is traced once per key and compiled. Needs a C++ compiler,
/// as the installation does.
#[test]
fn fused_functions_of_the_runtime_compile_to_what_they_say() {
    let Some(folder) = skip::mlx_runtime(FOLDER) else { return };
    let library = Library::open(&folder, Some(Device::Cpu)).unwrap();
    let results = || {
        let mut found = Vec::new();
        for rows in [1, 3] {
            let values: Vec<f32> = (0..rows * 8).map(|i| i as f32 * 0.37 - 2.0).collect();
            let x = library.floats(&values, &[rows, 8]).cast(Element::Bf16);
            let gate = library.floats(&values[..rows], &[rows, 1]).cast(Element::Bf16);
            // Another type within, another shape of the second argument.
            let gated = library.fused(1, 1, &[&x, &gate], &|x| {
                let exact: Vec<_> = x.iter().map(|x| x.cast(Element::F32)).collect();
                let open = exact[1].unary(Unary::Sigmoid);
                vec![exact[0].binary(Binary::Multiply, &open).cast(Element::Bf16)]
            });
            let capped = library.fused(2, 1, &[&x], &|x| {
                vec![x[0].with_constant(Binary::Minimum, 0.5).with_constant(Binary::Multiply, 3.0)]
            });
            let indices: Vec<u32> = (0..rows as u32 * 8).collect();
            let indices = library.indices(&indices, &[rows, 8]);
            let parts = library.fused(3, 2, &[&indices, &x], &|x| {
                let here = x[0].with_constant(Binary::GreaterEqual, 4.0);
                let here = here.binary(Binary::And, &x[0].with_constant(Binary::Less, 9.0));
                let [none, nothing] =
                    [Element::U32, Element::Bf16].map(|it| library.full(0.0, it, &[]));
                let local = x[0].with_constant(Binary::Subtract, 4.0);
                vec![here.choose(&local, &none), here.choose(&x[1], &nothing)]
            });
            assert_eq!(parts[0].element(), Element::U32);
            assert_eq!(gated[0].element(), Element::Bf16);
            for array in gated.iter().chain(&capped).chain(&parts) {
                found.push(array.read().unwrap());
            }
        }
        found
    };
    let plain = results();
    library.compile_always(true);
    // Twice: traced, and from the cache.
    assert_eq!((results(), results()), (plain.clone(), plain));
    library.compile_always(false);
}

#[test]
fn runtime_that_is_whole_computes() {
    let Some(folder) = skip::mlx_runtime(FOLDER) else { return };
    let library = match Library::open(&folder, Some(Device::Cpu)) {
        Ok(library) => library,
        Err(error @ OpenError::Runtime(_)) => panic!("the installed runtime: {error}"),
        Err(error) => panic!("{error}"),
    };
    arithmetic(library);
    sums(library);
    order_of_sums(library);
}

/// Notes the first value of each sum.
struct Noted(Vec<f32>);

impl Collective for Noted {
    fn sum(&mut self, values: &mut [f32]) -> bool {
        self.0.push(values[0]);
        true
    }

    fn gather(&mut self, _: &[f32], _: &mut [f32]) -> bool {
        false
    }
}

/// A rank that holds nothing of a layer sums zeros that depend on nothing.
fn order_of_sums(library: Library) {
    let mut noted = Noted(Vec::new());
    let values = library.with_collective(&mut noted, || {
        let mut last: Option<Array> = None;
        for index in 0..100_u8 {
            let x = library.floats(&[f32::from(index)], &[1]);
            // Some depend on what was summed before, by longer and shorter ways.
            let x = match (index % 3, &last) {
                (1, Some(last)) => {
                    x.binary(Binary::Add, &last.with_constant(Binary::Multiply, 0.0))
                }
                _ => x,
            };
            last = Some(x.summed_over_ranks(last.as_ref()));
        }
        last.unwrap().read()
    });
    assert_eq!(values.unwrap(), [99.0]);
    let expected: Vec<f32> = (0..100_u8).map(f32::from).collect();
    assert_eq!(noted.0, expected, "sums take place in the order in which they were built");
}

fn arithmetic(library: Library) {
    let x = library.floats(&[1.0, 2.0, 3.0, 4.0], &[2, 2]);
    let y = x.matmul(&x.transpose(&[1, 0]));
    assert_eq!(y.read().unwrap(), [5.0, 11.0, 11.0, 25.0]);
    let z = y.binary(Binary::Subtract, &x).unary(Unary::Negative).slice(1, 1, 2);
    assert_eq!(z.read().unwrap(), [-9.0, -21.0]);
    // Eight words of 4-bit ones, scale 2 and bias −1: every weight is 1.
    let words = library.copy_in(&[0x11; 32], Element::U32, &[1, 8]);
    let [scales, biases] = [2.0, -1.0].map(|value| library.floats(&[value], &[1, 1]));
    let [words, scales, biases] = [&words, &scales, &biases];
    let matrix =
        Quantized { words, scales, biases: Some(biases), group: 64, bits: 4, mode: c"affine" };
    let ones = library.full(1.0, Element::F32, &[1, 64]);
    assert_eq!(ones.quantized_matmul(matrix, true).read().unwrap(), [64.0]);
    let (kept, _) = library.wrap(vec![0_u8; 4], Element::F32, &[1]);
    assert_eq!(kept.read().unwrap(), [0.0]);
}

/// A group of one whose only rank counts double, and that fails when told to.
struct Twice {
    fails_after: usize,
}

impl Collective for Twice {
    fn sum(&mut self, values: &mut [f32]) -> bool {
        for value in values.iter_mut() {
            *value *= 2.0;
        }
        self.fails_after = self.fails_after.wrapping_sub(1);
        self.fails_after != usize::MAX
    }

    fn gather(&mut self, mine: &[f32], all: &mut [f32]) -> bool {
        all[..mine.len()].copy_from_slice(mine);
        all[mine.len()..].copy_from_slice(mine);
        true
    }
}

fn sums(library: Library) {
    let graph = || {
        let mut x = library.floats(&[1.0, 2.0], &[2]);
        for _ in 0..6 {
            x = x.with_constant(Binary::Add, 1.0).summed_over_ranks(None);
        }
        x.gathered_over_ranks(4, None)
    };
    let mut whole = Twice { fails_after: 100 };
    let values = library.with_collective(&mut whole, || graph().read()).unwrap();
    assert_eq!(values, [190.0, 254.0, 190.0, 254.0]);
    // The fourth of six sums fails: an error, not a hang, and no further call.
    let mut broken = Twice { fails_after: 3 };
    library.with_collective(&mut broken, || graph().read()).unwrap_err();
    assert_eq!(broken.fails_after, usize::MAX, "calls after the failure");
    let values = library.with_collective(&mut whole, || graph().read()).unwrap();
    assert_eq!(values, [190.0, 254.0, 190.0, 254.0], "after a failure");
    let bf16 = || library.floats(&[1.5, -3.0], &[2]).cast(Element::Bf16).summed_over_ranks(None);
    assert_eq!(bf16().element(), Element::Bf16);
    let values = library.with_collective(&mut whole, || bf16().read()).unwrap();
    assert_eq!(values, [3.0, -6.0], "in 16 bits");
}
