//! `shardpack calibrate`: runs a model at 16 bits over a text, layer by layer, and writes the second
//! moments of what its matrices read; with `--sensitivity` also what rounding each of them does.

mod imatrix;
mod sensitivity;
mod text;
pub(super) mod work;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, anyhow};
use serde_json::json;
use shardpack_chat::PromptHome;
use shardpack_containers::imatrix::write as write_imatrix;
use shardpack_converter::ConvertOptions;
use shardpack_engine::calibration::{CalibrationRun, CalibrationRunError};
use shardpack_engine_api::TokenId;
use shardpack_formats::{
    Calibration,
    calibration::{CALIBRATION_FILE, CALIBRATION_FORMAT},
    sensitivity::SENSITIVITY_FILE,
};
use shardpack_manifests::Digest;

use super::{Outcome, convert, package, text_worker, threads};
use crate::{
    args::{CalibrateArgs, CalibrationTextArgs},
    failure::Failure,
    kill_points,
    progress::{Progress, result, say},
    source::{Input, Keep},
    text_file,
};
use work::WorkFolder;

/// Fewest tokens over which sensitivities mean anything; also the shortest sequence.
const FEWEST_TOKENS: usize = 16;

/// Bytes of a text of which a token takes no more in the mean: most take four.
const MOST_BYTES_PER_TOKEN: usize = 16;

/// Runs the command.
pub(crate) fn run(args: &CalibrateArgs) -> Outcome {
    let request = Request {
        input: Input::of(&args.source, Keep::All),
        text: &args.text,
        sensitivity: args.sensitivity,
        memory_bytes: args.budget.memory.0,
        threads: args.budget.threads.count,
    };
    let index = calibrate(&request, &args.output)?;
    if let Some(path) = &args.imatrix_out {
        let figures = imatrix::figures(&args.output, &index)?;
        let chunks = index.tokens.div_ceil(index.context) as u32;
        let shown = || path.display().to_string();
        fs::write(path, write_imatrix(&figures, chunks)).with_context(shown)?;
    }
    if args.form.json {
        let (inputs, tokens) = (index.inputs.len(), index.tokens);
        let document =
            json!({ "ok": true, "output": args.output, "inputs": inputs, "tokens": tokens });
        result(&document.to_string());
    } else {
        let (shown, tokens) = (args.output.display(), index.tokens);
        result(&format!("{shown}: moments of {} inputs over {tokens} tokens", index.inputs.len()));
    }
    Ok(ExitCode::SUCCESS)
}

/// What is calibrated with what.
pub(super) struct Request<'a> {
    pub(super) input: Input<'a>,
    pub(super) text: &'a CalibrationTextArgs,
    /// Tokens over which each matrix is rounded by itself, if it is.
    pub(super) sensitivity: Option<usize>,
    pub(super) memory_bytes: u64,
    pub(super) threads: Option<usize>,
}

/// Writes the moments of a model's inputs to a folder that does not exist yet.
pub(super) fn calibrate(request: &Request<'_>, output: &Path) -> Result<Calibration, Failure> {
    if output.exists() {
        return Err(anyhow!("{}: exists already; name a new folder", output.display()).into());
    }
    if let Some(tokens @ ..FEWEST_TOKENS) = request.sensitivity {
        let error = anyhow!("--sensitivity {tokens} is not possible; {FEWEST_TOKENS} or more are");
        return Err(error.into());
    }
    let work = WorkFolder::open(output, &request.key()?)?;
    let model = request.model(&work)?;
    let (sequences, context) = request.sequences(&model)?;
    let digest = Digest::of(
        &sequences.iter().flatten().flat_map(|token| token.0.to_le_bytes()).collect::<Vec<u8>>(),
    );
    let threads = threads::count(request.threads);
    let mut run = CalibrationRun::open(&model, &sequences, threads).map_err(failure)?;
    if request.sensitivity.is_some() && run.has_cross_layer_state() {
        return Err(Failure::wrong(anyhow!(
            "--sensitivity: layers of this architecture hand more to each other than the residual stream, and are not run with one matrix rounded; choose bits with --recipe or --override"
        )));
    }
    run_layers(&mut run, &work)?;
    let index = Calibration {
        format: CALIBRATION_FORMAT,
        weights: run.manifest().ids.weights.to_string(),
        text: digest.to_string(),
        tokens: sequences.iter().map(|sequence| sequence.len() as u64).sum(),
        context: context as u64,
        inputs: work.entries(run.layers())?,
    };
    let text = serde_json::to_string_pretty(&index).context("the index")?;
    work.replace(&work.path().join(CALIBRATION_FILE), text.as_bytes())?;
    if let Some(tokens) = request.sensitivity {
        let model = (model.as_path(), threads);
        let found = threads::with(request.threads, || {
            sensitivity::measure(&work, model, &sequences, tokens, &index)
        })??;
        let text = serde_json::to_string_pretty(&found).context("sensitivities")?;
        work.replace(&work.path().join(SENSITIVITY_FILE), text.as_bytes())?;
    }
    work.publish(output, &[CALIBRATION_FILE, SENSITIVITY_FILE])?;
    Ok(index)
}

/// Runs all sequences through the layers that an earlier run has not finished.
fn run_layers(run: &mut CalibrationRun<'_>, work: &WorkFolder) -> Result<(), Failure> {
    let lengths: Vec<usize> = (0..run.sequences()).map(|it| run.stream_len(it)).collect();
    let layers = run.layers();
    let mut next = work.finished(layers, &lengths);
    if next > 0 && run.has_cross_layer_state() {
        next = 0;
    }
    if next == 0 {
        let mut streams = work.streams(None, 0, &lengths)?;
        run.embed(&mut streams).map_err(failure)?;
        streams.finish()?;
    } else {
        say(&format!("note: resuming after {next} layers that an earlier run has finished"));
    }
    let stream_bytes: u64 = lengths.iter().map(|len| *len as u64 * 4).sum();
    let progress = Progress::bytes("calibrate", stream_bytes * (layers - next) as u64);
    for layer in next..layers {
        kill_points::at(|| format!("calibrate:layer:{layer}"));
        progress.message(&format!("layer {layer} of {layers}"));
        let mut streams = work.streams(Some(layer), layer + 1, &lengths)?;
        let mut note = |done: usize| progress.add(lengths[done - 1] as u64 * 4);
        let moments = run.layer(layer, &mut streams, &mut note).map_err(failure)?;
        streams.finish()?;
        work.write(&format!("layer-{layer:05}"), &moments)?;
        work.forget_streams(layer)?;
    }
    let moments = run.head(&mut work.streams(Some(layers), layers + 1, &lengths)?);
    work.write("head", &moments.map_err(failure)?)?;
    progress.finish();
    Ok(())
}

fn failure(error: CalibrationRunError) -> Failure {
    match error {
        CalibrationRunError::Backend(_)
        | CalibrationRunError::Step(_)
        | CalibrationRunError::Keep(_) => error.into(),
        error => Failure::wrong(error),
    }
}

impl Request<'_> {
    /// What an earlier run must have had in common with this one.
    pub(super) fn key(&self) -> Result<String, Failure> {
        let Input { source, subfolder, adapters, pickles, ignored_config_keys, .. } = &self.input;
        let CalibrationTextArgs { tokens, context, .. } = self.text;
        let texts = self.files()?;
        let texts: Vec<_> = texts.iter().map(|it| Digest::of(it.as_bytes())).collect();
        let source = fs::canonicalize(source).unwrap_or_else(|_| source.to_path_buf());
        let subfolder = subfolder.map(|it| format!("{it:?}"));
        let pickles = format!("{pickles:?}");
        let version = env!("CARGO_PKG_VERSION");
        Ok(json!([
            version,
            source,
            subfolder,
            adapters,
            pickles,
            ignored_config_keys,
            tokens,
            context,
            texts,
            self.sensitivity
        ])
        .to_string())
    }

    /// The texts that the user has given.
    fn files(&self) -> Result<Vec<String>, Failure> {
        Ok(self.text.files.iter().map(|path| text_file::read(path)).collect::<Result<_, _>>()?)
    }

    /// The package of the whole model at 16 bits: the given one, or one that is made of the source.
    pub(super) fn model(&self, work: &WorkFolder) -> Result<PathBuf, Failure> {
        let given = self.input.source;
        let set = if package::is_set(given) || package::is_package(given) {
            given.to_path_buf()
        } else {
            let set = work.model();
            if !package::is_set(&set) {
                let options = ConvertOptions {
                    bits: 16,
                    memory_bytes: self.memory_bytes,
                    ..ConvertOptions::new(set.clone(), 1)
                };
                threads::with(self.threads, || convert::convert_source(&self.input, options))??;
            }
            set
        };
        let first = package::members(&set)?.1.into_iter().next();
        first.ok_or_else(|| Failure::wrong(anyhow!("{}: no packages", set.display())))
    }

    /// Whole windows of the texts in turn, each beginning with the model's first token, if it has one.
    pub(super) fn sequences(&self, folder: &Path) -> Result<(Vec<Vec<TokenId>>, usize), Failure> {
        let longest = package::read_manifest(folder)?.architecture.max_positions as usize;
        let context = self.text.context.unwrap_or(longest.min(512));
        if !(FEWEST_TOKENS..=longest).contains(&context) {
            let error =
                anyhow!("--context {context} is not possible; {FEWEST_TOKENS} to {longest} are");
            return Err(error.into());
        }
        let mut texts = Vec::new();
        let sandbox = text_worker::program();
        let given = self.files()?;
        let is_own = !given.is_empty();
        let all = if given.is_empty() { text::builtin(folder)? } else { given };
        for text in all {
            let home = PromptHome::Sandboxed(&sandbox);
            // The sandbox has little memory, and what comes later is not read anyway.
            let most = self.text.tokens.saturating_mul(MOST_BYTES_PER_TOKEN);
            let text = &text[..text.floor_char_boundary(most)];
            let tokenized = shardpack_chat::tokenize(folder, text, home);
            let (tokens, first) = tokenized.map_err(Failure::wrong)?;
            let own = context - first.iter().count();
            let windows = tokens.chunks(own).filter(|window| window.len() >= own.min(tokens.len()));
            let whole =
                |window: &[TokenId]| first.into_iter().chain(window.iter().copied()).collect();
            texts.push(windows.map(whole).collect::<Vec<Vec<TokenId>>>().into_iter());
        }
        let mut sequences: Vec<Vec<TokenId>> = Vec::new();
        let mut tokens = 0;
        loop {
            let before = sequences.len();
            for text in &mut texts {
                if let Some(window) = text.next().filter(|it| tokens + it.len() <= self.text.tokens)
                {
                    tokens += window.len();
                    sequences.push(window);
                }
            }
            if sequences.len() == before {
                break;
            }
        }
        if sequences.is_empty() {
            let limit = self.text.tokens;
            let error =
                anyhow!("nothing to read: no window of {context} tokens within {limit} tokens");
            return Err(Failure::from(error).hint("give a longer text, or a shorter --context"));
        }
        // Of a text of the user's own more would have been read.
        if is_own && tokens + context <= self.text.tokens {
            let limit = self.text.tokens;
            say(&format!(
                "note: the text has {tokens} of the {limit} tokens that would be read; statistics of a short text say little: give a longer text, or several"
            ));
        }
        Ok((sequences, context))
    }
}

/// Makes a file durable.
pub(super) fn sync(path: &Path) -> Result<(), Failure> {
    let shown = || path.display().to_string();
    File::open(path).and_then(|file| file.sync_all()).with_context(shown)?;
    Ok(())
}
