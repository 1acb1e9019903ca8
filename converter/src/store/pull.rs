//! Brings a model into the store: fetches it where it is on the hub, and converts it.

use std::{fs, path::PathBuf, sync::Arc};

#[cfg(feature = "hub")]
use std::{os::unix::fs::symlink, path::Path};

use super::{ConvertEvent, Store, StoreError, Stored, at, name};
#[cfg(feature = "hub")]
use crate::hub::{Hub, HubEvent, HubOptions, ModelName, Selection};
use crate::{
    cancel::Cancel,
    checkpoint::Pickles,
    convert::convert,
    plan::{ConvertOptions, Plan},
    source::Source,
};

/// Bits per weight when none are asked for.
pub const BITS: u32 = 4;

/// Where a model comes from.
#[derive(Clone, Debug)]
pub enum PullSource {
    /// A folder or a file of this machine.
    Local(PathBuf),
    /// The hub: a model, or a package set that `push-hub` has uploaded.
    #[cfg(feature = "hub")]
    Hub {
        /// Its name.
        name: ModelName,
        /// The GGUF file of the repository, if it is one.
        gguf: Option<String>,
        /// How the hub is reached; its `cancel` is replaced by the request's.
        options: Box<HubOptions>,
    },
}

/// A model to bring into the store.
#[derive(Clone, Debug)]
pub struct PullRequest {
    /// Where it comes from.
    pub source: PullSource,
    /// Bits per weight; [`BITS`] when absent. A package set of the hub has its own.
    pub bits: Option<u32>,
    /// The nodes to shard for.
    pub nodes: u32,
    /// Name to serve it under; its source's own when absent. A package set of the hub has its own.
    pub served_as: Option<String>,
    /// Ends the pull; the next one goes on from there.
    pub cancel: Cancel,
}

/// What is happening, for progress displays.
#[derive(Clone, Copy, Debug)]
pub enum PullEvent<'a> {
    /// Files come from the hub. Their sum is in [`HubEvent::Found`], and each part that arrives in
    /// [`HubEvent::Arrived`].
    #[cfg(feature = "hub")]
    Fetching(&'a HubEvent<'a>),
    /// The conversion into this folder begins: bits and nodes.
    Converting {
        /// Bits per weight.
        bits: u32,
        /// Nodes.
        nodes: u32,
        /// The set's folder.
        folder: &'a std::path::Path,
    },
    /// The model is converted. The sum of bytes is in [`ConvertEvent::Planned`], and each part that
    /// is done in [`ConvertEvent::Converted`].
    Conversion(&'a ConvertEvent<'a>),
}

/// Called with every event, from any thread.
pub type PullObserver = Arc<dyn Fn(&PullEvent) + Send + Sync>;

impl PullRequest {
    /// What the source is called: with its revision and file on the hub, and with what tells one
    /// file of this machine from another.
    fn origin(&self) -> Result<String, StoreError> {
        match &self.source {
            PullSource::Local(path) => at(path, name::of_local(path)),
            #[cfg(feature = "hub")]
            PullSource::Hub { name, gguf, .. } => {
                let mut origin = name.repo();
                if name.revision != ModelName::MAIN {
                    origin = format!("{origin}@{}", name.revision);
                }
                Ok(gguf.iter().fold(origin, |origin, file| format!("{origin}/{file}")))
            }
        }
    }

    /// Name to serve the model under.
    fn served_name(&self) -> String {
        if let Some(name) = &self.served_as {
            return name.clone();
        }
        match &self.source {
            PullSource::Local(path) => name::of_file(path),
            #[cfg(feature = "hub")]
            PullSource::Hub { gguf: Some(file), .. } => name::of_file(Path::new(file)),
            #[cfg(feature = "hub")]
            PullSource::Hub { name, .. } => name.model().to_owned(),
        }
    }

    /// Its name in the store once it is converted.
    pub(super) fn name(&self) -> Result<String, StoreError> {
        Ok(name::converted(&self.origin()?, self.bits.unwrap_or(BITS), self.nodes))
    }
}

impl Store {
    /// The model of a request if it is there; nothing is fetched for it.
    pub fn pulled(&self, request: &PullRequest) -> Result<Option<Stored>, StoreError> {
        self.find(&request.name()?)
    }

    /// Brings a model into the store unless it is there. What an interrupted pull has left is gone
    /// on with; only complete models have a name.
    pub fn pull(
        &self,
        request: &PullRequest,
        observe: &PullObserver,
    ) -> Result<Stored, StoreError> {
        if let Some(stored) = self.pulled(request)? {
            return Ok(stored);
        }
        at(&self.folder, fs::create_dir_all(&self.folder))?;
        let (nodes, bits) = (request.nodes, request.bits.unwrap_or(BITS));
        let source = match &request.source {
            PullSource::Local(path) => Source::open_part(path, None, Pickles::Refuse)?,
            #[cfg(feature = "hub")]
            PullSource::Hub { name, gguf, options } => {
                let told = Arc::clone(observe);
                let told = Arc::new(move |event: &HubEvent| told(&PullEvent::Fetching(event)));
                let options = HubOptions { cancel: request.cancel.clone(), ..(**options).clone() };
                let hub = Hub::new(options, told)?;
                if gguf.is_none()
                    && let Some(set) = self.pull_set(&hub, name, request)?
                {
                    return Ok(set);
                }
                let selection = Selection { gguf: gguf.clone(), ..Selection::WHOLE };
                Source::open_snapshot(&hub, &hub.find(name, &selection)?)?
            }
        };
        let name = request.name()?;
        let folder = self.folder.join(&name);
        observe(&PullEvent::Converting { bits, nodes, folder: &folder });
        let options = ConvertOptions {
            bits,
            name: Some(request.served_name()),
            cancel: request.cancel.clone(),
            ..ConvertOptions::new(folder, nodes)
        };
        let plan = Plan::new(&source, options)?;
        convert(&source, &plan, &|event| observe(&PullEvent::Conversion(event)))?;
        self.find(&name)?.ok_or_else(|| StoreError::NotStored { name, folder: self.folder.clone() })
    }

    /// A package set of the hub, fetched into its cache and linked here; none if the repository
    /// holds something else.
    #[cfg(feature = "hub")]
    fn pull_set(
        &self,
        hub: &Hub,
        name: &ModelName,
        request: &PullRequest,
    ) -> Result<Option<Stored>, StoreError> {
        if request.bits.is_some() {
            let is_set = hub.is_set(name)?;
            return if is_set { Err(StoreError::Converted(name.to_string())) } else { Ok(None) };
        }
        let Some(fetched) = hub.fetch_set(name, None)? else { return Ok(None) };
        let stored = name::plain(&request.origin()?);
        let link = self.folder.join(&stored);
        let new = self.folder.join(format!(".{stored}.{}", std::process::id()));
        let fetched = at(&fetched, fetched.canonicalize())?;
        // A link that a killed run has left is of no use.
        let _ = fs::remove_file(&new);
        at(&new, symlink(fetched, &new).and_then(|()| fs::rename(&new, &link)))?;
        self.find(&stored)
    }
}
