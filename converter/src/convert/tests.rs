//! Every checkpoint of `tests/data/sources` through a whole conversion: what the packages stand
//! for, against what the source stands for.

mod blocks;
mod float_groups;
mod published;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use shardpack_manifests::manifest::MatrixFormat;
use shardpack_quantize::{Dtype, Platform, affine};

use super::{convert, read::Rows};
use crate::{
    checkpoint::Pickles,
    export::{ExportForm, ExportOptions, export},
    plan::{ConvertOptions, Plan},
    report::Carried,
    source::{RowBuffers, Source},
    unsharded::UnshardedModel,
};

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/sources")
}

/// What becomes of a fixture's quantized matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// They were floats.
    Floats,
    /// Their integers are carried over: no bit is lost.
    Exact,
    /// They are quantized anew, with the error of the new grid.
    Anew,
    /// They stay floats, rounded once to the package's type.
    Kept,
}
use Way::{Anew, Exact, Floats, Kept};

/// Bits, group size, type of scales, ranks.
type Form = (u32, u32, Option<&'static str>, u32);

const FOUR: Form = (4, 64, None, 1);
const FOUR_BY_32: Form = (4, 32, None, 2);
const SIX: Form = (6, 64, None, 2);
const SIX_BY_32: Form = (6, 32, None, 1);
const EIGHT: Form = (8, 64, None, 1);
const EIGHT_BY_32: Form = (8, 32, None, 2);
const SIXTEEN: Form = (16, 64, None, 2);

/// Every fixture that converts, in forms that try all ways it can go.
const TABLE: &[(&str, &[(Form, Way)])] = &[
    ("bf16_sharded", &[(FOUR, Floats), (SIXTEEN, Floats)]),
    ("bf16_moe", &[(SIX, Floats), (SIXTEEN, Floats)]),
    ("f16", &[(EIGHT, Floats), (SIXTEEN, Floats)]),
    ("f32", &[(FOUR, Floats), (SIXTEEN, Floats)]),
    ("pickle_bin", &[(FOUR, Floats), (SIXTEEN, Floats)]),
    ("fp8_block_ragged", &[(EIGHT_BY_32, Anew), (SIXTEEN, Kept)]),
    ("fp8_block_ue8m0", &[(SIX, Anew), (SIXTEEN, Kept)]),
    ("fp8_per_tensor", &[(FOUR, Anew), (SIXTEEN, Kept)]),
    ("modelopt_fp8", &[(EIGHT, Anew), (SIXTEEN, Kept)]),
    ("modelopt_nvfp4", &[(FOUR, Anew), (SIXTEEN, Kept)]),
    ("modelopt_int4_awq", &[(FOUR, Anew), (SIXTEEN, Kept)]),
    ("modelopt_int8_sq", &[(EIGHT, Anew), (SIXTEEN, Kept)]),
    ("torchao_int4_g32", &[(FOUR_BY_32, Anew), (SIXTEEN, Kept)]),
    // Scales of 24 significant bits, whose products with integers are rounded.
    ("torchao_int8", &[(EIGHT_BY_32, Anew), (FOUR, Anew), (SIXTEEN, Kept)]),
    ("bnb_nf4", &[(FOUR, Anew), (SIXTEEN, Kept)]),
    ("bnb_fp4_nested", &[(SIX, Anew), (SIXTEEN, Kept)]),
    ("bnb_int8", &[(EIGHT, Anew), (FOUR, Anew), (SIXTEEN, Kept)]),
    ("hqq_2bit", &[(FOUR_BY_32, Anew), (SIXTEEN, Kept)]),
    ("hqq_4bit", &[(FOUR, Anew), (SIXTEEN, Kept)]),
    ("ct_nvfp4", &[(EIGHT, Anew), (SIXTEEN, Kept)]),
    ("ct_int4_g32_experts", &[(FOUR_BY_32, Exact), (FOUR, Anew)]),
    ("ct_int4_g128_asym", &[(FOUR, Anew), (SIXTEEN, Kept)]),
    ("ct_fp8_channel", &[(EIGHT, Anew), (SIXTEEN, Kept)]),
    ("ct_int8_channel", &[(EIGHT_BY_32, Exact), (FOUR, Anew)]),
    ("gptq_4bit_g64_sym", &[(FOUR, Exact), (FOUR_BY_32, Exact), (SIX, Exact)]),
    ("gptq_8bit_g64_sym", &[(EIGHT, Exact), (FOUR, Anew)]),
    ("gptq_4bit_g64_desc_act", &[(FOUR, Anew), (SIXTEEN, Kept)]),
    ("gptq_v2_4bit_g64_asym", &[(SIXTEEN, Kept)]),
    ("awq_gemm_4bit_g64", &[(SIXTEEN, Kept)]),
    ("mlx_4bit_g64", &[(FOUR, Exact), ((4, 128, None, 1), Anew)]),
    ("mlx_8bit_g32_overrides", &[(EIGHT_BY_32, Exact)]),
    ("mxfp4_gpt_oss", &[(SIX_BY_32, Exact), (FOUR_BY_32, Anew), (SIXTEEN, Kept)]),
    ("mlx_mxfp4", &[(SIX_BY_32, Exact), (FOUR_BY_32, Anew)]),
    ("gguf_f16", &[(FOUR, Floats), (SIXTEEN, Floats)]),
    ("gguf_q4_0", &[(FOUR_BY_32, Exact), (FOUR, Anew), (SIXTEEN, Kept)]),
    ("gguf_q8_0", &[(EIGHT_BY_32, Exact), (SIX, Anew), (SIXTEEN, Kept)]),
    ("gguf_q4_k_m", &[(FOUR_BY_32, Anew), (SIXTEEN, Kept)]),
    ("gguf_q6_k", &[(SIX, Anew), (SIXTEEN, Kept)]),
    ("gguf_blocks", &[(SIX_BY_32, Anew), ((6, 32, Some("F32"), 2), Exact)]),
    ("gguf_iq4", &[(FOUR, Anew), ((8, 32, Some("F32"), 2), Exact)]),
    ("gguf_gemma2", &[(FOUR_BY_32, Floats), (SIXTEEN, Floats)]),
    ("gguf_gemma3", &[(FOUR_BY_32, Floats), (SIXTEEN, Floats)]),
    ("gguf_phi3", &[(FOUR_BY_32, Floats), (SIXTEEN, Floats)]),
    ("gguf_gpt_oss", &[(SIX_BY_32, Exact), (FOUR_BY_32, Anew), (SIXTEEN, Kept)]),
];

/// Folders with other things than a checkpoint that converts.
const OTHERS: &[&str] = &["lora", "refused", "pickle_legacy", "pickle_malicious"];

#[test]
fn every_fixture_converts_and_stands_for_its_source() {
    let all = TABLE.iter().flat_map(|(name, forms)| forms.iter().map(move |form| (name, form)));
    // All that fail are named, not the first alone.
    let failed: Vec<String> = all
        .filter(|(name, (form, way))| {
            std::panic::catch_unwind(|| check(name, *form, *way)).is_err()
        })
        .map(|(name, (form, way))| format!("{name} {form:?} {way:?}"))
        .collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn no_fixture_is_forgotten() {
    let folders = fs::read_dir(sources()).unwrap().map(|entry| entry.unwrap());
    let folders = folders.filter(|entry| entry.path().is_dir());
    let found: BTreeSet<String> =
        folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    let known = TABLE.iter().map(|(name, _)| name).chain(OTHERS);
    assert_eq!(found, known.map(|name| (*name).to_owned()).collect());
}

#[track_caller]
fn check(name: &str, (bits, group_size, dtype, ranks): Form, way: Way) {
    let folder = tempfile::tempdir().unwrap();
    let source = Source::open_as(&sources().join(name), Pickles::Read).unwrap();
    let options = ConvertOptions {
        bits,
        group_size,
        dtype: dtype.map(str::to_owned),
        nodes: ranks.to_string().parse().unwrap(),
        ..ConvertOptions::new(folder.path().join("set"), ranks)
    };
    let plan = Plan::new(&source, options).unwrap();
    let converted = convert(&source, &plan, &|_| {}).unwrap();
    let model = UnshardedModel::open(std::slice::from_ref(&converted.output)).unwrap();
    let form = ExportForm::HuggingFace { dtype: Some("F32".to_owned()) };
    let output = folder.path().join("floats");
    let options = ExportOptions { output: output.clone(), form, memory_bytes: 256 << 20 };
    export(&model, &options, &|_| {}).unwrap();
    let exported = Source::open(&output).unwrap();
    // Publishers may have a tensor in parts of others.
    let again = ConvertOptions::new(folder.path().join("again"), ranks);
    let again = Plan::new(&exported, again).unwrap();
    let what = format!("{name} at {bits} bits, groups of {group_size}");
    let mut ways = BTreeMap::new();
    for step in &plan.steps {
        let tensor = &step.tensor.name;
        let wanted = values(&source, &plan, tensor);
        let found = values(&exported, &again, tensor);
        let report = &converted.report.tensors[tensor];
        if step.tensor.quantizable && report.source.is_some() {
            *ways.entry(format!("{:?}", report.carried)).or_insert(0) += 1;
        }
        let what = format!("{what}: {tensor}");
        match (step.format, report.carried) {
            (MatrixFormat::Plain, _) => check_rounded(&found, &wanted, step.parts[0].dtype, &what),
            // By value: the grid has one zero, floats have two.
            (_, Some(Carried::Repacked)) => assert!(found == wanted, "{what}"),
            (MatrixFormat::Affine { bits, group_size }, _) => {
                check_quantized(&found, &wanted, (bits, group_size), step.parts[1].dtype, &what);
            }
            (MatrixFormat::Float(format), _) => panic!("{what}: {format}, and nobody asked for it"),
        }
    }
    check_way(&ways, way, &what);
}

/// What the report says of the matrices that the source stores quantized.
#[track_caller]
fn check_way(ways: &BTreeMap<String, i32>, way: Way, what: &str) {
    let expected = match way {
        Floats => None,
        Exact => Some(Carried::Repacked),
        Anew => Some(Carried::Requantized),
        Kept => Some(Carried::Dequantized),
    };
    match expected {
        None => assert!(ways.is_empty(), "{what}: {ways:?}"),
        Some(carried) => {
            assert!(ways.contains_key(&format!("{:?}", Some(carried))), "{what}: {ways:?}");
        }
    }
}

/// A tensor of the plan as its source has it.
fn values(source: &Source, plan: &Plan, name: &str) -> Vec<f32> {
    let step = plan.steps.iter().find(|step| step.tensor.name == name).unwrap();
    let rows = Rows::new(source, &step.tensor);
    let (mut out, mut stored) = (Vec::new(), Vec::new());
    rows.read(0..step.tensor.rows(), &mut out, &mut stored, &mut RowBuffers::default()).unwrap();
    let dtype = step.tensor.dtype;
    let mut values = vec![0.0; out.len() / dtype.size_bytes()];
    affine::widen(Platform::detect_for_quantizing(), dtype, &out, &mut values);
    values
}

/// Expects the values rounded once to a type: bit for bit what they were where it holds them.
#[track_caller]
fn check_rounded(found: &[f32], wanted: &[f32], dtype: Dtype, what: &str) {
    let mut narrow = vec![0; wanted.len() * dtype.size_bytes()];
    affine::narrow(Platform::detect_for_quantizing(), dtype, wanted, &mut narrow);
    let mut rounded = vec![0.0; wanted.len()];
    affine::widen(Platform::detect_for_quantizing(), dtype, &narrow, &mut rounded);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert!(bits(found) == bits(&rounded), "{what}");
}

/// Expects of every group an error (root of the mean square) below that of a grid of so many steps
/// over the group's own range: half a step, and what rounding scale and bias to their type adds.
#[track_caller]
fn check_quantized(
    found: &[f32],
    wanted: &[f32],
    (bits, group_size): (u32, u32),
    store: Dtype,
    what: &str,
) {
    let steps = f64::from((1_u32 << bits) - 1);
    // Half of the last place of a number of this type (8, 11 and 24 significant bits), relative to
    // it, and half of the smallest number, which is what a scale below it can be off by.
    let (unit, least_half) = match store {
        Dtype::BF16 => (2.0_f64.powi(-8), 0.0),
        Dtype::F16 => (2.0_f64.powi(-11), 2.0_f64.powi(-25)),
        _ => (2.0_f64.powi(-24), 0.0),
    };
    let groups = found.chunks(group_size as usize).zip(wanted.chunks(group_size as usize));
    for (index, (found, wanted)) in groups.enumerate() {
        let errors = found.iter().zip(wanted);
        let squares = errors.map(|(found, wanted)| f64::from(found - wanted).powi(2));
        let error = (squares.sum::<f64>() / found.len() as f64).sqrt();
        let least = wanted.iter().copied().fold(f32::INFINITY, f32::min);
        let most = wanted.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let range = f64::from(most) - f64::from(least);
        let edge = f64::from(most.abs().max(least.abs()));
        let bound = range / steps / 2.0 + unit * (range + edge) + least_half * (steps + 1.0);
        assert!(error <= bound, "{what}: group {index} is off by {error}, its grid by {bound}");
    }
}
