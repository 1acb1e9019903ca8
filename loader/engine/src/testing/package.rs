//! Packages of the reference models, sharded and quantized here in the plainest way, so that the
//! loader is not tested against the converter's own ideas.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use half::bf16;
use shardpack_formats::Spec;
use shardpack_manifests::{
    Digest, Layout, Manifest, TensorShard, canonical,
    digest::ChunkHasher,
    ids::Ids,
    layout::{Axis, Stages},
    manifest::{FORMAT, FileEntry, Quantization, Source, TensorEntry},
};
use shardpack_quantize::Dtype;

use super::models::{self, Plain};
use crate::loading::{OpenOptions, Package};

/// What to make of a reference model.
#[derive(Clone, Copy)]
pub(crate) struct Recipe {
    pub(crate) model: &'static str,
    pub(crate) ranks: u32,
    /// Inputs of `o_proj` and `down_proj` are sharded at multiples of this.
    pub(crate) align: u64,
    pub(crate) embedding_sharded: bool,
    pub(crate) weights: Weights,
}

/// How matrices are stored.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Weights {
    AsPublished,
    Affine {
        bits: u32,
        group: u32,
    },
    /// The weights that `Affine` stands for, in f32.
    Decoded {
        bits: u32,
        group: u32,
    },
}

impl Recipe {
    pub(crate) const fn plain(model: &'static str, ranks: u32) -> Self {
        let embedding_sharded = ranks > 1;
        Self { model, ranks, align: 1, embedding_sharded, weights: Weights::AsPublished }
    }

    /// Writes all packages below `out` and returns their directories.
    pub(crate) fn write(&self, out: &Path) -> Vec<PathBuf> {
        let spec = models::spec(self.model);
        let layout = self.layout(&spec);
        let stored: Vec<_> =
            models::tensors(self.model).into_iter().flat_map(|t| self.store(t)).collect();
        let (bits, group_size) = match self.weights {
            Weights::Affine { bits, group } => (bits, Some(group)),
            _ => (16, None),
        };
        let quantization = Quantization {
            importance: None,
            bits,
            group_size,
            float: None,
            rounding: None,
            dtype: Dtype::BF16,
            overrides: BTreeMap::new(),
        };
        (0..self.ranks)
            .map(|rank| {
                let directory = out.join(format!("node-{rank}"));
                let tensors =
                    stored.iter().filter_map(|stored| stored.shard(&layout, rank)).collect();
                let about = About { spec: &spec, layout: &layout, quantization: &quantization };
                write_package(&directory, &about, rank, tensors);
                directory
            })
            .collect()
    }

    /// Writes and opens all packages.
    pub(crate) fn open(&self) -> Vec<Package> {
        let out = tempfile::tempdir().unwrap();
        let open =
            |directory: PathBuf| Package::open(&directory, &OpenOptions::fast(2), &|_| {}).unwrap();
        self.write(out.path()).into_iter().map(open).collect()
    }

    fn layout(&self, spec: &Spec) -> Layout {
        let (heads, head_dim) =
            (u64::from(spec.attention.heads), u64::from(spec.attention.head_dim));
        let kv_heads = u64::from(spec.attention.kv_heads);
        let ranks = u64::from(self.ranks);
        let ranges = |size: u64, block: u64| -> Vec<[u64; 2]> {
            let at = |rank: u64| (size.div_ceil(block) * rank / ranks * block).min(size);
            (0..ranks).map(|rank| [at(rank), at(rank + 1)]).collect()
        };
        let q = ranges(heads, self.align.div_ceil(head_dim));
        let per_kv = heads / kv_heads;
        let kv = q
            .iter()
            .map(
                |[start, end]| {
                    if start == end { [0, 0] } else { [start / per_kv, (end - 1) / per_kv + 1] }
                },
            )
            .collect();
        let axis = |size, unit, ranges| Axis { size, unit, ranges };
        let (ffn, vocab) = (u64::from(spec.ffn.size), u64::from(spec.vocab_size));
        let axes = [
            ("q", axis(heads, head_dim, q)),
            ("kv", axis(kv_heads, head_dim, kv)),
            ("ffn", axis(ffn, 1, ranges(ffn, self.align))),
            ("vocab", axis(vocab, 1, ranges(vocab, 1))),
        ];
        Layout {
            ranks: self.ranks,
            stages: Stages::default(),
            axes: axes.into_iter().map(|(name, axis)| (name.to_owned(), axis)).collect(),
            q_to_kv: (0..heads).map(|head| (head / per_kv) as u32).collect(),
            embedding_sharded: self.embedding_sharded,
        }
    }

    fn store(&self, tensor: Plain) -> Vec<Stored> {
        let rule = self.rule(&tensor.name);
        let matrix = tensor.shape.len() == 2;
        match self.weights {
            Weights::Affine { bits, group } if matrix => quantize(&tensor, bits, group)
                .0
                .into_iter()
                .zip([(u64::from(bits), 32), (1, u64::from(group)), (1, u64::from(group))])
                .map(|(tensor, per_input)| Stored { tensor, rule, per_input })
                .collect(),
            Weights::Decoded { bits, group } if matrix => {
                let tensor = quantize(&tensor, bits, group).1;
                vec![Stored { tensor, rule, per_input: (1, 1) }]
            }
            _ => vec![Stored { tensor, rule, per_input: (1, 1) }],
        }
    }

    fn rule(&self, name: &str) -> Rule {
        let (path, part) = name.rsplit_once('.').unwrap();
        let module = path.rsplit('.').next().unwrap();
        let bias = part == "bias";
        match module {
            "embed_tokens" if !self.embedding_sharded => Rule::Replicated,
            "embed_tokens" | "lm_head" => Rule::Axis("vocab", 0),
            "q_proj" => Rule::Axis("q", 0),
            "k_proj" | "v_proj" => Rule::Axis("kv", 0),
            "gate_proj" | "up_proj" => Rule::Axis("ffn", 0),
            "o_proj" | "down_proj" if bias => Rule::Once,
            "o_proj" => Rule::Axis("q", 1),
            "down_proj" => Rule::Axis("ffn", 1),
            _ => Rule::Replicated,
        }
    }
}

#[derive(Clone, Copy)]
enum Rule {
    Replicated,
    Once,
    Axis(&'static str, u32),
}

/// A whole tensor as it is stored.
struct Stored {
    tensor: Plain,
    rule: Rule,
    /// Stored elements per input feature, as a fraction.
    per_input: (u64, u64),
}

impl Stored {
    fn shard(&self, layout: &Layout, rank: u32) -> Option<(Plain, TensorShard)> {
        let (axis, dim) = match self.rule {
            Rule::Replicated => return Some((self.tensor.clone(), TensorShard::Replicated)),
            Rule::Once => return (rank == 0).then(|| (self.tensor.clone(), TensorShard::Once)),
            Rule::Axis(axis, dim) => (axis, dim),
        };
        let held = &layout.axes[axis];
        let (times, per) = if dim == 1 { self.per_input } else { (1, 1) };
        let [start, end] = held.ranges[rank as usize].map(|unit| unit * held.unit * times / per);
        if start == end {
            return None;
        }
        let mut tensor = self.tensor.clone();
        let full = tensor.shape[dim as usize];
        let below: u64 = tensor.shape[dim as usize + 1..].iter().product();
        let inner = (below * tensor.dtype.size_bytes() as u64) as usize;
        tensor.bytes = tensor
            .bytes
            .chunks(full as usize * inner)
            .flat_map(|run| run[start as usize * inner..end as usize * inner].to_vec())
            .collect();
        tensor.shape[dim as usize] = end - start;
        Some((tensor, TensorShard::Range { axis: axis.to_owned(), dim, start, end, full }))
    }
}

/// Least and greatest weight of each group as the ends of its grid: the three stored tensors,
/// and the weights that they stand for.
fn quantize(tensor: &Plain, bits: u32, group: u32) -> ([Plain; 3], Plain) {
    let weights: Vec<f32> = tensor
        .bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|half| bf16::from_le_bytes(*half).to_f32())
        .collect();
    let levels = (1_u32 << bits) - 1;
    let (mut words, mut scales, mut biases, mut decoded) = (vec![], vec![], vec![], vec![]);
    let (mut pending, mut pending_bits) = (0_u64, 0);
    for weights in weights.chunks(group as usize) {
        let low = weights.iter().copied().fold(f32::INFINITY, f32::min);
        let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (scale, bias) = (bf16::from_f32((high - low) / levels as f32), bf16::from_f32(low));
        scales.extend(scale.to_le_bytes());
        biases.extend(bias.to_le_bytes());
        for weight in weights {
            let level = ((weight - bias.to_f32()) / scale.to_f32()).round();
            let level = level.clamp(0.0, levels as f32);
            decoded.extend((scale.to_f32() * level + bias.to_f32()).to_le_bytes());
            pending |= (level as u64) << pending_bits;
            pending_bits += bits;
            if pending_bits >= 32 {
                words.extend((pending as u32).to_le_bytes());
                pending >>= 32;
                pending_bits -= 32;
            }
        }
    }
    let [rows, cols] = [tensor.shape[0], tensor.shape[1]];
    let module = tensor.name.strip_suffix(".weight").unwrap().to_owned();
    let part = |suffix: &str, dtype, width, bytes| Plain {
        name: format!("{module}.{suffix}"),
        dtype,
        shape: vec![rows, width],
        bytes,
    };
    let groups = cols / u64::from(group);
    let stored = [
        part("weight", Dtype::U32, cols * u64::from(bits) / 32, words),
        part("scales", Dtype::BF16, groups, scales),
        part("biases", Dtype::BF16, groups, biases),
    ];
    (stored, part("weight", Dtype::F32, cols, decoded))
}

/// What a manifest says besides files and tensors.
pub(crate) struct About<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) layout: &'a Layout,
    pub(crate) quantization: &'a Quantization,
}

/// Writes one package with all tensors in one file, whose data begins at an odd multiple of 8,
/// and a small text file.
pub(crate) fn write_package(
    directory: &Path,
    about: &About<'_>,
    rank: u32,
    tensors: Vec<(Plain, TensorShard)>,
) {
    fs::create_dir_all(directory).unwrap();
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (tensor, _) in &tensors {
        let offsets = [data.len(), data.len() + tensor.bytes.len()];
        header.insert(
            tensor.name.clone(),
            serde_json::json!({
                "dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": offsets,
            }),
        );
        data.extend(&tensor.bytes);
    }
    let mut header = serde_json::to_string(&header).unwrap();
    while !header.len().is_multiple_of(16) {
        header.push(' ');
    }
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    let mut offset = file.len() as u64;
    file.extend(data);
    let mut entries = Vec::new();
    for (tensor, shard) in tensors {
        let size = tensor.bytes.len() as u64;
        entries.push(TensorEntry {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            file: WEIGHTS.to_owned(),
            offset,
            size,
            shard,
            blake3: Digest::of(&tensor.bytes),
        });
        offset += size;
    }
    let files = [("config.json", b"{}\n".to_vec()), (WEIGHTS, file)];
    let manifest = Manifest {
        format: FORMAT,
        requires: vec![],
        name: None,
        ids: Ids { weights: Digest([1; 32]), model: Digest([2; 32]), layout: Digest([3; 32]) },
        source: Source::default(),
        architecture: about.spec.clone(),
        quantization: about.quantization.clone(),
        chat: None,
        layout: about.layout.clone(),
        rank,
        files: files.iter().map(|(name, bytes)| file_entry(name, bytes)).collect(),
        tensors: entries,
    };
    for (name, bytes) in files {
        fs::write(directory.join(name), bytes).unwrap();
    }
    fs::write(directory.join("manifest.json"), canonical::to_string(&manifest).unwrap()).unwrap();
}

/// The file that holds all tensors.
pub(crate) const WEIGHTS: &str = "model.safetensors";

fn file_entry(name: &str, bytes: &[u8]) -> FileEntry {
    let mut hasher = ChunkHasher::new();
    hasher.update(bytes);
    let digests = hasher.finish();
    FileEntry {
        name: name.to_owned(),
        size: digests.size_bytes,
        blake3: digests.digest,
        chunks: digests.chunks,
    }
}
