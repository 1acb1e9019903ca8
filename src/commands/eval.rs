//! `shardpack eval`.

mod inputs;
mod plot;
mod report;
mod tasks;

use std::{
    fs,
    io::BufWriter,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, anyhow};
use shardpack_engine::{
    backend::{Arithmetic, Cpu, CpuOptions},
    engine::{LocalModel, memory_group},
    eval::{
        EvalOptions, Evaluations, LogitsDocument, LogitsReader, LogitsWriter, MAX_TOP, Reference,
        evaluate, record,
    },
    loading::{OpenOptions, Package},
};
use shardpack_manifests::Manifest;

use super::{Outcome, package, store, threads};
use crate::{
    args::EvalArgs,
    failure::Failure,
    progress::{result, say},
};
use inputs::Texts;
use report::Row;

/// Runs the command.
pub(crate) fn run(args: &EvalArgs) -> Outcome {
    if !args.tasks.is_empty() {
        return tasks::run(args);
    }
    if args.save_logits.is_some() && args.sets.len() > 1 {
        return Err(anyhow!("--save-logits is of one set, {} were given", args.sets.len()).into());
    }
    if args.svg.is_some() && args.against.is_none() && args.logits.is_none() {
        return Err(anyhow!(
            "--svg draws the KL divergence: give a reference with --against or --logits"
        )
        .into());
    }
    let sets = args.sets.iter().map(|set| store::model(set)).collect::<Result<Vec<_>, _>>()?;
    let mut source = Source::open(args, &sets)?;
    let mut rows = Vec::new();
    for (given, set) in args.sets.iter().zip(&sets) {
        rows.push(source.row(given, set)?);
    }
    let shown = report::Report { options: &source.options, texts: &source.texts, rows: &rows };
    for (path, text) in [(&args.markdown, shown.markdown()), (&args.svg, plot::svg(&rows))] {
        if let Some(path) = path {
            fs::write(path, text).with_context(|| path.display().to_string())?;
        }
    }
    result(&if args.form.json { shown.json().to_string() } else { shown.text() });
    Ok(ExitCode::SUCCESS)
}

/// What sets are evaluated with.
struct Source<'a> {
    args: &'a EvalArgs,
    threads: usize,
    texts: Texts,
    options: EvalOptions,
    against: Option<LocalModel>,
    stored: Option<LogitsReader>,
}

impl<'a> Source<'a> {
    fn open(args: &'a EvalArgs, sets: &[PathBuf]) -> Result<Self, Failure> {
        let threads = threads::count(args.threads.count);
        let stored = args.logits.as_deref().map(LogitsReader::open).transpose();
        let stored = stored.map_err(Failure::wrong)?;
        let (texts, options) = match &stored {
            Some(stored) => (Texts::of_file(stored), stored.options()),
            None => inputs::read(args, sets)?,
        };
        let against = args.against.as_deref().map(store::model).transpose()?;
        let arithmetic = if args.exact { Arithmetic::Exact } else { Arithmetic::Fast };
        let against = against.map(|set| load(&set, threads, arithmetic)).transpose()?;
        Ok(Self { args, threads, texts, options, against, stored })
    }

    /// One set's figures.
    fn row(&mut self, given: &Path, set: &Path) -> Result<Row, Failure> {
        let arithmetic = if self.args.exact { Arithmetic::Exact } else { Arithmetic::Fast };
        let exact = if self.args.terms {
            Some(self.evaluate(given, set, Arithmetic::Exact)?)
        } else {
            None
        };
        let found = self.evaluate(given, set, arithmetic)?;
        let manifests = manifests(set)?;
        Ok(Row::new(given, &manifests, found, exact))
    }

    fn evaluate(
        &mut self,
        given: &Path,
        set: &Path,
        arithmetic: Arithmetic,
    ) -> Result<Evaluations, Failure> {
        let model = load(set, self.threads, arithmetic)?;
        let shown = given.display();
        let mut note =
            |done: usize, all: usize| say(&format!("eval: {shown}: {done} of {all} windows"));
        if let Some(path) = &self.args.save_logits {
            return self.save(&model, set, path, &mut note);
        }
        if let Some(stored) = &self.stored {
            inputs::compare_tokenizers(stored.document(), given, &manifests(set)?);
        }
        let reference = match (&mut self.stored, &self.against) {
            (Some(stored), _) => Reference::Stored(stored),
            (None, Some(against)) => Reference::Model(against),
            (None, None) => Reference::None,
        };
        let texts = &self.texts.tokens;
        let found = evaluate(&model, reference, texts, &self.options, &mut note);
        found.map_err(|error| {
            Failure::wrong(anyhow::Error::from(error).context(given.display().to_string()))
        })
    }

    /// Writes the file under a temporary name, and gives it its own when it is complete.
    fn save(
        &self,
        model: &LocalModel,
        set: &Path,
        path: &Path,
        note: &mut dyn FnMut(usize, usize),
    ) -> Result<Evaluations, Failure> {
        let document = self.document(model, set)?;
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let shown = || path.display().to_string();
        let partial = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")));
        let partial = partial.with_context(shown)?;
        let mut out = BufWriter::new(partial.as_file());
        let texts = &self.texts.tokens;
        let mut writer = LogitsWriter::new(path, &mut out, &document, texts)?;
        let found =
            record(model, texts, &self.options, &mut writer, note).map_err(Failure::wrong)?;
        writer.finish()?;
        drop(out);
        partial.as_file().sync_all().with_context(shown)?;
        partial.persist(path).with_context(shown)?;
        Ok(found)
    }

    fn document(&self, model: &LocalModel, set: &Path) -> Result<LogitsDocument, Failure> {
        let vocab_size = model.spec().vocab_size;
        let top = self.args.top.min(vocab_size);
        if top as usize > MAX_TOP {
            return Err(anyhow!("--top {top}: 1 to {MAX_TOP} are possible").into());
        }
        let manifests = manifests(set)?;
        let first = manifests.first().context("the set has no packages")?;
        let name = first.name.clone().or_else(|| first.source.repo.clone());
        let folder = set.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(LogitsDocument {
            model: name.or(folder).unwrap_or_default(),
            weights: first.ids.weights,
            tokenizer: inputs::tokenizer(first),
            vocab_size,
            context: u32::try_from(self.options.context).context("--context")?,
            first: self.options.first.map(|first| first.0),
            top,
            texts: self.texts.stored.clone(),
        })
    }
}

/// The manifests of a set, in rank order.
fn manifests(set: &Path) -> Result<Vec<Manifest>, Failure> {
    let (_, folders) = package::members(set)?;
    folders.iter().map(|folder| package::read_manifest(folder)).collect()
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
