//! The bundled model's decode speed in mlx-lm, if this machine's Python has it: the same weights, by
//! another program over the same library.

use std::{path::Path, process::Command, time::Duration};

use anyhow::Context as _;
use serde_json::{Value, json};
use shardpack_converter::{ExportForm, ExportOptions, UnshardedModel, export};

use super::{
    numerics::Bundled,
    report::{Finding, Report},
};

/// Reading and compiling of kernels included.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Memory of the export; the model has a few megabytes.
const EXPORT_BYTES: u64 = 256 << 20;

/// Share of mlx-lm's speed, in percent, below which ours is slow: it has no server around it.
const SHARE_PERCENT: f64 = 80.0;

/// Prints tokens per second of a text, the first run left out.
const SCRIPT: &str = "\
import json, sys
from mlx_lm import load, stream_generate
model, tokenizer = load(sys.argv[1])
for _ in range(2):
    for last in stream_generate(model, tokenizer, 'John 3:16', max_tokens=64):
        pass
print(json.dumps({'tokens_per_second': last.generation_tps, 'tokens': last.generation_tokens}))
";

/// Adds the row; `ours` are the tokens per second of `--engine mlx` on one rank.
pub(super) fn check(bundled: &Bundled<'_>, ours: Option<f64>, report: &mut Report) {
    const NAME: &str = "4-bit decode beside mlx-lm";
    let Some(ours) = ours else {
        return report.skip(NAME, "--engine mlx was not measured");
    };
    // Without Apple's command-line tools `python3` is a program that offers to install them.
    let is_offer =
        cfg!(target_os = "macos") && super::machine::ask("xcode-select", &["-p"]).is_err();
    if is_offer || python(&["-c", "import mlx_lm"], Duration::from_mins(1)).is_err() {
        return report.skip(NAME, "python3 has no mlx_lm: pip install mlx-lm");
    }
    let found = measure(bundled).map(|theirs| {
        let detail = format!("{ours:.1} tokens per second, mlx-lm {theirs:.1}");
        let figures = json!({ "ours": ours, "mlx_lm": theirs });
        let least = theirs * SHARE_PERCENT / 100.0;
        let found = Finding::new(detail, figures).expected(format!("at least {least:.1}"));
        found.slow_if(ours < least, "attach this report to a bug")
    });
    match found {
        Ok(found) => report.find(NAME, found),
        // Another program's failure is none of this machine's.
        Err(error) => report.skip(NAME, format!("mlx-lm does not run it: {error:#}")),
    }
}

fn measure(bundled: &Bundled<'_>) -> anyhow::Result<f64> {
    let output = bundled.scratch("export")?.join("model");
    let set = bundled.set(4, 1)?;
    let model = UnshardedModel::open(&[set.join("node-0")])?;
    let options =
        ExportOptions { output: output.clone(), form: ExportForm::Mlx, memory_bytes: EXPORT_BYTES };
    export(&model, &options, &|_| ())?;
    let text = python(&["-c", SCRIPT, path(&output)?], TIMEOUT)?;
    let line = text.lines().last().context("no output")?;
    let json: Value = serde_json::from_str(line).context("no line of JSON")?;
    json["tokens_per_second"].as_f64().context("no tokens per second")
}

fn path(path: &Path) -> anyhow::Result<&str> {
    path.to_str().context("the folder's name is not UTF-8")
}

fn python(arguments: &[&str], timeout: Duration) -> anyhow::Result<String> {
    let mut command = Command::new("python3");
    command.args(arguments);
    super::machine::output(command, timeout)
}
