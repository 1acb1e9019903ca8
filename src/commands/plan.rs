//! `shardpack plan`: what a conversion would write, from headers alone.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use serde_json::json;
use shardpack_converter::{ConvertError, ConvertOptions, Plan, PlanError, RankMemory};
use shardpack_manifests::{Layout, manifest::MatrixFormat};
use shardpack_quantize::Rounding;

use super::{Outcome, convert, rules};
use crate::{
    args::PlanArgs,
    failure::Failure,
    progress::{result, say, size, table},
    source::{self, Input, Keep},
};

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> Outcome {
    let options = ConvertOptions {
        stats: args.stats.clone(),
        ..convert::format_options(PathBuf::new(), &args.format)?
    };
    let source = source::open(&Input::of(&args.source, Keep::Headers), Path::new(""))?;
    let plan = match Plan::new(&source, options) {
        Ok(plan) => plan,
        Err(error @ PlanError::Resolve(_)) => return Err(rules::refuse(&source, error, args)),
        Err(error) => {
            let error = ConvertError::from(error);
            return Err(if error.is_wrong() { Failure::wrong(error) } else { error.into() });
        }
    };
    if plan.options.rounding == Rounding::Gptq.name() && args.stats.is_none() {
        say("note: `convert --rounding gptq` needs --stats or --calibrate; sizes are the same");
    }
    if let Some(path) = &args.scaffold_rules {
        say(&format!("note: {} is not written: this model has rules already", path.display()));
    }
    if args.listing.form.json {
        result(&json(&plan, args.listing.tensors).to_string());
    } else {
        result(text(&plan, args.listing.tensors).trim_end());
    }
    Ok(if plan.fits() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The message for a rank that does not fit its node.
pub(super) fn too_large(memory: &RankMemory) -> String {
    format!(
        "node {} needs {} and allows {}; use fewer bits, a shorter --context, or more nodes",
        memory.node.as_deref().unwrap_or("?"),
        size(memory.total_bytes()),
        size(memory.limit_bytes.unwrap_or(0)),
    )
}

fn name(memory: &RankMemory, rank: usize) -> String {
    memory.node.clone().unwrap_or_else(|| rank.to_string())
}

/// The layers that a rank of a staged set runs.
pub(super) fn layers(layout: &Layout, rank: u32) -> Option<String> {
    let [start, end] = layout.stages.get(layout.stage_of(rank))?.layers;
    Some(format!("{start}..{end}"))
}

fn text(plan: &Plan, tensors: bool) -> String {
    let mut rows = vec![
        ["node", "weights", "KV cache", "working", "together", "limit"].map(str::to_owned).to_vec(),
    ];
    let staged = !plan.layout.stages.is_empty();
    if staged {
        rows[0].push("layers".to_owned());
    }
    rows[0].extend(plan.layout.axes.keys().cloned());
    for (rank, memory) in plan.memory.iter().enumerate() {
        let limit = memory.limit_bytes.map_or_else(|| "-".to_owned(), size);
        let mut row = vec![
            name(memory, rank),
            size(memory.weight_bytes),
            size(memory.cache_bytes),
            size(memory.working_bytes),
            size(memory.total_bytes()),
            if memory.fits() { limit } else { format!("{limit} (too small)") },
        ];
        row.extend(layers(&plan.layout, rank as u32));
        row.extend(plan.layout.axes.values().map(|axis| {
            let units = axis.units(rank as u32);
            (units.end - units.start).to_string()
        }));
        rows.push(row);
    }
    let weights = plan.weight_bytes_per_rank();
    let (largest, total) =
        (weights.iter().max().copied().unwrap_or(0), weights.iter().sum::<u64>());
    let spec = &plan.normalised.spec;
    let cache = match plan.options.context {
        Some(context) => format!(
            "KV cache for {context} tokens, which `serve --kv-memory {}m` allows",
            plan.memory.iter().map(|it| it.cache_bytes).max().unwrap_or(0).div_ceil(1 << 20),
        ),
        None => format!(
            "KV cache for one sequence of {} tokens, or 64 MiB if that is more",
            spec.max_positions
        ),
    };
    let mut text = format!(
        "{}, {} layers, {} of source, {} on disk\n\n{}\n{cache}; the largest node holds {:.1} % more than the mean\n",
        spec.model_type,
        spec.layers.len(),
        size(plan.source_bytes()),
        size(total),
        table(&rows),
        (largest as f64 * weights.len() as f64 / total.max(1) as f64 - 1.0) * 100.0,
    );
    for warning in &plan.warnings {
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(text, "note: {warning}");
    }
    for memory in plan.memory.iter().filter(|memory| !memory.fits()) {
        let _ = writeln!(text, "wrong: {}", too_large(memory));
    }
    if tensors {
        let rows: Vec<Vec<String>> = plan
            .tensors()
            .map(|(name, format, place)| {
                vec![name.to_owned(), format_text(format), place.to_owned()]
            })
            .collect();
        let _ = write!(text, "\n{}", table(&rows));
    }
    text
}

fn format_text(format: MatrixFormat) -> String {
    match format {
        MatrixFormat::Plain => "16 bits".to_owned(),
        MatrixFormat::Affine { bits, group_size } => format!("{bits} bits, group {group_size}"),
        MatrixFormat::Float(format) => format.to_string(),
    }
}

fn json(plan: &Plan, tensors: bool) -> serde_json::Value {
    let ranks: Vec<_> = plan
        .memory
        .iter()
        .map(|memory| {
            let mut value = json!(memory);
            value["total_bytes"] = memory.total_bytes().into();
            value["fits"] = memory.fits().into();
            value
        })
        .collect();
    let mut value = json!({
        "ok": plan.fits(),
        "source_bytes": plan.source_bytes(),
        "disk_bytes": plan.weight_bytes_per_rank().iter().sum::<u64>(),
        "ranks": ranks,
        "layout": plan.layout,
        "quantization": plan.quantization,
        "warnings": plan.warnings,
    });
    if tensors {
        let list = plan
            .tensors()
            .map(|(name, format, place)| json!({ "name": name, "format": format, "cut": place }));
        value["tensors"] = list.collect::<Vec<_>>().into();
    }
    value
}
