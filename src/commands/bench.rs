//! `shardpack bench`.

use std::{fs, path::Path, process::ExitCode};

use anyhow::anyhow;
use serde_json::{Value, json};
use shardpack_converter::{
    RankMemory,
    plan::{EngineLoad, PROCESS_BYTES},
};
use shardpack_engine::{
    backend::Cpu,
    bench::{Speed, Workload, all_reduce_latency, bench, bench_drafts, read_bandwidth},
    engine::{Engine, EngineOptions, Speculate, memory_group},
    loading::{OpenOptions, Package},
    rank_engine::CpuModel,
};
use shardpack_formats::memory::{KvType, MIN_KV_BYTES, PREFILL_TOKENS, TOKENS_PER_PAGE};
use shardpack_manifests::Manifest;

use super::{Outcome, draft, package, store, threads};
use crate::{
    args::BenchArgs,
    failure::Failure,
    progress::{result, say, size},
};

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Outcome {
    let threads = threads::count(args.threads);
    let (_, folders) = package::members(&store::model(&args.set)?)?;
    let each = (threads / folders.len().max(1)).max(1);
    let mut ranks = Vec::new();
    let mut engines = Vec::new();
    let mut manifests = Vec::new();
    let mut loads = Vec::new();
    for folder in &folders {
        let (package, model) = open(folder, threads, each, args)?;
        loads = self::loads(args, model.spec().max_positions as usize)?;
        let page = model.page_bytes();
        ranks.push(RankBytes::of(package.manifest(), page));
        manifests.push(package.manifest().clone());
        // Steps are compared with the memory bandwidth: one token each, of all requests at once.
        let options = EngineOptions { speculate: Speculate::Off, ..EngineOptions::STANDARD };
        let kv_bytes = Some(model.kv_bytes(&options).max(pages(&loads) * page));
        let set = args.draft_model.as_deref().filter(|_| engines.is_empty());
        let draft = set.map(|set| {
            let draft = draft::folder(set)?;
            draft::compare(&draft, folder).map_err(Failure::wrong)?;
            open(&draft, threads, each, args).map(|(_, model)| model)
        });
        let options = EngineOptions { kv_bytes, ..options };
        engines.push(model.engine(draft.transpose()?, options).map_err(Failure::wrong)?);
    }
    let spec = engines.first().map(|engine| engine.model().spec().clone());
    let spec = spec.ok_or_else(|| Failure::wrong(anyhow!("the set has no packages")))?;
    let mut note = |speed: &Speed| {
        say(&format!("bench: {} tokens of context, {} at a time", speed.context, speed.batch));
    };
    let groups = memory_group(engines.len() as u32)?;
    let speeds = bench(&mut engines, &groups, &loads, &mut note).map_err(anyhow::Error::from)?;
    let drafts = drafts(args, &mut engines, &loads)?;
    let [resident, peak] = resident_bytes();
    let planned = planned_bytes(&manifests, &ranks, &loads, args.kv_type.kv_type());
    // Only now: it takes memory of its own.
    let bandwidth = read_bandwidth(threads).map_err(anyhow::Error::from)?;
    let sums = memory_group(engines.len() as u32)?;
    let latency = (sums.len() > 1)
        .then(|| all_reduce_latency(&sums, spec.hidden_size as usize))
        .transpose()
        .map_err(anyhow::Error::from)?;
    let rows: Vec<Value> =
        speeds.iter().map(|speed| row(speed, args.generate, &ranks, bandwidth)).collect();
    let most = |of: fn(&RankBytes) -> u64| ranks.iter().map(of).sum::<u64>();
    let document = json!({
        "threads": threads,
        "ranks": engines.len(),
        "read_bytes_per_second": bandwidth,
        "weight_bytes": most(|rank| rank.stored),
        "kv_bytes_per_token": most(|rank| rank.page) / TOKENS_PER_PAGE as u64,
        "resident_bytes": resident,
        "peak_bytes": peak,
        "planned_bytes": planned,
        "sum_seconds": latency.map(|latency| latency.as_secs_f64()),
        "sum_bytes": u64::from(spec.hidden_size) * 4,
        "loads": rows,
        "drafts": drafts,
    });
    result(&if args.form.json { document.to_string() } else { table(&document) });
    Ok(ExitCode::SUCCESS)
}

/// Opens a package and loads its model for a backend with `each` threads.
fn open(
    folder: &Path,
    threads: usize,
    each: usize,
    args: &BenchArgs,
) -> Result<(Package, CpuModel), Failure> {
    let shown = || folder.display().to_string();
    let wrong = |error: anyhow::Error| Failure::wrong(error.context(shown()));
    let package = Package::open(folder, &OpenOptions::fast(threads), &|_| ())
        .map_err(|error| wrong(error.into()))?;
    let backend = Cpu::new(each).map_err(anyhow::Error::from)?.with_kv(args.kv_type.kv_type());
    let model = CpuModel::load(&package, backend).map_err(|error| wrong(error.into()))?;
    Ok((package, model))
}

/// Pages that the largest load takes.
fn pages(loads: &[Workload]) -> u64 {
    let of_load = |load: &Workload| {
        let tokens = load.context + load.generate + 1;
        (load.batch * (tokens + 1).div_ceil(TOKENS_PER_PAGE)) as u64
    };
    loads.iter().map(of_load).max().unwrap_or(0)
}

/// The effect of speculative decoding, if that was asked for.
fn drafts(
    args: &BenchArgs,
    engines: &mut [Engine<Cpu>],
    loads: &[Workload],
) -> anyhow::Result<Value> {
    if args.speculate.when() == Speculate::Off && args.draft_model.is_none() {
        return Ok(Value::Null);
    }
    say("bench: each load again, without and with draft tokens");
    let groups = memory_group(engines.len() as u32)?;
    Ok(json!(bench_drafts(engines, &groups, loads)?))
}

/// Bytes that a step reads on one rank.
struct RankBytes {
    /// All weights.
    stored: u64,
    /// Weights that every token needs.
    always: u64,
    /// Stacked experts, and the share of them that one token needs.
    experts: u64,
    active: f64,
    /// KV cache of one page.
    page: u64,
}

impl RankBytes {
    fn of(manifest: &Manifest, page: u64) -> Self {
        let spec = &manifest.architecture;
        let mut bytes = Self { stored: 0, always: 0, experts: 0, active: 1.0, page };
        if let Some(moe) = &spec.moe {
            bytes.active = f64::from(moe.top_k) / f64::from(moe.experts);
        }
        for tensor in &manifest.tensors {
            bytes.stored += tensor.size;
            if tensor.name.contains(".switch_mlp.") {
                bytes.experts += tensor.size;
            } else if spec.tied_embeddings || !tensor.name.starts_with("model.embed_tokens.") {
                // Of an embedding that is not the head too, only single rows are read.
                bytes.always += tensor.size;
            }
        }
        bytes
    }

    /// Bytes of a step with `batch` sequences of `context` tokens; experts are counted as if every
    /// sequence were routed to different ones.
    fn step(&self, batch: usize, context: f64) -> f64 {
        let kv = self.page as f64 / TOKENS_PER_PAGE as f64 * context * batch as f64;
        let experts = self.experts as f64 * (self.active * batch as f64).min(1.0);
        self.always as f64 + experts + kv
    }
}

fn loads(args: &BenchArgs, longest: usize) -> Result<Vec<Workload>, Failure> {
    let mut loads = Vec::new();
    for &context in &args.contexts {
        for &batch in &args.batches {
            let generate = args.generate;
            if context == 0 || batch == 0 || generate == 0 || context + generate >= longest {
                return Err(Failure::wrong(anyhow!(
                    "{batch} prompts of {context} tokens and {generate} generated: the model takes \
                     1 to {} tokens together",
                    longest - 1
                )));
            }
            if batch > EngineOptions::STANDARD.max_sequences {
                let most = EngineOptions::STANDARD.max_sequences;
                return Err(Failure::wrong(anyhow!("batch size {batch}: the limit is {most}")));
            }
            loads.push(Workload { context, batch, generate });
        }
    }
    Ok(loads)
}

fn row(speed: &Speed, generate: usize, ranks: &[RankBytes], bandwidth: f64) -> Value {
    let context = speed.context as f64 + generate as f64 / 2.0;
    let bytes: f64 = ranks.iter().map(|rank| rank.step(speed.batch, context)).sum();
    let mut row = json!(speed);
    row["bytes_per_step"] = json!(bytes);
    row["share_of_read_bandwidth"] = json!(bytes / speed.step_seconds / bandwidth);
    row
}

/// What `plan` reckons that these ranks take in one process after these loads.
fn planned_bytes(
    manifests: &[Manifest],
    ranks: &[RankBytes],
    loads: &[Workload],
    kv: KvType,
) -> u64 {
    let Some(spec) = manifests.first().map(|manifest| &manifest.architecture) else { return 0 };
    let page = TOKENS_PER_PAGE as u64;
    let [mut kept, mut own, mut sequences, mut step_tokens] = [0; 4];
    for load in loads {
        let (batch, tokens) = (load.batch as u64, (load.context + load.generate) as u64);
        // Full pages stay for sequences that begin alike, unless states go with them.
        let full = if spec.has_states() { 0 } else { tokens / page * page };
        kept += batch * full;
        own = own.max(batch * (tokens - full));
        sequences = sequences.max(batch);
        step_tokens = step_tokens.max(batch * load.context as u64);
    }
    let largest = ranks.iter().map(|rank| rank.page).max().unwrap_or(0);
    let least = MIN_KV_BYTES.checked_div(largest).unwrap_or(0);
    let most = u64::from(spec.max_positions).div_ceil(page).max(least).max(pages(loads)) * page;
    let load = EngineLoad {
        tokens: (kept + own).min(most),
        sequences,
        step_tokens: step_tokens.min(PREFILL_TOKENS as u64),
        kv,
    };
    let rank = |(manifest, rank): (&Manifest, &RankBytes)| {
        let place = (manifest.rank, rank.stored);
        RankMemory::of(&manifest.architecture, &manifest.layout, place, &load).total_bytes()
            - PROCESS_BYTES
    };
    manifests.iter().zip(ranks).map(rank).sum::<u64>() + PROCESS_BYTES
}

/// Memory of this process, now and at most; unknown where the system does not say.
fn resident_bytes() -> [Option<u64>; 2] {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ["VmRSS:", "VmHWM:"].map(|name| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    })
}

/// The kind of a row's answers. The names in the JSON are older than these.
fn answer_kind(row: &Value) -> &'static str {
    match row["text"].as_str() {
        Some("new") => "sampled",
        Some("likely") => "greedy",
        Some("foretold") => "predicted",
        _ => "",
    }
}

fn table(document: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let bytes = |key: &str| size(document[key].as_u64().unwrap_or(0));
    let mut lines = vec![
        format!(
            "{} ranks, {} threads; memory is read at {:.1} GB/s",
            document["ranks"],
            document["threads"],
            number(&document["read_bytes_per_second"]) / 1e9
        ),
        format!(
            "weights {}, KV cache {} per token",
            bytes("weight_bytes"),
            bytes("kv_bytes_per_token")
        ),
        format!(
            "memory: {} planned, {} peak, {} at the end",
            bytes("planned_bytes"),
            bytes("peak_bytes"),
            bytes("resident_bytes")
        ),
    ];
    if !document["sum_seconds"].is_null() {
        lines.push(format!(
            "an all-reduce of {} takes {:.1} µs",
            bytes("sum_bytes"),
            number(&document["sum_seconds"]) * 1e6
        ));
    }
    lines.push(
        "context  batch  prefill t/s  first token s  decode t/s  step ms  of bandwidth  messages  waiting ms"
            .to_owned(),
    );
    for row in document["loads"].as_array().into_iter().flatten() {
        let of = |key: &str| number(&row[key]);
        lines.push(format!(
            "{:>7}  {:>5}  {:>11.1}  {:>13.3}  {:>10.2}  {:>7.2}  {:>10.1} %  {:>8.0}  {:>10.2}",
            of("context"),
            of("batch"),
            of("prefill_tokens_per_second"),
            of("first_token_seconds"),
            of("decode_tokens_per_second"),
            of("step_seconds") * 1e3,
            of("share_of_read_bandwidth") * 100.0,
            of("sums_per_step") + of("gathers_per_step") + of("passes_per_step"),
            of("communication_seconds") * 1e3,
        ));
    }
    let drafts: Vec<&Value> = document["drafts"].as_array().into_iter().flatten().collect();
    if !drafts.is_empty() {
        lines.push(
            "context  batch  answers    without t/s  with drafts t/s  gain  draft tok/tok  accepted"
                .to_owned(),
        );
    }
    for row in drafts {
        let of = |key: &str| number(&row[key]);
        let [off, auto] = ["off_tokens_per_second", "auto_tokens_per_second"].map(of);
        lines.push(format!(
            "{:>7}  {:>5}  {:<9}  {off:>11.2}  {auto:>15.2}  {:>3.2}x  {:>13.2}  {:>6.1} %",
            of("context"),
            of("batch"),
            answer_kind(row),
            auto / off,
            of("drafted_per_token"),
            of("accepted_share") * 100.0,
        ));
    }
    lines.join("\n")
}
