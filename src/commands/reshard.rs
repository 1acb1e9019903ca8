//! `shardpack reshard`.

use std::{process::ExitCode, sync::OnceLock};

use serde_json::json;
use shardpack_converter::{
    ReshardError, ReshardEvent, ReshardOptions, Resharded, UnshardedModel, reshard,
};

use super::{Outcome, plan, store, threads};
use crate::{
    args::ReshardArgs,
    failure::Failure,
    kill_points,
    progress::{Progress, result, say, size, table},
};

/// Runs the command.
pub(crate) fn run(args: &ReshardArgs) -> Outcome {
    let options = ReshardOptions {
        output: args.output.folder.clone(),
        nodes: args.sharding.parse_nodes()?,
        stages: args.sharding.stages,
        context: args.sharding.context,
        memory_bytes: args.budget.memory.0,
    };
    let display = Display::new("reshard");
    let paths = store::packed_all(&args.packages.paths)?;
    let work = || {
        let model = UnshardedModel::open(&paths)?;
        reshard(&model, &options, &|event| display.show(event))
    };
    let resharded =
        threads::with(args.budget.threads.count, work)?.map_err(|error: ReshardError| {
            if error.is_wrong() { Failure::wrong(error) } else { error.into() }
        })?;
    for memory in resharded.memory.iter().filter(|memory| !memory.fits()) {
        say(&format!("note: {}", plan::too_large(memory)));
    }
    if resharded.report.is_none() {
        say("note: the set has no report.json, so none is written");
    }
    if args.form.json {
        result(&json(&resharded).to_string());
    } else {
        result(summary(&resharded).trim_end());
    }
    Ok(ExitCode::SUCCESS)
}

/// Moving tensors as a progress bar.
pub(super) struct Display {
    label: &'static str,
    progress: OnceLock<Progress>,
}

impl Display {
    pub(super) const fn new(label: &'static str) -> Self {
        Self { label, progress: OnceLock::new() }
    }

    pub(super) fn show(&self, event: ReshardEvent) {
        let progress = self.progress.get();
        match event {
            ReshardEvent::Planned { size_bytes } => {
                self.progress.get_or_init(|| Progress::bytes(self.label, size_bytes));
            }
            ReshardEvent::Moved { size_bytes } => {
                if let Some(progress) = progress {
                    progress.add(size_bytes);
                }
            }
            ReshardEvent::Hashing => progress.into_iter().for_each(Progress::finish),
            ReshardEvent::Publishing => kill_points::at(|| format!("{}:publishing", self.label)),
        }
    }
}

fn json(resharded: &Resharded) -> serde_json::Value {
    let packages: Vec<_> = resharded
        .set
        .packages
        .iter()
        .map(|package| json!({ "directory": package.directory, "size_bytes": package.size_bytes, "manifest": package.manifest }))
        .collect();
    json!({
        "ok": true,
        "output": resharded.output,
        "ids": resharded.set.ids,
        "packages": packages,
        "run": resharded.run,
    })
}

fn summary(resharded: &Resharded) -> String {
    let (set, run) = (&resharded.set, &resharded.run);
    let rate = run.source_bytes as f64 / run.seconds.max(1e-9);
    let mut rows = vec![vec!["package".to_owned(), "weights".to_owned(), "all files".to_owned()]];
    for (package, memory) in set.packages.iter().zip(&resharded.memory) {
        let weights = size(memory.weight_bytes);
        rows.push(vec![package.directory.clone(), weights, size(package.size_bytes)]);
    }
    format!(
        "{}: {} of weights for {} nodes, {:.1} s ({}/s)\nmodel {}\n{}",
        resharded.output.display(),
        size(run.source_bytes),
        set.packages.len(),
        run.seconds,
        size(rate as u64),
        set.ids.model.short(),
        table(&rows),
    )
}
