//! The hub's API: commits of revisions, lists of files, and what its refusals mean.

use std::{sync::Arc, time::Duration};

use serde::Deserialize;
use shardpack_http::{
    Bearer, Client, Failed, HttpError, HttpOptions, Request, Retries, percent_encode,
};

use super::{
    HubError, HubEvent, HubObserver, HubOptions, ModelName,
    listing::{self, ListingError, RepoFile},
};

/// For an answer that is held in memory.
pub(super) const WHOLE: Duration = Duration::from_mins(2);
/// Bytes of one answer: a page of 1,000 files is about 300 kB.
pub(super) const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// Pages of one list of files.
const MAX_PAGES: usize = 200;

/// How long a request about a model is worth waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// There is no other way to the model.
    Full,
    /// The cache has the model, too.
    Short,
}

/// Deadline of an answer that the cache can do without.
const SHORT: Duration = Duration::from_secs(5);

/// The hub at one address.
pub(super) struct Api {
    pub(super) client: Client,
    pub(super) endpoint: String,
    pub(super) has_token: bool,
    observe: HubObserver,
}

impl Api {
    pub(super) fn new(options: HubOptions, observe: HubObserver) -> Result<Self, HubError> {
        let endpoint = options.endpoint.trim_end_matches('/').to_owned();
        let has_token = options.token.is_some();
        let bearer = options.token.map(|token| Bearer { origin: endpoint.clone(), token });
        let cancel = options.cancel;
        let client = Client::new(HttpOptions {
            proxy: options.proxy,
            no_proxy: options.no_proxy,
            authorities: options.authorities,
            bearer,
            silence: options.silence,
            retries: Retries { wait: options.wait, ..Retries::STANDARD },
            cancelled: Some(Arc::new(move || cancel.is_cancelled())),
            ..HttpOptions::new()
        })?;
        client
            .check_url(&endpoint)
            .map_err(|problem| HubError::Option(format!("the hub's address: {problem}")))?;
        Ok(Self { client, endpoint, has_token, observe })
    }

    /// URL of a file at a commit.
    pub(super) fn file_url(&self, name: &ModelName, commit: &str, path: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.endpoint, name.repo(), percent_encode(path))
    }

    /// URL below a model's API.
    pub(super) fn model_url(&self, name: &ModelName, path: &str) -> String {
        format!("{}/api/models/{}/{path}", self.endpoint, name.repo())
    }

    /// The commit of a model's revision.
    pub(super) fn commit(&self, name: &ModelName, patience: Patience) -> Result<String, HubError> {
        #[derive(Deserialize)]
        struct Info {
            #[serde(default)]
            sha: String,
        }
        let url = self.model_url(name, &format!("revision/{}", one_segment(&name.revision)));
        let (text, _) = self.get(&url, name, patience)?;
        let info: Info = parse(&url, &text)?;
        if listing::is_commit(&info.sha) {
            return Ok(info.sha);
        }
        let problem = format!("the hub states {:?} as the commit", info.sha);
        Err(HttpError::Answer { url, problem }.into())
    }

    /// Every file of a model at a commit.
    pub(super) fn tree(
        &self,
        name: &ModelName,
        commit: &str,
        patience: Patience,
    ) -> Result<Vec<RepoFile>, HubError> {
        let mut url = self.model_url(name, &format!("tree/{commit}?recursive=true"));
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let (text, next) = self.get(&url, name, patience)?;
            let page = listing::parse_tree(&text)
                .map_err(|source| HubError::Listing { url: url.clone(), source })?;
            files.extend(page);
            match next {
                None => return Ok(files),
                Some(next) if is_below(&next, &self.endpoint) => url = next,
                Some(next) => {
                    let problem = format!("the list of files continues at another host, {next}");
                    return Err(HttpError::Answer { url, problem }.into());
                }
            }
        }
        let problem = format!("the list of files has more than {MAX_PAGES} pages");
        Err(HttpError::Answer { url, problem }.into())
    }

    /// A whole answer, and the URL of its next page.
    fn get(
        &self,
        url: &str,
        name: &ModelName,
        patience: Patience,
    ) -> Result<(Vec<u8>, Option<String>), HubError> {
        let (deadline, retries) = match patience {
            Patience::Full => (WHOLE, self.client.retries()),
            Patience::Short => {
                (SHORT, Retries { attempts: 2, max_retry_after: SHORT, ..self.client.retries() })
            }
        };
        let request = Request { deadline: Some(deadline), ..Request::get(url) };
        self.retry_by(retries, url, name, &mut || {
            let mut answer = self.client.send(&request)?;
            if answer.status() != 200 {
                return Err(answer.refusal());
            }
            let next = next_page(answer.header("link"));
            Ok((answer.read(MAX_ANSWER_BYTES)?, next))
        })
    }

    /// Repeats a request, shows that it is repeated, and says what the hub's refusal means.
    pub(super) fn retry<T>(
        &self,
        url: &str,
        name: &ModelName,
        request: &mut dyn FnMut() -> Result<T, Failed>,
    ) -> Result<T, HubError> {
        self.retry_by(self.client.retries(), url, name, request)
    }

    fn retry_by<T>(
        &self,
        retries: Retries,
        url: &str,
        name: &ModelName,
        request: &mut dyn FnMut() -> Result<T, Failed>,
    ) -> Result<T, HubError> {
        let observe = |problem: &str| self.retrying(problem);
        let result = self.client.retry_by(retries, url, &observe, &mut |_| request());
        result.map_err(|error| self.refused(error, name))
    }

    /// Shows that a request is repeated.
    pub(super) fn retrying(&self, problem: &str) {
        (self.observe)(&HubEvent::Retrying(problem));
    }

    /// What an error means for a model.
    fn refused(&self, error: HttpError, name: &ModelName) -> HubError {
        let HttpError::Status { status, code, .. } = &error else { return error.into() };
        match (*status, code.as_str()) {
            (_, "GatedRepo") | (403, _) => HubError::Gated {
                name: name.to_string(),
                page: format!("{}/{name}", self.endpoint),
            },
            (404, "RevisionNotFound") => {
                HubError::Revision { name: name.to_string(), revision: name.revision.clone() }
            }
            (401, "") if self.has_token => HubError::Token { name: name.to_string() },
            (401 | 404, _) => {
                HubError::NotFound { name: name.to_string(), endpoint: self.endpoint.clone() }
            }
            _ => error.into(),
        }
    }
}

/// Parses an answer.
pub(super) fn parse<T: serde::de::DeserializeOwned>(url: &str, text: &[u8]) -> Result<T, HubError> {
    serde_json::from_slice(text).map_err(|error| HubError::Listing {
        url: url.to_owned(),
        source: ListingError::Json(error),
    })
}

/// A revision as one segment of a path.
pub(super) fn one_segment(revision: &str) -> String {
    percent_encode(revision).replace('/', "%2F")
}

/// Whether a URL is at the hub itself.
fn is_below(url: &str, endpoint: &str) -> bool {
    url.strip_prefix(endpoint).is_some_and(|rest| rest.starts_with('/'))
}

/// The URL of the next page, of a `Link` header.
fn next_page(link: &str) -> Option<String> {
    link.split(',').find_map(|link| {
        let (url, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        rest.contains("rel=\"next\"").then(|| url.to_owned())
    })
}
