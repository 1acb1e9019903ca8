//! `shardpack convert`.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use anyhow::Context;
use serde_json::json;
use shardpack_chat::{ChatModel, PromptHome};
use shardpack_converter::{
    ConvertError, ConvertEvent, ConvertOptions, Converted, Plan, PlanError, convert,
    recipe::{self, Budget},
};
use shardpack_formats::normalise::ResolveError;
use shardpack_manifests::{Digest, PackageSet};
use shardpack_quantize::{FloatFormat, Rounding};

use super::{Outcome, distillation, plan, rules, sign, text_worker, threads};
use crate::{
    args::{CalibrationTextArgs, ConvertArgs, FormatArgs, SENSITIVITY_TOKENS},
    failure::Failure,
    kill_points,
    progress::{Progress, result, say, size, table},
    source::{self, Input, Keep},
    text_file,
};

/// What is said where a configuration has keys that no rules know.
const UNKNOWN_KEYS: &str = "a key that does not change what the model computes can be left out with --ignore-config-key KEY";

/// Runs the command.
pub(crate) fn run(args: &ConvertArgs) -> Outcome {
    let mut options = options(args)?;
    let keep = if args.no_keep_source { Keep::Nothing } else { Keep::All };
    let input = Input::of(&args.source, keep);
    let measured = measure(args, &mut options)?;
    let converted = threads::with(args.budget.threads.count, || convert_source(&input, options))??;
    for folder in measured {
        std::fs::remove_dir_all(&folder).with_context(|| folder.display().to_string())?;
    }
    if args.form.json {
        result(&json(&converted).to_string());
    } else {
        result(summary(&converted).trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

/// Calibrates beside the output, and distills, if that is asked for; what an interrupted conversion has
/// measured is taken up. Returns the folders, for their removal.
fn measure(args: &ConvertArgs, options: &mut ConvertOptions) -> Result<Vec<PathBuf>, Failure> {
    let Some(files) = &args.calibrate else { return Ok(Vec::new()) };
    if let Some(format) = options.float {
        return Err(Failure::from(anyhow::anyhow!(
            "--format {format} with --calibrate is not possible; calibration rounds affine groups"
        )));
    }
    if args.distill.is_some() {
        distillation::check()?;
    }
    let sensitivity = SENSITIVITY_TOKENS.parse().context("tokens of a sensitivity")?;
    let text = CalibrationTextArgs::default();
    let text = CalibrationTextArgs {
        files: files.clone(),
        tokens: args.calibration_tokens.unwrap_or(text.tokens),
        context: args.calibration_context,
    };
    let request = super::calibrate::Request {
        input: Input::of(&args.source, Keep::All),
        text: &text,
        sensitivity: options.budget.map(|_| sensitivity),
        memory_bytes: args.budget.memory.0,
        threads: args.budget.threads.count,
    };
    // Named after what was asked for: what is there is of the same model and text.
    let mut stats = options.output.clone().into_os_string();
    stats.push(format!(".calibration-{}", Digest::of(request.key()?.as_bytes()).short()));
    let stats = PathBuf::from(stats);
    if !stats.exists() {
        super::calibrate::calibrate(&request, &stats)?;
    }
    options.stats = Some(stats.clone());
    Rounding::Gptq.name().clone_into(&mut options.rounding);
    let Some(steps) = args.distill else { return Ok(vec![stats]) };
    options.learned = distillation::distill(&request, steps.get(), options)?;
    Ok([stats].into_iter().chain(options.learned.clone()).collect())
}

fn options(args: &ConvertArgs) -> Result<ConvertOptions, Failure> {
    Ok(ConvertOptions {
        name: args.name.clone(),
        importance: args.imatrix.clone(),
        stats: args.stats.clone(),
        fail_on: args.fail_on.clone(),
        sign: args.sign.as_deref().map(sign::read_key).transpose()?.map(Arc::new),
        memory_bytes: args.budget.memory.0,
        ..format_options(args.output.folder.clone(), &args.format)?
    })
}

/// The options that `plan` and `convert` share.
pub(super) fn format_options(
    output: PathBuf,
    args: &FormatArgs,
) -> Result<ConvertOptions, Failure> {
    let budget = args.bpw.or_else(|| args.size.map(|size| Budget::Bytes(size.0)));
    let rounding = args.rounding.clone().unwrap_or_else(|| {
        let rounding = if budget.is_some() { Rounding::Gptq } else { Rounding::Refined };
        rounding.name().to_owned()
    });
    let float = args.groups.float();
    if let (Some(format), Some(rounding)) = (float, &args.rounding) {
        return Err(Failure::from(anyhow::anyhow!(
            "--format {format} with --rounding {rounding} is not possible; float groups are rounded as MLX rounds: leave --rounding away"
        )));
    }
    let (recipe, mut overrides) = read_recipe(&args.recipe)?;
    overrides.extend(args.overrides.iter().cloned());
    let experts =
        args.experts.parse().map_err(|error: String| anyhow::anyhow!("--experts: {error}"))?;
    Ok(ConvertOptions {
        experts,
        rules: args.rules.as_deref().map(rules::read).transpose()?,
        bits: args.bits.unwrap_or_else(|| float.map_or(4, FloatFormat::bits)),
        group_size: args.group_size,
        float,
        nodes: args.sharding.parse_nodes()?,
        stages: args.sharding.stages,
        rounding,
        dtype: args.dtype.map(|dtype| dtype.name().to_owned()),
        recipe,
        budget,
        overrides,
        context: args.sharding.context,
        kv: args.kv_type.kv_type(),
        ..ConvertOptions::new(output, 1)
    })
}

/// A recipe's name and what comes before the user's own overrides: the lines of a recipe file.
fn read_recipe(asked: &str) -> Result<(String, Vec<String>), Failure> {
    let path = Path::new(asked);
    if !path.is_file() {
        return Ok((asked.to_owned(), Vec::new()));
    }
    let text = text_file::read(path)?;
    Ok((ConvertOptions::new(PathBuf::new(), 1).recipe, recipe::lines(&text)))
}

/// Converts a source and shows how far it is.
pub(crate) fn convert_source(input: &Input, options: ConvertOptions) -> Result<Converted, Failure> {
    let mut spools = options.output.clone().into_os_string();
    spools.push(".source");
    let spools = PathBuf::from(spools);
    // Of this process: another one that has the same output in mind must not meet it.
    let spool = spools.join(std::process::id().to_string());
    let source = source::open(input, &spool)?;
    let converted = || {
        let plan = Plan::new(&source, options)?;
        for memory in plan.memory.iter().filter(|memory| !memory.fits()) {
            say(&format!("note: {}", plan::too_large(memory)));
        }
        let display = Display::default();
        convert(&source, &plan, &|event| display.show(event))
    };
    let mut converted = converted();
    if let Ok(converted) = &mut converted {
        check_text_side(converted);
    }
    if input.keep == Keep::Nothing {
        // Pieces remove themselves when they are dropped. What killed runs have left goes too, if
        // the output was ours: else it may be that of another run.
        drop(source);
        let foreign = matches!(converted, Err(ConvertError::Plan(_) | ConvertError::Staging(_)));
        let _ = std::fs::remove_dir_all(if foreign { &spool } else { &spools });
        let _ = std::fs::remove_dir(&spools);
    }
    converted.map_err(failure)
}

/// The failure for a conversion that ended without a result.
pub(super) fn failure(error: ConvertError) -> Failure {
    if let ConvertError::Plan(PlanError::Resolve(ResolveError::UnknownKeys { .. })) = &error {
        return Failure::wrong(error).hint(UNKNOWN_KEYS);
    }
    if error.is_wrong() {
        return Failure::wrong(error);
    }
    let is_full = anyhow::Chain::new(&error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::StorageFull);
    let failure = Failure::from(error);
    if is_full {
        failure.hint("free some disk space and run the same command again: it resumes")
    } else {
        failure
    }
}

/// Says what `serve` would say of the packages' text files.
fn check_text_side(converted: &mut Converted) {
    if let Some(warning) = refused_text(&converted.output, &converted.set) {
        say(&format!("note: {warning}"));
        converted.report.warnings.push(warning);
    }
}

/// What `serve` refuses of the text files of a set's packages.
pub(super) fn refused_text(set_folder: &Path, set: &PackageSet) -> Option<String> {
    let folder = set_folder.join(&set.packages.first()?.directory);
    // Without a tokenizer it was said before.
    if !folder.join("tokenizer.json").is_file() {
        return None;
    }
    let sandbox = text_worker::program();
    let opened = ChatModel::open_in(&folder, PromptHome::Sandboxed(&sandbox));
    let error = anyhow::Error::from(opened.err()?);
    Some(format!("serve will refuse these packages: {error:#}"))
}

/// A conversion as a progress bar.
#[derive(Default)]
pub(super) struct Display {
    tensors: OnceLock<Progress>,
}

impl Display {
    pub(super) fn show(&self, event: &ConvertEvent) {
        // Before the plan stands there is nothing to show.
        let show = |show: &dyn Fn(&Progress)| {
            if let Some(progress) = self.tensors.get() {
                show(progress);
            }
        };
        match event {
            ConvertEvent::Planned(plan) => {
                kill_points::at(|| "convert:planned".to_owned());
                for warning in &plan.warnings {
                    say(&format!("note: {warning}"));
                }
                self.tensors.get_or_init(|| Progress::bytes("convert", plan.source_bytes));
            }
            ConvertEvent::Resumed { tensors, source_bytes } => {
                say(&format!(
                    "note: resuming after {tensors} tensors that an earlier run has finished"
                ));
                show(&|progress| progress.add(*source_bytes));
            }
            ConvertEvent::TensorStarted { name, index } => {
                kill_points::at(|| format!("convert:tensor:{index}"));
                show(&|progress| progress.message(name));
            }
            ConvertEvent::Converted(bytes) => {
                show(&|progress| progress.add(*bytes));
            }
            ConvertEvent::TensorFinished { index } => {
                kill_points::at(|| format!("convert:finished:{index}"));
            }
            ConvertEvent::Hashing => {
                show(&|progress| progress.message("hashing and syncing"));
                kill_points::at(|| "convert:hashing".to_owned());
            }
            ConvertEvent::Publishing => {
                show(&Progress::finish);
                kill_points::at(|| "convert:publishing".to_owned());
            }
        }
    }
}

fn json(converted: &Converted) -> serde_json::Value {
    let packages: Vec<_> = converted
        .set
        .packages
        .iter()
        .map(|package| json!({ "directory": package.directory, "size_bytes": package.size_bytes, "manifest": package.manifest }))
        .collect();
    json!({
        "ok": true,
        "output": converted.output,
        "ids": converted.set.ids,
        "bits_per_weight": converted.report.bits_per_weight,
        "parameters": converted.report.parameters,
        "imbalance": converted.report.imbalance,
        "packages": packages,
        "warnings": converted.report.warnings,
        "run": converted.run,
    })
}

fn summary(converted: &Converted) -> String {
    let (set, report, run) = (&converted.set, &converted.report, &converted.run);
    let rate = run.source_bytes as f64 / run.seconds.max(1e-9);
    let mut rows = vec![vec!["package".to_owned(), "weights".to_owned(), "all files".to_owned()]];
    for (package, weights) in set.packages.iter().zip(&report.bytes_per_rank) {
        rows.push(vec![package.directory.clone(), size(*weights), size(package.size_bytes)]);
    }
    format!(
        "{}: {:.1} million weights at {:.2} bits each, {:.1} s ({}/s)\nmodel {}\n{}",
        converted.output.display(),
        report.parameters as f64 / 1e6,
        report.bits_per_weight,
        run.seconds,
        size(rate as u64),
        set.ids.model.short(),
        table(&rows),
    )
}
