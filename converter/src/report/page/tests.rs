//! Whole pages of small reports.

use shardpack_manifests::{
    Digest,
    ids::Ids,
    manifest::{FORMAT, Source},
    set::PackageEntry,
};
use shardpack_quantize::Dtype;

use super::*;

fn tensor(bits: u32, rmse: f64) -> TensorReport {
    TensorReport {
        format: MatrixFormat::Affine { bits, group_size: 64 },
        relative_rmse: Some(rmse),
        cosine: Some(1.0 - rmse * rmse / 2.0),
        at_ends: Some(0.125),
        ..TensorReport::plain()
    }
}

fn report(tensors: &[(&str, TensorReport)], warnings: &[&str]) -> Report {
    let tensors = tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone()));
    let warnings = warnings.iter().map(|warning| (*warning).to_owned()).collect();
    Report::new(tensors.collect(), (4_200_000, 2_400_000), vec![1_300_000, 1_200_000], warnings)
}

fn set(quantization: Quantization) -> PackageSet {
    let digest = |byte| Digest([byte; 32]);
    let package = |directory: &str, size_bytes| PackageEntry {
        directory: directory.to_owned(),
        manifest: digest(9),
        size_bytes,
    };
    PackageSet {
        format: FORMAT,
        requires: Vec::new(),
        name: Some("tiny|<b>".to_owned()),
        ids: Ids { weights: digest(1), model: digest(2), layout: digest(3) },
        source: Source::default(),
        quantization,
        packages: vec![package("node-0", 1_400_000), package("node-1", 999)],
    }
}

fn quantized(overrides: &[(&str, MatrixFormat)]) -> Quantization {
    Quantization {
        importance: None,
        bits: 4,
        group_size: Some(64),
        float: None,
        rounding: Some("refined".to_owned()),
        dtype: Dtype::BF16,
        overrides: overrides.iter().map(|(name, format)| ((*name).to_owned(), *format)).collect(),
    }
}

#[test]
fn a_page_shows_size_error_worst_exceptions_and_warnings() {
    let report = report(
        &[
            ("lm_head.weight", tensor(6, 0.02)),
            ("model.layers.0.mlp.down_proj.weight", tensor(6, 0.03)),
            ("model.layers.0.mlp.up_proj.weight", tensor(4, 0.04)),
            ("model.layers.1.mlp.down_proj.weight", tensor(4, 0.08)),
            ("model.layers.1.mlp.up_proj.weight", tensor(4, 0.06)),
            ("model.norm.weight", TensorReport::plain()),
        ],
        &["config key \"a|b\" <ignored>\nby rule"],
    );
    let six = MatrixFormat::Affine { bits: 6, group_size: 64 };
    let quantization = quantized(&[
        ("lm_head", six),
        ("model.layers.0.mlp.down_proj", six),
        ("model.layers.1.self_attn.q_proj", MatrixFormat::Plain),
    ]);
    let text = page(&report, &set(quantization));
    let expected = format!(
        r#"# tiny\|\<b\>

What the conversion did to the weights, by shardpack {version}.

- Weights: 4.20 million
- Bits per weight, scales and biases included: 4.571
- Main format: 4 bits in groups of 64, rounding refined, scales and other weights BF16
- Model id: {model}
- Weights id: {weights}

## Size

| node | weights | share | all files |
|---|---:|---:|---:|
| node-0 | 1.30 MB | 52.0 % | 1.40 MB |
| node-1 | 1.20 MB | 48.0 % | 999 B |

The largest node holds 4.0 % more than the mean.

## Error by layer

Relative error (root of squared error over squared weights): the mean of each layer's matrices, and its worst one.

```text
      0  0.0354  ████████████████                  0.0400 mlp.up_proj
      1  0.0707  ████████████████████████████████  0.0800 mlp.down_proj
lm_head  0.0200  █████████
```

## Error by kind of matrix

| kind | matrices | format | mean error | largest | least cosine | at ends |
|---|---:|---|---:|---:|---:|---:|
| `lm_head` | 1 | 6:64 | 0.0200 | 0.0200 | 0.999800 | 12.50 % |
| `mlp.down_proj` | 2 | 4:64, 6:64 | 0.0604 | 0.0800 | 0.996800 | 12.50 % |
| `mlp.up_proj` | 2 | 4:64 | 0.0510 | 0.0600 | 0.998200 | 12.50 % |

## Worst matrices

| matrix | format | error | cosine |
|---|---|---:|---:|
| `model.layers.1.mlp.down_proj.weight` | 4:64 | 0.0800 | 0.996800 |
| `model.layers.1.mlp.up_proj.weight` | 4:64 | 0.0600 | 0.998200 |
| `model.layers.0.mlp.up_proj.weight` | 4:64 | 0.0400 | 0.999200 |
| `model.layers.0.mlp.down_proj.weight` | 6:64 | 0.0300 | 0.999550 |
| `lm_head.weight` | 6:64 | 0.0200 | 0.999800 |

## Exceptions from the main format

- 6 bits in groups of 64: `lm_head`
- 6 bits in groups of 64: `mlp.down_proj` of layer 0
- not quantized: `self_attn.q_proj` of layer 1

## Warnings

- config key "a\|b" \<ignored\> by rule
"#,
        version = env!("CARGO_PKG_VERSION"),
        model = Digest([2; 32]),
        weights = Digest([1; 32]),
    );
    assert_eq!(text, expected);
}

#[test]
fn a_model_of_floats_has_no_error_to_show() {
    let plain = report(&[("lm_head.weight", TensorReport::plain())], &[]);
    let quantization = Quantization {
        importance: None,
        bits: 16,
        group_size: None,
        float: None,
        rounding: None,
        dtype: Dtype::BF16,
        overrides: BTreeMap::new(),
    };
    let text = page(&plain, &set(quantization));
    assert!(text.contains("- Main format: not quantized, BF16\n"), "{text}");
    assert!(text.contains("No matrix is quantized"), "{text}");
    assert!(!text.contains("Warnings") && !text.contains("Worst"), "{text}");
}

#[test]
fn layers_are_listed_as_ranges() {
    assert_eq!(layers(vec![3, 0, 1, 1, 2, 7, 9, 10]), " of layers 0–3, 7, 9–10");
    assert_eq!(layers(vec![4]), " of layer 4");
    assert_eq!(layers(vec![4, 5]), " of layers 4–5");
    assert_eq!(layers(vec![]), "");
}

#[test]
fn layers_and_modules_come_from_names() {
    let split = |name| {
        let ModuleName { layer, kind } = ModuleName::of(name);
        (layer, kind)
    };
    assert_eq!(split("model.layers.12.mlp.up_proj.weight"), (Some(12), "mlp.up_proj"));
    assert_eq!(split("lm_head"), (None, "lm_head"));
    assert_eq!(split("model.layers.x.mlp"), (None, "model.layers.x.mlp"));
    assert_eq!(split("model.layers.1"), (None, "model.layers.1"));
}
