//! Small package sets on disk, for tests. Shared by path with the unit tests of the crates below.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::json;
use shardpack_manifests::{
    CHUNK_BYTES, ChunkHasher, Digest, Layout, Manifest, PackageSet, TensorShard, canonical,
    ids::{self, Ids, TEXT_FILES},
    layout::{Axis, Stages},
    manifest::{FORMAT, FileEntry, MANIFEST_FILE, Source, TensorEntry},
    set::{PackageEntry, SET_FILE},
};

/// What a set holds. Sets that share a seed share the bytes that it decides.
#[derive(Clone)]
pub(crate) struct SetPlan {
    /// Packages.
    pub(crate) ranks: u32,
    /// Decides the ranks' own weights.
    pub(crate) seed: u64,
    /// Decides the replicated weights.
    pub(crate) shared_seed: u64,
    /// Bytes of each rank's own weights.
    pub(crate) own_bytes: u64,
    /// Bytes of the replicated weights.
    pub(crate) shared_bytes: u64,
    /// Small files that each rank has for itself, and as many that all have: chunks that cost little.
    pub(crate) small_files: u64,
    /// Name to serve under.
    pub(crate) name: &'static str,
}

/// A rank's own weights: 2 whole chunks and a part, by default.
pub(crate) const OWN_FILE: &str = "model-00001-of-00001.safetensors";
/// The replicated weights.
pub(crate) const SHARED_FILE: &str = "model-shared-00001-of-00001.safetensors";

impl Default for SetPlan {
    fn default() -> Self {
        Self {
            ranks: 2,
            seed: 1,
            shared_seed: 2,
            own_bytes: 2 * CHUNK_BYTES + 12_345,
            shared_bytes: CHUNK_BYTES + 77,
            small_files: 0,
            name: "tiny",
        }
    }
}

/// Writes the set into `directory` and returns its document.
pub(crate) fn write_set(directory: &Path, plan: &SetPlan) -> PackageSet {
    let texts: Vec<(&str, Vec<u8>)> = vec![
        ("config.json", b"{}\n".to_vec()),
        ("tokenizer.json", noise(plan.seed ^ 0x70, 5_000)),
        ("empty.txt", Vec::new()),
    ];
    let digests = texts
        .iter()
        .filter(|(name, _)| TEXT_FILES.contains(name))
        .map(|(name, bytes)| ((*name).to_owned(), Digest::of(bytes)))
        .collect();
    let units = u64::from(plan.ranks) * 4;
    let ranges = (0..u64::from(plan.ranks)).map(|rank| [rank * 4, rank * 4 + 4]).collect();
    let layout = Layout {
        ranks: plan.ranks,
        stages: Stages::default(),
        axes: BTreeMap::from([("q".to_owned(), Axis { size: units, unit: 8, ranges })]),
        q_to_kv: vec![0; units as usize],
        embedding_sharded: false,
    };
    let weights = Digest::of(&plan.seed.to_le_bytes());
    let model = ids::model_id(weights, &digests).unwrap();
    let ids = Ids { weights, model, layout: ids::layout_id(model, &layout).unwrap() };
    let packages = (0..plan.ranks)
        .map(|rank| {
            let name = format!("node-{rank}");
            write_package(&directory.join(&name), plan, &texts, &ids, &layout, rank)
        })
        .collect();
    let set = PackageSet {
        format: FORMAT,
        requires: Vec::new(),
        name: Some(plan.name.to_owned()),
        ids,
        source: Source::default(),
        quantization: quantization(),
        packages,
    };
    let text = canonical::to_string(&set).unwrap() + "\n";
    fs::write(directory.join(SET_FILE), text).unwrap();
    set
}

fn write_package(
    directory: &Path,
    plan: &SetPlan,
    texts: &[(&str, Vec<u8>)],
    ids: &Ids,
    layout: &Layout,
    rank: u32,
) -> PackageEntry {
    fs::create_dir_all(directory).unwrap();
    let own = noise(plan.seed * 1_000 + u64::from(rank), plan.own_bytes);
    let shared = noise(plan.shared_seed * 1_000_003, plan.shared_bytes);
    let mut contents: Vec<(&str, &[u8])> =
        texts.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect();
    contents.extend([(OWN_FILE, own.as_slice()), (SHARED_FILE, shared.as_slice())]);
    let small: Vec<(String, Vec<u8>)> = (0..plan.small_files)
        .flat_map(|number| {
            let bytes = |seed| noise(seed + number, 2_000 + number * 371);
            let own = bytes(plan.seed * 7_000 + u64::from(rank) * 100);
            let shared = bytes(plan.shared_seed * 9_000_000);
            [(format!("own-{number:02}.bin"), own), (format!("shared-{number:02}.bin"), shared)]
        })
        .collect();
    contents.extend(small.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())));
    contents.sort_unstable_by_key(|(name, _)| *name);
    let files: Vec<FileEntry> = contents
        .iter()
        .map(|(name, bytes)| {
            fs::write(directory.join(name), bytes).unwrap();
            let mut hasher = ChunkHasher::new();
            hasher.update(bytes);
            let found = hasher.finish();
            let size = found.size_bytes;
            FileEntry { name: (*name).to_owned(), size, blake3: found.digest, chunks: found.chunks }
        })
        .collect();
    let half = plan.own_bytes / 2;
    let tensor = |name: &str, file: &str, bytes: &[u8], start: u64, end: u64| TensorEntry {
        name: name.to_owned(),
        dtype: serde_json::from_value(json!("U8")).unwrap(),
        shape: vec![end - start],
        file: file.to_owned(),
        offset: start,
        size: end - start,
        shard: TensorShard::Replicated,
        blake3: Digest::of(&bytes[start as usize..end as usize]),
    };
    let manifest = Manifest {
        format: FORMAT,
        requires: Vec::new(),
        name: Some(plan.name.to_owned()),
        ids: ids.clone(),
        source: Source::default(),
        architecture: serde_json::from_value(architecture()).unwrap(),
        quantization: quantization(),
        chat: None,
        layout: layout.clone(),
        rank,
        files,
        tensors: vec![
            tensor("layers.0.w", OWN_FILE, &own, 0, half),
            tensor("layers.1.w", OWN_FILE, &own, half, plan.own_bytes),
            tensor("norm", SHARED_FILE, &shared, 0, plan.shared_bytes),
        ],
    };
    let text = canonical::to_string(&manifest).unwrap() + "\n";
    fs::write(directory.join(MANIFEST_FILE), &text).unwrap();
    PackageEntry {
        directory: format!("node-{rank}"),
        manifest: Digest::of(text.as_bytes()),
        size_bytes: manifest.files.iter().map(|file| file.size).sum(),
    }
}

fn quantization<T: serde::de::DeserializeOwned>() -> T {
    serde_json::from_value(json!({"bits": 16, "dtype": "BF16"})).unwrap()
}

/// Any architecture: nothing here computes with it.
fn architecture() -> serde_json::Value {
    json!({
        "rules": "dense-gqa", "model_type": "llama", "hidden_size": 64, "vocab_size": 256,
        "max_positions": 128, "norm": {"kind": "rms", "eps": "3727c5ac"},
        "attention": {
            "heads": 8, "kv_heads": 1, "head_dim": 8, "scale": "3eb504f3", "qkv_bias": false,
            "o_bias": false, "qk_norm": "none",
        },
        "ropes": [], "ffn": {"intermediate_size": 128, "activation": "silu_glu", "bias": false},
        "layers": [], "tied_embeddings": true,
    })
}

/// Bytes without a pattern (xorshift).
pub(crate) fn noise(seed: u64, len: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while (bytes.len() as u64) < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}
