//! `shardpack eval`.

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context, anyhow};
use serde_json::json;
use shardpack_chat::{PromptHome, tokenize};
use shardpack_engine::{
    backend::{Arithmetic, Cpu, CpuOptions},
    engine::{LocalModel, memory_group},
    eval::{Estimate, EvalOptions, Evaluation, evaluate},
    loading::{OpenOptions, Package},
};

use super::{Outcome, package, store, text_worker, threads};
use crate::{
    args::EvalArgs,
    failure::Failure,
    progress::{result, say},
};

/// Runs the command.
pub(crate) fn run(args: &EvalArgs) -> Outcome {
    let threads = threads::count(args.threads.count);
    let shown = || args.text.display().to_string();
    let text = fs::read_to_string(&args.text).with_context(shown)?;
    let set = store::model(&args.set)?;
    let folder = package::members(&set)?.1.into_iter().next();
    let folder = folder.ok_or_else(|| Failure::wrong(anyhow!("the set has no packages")))?;
    let sandbox = text_worker::program();
    let tokenized = tokenize(&folder, &text, PromptHome::Sandboxed(&sandbox));
    let (tokens, first) = tokenized.map_err(|error| {
        Failure::wrong(anyhow::Error::from(error).context(folder.display().to_string()))
    })?;
    let arithmetic = if args.exact { Arithmetic::Exact } else { Arithmetic::Fast };
    let load = |set: &Path| load(set, threads, arithmetic);
    let model = load(&set)?;
    let against = args.against.as_deref();
    let against = against.map(|set| load(&store::model(set)?)).transpose()?;
    let longest = model.spec().max_positions as usize;
    let options = EvalOptions { context: args.context.unwrap_or(longest.min(512)), first };
    let mut note = |done: usize, all: usize| say(&format!("eval: {done} of {all} windows"));
    let found =
        evaluate(&model, against.as_ref(), &tokens, &options, &mut note).map_err(Failure::wrong)?;
    if args.form.json {
        let mut document = json!(found);
        document["context"] = json!(options.context);
        result(&document.to_string());
    } else {
        result(&table(&found, &options));
    }
    Ok(ExitCode::SUCCESS)
}

/// All ranks of a set, in this process.
fn load(folder: &Path, threads: usize, arithmetic: Arithmetic) -> Result<LocalModel, Failure> {
    let (_, folders) = package::members(folder)?;
    let packages = folders
        .iter()
        .map(|folder| {
            Package::open(folder, &OpenOptions::fast(threads), &|_| ()).map_err(|error| {
                Failure::wrong(anyhow::Error::from(error).context(folder.display().to_string()))
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let groups = memory_group(packages.len() as u32)?;
    let each = (threads / packages.len().max(1)).max(1);
    let options = CpuOptions { threads: each, platform: None, arithmetic };
    let backends = packages.iter().map(|_| Cpu::with_options(&options));
    let backends = backends.collect::<Result<_, _>>()?;
    LocalModel::over(&packages, &groups, backends).map_err(Failure::wrong)
}

fn table(found: &Evaluation, options: &EvalOptions) -> String {
    let plain = |it: &Estimate| format!("{:.4} ± {:.4}", it.value, it.error);
    let percent = |it: &Estimate| format!("{:.3} ± {:.3} %", it.value * 100.0, it.error * 100.0);
    let mut lines = vec![
        format!(
            "tokens            {} in {} windows of {}",
            found.tokens, found.windows, options.context
        ),
        format!("perplexity        {}", plain(&found.perplexity)),
    ];
    if let Some(against) = &found.against {
        let ratio = found.perplexity.value / against.perplexity.value;
        lines.extend([
            format!("  of the other    {} (ratio {ratio:.4})", plain(&against.perplexity)),
            format!(
                "KL divergence     mean {:.6} ± {:.6}",
                against.kl_mean.value, against.kl_mean.error
            ),
            format!("  median          {:.6}", against.kl.median),
            format!("  99 %            {:.6}", against.kl.p99),
            format!("  99.9 %          {:.6}", against.kl.p999),
            format!("  maximum         {:.6}", against.kl.maximum),
            format!("same top token    {}", percent(&against.same_top)),
            format!("RMS Δp            {:.3} %", against.rms_probability_difference * 100.0),
        ]);
    }
    lines.join("\n")
}
