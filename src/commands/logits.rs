//! `shardpack logits`.

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context, anyhow};
use shardpack_engine::loading::Package;
use shardpack_engine_api::TokenId;

use super::{Outcome, package, store, threads};
use crate::{args::LogitsArgs, failure::Failure, text_file};

/// Runs the command.
pub(crate) fn run(args: &LogitsArgs) -> Outcome {
    args.engine.check()?;
    if args.engine.kv_memory.is_some() {
        return Err(anyhow::anyhow!("--kv-memory is for serving").into());
    }
    let tokens = read_tokens(&args.tokens)?;
    let (_, folders) = package::members(&store::model(&args.set)?)?;
    let threads = threads::count(args.threads.count);
    let options = args.engine.opening(threads).map_err(anyhow::Error::from)?;
    let packages = folders
        .iter()
        .map(|folder| {
            let opened = Package::open(folder, &options, &|_| ());
            opened.map_err(|error| {
                Failure::wrong(anyhow::Error::from(error).context(folder.display().to_string()))
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let each = (threads / packages.len().max(1)).max(1);
    let values = args.engine.logits(&packages, &tokens, each)?;
    write(&args.output, &values, tokens.len())?;
    Ok(ExitCode::SUCCESS)
}

fn read_tokens(path: &Path) -> Result<Vec<TokenId>, Failure> {
    let text = text_file::read(path)?;
    let tokens: Vec<TokenId> = serde_json::from_str(&text).map_err(|error| {
        Failure::wrong(anyhow!("{}: not a JSON list of token ids: {error}", path.display()))
    })?;
    if tokens.is_empty() {
        return Err(Failure::wrong(anyhow!("{}: no tokens", path.display())));
    }
    Ok(tokens)
}

/// Writes `logits`, f32, `[tokens, vocab]`.
fn write(path: &Path, values: &[f32], tokens: usize) -> anyhow::Result<()> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let shape = vec![tokens, values.len() / tokens];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, &bytes)?;
    let file = safetensors::serialize([("logits", view)], None)?;
    fs::write(path, file).with_context(|| path.display().to_string())
}
