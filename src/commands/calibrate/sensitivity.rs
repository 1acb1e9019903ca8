//! The second pass of `calibrate --sensitivity`: each matrix rounded by itself, and how far answers move.

use std::{cell::RefCell, fs, path::Path};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use shardpack_converter::{Candidates, Weights};
use shardpack_engine::{
    calibration::{Round, RoundingError, SensitivityRun},
    loading::PackageTensor,
};
use shardpack_engine_api::TokenId;
use shardpack_formats::{
    Calibration,
    sensitivity::{FormatError, ModuleSensitivity, SENSITIVITY_FORMAT, Sensitivities},
};

use super::{failure, work::WorkFolder};
use crate::{failure::Failure, kill_points, progress::Progress, progress::say};

/// Tokens of a sequence: more sequences tell more than longer ones.
const CONTEXT: usize = 256;

/// What has been measured before a layer.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Variants {
    /// Each variant's module and what formats do to it.
    modules: Vec<(String, Vec<FormatError>)>,
}

/// Measures over the first `tokens` of the sequences. `work` holds the moments and their index.
pub(super) fn measure(
    work: &WorkFolder,
    (model, threads): (&Path, usize),
    sequences: &[Vec<TokenId>],
    tokens: usize,
    index: &Calibration,
) -> Result<Sensitivities, Failure> {
    let sequences = beginnings(sequences, tokens);
    let run = SensitivityRun::open(model, &sequences, threads).map_err(failure)?;
    let candidates = Candidates::open(work.path()).map_err(Failure::wrong)?;
    // Taken between two layers, while the rounding stays borrowed.
    let errors = Errors::default();
    let mut round = |module: &str, tensor: &PackageTensor| {
        let (dtype, shape, bytes) = (tensor.dtype(), tensor.shape(), tensor.bytes());
        let measured = candidates.measure(&Weights { module, dtype, shape, bytes });
        let measured = measured.map_err(|error| Box::new(error) as RoundingError)?;
        Ok(measured.map(|measured| {
            errors.borrow_mut().push((module.to_owned(), measured.errors));
            measured.rounded
        }))
    };
    let lengths = run.stream_lengths();
    let all = |variants: usize| -> Vec<usize> { lengths.repeat(1 + variants) };
    let layers = run.layers();
    let tokens: usize = sequences.iter().map(Vec::len).sum();
    let (next, mut variants) = begin(work, &run, tokens, &mut round, &errors)?;
    let progress = Progress::bytes("sensitivity", bytes(&lengths, layers, next, &variants, index));
    for layer in next..layers {
        kill_points::at(|| format!("sensitivity:layer:{layer}"));
        progress.message(&format!("layer {layer} of {layers}"));
        let before = variants.modules.len();
        let mut streams = work.variant_streams(tokens, Some(layer), layer + 1, &all(before))?;
        let mut step = 0;
        let mut note = || {
            progress.add(lengths[step % lengths.len()] as u64 * 4);
            step += 1;
        };
        run.layer(layer, before, &mut streams, &mut round, &mut note).map_err(failure)?;
        variants.modules.append(&mut errors.take());
        streams.finish()?;
        work.write_variants(tokens, layer + 1, &variants)?;
        work.forget_variants(tokens, layer)?;
    }
    progress.message("logits");
    let names: Vec<String> = variants.modules.iter().map(|(module, _)| module.clone()).collect();
    let from = all(names.len());
    let mut streams = work.variant_streams(tokens, Some(layers), layers + 1, &from)?;
    let mut step = 0;
    let mut note = || {
        progress.add(lengths[step / (names.len() + 1) % lengths.len()] as u64 * 4);
        step += 1;
    };
    let found = run.divergences(&names, &mut streams, &mut round, &mut note).map_err(failure)?;
    // A tied head is rounded once more, and is there already.
    let last = errors.take().into_iter();
    variants.modules.extend(last.filter(|(module, _)| !names.contains(module)));
    progress.finish();
    let modules = found.into_iter().zip(variants.modules);
    Ok(Sensitivities {
        format: SENSITIVITY_FORMAT,
        weights: index.weights.clone(),
        tokens: tokens as u64,
        modules: modules
            .map(|((module, kl), (_, errors))| ModuleSensitivity { module, kl, errors })
            .collect(),
    })
}

/// Modules whose rounding has been measured, and what other formats do to them.
type Errors = RefCell<Vec<(String, Vec<FormatError>)>>;

/// The layer at which an earlier run was, or the first one, and the variants before it.
fn begin(
    work: &WorkFolder,
    run: &SensitivityRun<'_>,
    tokens: usize,
    round: &mut Round<'_>,
    errors: &Errors,
) -> Result<(usize, Variants), Failure> {
    if let Some((layer, found)) = work.variants(tokens, run.layers())? {
        say(&format!("note: resuming after {layer} layers that an earlier run has measured"));
        return Ok((layer, found));
    }
    let mut streams = work.variant_streams(tokens, None, 0, &[])?;
    run.embed(&mut streams, round).map_err(failure)?;
    streams.finish()?;
    let variants = Variants { modules: errors.take() };
    work.write_variants(tokens, 0, &variants)?;
    Ok((0, variants))
}

/// The first tokens of the first sequences, which are of different texts.
fn beginnings(sequences: &[Vec<TokenId>], tokens: usize) -> Vec<Vec<TokenId>> {
    let mut left = tokens;
    let mut taken = Vec::new();
    for sequence in sequences {
        let count = sequence.len().min(CONTEXT).min(left);
        if count == 0 {
            break;
        }
        taken.push(sequence[..count].to_vec());
        left -= count;
    }
    taken
}

/// Bytes of hidden states that pass through the layers from `next` on, and once through the head.
fn bytes(
    lengths: &[usize],
    layers: usize,
    next: usize,
    variants: &Variants,
    index: &Calibration,
) -> u64 {
    let modules = || index.inputs.iter().flat_map(|input| &input.modules);
    let mut branches = 1 + variants.modules.len();
    let mut passes = 0;
    for layer in next..layers {
        let prefix = format!("model.layers.{layer}.");
        branches += modules().filter(|module| module.starts_with(&prefix)).count();
        passes += branches;
    }
    passes += branches;
    (passes * lengths.iter().sum::<usize>()) as u64 * 4
}

impl Variants {
    /// Reads what `calibrate` has written with [`Self::bytes`].
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let shown = || path.display().to_string();
        let text = fs::read(path).with_context(shown)?;
        Ok(serde_json::from_slice(&text).with_context(shown)?)
    }

    pub(super) fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        serde_json::to_vec(self).context("what was measured")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_are_of_many_sequences_and_no_longer_than_asked() {
        let sequence = |length: u32| (0..length).map(TokenId).collect::<Vec<_>>();
        let lengths = |tokens: usize, of: &[u32]| -> Vec<usize> {
            let all: Vec<_> = of.iter().map(|length| sequence(*length)).collect();
            beginnings(&all, tokens).iter().map(Vec::len).collect()
        };
        assert_eq!(lengths(1024, &[512; 8]), [256; 4]);
        assert_eq!(lengths(300, &[512, 40, 512]), [256, 40, 4]);
        assert_eq!(lengths(5000, &[100]), [100]);
    }
}
