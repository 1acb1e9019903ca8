//! The managed store for Ollama's clients: `/api/pull` converts a model of the hub into it, and
//! `/api/delete` removes one. Paths of this machine are no names here.

use std::{
    error::Error,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use shardpack_converter::{
    Cancel, ConvertEvent,
    store::{PullEvent, PullObserver, PullRequest, Store, StoreError},
};
use shardpack_server::{ModelStore, ModelStoreError, PullReport, PullStatus};

use crate::{commands::threads, source};

/// What stands before the names of models of the hub that Ollama's clients send.
const PREFIXES: [&str; 3] = ["https://", "hf.co/", "huggingface.co/"];

/// The store, and for how many nodes models are converted.
pub(super) struct Models {
    pub(super) store: Store,
    pub(super) nodes: u32,
}

/// A name as clients send it: without the hub's host, and the bits that its tag asks for.
fn named(name: &str) -> Result<(&str, Option<u32>), ModelStoreError> {
    let mut rest = name;
    for prefix in PREFIXES {
        rest = rest.strip_prefix(prefix).unwrap_or(rest);
    }
    let Some((model, tag)) = rest.split_once(':') else { return Ok((rest, None)) };
    let bits = match tag.to_ascii_lowercase().as_str() {
        "latest" => None,
        "4bit" | "int4" | "q4" => Some(4),
        "6bit" | "int6" | "q6" => Some(6),
        "8bit" | "int8" | "q8" => Some(8),
        "16bit" | "f16" | "fp16" | "bf16" => Some(16),
        _ => {
            let message = format!(
                "{name}: expected a tag of 4bit, 6bit, 8bit or 16bit, found {tag:?}; a GGUF file is named by its path, organisation/model/file.gguf"
            );
            return Err(ModelStoreError::Invalid(message));
        }
    };
    Ok((model, bits))
}

impl ModelStore for Models {
    fn pull(&self, name: &str, report: PullReport) -> Result<(), ModelStoreError> {
        if self.store.find(name).map_err(failure)?.is_some() {
            return Ok(());
        }
        let request = self.request(name)?;
        let cancel = request.cancel.clone();
        let observe = observer(report, cancel);
        let pulled = threads::with(None, || self.store.pull(&request, &observe));
        let pulled = pulled.map_err(|error| ModelStoreError::Failed(format!("{error:#}")))?;
        pulled.map(|_| ()).map_err(failure)
    }

    fn remove(&self, name: &str) -> Result<(), ModelStoreError> {
        let pulled = match self.store.find(name).map_err(failure)? {
            Some(_) => None,
            // By the name that it was pulled by.
            None => match self.request(name) {
                Ok(request) => self.store.pulled(&request).map_err(failure)?,
                Err(_) => None,
            },
        };
        let name = pulled.as_ref().map_or(name, |stored| stored.name.as_str());
        self.store.remove(name).map(|_| ()).map_err(failure)
    }
}

impl Models {
    /// What is to be pulled for a client's name.
    fn request(&self, name: &str) -> Result<PullRequest, ModelStoreError> {
        let (model, bits) = named(name)?;
        let source = source::of_hub(Path::new(model));
        let source = source
            .map_err(|failure| ModelStoreError::NotFound(format!("{:#}", failure.into_error())))?;
        let source = source.ok_or_else(|| {
            ModelStoreError::NotFound(format!(
                "model '{name}' not found: expected organisation/model of the hub, or a name that `shardpack list` shows"
            ))
        })?;
        let cancel = Cancel::default();
        Ok(PullRequest { source, bits, nodes: self.nodes, served_as: None, cancel })
    }
}

/// Reports what happens until nobody waits for it any more.
fn observer(report: PullReport, cancel: Cancel) -> PullObserver {
    let state = Mutex::new(State::default());
    Arc::new(move |event: &PullEvent| {
        let status = state.lock().unwrap_or_else(PoisonError::into_inner).status(event);
        if status.is_some_and(|status| !report(status)) {
            cancel.cancel();
        }
    })
}

/// Bytes of the part that is being done, and how many of them are done.
#[derive(Default)]
struct State {
    total: u64,
    done: u64,
}

impl State {
    /// What a client is told of an event; nothing where nothing has moved.
    fn status(&mut self, event: &PullEvent) -> Option<PullStatus> {
        match event {
            #[cfg(feature = "hub")]
            PullEvent::Fetching(event) => self.fetching(event),
            PullEvent::Converting { bits, nodes, .. } => {
                Some(said(&format!("converting to {bits} bits for {nodes} nodes")))
            }
            PullEvent::Conversion(event) => self.conversion(event),
        }
    }

    #[cfg(feature = "hub")]
    fn fetching(&mut self, event: &shardpack_converter::hub::HubEvent) -> Option<PullStatus> {
        use shardpack_converter::hub::HubEvent;
        match event {
            HubEvent::Found { bytes, .. } => {
                *self = Self { total: *bytes, done: 0 };
                return Some(said("pulling manifest"));
            }
            HubEvent::Arrived(bytes) => self.done += bytes,
            HubEvent::Lost(bytes) => self.done = self.done.saturating_sub(*bytes),
            HubEvent::Retrying(problem) => return Some(said(&format!("trying again: {problem}"))),
            HubEvent::Away { problem, .. } => {
                return Some(said(&format!(
                    "the hub cannot be reached, the cache is used: {problem}"
                )));
            }
            HubEvent::FileStarted(_) => return None,
        }
        Some(self.moved("pulling files"))
    }

    fn conversion(&mut self, event: &ConvertEvent) -> Option<PullStatus> {
        match event {
            ConvertEvent::Planned(summary) => {
                *self = Self { total: summary.source_bytes, done: 0 };
                None
            }
            ConvertEvent::Resumed { source_bytes, .. } => {
                self.done += source_bytes;
                Some(self.moved("converting"))
            }
            ConvertEvent::Converted(bytes) => {
                self.done += bytes;
                Some(self.moved("converting"))
            }
            ConvertEvent::Hashing => Some(said("verifying digest")),
            ConvertEvent::Publishing => Some(said("writing manifest")),
            ConvertEvent::TensorStarted { .. } | ConvertEvent::TensorFinished { .. } => None,
        }
    }

    fn moved(&self, status: &str) -> PullStatus {
        let done = self.done.min(self.total);
        PullStatus { bytes: Some([self.total, done]), ..said(status) }
    }
}

fn said(status: &str) -> PullStatus {
    PullStatus { status: status.to_owned(), bytes: None }
}

/// The error with its causes, which are all that a client sees.
fn failure(error: StoreError) -> ModelStoreError {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    match error {
        StoreError::NotStored { name, .. } => {
            ModelStoreError::NotFound(format!("model '{name}' not found in the store"))
        }
        StoreError::Converted(_) => ModelStoreError::Invalid(text),
        error if error.is_wrong() => ModelStoreError::Invalid(text),
        _ => ModelStoreError::Failed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_clients_are_names_of_the_hub() {
        let check = |name: &str, model: &str, bits: Option<u32>| {
            assert_eq!(named(name).unwrap(), (model, bits), "{name}");
        };
        check("org/model", "org/model", None);
        check("org/model:latest", "org/model", None);
        check("hf.co/org/model:4bit", "org/model", Some(4));
        check("huggingface.co/org/model:BF16", "org/model", Some(16));
        check("https://hf.co/org/model:q8", "org/model", Some(8));
        assert!(matches!(named("org/model:Q4_K_M"), Err(ModelStoreError::Invalid(_))));
    }

    #[test]
    fn bytes_that_are_done_are_never_more_than_all() {
        let mut state = State { total: 10, done: 0 };
        let moved = |state: &mut State, bytes| {
            state.status(&PullEvent::Conversion(&ConvertEvent::Converted(bytes))).unwrap().bytes
        };
        assert_eq!(moved(&mut state, 7), Some([10, 7]));
        assert_eq!(moved(&mut state, 7), Some([10, 10]));
    }
}
