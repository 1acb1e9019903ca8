//! Tasks of `eval`: items of multiple choice and last words, in the forms of lm-eval,
//! scored as it scores them.
//!
//! | line of the file | item |
//! |---|---|
//! | `arguments`, `target` | a sample of `lm_eval --log_samples`: contexts and continuations as lm-eval has put them together, few-shot examples included |
//! | `query` (or `context`), `choices`, `gold` (or `label`) | a choice: each stands after the query and a space |
//! | `context`, `continuation` | a continuation that should be the most likely one |
//! | `text` | the same with its last word, as LAMBADA has it |

mod item;

use std::path::Path;

use anyhow::{Context, anyhow};
use serde::Serialize;
use serde_json::json;
use shardpack_chat::{PromptHome, tokenize_all};
use shardpack_engine::{
    backend::Arithmetic,
    engine::LocalModel,
    eval::{Estimate, Likelihood, likelihood},
};
use shardpack_engine_api::TokenId;

use super::super::{Outcome, package, store, text_worker, threads};
use crate::{
    args::EvalArgs,
    failure::Failure,
    progress::{result, say, table},
    text_file,
};
use item::{Item, Request};

/// Items between two notes of progress.
const NOTE_EVERY: usize = 100;

/// A file of items.
struct Task {
    name: String,
    items: Vec<Item>,
}

/// What a set makes of a task.
#[derive(Serialize)]
struct Score {
    task: String,
    items: usize,
    /// Of choices: the most likely one is right. Of continuations: each token is the most likely one.
    accuracy: Estimate,
    /// Of choices: the most likely one per character is right.
    #[serde(skip_serializing_if = "Option::is_none")]
    normalised_accuracy: Option<Estimate>,
    /// Of continuations, each counted as one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<Estimate>,
}

/// Runs `eval --task`.
pub(super) fn run(args: &EvalArgs) -> Outcome {
    let tasks = args.tasks.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    let threads = threads::count(args.threads.count);
    let arithmetic = if args.exact { Arithmetic::Exact } else { Arithmetic::Fast };
    let mut sets = Vec::new();
    for given in &args.sets {
        let set = store::model(given)?;
        let folder = package::members(&set)?.1.into_iter().next().context("no packages")?;
        let model = super::load(&set, threads, arithmetic)?;
        let scores =
            tasks.iter().map(|task| score(&model, &folder, task)).collect::<Result<Vec<_>, _>>()?;
        sets.push((given.display().to_string(), scores));
    }
    if args.form.json {
        let sets: Vec<_> =
            sets.iter().map(|(set, tasks)| json!({ "set": set, "tasks": tasks })).collect();
        result(&json!({ "sets": sets }).to_string());
    } else {
        result(text(&sets).trim_end());
    }
    Ok(std::process::ExitCode::SUCCESS)
}

fn read(path: &Path) -> Result<Task, Failure> {
    let text = text_file::read(path)?;
    let mut items: Vec<Item> = Vec::new();
    for (line, text) in text.lines().enumerate().filter(|it| !it.1.trim().is_empty()) {
        let wrong = |problem: String| {
            Failure::wrong(anyhow!("{}, line {}: {problem}", path.display(), line + 1))
        };
        let item = Item::parse(text).map_err(wrong)?;
        if items.first().is_some_and(|first| first.gold.is_some() != item.gold.is_some()) {
            let problem = "the items before are of another kind: put choices and continuations into files of their own";
            return Err(wrong(problem.to_owned()));
        }
        items.push(item);
    }
    if items.is_empty() {
        return Err(Failure::wrong(anyhow!(
            "{}: no items; one JSON object a line",
            path.display()
        )));
    }
    let name = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok(Task { name, items })
}

fn score(model: &LocalModel, folder: &Path, task: &Task) -> Result<Score, Failure> {
    let requests: Vec<&Request> = task.items.iter().flat_map(|item| &item.requests).collect();
    let mut sequences = sequences(model, folder, &requests)?.into_iter();
    let [mut right, mut normalised, mut logs] = [Vec::new(), Vec::new(), Vec::new()];
    for (index, item) in task.items.iter().enumerate() {
        let of_item = sequences.by_ref().take(item.requests.len());
        let found = of_item
            .map(|(tokens, from)| likelihood(model, &tokens, from))
            .collect::<Result<Vec<_>, _>>()
            .map_err(Failure::wrong)?;
        let indicator = |is_right: bool| if is_right { 1.0 } else { 0.0 };
        if let Some(gold) = item.gold {
            let per_character: Vec<f64> = found
                .iter()
                .zip(&item.requests)
                .map(|(it, request)| it.log / request.characters().max(1) as f64)
                .collect();
            let logs: Vec<f64> = found.iter().map(|it| it.log).collect();
            right.push(indicator(first_largest(&logs) == gold));
            normalised.push(indicator(first_largest(&per_character) == gold));
        } else {
            right.push(indicator(found.iter().all(|it| it.is_greedy)));
            logs.push(found.iter().map(|it: &Likelihood| -it.log).sum());
        }
        if (index + 1) % NOTE_EVERY == 0 {
            say(&format!("eval: {}: {} of {} items", task.name, index + 1, task.items.len()));
        }
    }
    let some = |values: &Vec<f64>| (!values.is_empty()).then(|| Estimate::of(values));
    Ok(Score {
        task: task.name.clone(),
        items: task.items.len(),
        accuracy: Estimate::of(&right),
        normalised_accuracy: some(&normalised),
        perplexity: some(&logs).map(Estimate::exp),
    })
}

/// The first of the largest.
fn first_largest(values: &[f64]) -> usize {
    (0..values.len()).reduce(|a, b| if values[b] > values[a] { b } else { a }).unwrap_or(0)
}

/// The tokens of every request, and where its continuation begins. What is too long for the model
/// loses its beginning.
fn sequences(
    model: &LocalModel,
    folder: &Path,
    requests: &[&Request],
) -> Result<Vec<(Vec<TokenId>, usize)>, Failure> {
    let sandbox = text_worker::program();
    let texts: Vec<[String; 2]> = requests.iter().map(|request| request.texts()).collect();
    let all: Vec<&str> = texts.iter().flatten().map(String::as_str).collect();
    let (tokens, first) =
        tokenize_all(folder, &all, PromptHome::Sandboxed(&sandbox)).map_err(Failure::wrong)?;
    let longest = model.spec().max_positions as usize + 1;
    let mut sequences = Vec::with_capacity(requests.len());
    for (pair, request) in tokens.chunks_exact(2).zip(requests) {
        let [context, whole] = pair else { continue };
        let before = first.iter().count();
        let continued = whole.len().saturating_sub(context.len());
        let room = longest - before;
        if continued == 0 || continued >= room || before + context.len() == 0 {
            return Err(Failure::wrong(anyhow!(
                "the continuation {:?} has {continued} tokens after {} of context: 1 to {} after at \
                 least one can be scored",
                request.continuation,
                before + context.len(),
                room - 1
            )));
        }
        let kept = &whole[whole.len().saturating_sub(room)..];
        let sequence: Vec<TokenId> = first.into_iter().chain(kept.iter().copied()).collect();
        let from = sequence.len() - continued;
        sequences.push((sequence, from));
    }
    Ok(sequences)
}

fn text(sets: &[(String, Vec<Score>)]) -> String {
    let names = ["set", "task", "items", "accuracy", "normalised", "perplexity"];
    let mut rows = vec![names.map(str::to_owned).to_vec()];
    let percent = |it: &Estimate| format!("{:.2} ± {:.2} %", it.value * 100.0, it.error * 100.0);
    let absent = || "-".to_owned();
    for (set, scores) in sets {
        for score in scores {
            rows.push(vec![
                set.clone(),
                score.task.clone(),
                score.items.to_string(),
                percent(&score.accuracy),
                score.normalised_accuracy.as_ref().map_or_else(absent, percent),
                score
                    .perplexity
                    .as_ref()
                    .map_or_else(absent, |it| format!("{:.3} ± {:.3}", it.value, it.error)),
            ]);
        }
    }
    table(&rows)
}
