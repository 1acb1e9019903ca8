//! Statistics of what a model's matrices read, checked against the model: whether they are its own, how
//! many of its matrices they cover, and whether their text was long enough.

use std::{fs, path::Path};

use shardpack_containers::{Importance, imatrix::ImatrixError};
use shardpack_formats::{Normalised, Role, TensorPlan};
use shardpack_manifests::Digest;

use super::{PlanError, formats::module_name};
use crate::{
    moments::{MomentsError, StoredMoments},
    source::SourceError,
};

/// Fewest pieces of text of an importance file: of 512 tokens each, as llama.cpp has them, 5,120.
/// llama.cpp's own advice is a hundred.
const FEWEST_CHUNKS: u32 = 10;

/// Opens a folder of moments and checks that they are of this model.
pub(super) fn read_moments(
    folder: &Path,
    normalised: &Normalised,
) -> Result<StoredMoments, MomentsError> {
    let moments = StoredMoments::open(folder)?;
    let mut found = false;
    for tensor in normalised.tensors.iter().filter(|tensor| tensor.quantizable) {
        found |= moments.check(module_name(&tensor.name), tensor.rows(), tensor.columns())?;
    }
    if found { Ok(moments) } else { Err(moments.foreign()) }
}

/// The modules whose inputs statistics describe: embeddings have none, and a head often is left out.
pub(super) fn measured(normalised: &Normalised) -> Vec<&str> {
    let is_measured = |tensor: &&TensorPlan| {
        tensor.quantizable && !matches!(tensor.role, Role::Embed | Role::Head)
    };
    let tensors = normalised.tensors.iter().filter(is_measured);
    tensors.map(|tensor| module_name(&tensor.name)).collect()
}

/// Reads an importance file and checks that it was made for this model.
pub(super) fn read_importance(
    path: &Path,
    normalised: &Normalised,
) -> Result<(Importance, Digest), PlanError> {
    let bytes =
        fs::read(path).map_err(|source| SourceError::Read { path: path.to_owned(), source })?;
    let wrong = |source| PlanError::Importance { path: path.display().to_string(), source };
    let importance = Importance::parse(&bytes).map_err(wrong)?;
    let mut found = false;
    for tensor in normalised.tensors.iter().filter(|tensor| tensor.quantizable) {
        // Experts have figures each; the heads of a split matrix share those of its inputs.
        let matrices = if tensor.sharding.is_expert() { tensor.shape[0] } else { 1 };
        let module = module_name(&tensor.name);
        found |= importance.of(module, matrices, tensor.columns()).map_err(wrong)?.is_some();
    }
    match measured(normalised).first() {
        Some(example) if !found => Err(wrong(ImatrixError::Foreign {
            found: importance.example(),
            expected: format!("such as {example:?}"),
        })),
        _ => Ok((importance, Digest::of(&bytes))),
    }
}

/// What is to be said of an importance file.
pub(super) fn weighed(importance: &Importance, normalised: &Normalised) -> Vec<String> {
    let mut notes = Vec::new();
    let all = measured(normalised);
    let without: Vec<&&str> =
        all.iter().filter(|module| !importance.columns.contains_key(**module)).collect();
    if let Some(example) = without.first() {
        notes.push(format!(
            "the importance file has figures for {} of {} matrices; the others, such as {example:?}, are rounded as without it",
            all.len() - without.len(),
            all.len(),
        ));
    }
    if let Some(chunks) = importance.chunks.filter(|chunks| *chunks < FEWEST_CHUNKS) {
        notes.push(format!(
            "the importance file was made of {chunks} pieces of text, fewer than {FEWEST_CHUNKS}: statistics of a short text say little; make it of a longer text"
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use shardpack_containers::imatrix::{MeanSquares, write};

    use super::*;
    use crate::{ConvertOptions, Plan, Source};

    #[test]
    fn an_importance_file_of_another_model_is_refused_and_one_that_lacks_much_is_named() {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/models/llama-tied");
        let source = Source::open(&data).unwrap();
        let width = source.config["hidden_size"].as_u64().unwrap() as usize;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("im.dat");
        let planned = |module: &str, chunks: u32| {
            let figures = MeanSquares { module: module.to_owned(), columns: vec![1.0; width] };
            fs::write(&path, write(&[figures], chunks)).unwrap();
            let options = ConvertOptions {
                importance: Some(path.clone()),
                ..ConvertOptions::new(PathBuf::from("unused"), 1)
            };
            Plan::new(&source, options).map(|plan| plan.warnings)
        };
        let refusal = planned("model.layers.77.self_attn.q_proj", 100).unwrap_err();
        let mut error: &dyn std::error::Error = &refusal;
        let mut words = error.to_string();
        while let Some(source) = error.source() {
            words += &source.to_string();
            error = source;
        }
        for expected in ["im.dat", "none of this model's matrices", "layers.77", "llama-imatrix"] {
            assert!(words.contains(expected), "{expected}: {words}");
        }
        let notes = |chunks| planned("model.layers.0.self_attn.q_proj", chunks).unwrap();
        let has = |notes: &[String], word: &str| notes.iter().any(|note| note.contains(word));
        let short = notes(3);
        assert!(has(&short, "figures for 1 of") && has(&short, "3 pieces of text"), "{short:?}");
        assert!(!has(&notes(FEWEST_CHUNKS), "pieces of text"));
    }
}
