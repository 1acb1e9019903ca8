//! `convert --distill`: tunes scales and biases of a quantized model against the one at 16 bits, before the
//! packages are written.

mod stages;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, anyhow};
use shardpack_containers::container::{self, TensorInfo};
use shardpack_converter::{ConvertOptions, Nodes};
use shardpack_engine::{
    backend::{Collectives, Mlx, mlx::GroupParams},
    distillation::{DistillationError, DistillationRun, Rate},
};
use shardpack_formats::learned::{LEARNED_FILE, LEARNED_FORMAT, Learned, LearnedEntry};
use shardpack_manifests::Digest;
use shardpack_mlx::runtime;
use shardpack_quantize::{Dtype, Platform, affine};

use super::{
    calibrate::{
        Request, sync,
        work::{FileStreams, WorkFolder},
    },
    convert, package, threads,
};
use crate::{
    engines::mlx_folder,
    failure::Failure,
    kill_points,
    progress::{Progress, say},
};
use stages::StageFiles;

/// How far a parameter moves in a step at most, in steps of its group, before the rate falls.
const RATE: f32 = 0.01;

/// Most steps in which the rate rises from nothing, and one of how many steps does so at least.
const WARM_UP: [usize; 2] = [10, 15];

/// Tokens of a step, in whole sequences.
const STEP_TOKENS: usize = 2048;

/// One sequence in so many is not learned from; what was learned is judged by these.
const HELD_OUT: usize = 16;

/// Checks that there is what a distillation runs on.
pub(super) fn check() -> Result<(), Failure> {
    let checked = runtime::check(&mlx_folder(None)?).context("--distill runs on MLX");
    Ok(checked.map(drop)?)
}

/// Tunes what `options` would convert; the folder of what was learned, or nothing if that is no better.
pub(super) fn distill(
    request: &Request<'_>,
    steps: usize,
    options: &ConvertOptions,
) -> Result<Option<PathBuf>, Failure> {
    let student = ConvertOptions {
        nodes: Nodes::Equal(1),
        stages: 1,
        fail_on: Vec::new(),
        sign: None,
        ..options.clone()
    };
    let key = format!("{} {steps} {student:?}", request.key()?);
    let mut output = options.output.clone().into_os_string();
    output.push(format!(".distillation-{}", Digest::of(key.as_bytes()).short()));
    let output = PathBuf::from(output);
    if output.exists() {
        return Ok(Some(output));
    }
    let work = WorkFolder::open(&output, &key)?;
    let teacher = request.model(&work)?;
    let folder = work.path().join("student");
    if !package::is_set(&folder) {
        let options = ConvertOptions { output: folder.clone(), ..student };
        threads::with(request.threads, || convert::convert_source(&request.input, options))??;
    }
    let student = package::members(&folder)?.1.into_iter().next();
    let student = student.ok_or_else(|| anyhow!("{}: no packages", folder.display()))?;
    let (sequences, _) = request.sequences(&teacher)?;
    let mlx = Mlx::open(&mlx_folder(None)?, None, Collectives::Own, [0, 1]);
    let mlx = mlx.map_err(anyhow::Error::from)?.exact();
    let folders = [teacher.as_path(), student.as_path()];
    let threads = threads::count(request.threads);
    let run = DistillationRun::open(folders, &sequences, &mlx, threads).map_err(failure)?;
    let parts = Parts::of(&run, sequences.len(), request.memory_bytes)?;
    let teacher = package::read_manifest(&teacher)?.ids.weights.to_string();
    let learned = Course { run, work: &work, parts, steps }.learn(teacher)?;
    if learned.divergence_after >= learned.divergence_before {
        say(&format!(
            "note: distillation does not lower the KL divergence over {} tokens that were held out ({:.5} before, {:.5} after): scales stay as they were rounded; a longer text may help",
            learned.held_out, learned.divergence_before, learned.divergence_after
        ));
        fs::remove_dir_all(work.path()).with_context(|| work.path().display().to_string())?;
        return Ok(None);
    }
    let text = serde_json::to_string_pretty(&learned).context("the index")?;
    work.replace(&work.path().join(LEARNED_FILE), text.as_bytes())?;
    work.publish(&output, &[LEARNED_FILE])?;
    Ok(Some(output))
}

fn failure(error: DistillationError) -> Failure {
    match error {
        DistillationError::Step(_) | DistillationError::Keep(_) => error.into(),
        error => Failure::wrong(error),
    }
}

/// Which sequences are learned from, and which judge it.
struct Parts {
    learned: Vec<usize>,
    held_out: Vec<usize>,
    /// Sequences of a step.
    at_once: usize,
}

impl Parts {
    fn of(run: &DistillationRun<'_>, sequences: usize, memory_bytes: u64) -> Result<Self, Failure> {
        let is_held_out = |index: &usize| index % HELD_OUT == HELD_OUT - 1;
        let (held_out, learned): (Vec<usize>, _) = (0..sequences).partition(is_held_out);
        if held_out.is_empty() {
            let error = anyhow!(
                "--distill: the text has {sequences} sequences, {HELD_OUT} or more are needed"
            );
            return Err(
                Failure::from(error).hint("give a longer text, or a shorter --calibration-context")
            );
        }
        // What every layer has read stays in memory for the way back.
        let kept = run.stream_len(0) as u64 * 4 * (run.layers() as u64 + 2);
        let fits = (memory_bytes / 2 / kept.max(1)) as usize;
        let at_once = (STEP_TOKENS / run.tokens(0).max(1)).min(fits).clamp(1, learned.len());
        Ok(Self { learned, held_out, at_once })
    }

    /// The sequences of a step, from 0: each once before one comes again, in an order of its own.
    fn batch(&self, step: usize) -> Vec<usize> {
        let (first, count) = (step * self.at_once, self.learned.len());
        let order = |epoch: usize| {
            let mut order = self.learned.clone();
            order.sort_by_cached_key(|index| Digest::of(format!("{epoch} {index}").as_bytes()).0);
            order
        };
        // A step has no more sequences than there are, so it is in two epochs at most.
        let epoch = first / count;
        let both = order(epoch).into_iter().chain(order(epoch + 1));
        both.skip(first % count).take(self.at_once).collect()
    }
}

/// A distillation that is under way.
struct Course<'a> {
    run: DistillationRun<'a>,
    work: &'a WorkFolder,
    parts: Parts,
    steps: usize,
}

impl Course<'_> {
    fn learn(&self, weights: String) -> Result<Learned, Failure> {
        self.teach()?;
        let layers = self.run.layers();
        let last = self.lengths();
        let mut reference = self.work.streams(Some(layers), layers + 1, &last)?;
        let mut stages = StageFiles::open(self.work)?;
        let held_out = &self.parts.held_out;
        let divergence = |stages: &mut StageFiles<'_>, reference: &mut FileStreams| {
            self.run.divergence(held_out, reference, stages).map_err(failure)
        };
        let before = if let Some(before) = stages.before() {
            before
        } else {
            let before = divergence(&mut stages, &mut reference)?;
            stages.begin(before)?;
            before
        };
        if stages.done() > 0 {
            say(&format!(
                "note: resuming after {} steps that an earlier run has made",
                stages.done()
            ));
        }
        let progress =
            Progress::steps("distill", (self.steps - stages.done().min(self.steps)) as u64);
        for step in stages.done()..self.steps {
            kill_points::at(|| format!("distill:step:{step}"));
            let rate = Rate { number: 1 + step, size: self.rate(step) };
            let batch = self.parts.batch(step);
            let loss = self.run.step(&batch, &mut reference, &mut stages, rate).map_err(failure)?;
            stages.commit()?;
            progress.message(&format!("KL divergence {loss:.5}"));
            progress.add(1);
        }
        progress.finish();
        let after = divergence(&mut stages, &mut reference)?;
        let tokens = |of: &[usize]| of.iter().map(|it| self.run.tokens(*it) as u64).sum();
        Ok(Learned {
            format: LEARNED_FORMAT,
            weights,
            steps: self.steps,
            tokens: tokens(&self.parts.learned),
            held_out: tokens(held_out),
            divergence_before: before,
            divergence_after: after,
            matrices: self.write(&mut stages)?,
        })
    }

    /// The rate of a step: it rises at first, and falls to nothing at the end.
    fn rate(&self, step: usize) -> f32 {
        let [most, part] = WARM_UP;
        let rising = (self.steps / part).clamp(1, most);
        let warm = (1 + step).min(rising) as f32 / rising as f32;
        RATE * warm * (1.0 - step as f32 / self.steps as f32)
    }

    fn lengths(&self) -> Vec<usize> {
        let sequences = self.parts.learned.len() + self.parts.held_out.len();
        (0..sequences).map(|it| self.run.stream_len(it)).collect()
    }

    /// Runs all sequences through the model at 16 bits, from the layer where an earlier run was.
    fn teach(&self) -> Result<(), Failure> {
        let (layers, lengths) = (self.run.layers(), self.lengths());
        let bytes: u64 = lengths.iter().map(|len| *len as u64 * 4).sum();
        let next = self.work.streams_before(layers, bytes);
        if next.is_none() {
            let mut streams = self.work.streams(None, 0, &lengths)?;
            self.run.teach_embedding(&mut streams).map_err(failure)?;
            streams.finish()?;
        }
        let next = next.unwrap_or(0);
        let progress = Progress::bytes("16 bits", bytes * (layers - next) as u64);
        for layer in next..layers {
            kill_points::at(|| format!("distill:teach:{layer}"));
            progress.message(&format!("layer {layer} of {layers}"));
            let mut streams = self.work.streams(Some(layer), layer + 1, &lengths)?;
            let mut note = |done: usize| progress.add(lengths[done] as u64 * 4);
            self.run.teach_layer(layer, &mut streams, &mut note).map_err(failure)?;
            streams.finish()?;
            self.work.forget_streams(layer)?;
        }
        progress.finish();
        Ok(())
    }

    /// Writes what was learned, a file for each stage.
    fn write(&self, stages: &mut StageFiles<'_>) -> Result<Vec<LearnedEntry>, Failure> {
        let mut entries = Vec::new();
        for stage in 0..=self.run.layers() {
            let found = self.run.result(stage, stages).map_err(failure)?;
            if found.is_empty() {
                continue;
            }
            let file = format!("stage-{stage:05}.safetensors");
            let parts = found.iter().flat_map(|(module, params)| parts(module, params));
            let bytes = parts
                .map(|(name, values)| Ok((name, as_stored(values, self.run.store())?)))
                .collect::<Result<Vec<(String, Vec<u8>)>, Failure>>()?;
            let info = |(name, bytes): &(String, Vec<u8>)| TensorInfo {
                name: name.clone(),
                dtype: self.run.store(),
                shape: vec![(bytes.len() / self.run.store().size_bytes()) as u64],
                offset: 0,
                size: bytes.len() as u64,
            };
            let infos: Vec<TensorInfo> = bytes.iter().map(info).collect();
            let mut whole = container::header(&infos);
            whole.extend(bytes.iter().flat_map(|(_, bytes)| bytes));
            let path = self.work.path().join(&file);
            fs::write(&path, whole).with_context(|| path.display().to_string())?;
            sync(&path)?;
            for ((module, params), pair) in found.iter().zip(bytes.as_chunks::<2>().0) {
                entries.push(LearnedEntry {
                    module: module.clone(),
                    file: file.clone(),
                    groups: params.scales.len() as u64,
                    integers: self.integers(module)?,
                    blake3: pair.each_ref().map(|(_, bytes)| Digest::of(bytes).to_string()),
                });
            }
        }
        Ok(entries)
    }

    /// Digest of a module's packed integers.
    fn integers(&self, module: &str) -> Result<String, Failure> {
        let name = format!("{module}.weight");
        let entry = self.run.manifest().tensors.iter().find(|it| it.name == name);
        let entry = entry.ok_or_else(|| anyhow!("no tensor {name:?} in the quantized model"))?;
        Ok(entry.blake3.to_string())
    }
}

fn parts<'a>(module: &str, params: &'a GroupParams) -> [(String, &'a [f32]); 2] {
    let GroupParams { scales, biases } = params;
    [(format!("{module}.scales"), scales), (format!("{module}.biases"), biases)]
}

/// Values that are of this type already, as bytes.
fn as_stored(values: &[f32], dtype: Dtype) -> Result<Vec<u8>, Failure> {
    let bytes: Vec<u8> = values.iter().flat_map(|it| it.to_le_bytes()).collect();
    let mut stored = vec![0; values.len() * dtype.size_bytes()];
    affine::cast(Platform::detect_for_quantizing(), (Dtype::F32, &bytes), (dtype, &mut stored))
        .map_err(|bad| anyhow!("what was learned: {bad}"))?;
    Ok(stored)
}
