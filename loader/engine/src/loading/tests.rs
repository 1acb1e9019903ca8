//! Packages that load, and damaged ones.

use std::{error::Error, fs, path::PathBuf, sync::Mutex};

use shardpack_kernels::Repack;
use shardpack_manifests::{
    CHUNK_BYTES, TensorShard, canonical,
    layout::{Layout, Stages},
    manifest::Quantization,
};
use shardpack_quantize::Dtype;
use tempfile::TempDir;

use super::*;
use crate::testing::{
    models::{self, Plain},
    package::{About, WEIGHTS, write_package},
};

pub(super) fn tensor(name: &str, len: usize) -> Plain {
    let bytes = (0..len * 2).map(|i| (i * 7 % 251) as u8 ^ (i >> 16) as u8).collect();
    Plain { name: name.to_owned(), dtype: Dtype::BF16, shape: vec![len as u64], bytes }
}

/// Small and large tensors; the weights' file has five chunks.
fn held() -> Vec<Plain> {
    let chunk = CHUNK_BYTES as usize;
    [("a", 3), ("b", chunk), ("c", 1), ("none", 0), ("d", chunk + 77), ("e", 5)]
        .map(|(name, len)| tensor(name, len))
        .to_vec()
}

pub(super) fn package() -> (TempDir, PathBuf) {
    package_of(held(), [16, 0])
}

/// A package of some tensors, of which those of words have a form of bits and group.
pub(super) fn package_of(held: Vec<Plain>, [bits, group]: [u32; 2]) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node-0");
    let stages = Stages::default();
    let layout = Layout {
        ranks: 1,
        stages,
        axes: BTreeMap::new(),
        q_to_kv: vec![],
        embedding_sharded: false,
    };
    let quantization = Quantization {
        importance: None,
        bits,
        group_size: (group > 0).then_some(group),
        float: None,
        rounding: None,
        dtype: Dtype::BF16,
        overrides: BTreeMap::new(),
    };
    let spec = models::spec("llama");
    let about = About { spec: &spec, layout: &layout, quantization: &quantization };
    let tensors = held.into_iter().map(|tensor| (tensor, TensorShard::Replicated)).collect();
    write_package(&path, &about, 0, tensors);
    (directory, path)
}

fn open(path: &Path, threads: usize) -> Result<Package, OpenError> {
    Package::open(path, &OpenOptions::stored(threads), &|_| {})
}

#[test]
fn every_tensor_lands_whole_on_a_page_boundary() {
    let (_directory, path) = package();
    for threads in [1, 2, 7] {
        let package = open(&path, threads).unwrap();
        for expected in held() {
            let found = package.tensor(&expected.name).unwrap();
            assert!(found.bytes() == expected.bytes, "tensor {}", expected.name);
            assert!(found.bytes().as_ptr().addr().is_multiple_of(PAGE_BYTES));
            assert_eq!(found.shape(), expected.shape);
            assert_eq!(found.floats().unwrap().len(), expected.bytes.len() / 2);
            assert!(found.words().is_none(), "floats are not words");
        }
        assert!(package.tensor("f").is_none());
        assert_eq!(package.file("config.json"), Some(&b"{}\n"[..]));
        assert_eq!(package.file(WEIGHTS), None);
    }
}

/// Packed integers of matrices of `rows` rows of 4-bit weights in 21 groups of 64.
pub(super) fn packed(name: &str, shape: &[u64]) -> Plain {
    let words = 21 * 64 / 8;
    let shape: Vec<u64> = shape.iter().copied().chain([words]).collect();
    let len = shape.iter().product::<u64>() as usize * 4;
    let bytes = (0..len).map(|i| (i * 13 % 241) as u8 ^ (i >> 9) as u8).collect();
    Plain { name: name.to_owned(), dtype: Dtype::U32, shape, bytes }
}

#[test]
fn integers_are_interleaved_while_they_arrive() {
    let odd = packed("odd.weight", &[6]);
    let tensors = vec![
        tensor("a", 3),
        odd.clone(),
        packed("b.weight", &[16_000]),
        packed("c.weight", &[3, 8]),
    ];
    let (_directory, path) = package_of(tensors, [4, 64]);
    for threads in [1, 3] {
        let stored = open(&path, threads).unwrap();
        let options = OpenOptions { threads, packing: Packing::Interleaved };
        let found = Package::open(&path, &options, &|_| {}).unwrap();
        for (name, rows) in [("b.weight", 16_000), ("c.weight", 8)] {
            let mut expected = stored.tensor(name).unwrap().bytes().to_vec();
            Repack::new([rows, 21 * 64], [4, 64], options.packing)
                .unwrap()
                .interleave(&mut expected);
            let found = found.tensor(name).unwrap();
            assert!(found.bytes() == expected, "{name} on {threads} threads");
            assert_ne!(found.bytes(), stored.tensor(name).unwrap().bytes());
            assert_eq!(found.packing(), Packing::Interleaved);
        }
        let found = found.tensor("odd.weight").unwrap();
        assert_eq!((found.bytes(), found.packing()), (&odd.bytes[..], Packing::Stored));
    }
}

#[test]
fn progress_ends_at_the_total() {
    let (_directory, path) = package();
    let seen = Mutex::new(Vec::new());
    let options = OpenOptions::stored(2);
    let package =
        Package::open(&path, &options, &|progress| seen.lock().unwrap().push(progress)).unwrap();
    let total: u64 = package.manifest().files.iter().map(|file| file.size).sum();
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), 6, "one call per chunk");
    assert_eq!(seen.iter().map(|progress| progress.done_bytes).max(), Some(total));
    assert!(seen.iter().all(|progress| progress.total_bytes == total));
    assert_eq!(package.report().bytes, total);
    assert!(package.report().gigabytes_per_second() > 0.0);
}

/// Flips one bit at each offset and returns the chunks that are reported.
fn damage(offsets: &[u64]) -> Vec<DamagedChunk> {
    let (_directory, path) = package();
    let file = path.join(WEIGHTS);
    let mut bytes = fs::read(&file).unwrap();
    for offset in offsets {
        bytes[*offset as usize] ^= 1;
    }
    fs::write(&file, bytes).unwrap();
    match open(&path, 2) {
        Err(OpenError::Damaged { chunks }) => chunks,
        other => panic!("expected damage at {offsets:?}, found {other:?}"),
    }
}

#[test]
fn every_damaged_chunk_is_named_with_its_tensors() {
    let two = damage(&[CHUNK_BYTES, 3 * CHUNK_BYTES - 1]);
    let named = |chunk: &DamagedChunk| (chunk.chunk, chunk.bytes.clone(), chunk.tensors.join(" "));
    assert_eq!(
        two.iter().map(named).collect::<Vec<_>>(),
        [
            (1, CHUNK_BYTES..2 * CHUNK_BYTES, "b".to_owned()),
            (2, 2 * CHUNK_BYTES..3 * CHUNK_BYTES, "b c none d".to_owned()),
        ]
    );
    assert_eq!(damage(&[3])[0].chunk, 0, "the header is verified too");
    let error = OpenError::Damaged { chunks: two }.to_string();
    assert!(error.contains(r#"file "model.safetensors", chunk 1 (bytes 4194304 to 8388608)"#));
}

fn refused(change: impl FnOnce(&Path)) -> String {
    let (_directory, path) = package();
    change(&path);
    let error = open(&path, 2).unwrap_err();
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    format!("{error}: {cause}")
}

#[test]
fn files_that_are_not_as_listed_are_named() {
    let missing = refused(|path| fs::remove_file(path.join("config.json")).unwrap());
    assert!(missing.contains("config.json is missing"), "{missing}");
    let short = refused(|path| fs::write(path.join("config.json"), "{").unwrap());
    assert!(short.contains("config.json has 1 bytes instead of 3"), "{short}");
    let directory = refused(|path| {
        fs::remove_file(path.join("config.json")).unwrap();
        fs::create_dir(path.join("config.json")).unwrap();
    });
    assert!(directory.contains("config.json is not a regular file"), "{directory}");
    let changed = refused(|path| fs::write(path.join("config.json"), "[]\n").unwrap());
    assert!(changed.contains(r#"file "config.json", chunk 0"#), "{changed}");
    let gone = refused(|path| fs::remove_file(path.join(MANIFEST_FILE)).unwrap());
    assert!(gone.contains("manifest.json"), "{gone}");
    let other = refused(|path| fs::write(path.join(MANIFEST_FILE), "{}").unwrap());
    assert!(other.contains("not a manifest"), "{other}");
}

#[test]
fn overlapping_tensors_are_refused_before_memory_is_taken() {
    let error = refused(|path| {
        let file = path.join(MANIFEST_FILE);
        let mut manifest = Manifest::parse(&fs::read(&file).unwrap()).unwrap();
        let a = manifest.tensors[0].offset;
        manifest.tensors[2].offset = a + 2;
        fs::write(&file, canonical::to_string(&manifest).unwrap()).unwrap();
    });
    assert!(error.contains(r#"tensors "a" and "c" overlap"#), "{error}");
}

#[test]
fn unlisted_files_are_reported_and_hidden_ones_are_not() {
    let (_directory, path) = package();
    for name in ["notes.txt", ".DS_Store", "extra.safetensors"] {
        fs::write(path.join(name), "x").unwrap();
    }
    let package = open(&path, 2).unwrap();
    assert_eq!(package.report().extra_files, ["extra.safetensors", "notes.txt"]);
}
