//! A head that shares the embedding's weights, until an adapter changes one of both.

use serde_json::Value;
use shardpack_formats::{RulePack, resolve};

use super::{Source, SourceError, TEXT_CONFIG};
use crate::adapter::Adapters;

/// Endings of embeddings' names.
const EMBEDDINGS: &[&str] = &["embed_tokens.weight", "wte.weight"];

/// The name of a head.
const HEAD: &str = "lm_head.weight";

/// Wrappers whose head stands within their text model.
const WRAPPER: &str = "language_model.model.";

/// The key that says whether both are one.
const KEY: &str = "tie_word_embeddings";

/// Names of an embedding and of the head that it stands for.
pub(super) struct Tied {
    pub(super) embedding: String,
    pub(super) head: String,
}

impl Source {
    /// The embedding that is the head too.
    pub(super) fn tied(&self) -> Option<Tied> {
        let is_end = |name: &str, endings: &[&str]| {
            endings.iter().any(|ending| {
                name.strip_suffix(ending).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            })
        };
        let names = || self.logical_tensors().map(|tensor| tensor.name.as_str());
        let mut embeddings = names().filter(|name| is_end(name, EMBEDDINGS));
        let (embedding, None) = (embeddings.next()?, embeddings.next()) else { return None };
        if names().any(|name| is_end(name, &[HEAD])) || !self.says_tied() {
            return None;
        }
        let before = if embedding.starts_with(WRAPPER) { "language_model." } else { "" };
        Some(Tied { embedding: embedding.to_owned(), head: format!("{before}{HEAD}") })
    }

    /// Whether the configuration has both as one; where it does not say, its family's rules do.
    fn says_tied(&self) -> bool {
        let stated = [&self.config[KEY], &self.config[TEXT_CONFIG][KEY]];
        match stated.iter().find_map(|value| value.as_bool()) {
            Some(stated) => stated,
            None => resolve(&self.config, &self.source_tensors(), &RulePack::builtin()).is_ok(),
        }
    }

    /// Gives the head its own weights where adapters do.
    pub(super) fn part(
        &mut self,
        Tied { embedding, head }: Tied,
        adapters: &mut Adapters,
    ) -> Result<(), SourceError> {
        let Some(mut own) = self.logical(&embedding).cloned() else { return Ok(()) };
        let rows = own.row_count();
        if !adapters.part((&embedding, rows), &head)? {
            return Ok(());
        }
        own.name.clone_from(&head);
        let tensors = &mut self.grouped.tensors;
        let place = tensors.partition_point(|tensor| tensor.name < head);
        tensors.insert(place, own);
        if let Value::Object(config) = &mut self.config {
            if let Some(Value::Object(text)) = config.get_mut(TEXT_CONFIG) {
                text.insert(KEY.to_owned(), false.into());
            }
            config.insert(KEY.to_owned(), false.into());
        }
        self.notes.push(format!(
            "{head} and {embedding} are one in the model and two after the adapter, which changes one of them: the packages hold both"
        ));
        Ok(())
    }
}
