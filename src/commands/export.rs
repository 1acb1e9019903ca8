//! `shardpack export`.

use std::process::ExitCode;

use serde_json::json;
use shardpack_converter::{ExportError, ExportForm, ExportOptions, UnshardedModel, export};

use super::{Outcome, reshard::Display, store, threads};
use crate::{
    args::ExportArgs,
    failure::Failure,
    progress::{result, size},
};

/// Runs the command.
pub(crate) fn run(args: &ExportArgs) -> Outcome {
    let form = if args.mlx {
        ExportForm::Mlx
    } else {
        ExportForm::HuggingFace { dtype: args.dtype.map(|dtype| dtype.name().to_owned()) }
    };
    let options =
        ExportOptions { output: args.output.clone(), form, memory_bytes: args.budget.memory.0 };
    let display = Display::new("export");
    let paths = store::packed_all(&args.packages.paths)?;
    let work = || {
        let model = UnshardedModel::open(&paths)?;
        export(&model, &options, &|event| display.show(event))
    };
    let exported =
        threads::with(args.budget.threads.count, work)?.map_err(|error: ExportError| {
            if error.is_wrong() { Failure::wrong(error) } else { error.into() }
        })?;
    if args.form.json {
        let json = json!({
            "ok": true,
            "output": exported.output,
            "tensors": exported.tensors,
            "size_bytes": exported.size_bytes,
        });
        result(&json.to_string());
    } else {
        result(&format!(
            "{}: {} tensors, {}",
            exported.output.display(),
            exported.tensors,
            size(exported.size_bytes)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
