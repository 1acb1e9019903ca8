//! Float groups: what a format holds is carried over, and bytes depend on nothing but the source.

use shardpack_quantize::FloatFormat;

use super::*;
use crate::{convert::Converted, recipe::RECIPE_FILE};

fn converted(source: &Source, output: PathBuf, format: FloatFormat, ranks: u32) -> Converted {
    let options = ConvertOptions {
        bits: format.bits(),
        float: Some(format),
        ..ConvertOptions::new(output, ranks)
    };
    let plan = Plan::new(source, options).unwrap();
    let converted = convert(source, &plan, &|_| {}).unwrap();
    assert!(!converted.output.join(RECIPE_FILE).exists());
    converted
}

/// The floats of every tensor of a set, in F32.
fn exported(set: &Path, output: &Path) -> Source {
    let model = UnshardedModel::open(&[set.to_owned()]).unwrap();
    let form = ExportForm::HuggingFace { dtype: Some("F32".to_owned()) };
    let options = ExportOptions { output: output.to_owned(), form, memory_bytes: 256 << 20 };
    export(&model, &options, &|_| {}).unwrap();
    Source::open(output).unwrap()
}

#[track_caller]
fn check_carried(name: &str, format: FloatFormat, expected: Carried) {
    let folder = tempfile::tempdir().unwrap();
    let source = Source::open_as(&sources().join(name), Pickles::Read).unwrap();
    let set = converted(&source, folder.path().join("set"), format, 2);
    let found = exported(&set.output, &folder.path().join("floats"));
    let plan = |source: &Source, name: &str| {
        Plan::new(source, ConvertOptions::new(folder.path().join(name), 1)).unwrap()
    };
    let (of_source, of_found) = (plan(&source, "a"), plan(&found, "b"));
    let mut carried = 0;
    for (tensor, report) in &set.report.tensors {
        if report.source.is_none() || report.format != MatrixFormat::Float(format) {
            continue;
        }
        carried += 1;
        assert_eq!(report.carried, Some(expected), "{name} {format}: {tensor}");
        if expected == Carried::Repacked {
            let [found, wanted] =
                [values(&found, &of_found, tensor), values(&source, &of_source, tensor)];
            assert!(found == wanted, "{name} {format}: {tensor}");
        }
    }
    assert!(carried > 0, "{name} has quantized matrices");
}

#[test]
fn sources_in_a_format_are_carried_over_exactly() {
    for name in ["mxfp4_gpt_oss", "mlx_mxfp4", "gguf_gpt_oss"] {
        check_carried(name, FloatFormat::Mxfp4, Carried::Repacked);
        // Its values are E4M3 too.
        check_carried(name, FloatFormat::Mxfp8, Carried::Repacked);
    }
    // The second scale has no place.
    check_carried("modelopt_nvfp4", FloatFormat::Nvfp4, Carried::Requantized);
}

#[test]
fn bytes_are_the_same_for_any_number_of_threads_and_ranks() {
    let source = Source::open(&sources().join("bf16_moe")).unwrap();
    for format in FloatFormat::ALL {
        let folder = tempfile::tempdir().unwrap();
        let on = |threads: usize, ranks: u32| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let output = folder.path().join(format!("{threads}-{ranks}"));
            pool.install(|| converted(&source, output, format, ranks))
        };
        let (one, two, sharded) = (on(1, 1), on(2, 1), on(2, 2));
        assert_eq!(one.set.packages, two.set.packages, "{format}");
        assert_eq!(one.set.ids.weights, sharded.set.ids.weights, "{format}");
        assert_eq!(one.report.tensors, sharded.report.tensors, "{format}");
    }
}
