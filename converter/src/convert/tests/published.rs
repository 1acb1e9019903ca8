//! DeepSeek V4 as it is published: most matrices in FP8 with scales for blocks, experts in four-bit
//! floats with scales for groups, tables of experts in integers, a configuration of its own spelling.

use std::{fs, path::Path};

use serde_json::{Value, json};
use shardpack_containers::container::{TensorInfo, header_for};
use shardpack_quantize::Dtype;

use super::*;

/// A tensor of a file.
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: Vec<u8>,
}

/// Sides of the blocks that share a scale.
const BLOCK: usize = 128;

/// Columns of the experts that share a scale.
const GROUP: usize = 32;

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models/deepseek_v4")
}

pub(super) fn write(folder: &Path, config: &Value, tensors: &[Stored]) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let info = |it: &Stored| TensorInfo {
        name: it.name.clone(),
        dtype: it.dtype,
        shape: it.shape.clone(),
        offset: 0,
        size: it.bytes.len() as u64,
    };
    let infos: Vec<TensorInfo> = tensors.iter().map(info).collect();
    let mut file = header_for("pt", &infos);
    for tensor in tensors {
        file.extend(&tensor.bytes);
    }
    fs::write(folder.join("model.safetensors"), file).unwrap();
}

/// A model's tensors as they stand there.
pub(super) fn tensors(source: &Source) -> Vec<Stored> {
    let stored = |tensor: &TensorInfo| {
        // Tables are read as floats.
        let logical = source.logical(&tensor.name).unwrap();
        let rows = 0..logical.row_count();
        let mut buffers = RowBuffers::default();
        let (dtype, bytes) = source.read_rows(logical, rows, &mut buffers).unwrap();
        let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
        Stored { name, dtype, shape, bytes: bytes.to_vec() }
    };
    source.tensors().map(stored).collect()
}

pub(super) fn floats(tensor: &Stored) -> Vec<f32> {
    let mut values = vec![0.0; tensor.bytes.len() / tensor.dtype.size_bytes()];
    affine::widen(Platform::detect_for_quantizing(), tensor.dtype, &tensor.bytes, &mut values);
    values
}

/// What a byte of E4M3 stands for, from its definition; none for the two that are no numbers.
fn e4m3(byte: u8) -> Option<f32> {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
    };
    (byte & 0x7f != 0x7f).then_some(if byte < 0x80 { magnitude } else { -magnitude })
}

/// What a nibble of E2M1 stands for.
fn e2m1(nibble: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(nibble & 7)];
    if nibble < 8 { magnitude } else { -magnitude }
}

/// The code whose value is nearest.
fn nearest(value: f32, codes: u8, decode: impl Fn(u8) -> Option<f32>) -> u8 {
    let distance = |code: &u8| decode(*code).map_or(f32::INFINITY, |found| (found - value).abs());
    (0..=codes).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
}

/// The power of two, and its byte, by which numbers are divided so that the largest is a code.
fn scale(values: impl Iterator<Item = f32>, largest: f32) -> (f32, u8) {
    let most = values.fold(f32::MIN_POSITIVE, |most, value| most.max(value.abs()));
    let exponent = (most / largest).log2().ceil() as i32;
    (2_f32.powi(exponent), (exponent + 127) as u8)
}

/// Codes, scales with their shape, and the values that both together stand for.
pub(super) type Coded = (Vec<u8>, Vec<u8>, [u64; 2], Vec<f32>);

pub(super) fn fp8(values: &[f32], width: usize) -> Coded {
    let height = values.len() / width;
    let (across, down) = (width.div_ceil(BLOCK), height.div_ceil(BLOCK));
    let within = |block: usize| {
        let (top, left) = (block / across * BLOCK, block % across * BLOCK);
        let rows = top..(top + BLOCK).min(height);
        rows.flat_map(move |row| (left..(left + BLOCK).min(width)).map(move |at| row * width + at))
    };
    let (mut codes, mut stood) = (vec![0; values.len()], vec![0.0; values.len()]);
    let mut scales = Vec::new();
    for block in 0..across * down {
        let (factor, byte) = scale(within(block).map(|at| values[at]), 448.0);
        scales.push(byte);
        for at in within(block) {
            codes[at] = nearest(values[at] / factor, 255, e4m3);
            stood[at] = e4m3(codes[at]).unwrap() * factor;
        }
    }
    (codes, scales, [down as u64, across as u64], stood)
}

fn fp4(values: &[f32], width: usize) -> Coded {
    let (mut codes, mut scales, mut stood) = (Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks_exact(GROUP) {
        let (factor, byte) = scale(group.iter().copied(), 6.0);
        scales.push(byte);
        for pair in group.chunks_exact(2) {
            let code = |value: f32| nearest(value / factor, 15, |nibble| Some(e2m1(nibble)));
            let [even, odd] = [code(pair[0]), code(pair[1])];
            codes.push(even | odd << 4);
            stood.extend([even, odd].map(|code| e2m1(code) * factor));
        }
    }
    let rows = (values.len() / width) as u64;
    (codes, scales, [rows, (width / GROUP) as u64], stood)
}

/// Writes the model as it is published, and another of the same values in BF16.
fn rewrite(folder: &Path) {
    let source = Source::open(&reference()).unwrap();
    let (mut published, mut plain) = (Vec::new(), Vec::new());
    let mut coded = [0; 2];
    for tensor in tensors(&source) {
        let Stored { name, dtype, shape, bytes } = &tensor;
        let copy = |dtype, bytes| Stored { name: name.clone(), dtype, shape: shape.clone(), bytes };
        let is = |part: &str| name.contains(part);
        let is_expert = is(".ffn.experts.");
        let is_fp8 = name.ends_with(".weight")
            && (is(".attn.w") || is(".indexer.wq_b.") || is(".shared_experts."));
        if is(".tid2eid") {
            let words = floats(&tensor).into_iter().flat_map(|it| (it as i32).to_le_bytes());
            published.push(copy(Dtype::I32, words.collect()));
            plain.push(copy(Dtype::F32, bytes.clone()));
            continue;
        }
        if !is_expert && !is_fp8 {
            published.push(copy(*dtype, bytes.clone()));
            plain.push(copy(*dtype, bytes.clone()));
            continue;
        }
        coded[usize::from(is_expert)] += 1;
        let width = shape[1] as usize;
        let (encode, dtype, packed): (fn(&[f32], usize) -> Coded, _, _) =
            if is_expert { (fp4, Dtype::I8, 2) } else { (fp8, Dtype::F8E4M3, 1) };
        let (codes, scales, of_scales, values) = encode(&floats(&tensor), width);
        let of_codes = vec![shape[0], shape[1] / packed];
        published.push(Stored { name: name.clone(), dtype, shape: of_codes, bytes: codes });
        published.push(Stored {
            name: name.replace(".weight", ".scale"),
            dtype: Dtype::F8E8M0,
            shape: of_scales.to_vec(),
            bytes: scales,
        });
        let mut narrow = vec![0; values.len() * 2];
        affine::narrow(Platform::detect_for_quantizing(), Dtype::BF16, &values, &mut narrow);
        plain.push(copy(Dtype::BF16, narrow));
    }
    // Five matrices of attention and three of the shared expert in each of five layers, two of an
    // index; three of each of four experts.
    assert_eq!(coded, [5 * 8 + 2, 5 * 4 * 3]);
    write(&folder.join("plain"), &source.config, &plain);
    for tensor in &mut plain {
        // As transformers saves them.
        let name = tensor.name.replace(".attn.kv_norm.", ".attn.norm.");
        tensor.name = if name.starts_with("layers.") { format!("model.{name}") } else { name };
    }
    write(&folder.join("saved"), &source.config, &plain);
    let mut config = source.config.clone();
    let keys = config.as_object_mut().unwrap();
    for key in ["layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "mlp_bias"] {
        keys.remove(key);
    }
    keys.remove("partial_rotary_factor");
    let own = json!({
        "compress_ratios": [0, 4, 128, 4, 128, 0], "compress_rate_hca": 8, "num_hash_layers": 2,
        "qk_rope_head_dim": 8, "rope_theta": 10000, "compress_rope_theta": 40000,
        "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 16,
            "beta_fast": 4, "beta_slow": 1},
        "expert_dtype": "fp4", "num_nextn_predict_layers": 1,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
            "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
    });
    keys.extend(own.as_object().unwrap().clone());
    write(&folder.join("published"), &config, &published);
}

/// Weights of all packages, and the architecture of the first.
pub(super) fn converted(
    source: &Path,
    output: PathBuf,
    bits: u32,
) -> (BTreeMap<PathBuf, Vec<u8>>, Value) {
    let source = Source::open(source).unwrap();
    let options = ConvertOptions { bits, group_size: 32, ..ConvertOptions::new(output, 2) };
    let plan = Plan::new(&source, options).unwrap();
    let set = convert(&source, &plan, &|_| {}).unwrap().output;
    let mut files = BTreeMap::new();
    for node in ["node-0", "node-1"] {
        for entry in fs::read_dir(set.join(node)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|ending| ending == "safetensors") {
                let name = path.strip_prefix(&set).unwrap().to_owned();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    let manifest = fs::read(set.join("node-0/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    (files, manifest["architecture"].clone())
}

#[test]
fn a_published_checkpoint_is_the_model_of_its_values() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    rewrite(folder.path());
    for bits in [4, 16] {
        let published = converted(&at("published"), at(&format!("published-{bits}")), bits);
        let plain = converted(&at("plain"), at(&format!("plain-{bits}")), bits);
        assert!(published.0.len() >= 2, "{:?}", published.0.keys());
        assert_eq!(published.1, plain.1, "the same architecture");
        assert!(published.0 == plain.0, "the same bytes at {bits} bits");
        let saved = converted(&at("saved"), at(&format!("saved-{bits}")), bits);
        assert!(saved == plain, "under other names at {bits} bits");
    }
}

#[test]
fn tables_that_name_no_expert_and_scales_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    rewrite(folder.path());
    let published = folder.path().join("published");
    let check = |change: &dyn Fn(&mut Vec<Stored>), expected: &[&str]| {
        let source = Source::open(&published).unwrap();
        let raw = |tensor: &TensorInfo| {
            let bytes = fs::read(published.join("model.safetensors")).unwrap();
            let bytes = &bytes[tensor.offset as usize..][..tensor.size as usize];
            let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
            Stored { name, dtype: tensor.dtype, shape, bytes: bytes.to_vec() }
        };
        let mut tensors: Vec<Stored> = source.tensors().map(raw).collect();
        change(&mut tensors);
        let changed = tempfile::tempdir().unwrap();
        write(changed.path(), &source.config, &tensors);
        let attempt = || -> Result<(), Box<dyn std::error::Error>> {
            let source = Source::open(changed.path())?;
            let options = ConvertOptions::new(changed.path().join("set"), 1);
            convert(&source, &Plan::new(&source, options)?, &|_| {})?;
            Ok(())
        };
        let error = attempt().unwrap_err();
        let error =
            format!("{error}: {}", error.source().map(ToString::to_string).unwrap_or_default());
        assert!(expected.iter().all(|word| error.contains(word)), "{expected:?}: {error}");
    };
    let find = |tensors: &mut Vec<Stored>, name: &str| {
        tensors.iter().position(|tensor| tensor.name == name).unwrap()
    };
    let table = "layers.1.ffn.gate.tid2eid";
    for (number, says) in
        [(4, "element 5 is 4, expected a whole number from 0 to 3"), (-1, "is -1")]
    {
        let change = |tensors: &mut Vec<Stored>| {
            let at = find(tensors, table);
            tensors[at].bytes[20..24].copy_from_slice(&i32::to_le_bytes(number));
        };
        check(&change, &[table, says]);
    }
    let expert = "layers.2.ffn.experts.3.w2";
    let without = |tensors: &mut Vec<Stored>| {
        let at = find(tensors, &format!("{expert}.scale"));
        tensors.remove(at);
    };
    check(&without, &[expert, "has shape [32, 16], expected [hidden_size = 32"]);
    let shorter = |tensors: &mut Vec<Stored>| {
        let at = find(tensors, &format!("{expert}.scale"));
        tensors[at].shape[0] = 16;
        tensors[at].bytes.truncate(16);
    };
    check(&shorter, &[&format!("{expert}.scale"), "a byte for each of 32 rows of 1 groups"]);
    let words = |tensors: &mut Vec<Stored>| {
        let at = find(tensors, table);
        tensors[at].dtype = Dtype::U32;
    };
    check(&words, &[table, "U32"]);
}
