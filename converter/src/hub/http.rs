//! Requests to the hub: deadlines, retries, redirects that never take the token to another host,
//! and readable errors.

use std::{
    error::Error,
    fs,
    future::{Future, poll_fn},
    io,
    ops::Range,
    path::Path,
    pin::{Pin, pin},
    time::{Duration, Instant},
};

use futures_core::Stream;
use hf_hub::{
    HFClient, HFError, HFRepository,
    repository::{RepoTypeModel, download::HFByteStream},
    split_id,
};
use reqwest::{Certificate, Proxy, Url, header, redirect::Policy};
use tokio::{runtime::Runtime, time::timeout};

use super::{
    HubError, HubEvent, HubObserver, HubOptions, ModelName, Visibility,
    listing::{self, RepoFile},
};
use crate::cancel::LOOK_AGAIN;

/// Until a connection stands.
const CONNECT: Duration = Duration::from_secs(15);
/// For an answer that is held in memory.
const WHOLE: Duration = Duration::from_mins(2);

/// Times that one request is made without anything having arrived.
pub(super) const ATTEMPTS: u32 = 6;
/// Between the first two of them; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest wait that a server may ask for.
const MAX_RETRY_AFTER: u64 = 300;

/// Redirects of one request; the hub needs two.
const MAX_REDIRECTS: usize = 8;
/// Bytes of one answer of the API: a page of 1,000 files is about 300 kB.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// Bytes of a file of authorities: a system's list has about 300 kB.
const MAX_AUTHORITIES_BYTES: u64 = 16 << 20;
/// Pages of one list of files.
const MAX_PAGES: usize = 200;

/// What stands for "no token": hf-hub would look for one in the environment if it were given none,
/// and sends none that no header can hold.
const NO_TOKEN: &str = "\n";

/// Makes requests: files, commits and uploads by hf-hub; lists of files by ourselves, since hf-hub 1.0
/// drops the SHA-256 that they state.
pub(super) struct Client {
    runtime: Runtime,
    http: reqwest::Client,
    hub: HFClient,
    options: HubOptions,
    observe: HubObserver,
}

/// A file at a commit.
#[derive(Clone)]
pub(super) struct Address {
    name: ModelName,
    commit: String,
    path: String,
    /// For messages.
    pub(super) url: String,
}

/// Why a request gave no usable answer.
pub(super) enum Failed {
    /// It may be made again: the problem, and how long the server asks to wait.
    Again { problem: String, after: Option<u64> },
    /// The server does not have the range that was asked for.
    Range,
    /// It may not.
    Final(HubError),
}

/// The bytes of a file, as they arrive.
pub(super) struct Body<'a> {
    client: &'a Client,
    stream: HFByteStream,
    /// What the server says of their number.
    pub(super) length: Option<u64>,
}

impl Body<'_> {
    /// Hands the next bytes on; false if there are none.
    pub(super) fn next(
        &mut self,
        take: impl FnOnce(&[u8]) -> Result<(), Failed>,
    ) -> Result<bool, Failed> {
        let next = poll_fn(|context| Pin::new(&mut self.stream).poll_next(context));
        match self.client.within(self.client.options.silence, next)? {
            None => Ok(false),
            Some(Ok(bytes)) => take(&bytes).map(|()| true),
            Some(Err(error)) => Err(Failed::Again { problem: chain(&error), after: None }),
        }
    }
}

impl Client {
    pub(super) fn new(mut options: HubOptions, observe: HubObserver) -> Result<Self, HubError> {
        while options.endpoint.ends_with('/') {
            options.endpoint.pop();
        }
        if let Some(token) = &options.token
            && !token.bytes().all(|byte| (b'!'..=b'~').contains(&byte))
        {
            let problem = "HF_TOKEN holds something other than a token";
            return Err(HubError::Option(problem.to_owned()));
        }
        let url = Url::parse(&options.endpoint).ok().filter(Url::has_host).ok_or_else(|| {
            HubError::Option(format!("{:?} is not the URL of a hub", options.endpoint))
        })?;
        check_scheme(&url).map_err(HubError::Option)?;
        let failed = |error: &dyn Error| HubError::Option(chain(error));
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("shardpack/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT)
            .read_timeout(options.silence)
            .redirect(Policy::custom(|attempt| {
                if attempt.previous().len() > MAX_REDIRECTS {
                    return attempt.error(format!("more than {MAX_REDIRECTS} redirects"));
                }
                match check_scheme(attempt.url()) {
                    Ok(()) => attempt.follow(),
                    Err(problem) => attempt.error(problem),
                }
            }))
            .tls_certs_only(authorities(options.authorities.as_deref())?)
            .no_proxy();
        if let Some(proxy) = options.proxy.as_deref().filter(|_| !is_loopback(&url)) {
            let proxy = Proxy::all(proxy);
            http = http.proxy(
                proxy.map_err(|error| HubError::Option(format!("proxy: {}", chain(&error))))?,
            );
        }
        let http = http.build().map_err(|error| failed(&error))?;
        let hub = HFClient::builder()
            .endpoint(&options.endpoint)
            .token(options.token.as_deref().unwrap_or(NO_TOKEN))
            .client(http.clone())
            .cache_dir(&options.cache)
            .cache_enabled(false)
            .retry_max_attempts(0)
            .build()
            .map_err(|error| failed(&error))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("hub")
            .enable_all()
            .build()
            .map_err(|error| failed(&error))?;
        Ok(Self { runtime, http, hub, options, observe })
    }

    /// A file at a commit.
    pub(super) fn address(&self, name: &ModelName, commit: &str, path: &str) -> Address {
        let url = format!("{}/{name}/resolve/{commit}/{path}", self.options.endpoint);
        Address { name: name.clone(), commit: commit.to_owned(), path: path.to_owned(), url }
    }

    /// The bytes of a file, or a range of them.
    pub(super) fn stream(
        &self,
        address: &Address,
        range: Option<Range<u64>>,
    ) -> Result<Body<'_>, Failed> {
        let repository = self.repository(&address.name);
        let stream = repository
            .download_file_stream()
            .filename(&address.path)
            .revision(&address.commit)
            .maybe_range(range)
            .send();
        match self.within(WHOLE, stream)? {
            Ok((length, stream)) => Ok(Body { client: self, stream, length }),
            Err(error) => Err(self.failed(&address.url, &error, None)),
        }
    }

    /// The commit of a model's revision.
    pub(super) fn commit(&self, name: &ModelName) -> Result<String, HubError> {
        let url = format!("{}/api/models/{name}/revision/{}", self.options.endpoint, name.revision);
        self.retry(&url, |_| {
            let repository = self.repository(name);
            let info = self.within(WHOLE, repository.info().revision(&name.revision).send())?;
            let info = info.map_err(|error| self.failed(&url, &error, Some(name)))?;
            let commit = info.sha.unwrap_or_default();
            if listing::is_commit(&commit) {
                return Ok(commit);
            }
            let problem = format!("the hub states {commit:?} as the commit");
            Err(Failed::Final(HubError::Answer { url: url.clone(), problem }))
        })
    }

    /// Uploads a folder as one commit to a model's repository, which is created unless it is there.
    pub(super) fn upload(
        &self,
        name: &ModelName,
        folder: &Path,
        visibility: Visibility,
    ) -> Result<String, HubError> {
        let url = format!("{}/{name}", self.options.endpoint);
        if self.options.token.is_none() {
            let problem = format!("{url}: uploading needs a token with write access; set HF_TOKEN");
            return Err(HubError::Option(problem));
        }
        let repo = name.repo();
        self.retry(&url, |_| {
            let create = self.hub.create_repository().repo_id(&repo).repo_type(RepoTypeModel);
            let create = create.private(visibility == Visibility::Private).exist_ok(true).send();
            let created = self.within(WHOLE, create)?;
            created.map(|_| ()).map_err(|error| self.failed(&url, &error, Some(name)))
        })?;
        self.retry(&url, |_| {
            let repository = self.repository(name);
            let upload = repository.upload_folder().folder_path(folder).revision(&name.revision);
            let upload = upload.commit_message("Upload a shardpack package set").send();
            // As long as it takes: each of its connections has deadlines.
            let commit = self.runtime.block_on(upload);
            let commit = commit.map_err(|error| self.failed(&url, &error, Some(name)))?;
            Ok(commit.commit_oid.unwrap_or_default())
        })
    }

    fn repository(&self, name: &ModelName) -> HFRepository<RepoTypeModel> {
        let repo = name.repo();
        let (owner, model) = split_id(&repo);
        self.hub.model(owner, model)
    }

    /// What a future gives, if it gives it in time.
    fn within<F: Future>(&self, limit: Duration, future: F) -> Result<F::Output, Failed> {
        self.runtime.block_on(async {
            let started = Instant::now();
            let mut future = pin!(future);
            loop {
                if self.options.cancel.is_cancelled() {
                    return Err(Failed::Final(HubError::Cancelled));
                }
                let left = limit.saturating_sub(started.elapsed());
                if let Ok(output) = timeout(left.min(LOOK_AGAIN), &mut future).await {
                    return Ok(output);
                }
                if left.is_zero() {
                    let problem = format!("nothing arrived within {} s", limit.as_secs());
                    return Err(Failed::Again { problem, after: None });
                }
            }
        })
    }

    /// Every file of a model at a commit.
    pub(super) fn tree(&self, name: &ModelName, commit: &str) -> Result<Vec<RepoFile>, HubError> {
        let mut url =
            format!("{}/api/models/{name}/tree/{commit}?recursive=true", self.options.endpoint);
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let (text, next) = self.page(&url, name)?;
            let page = listing::parse_tree(&text)
                .map_err(|source| HubError::Listing { url: url.clone(), source })?;
            files.extend(page);
            match next {
                None => return Ok(files),
                Some(next) if self.is_own(&next) => url = next,
                Some(next) => {
                    let problem = format!("the list of files continues at another host, {next}");
                    return Err(HubError::Answer { url, problem });
                }
            }
        }
        let problem = format!("the list of files has more than {MAX_PAGES} pages");
        Err(HubError::Answer { url, problem })
    }

    /// A page of a list, and the address of the next one.
    fn page(&self, url: &str, name: &ModelName) -> Result<(Vec<u8>, Option<String>), HubError> {
        self.retry(url, |_| self.within(WHOLE, self.get(url, name))?)
    }

    async fn get(&self, url: &str, name: &ModelName) -> Result<(Vec<u8>, Option<String>), Failed> {
        let mut request = self.http.get(url);
        if let Some(token) = &self.options.token {
            request = request.bearer_auth(token);
        }
        let sent = |error: reqwest::Error| failed(url, &error);
        let mut response = request.send().await.map_err(sent)?;
        if !response.status().is_success() {
            let text = |name: &str| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
            let after = text("retry-after").and_then(|after| after.trim().parse().ok());
            let (code, message) = (text("x-error-code"), text("x-error-message"));
            let status = response.status().as_u16();
            return Err(self.refusal(
                url,
                status,
                &code.unwrap_or_default(),
                &message.unwrap_or_default(),
                after,
                Some(name),
            ));
        }
        let next = next_page(response.headers());
        let mut text = Vec::new();
        while let Some(bytes) = response.chunk().await.map_err(sent)? {
            text.extend_from_slice(&bytes);
            if text.len() as u64 > MAX_ANSWER_BYTES {
                let problem = format!("the answer has over {MAX_ANSWER_BYTES} bytes");
                return Err(Failed::Final(HubError::Answer { url: url.to_owned(), problem }));
            }
        }
        Ok((text, next))
    }

    /// Makes a request until it succeeds or it makes no sense to go on. `request` is told how
    /// often it failed before, and says with [`Failed::Again`] that it may be made again.
    pub(super) fn retry<T>(
        &self,
        url: &str,
        mut request: impl FnMut(&mut u32) -> Result<T, Failed>,
    ) -> Result<T, HubError> {
        // Reset by requests that get further than those before.
        let mut failures = 0;
        let mut total = 0;
        loop {
            let (problem, after) = match request(&mut failures) {
                Ok(value) => return Ok(value),
                Err(Failed::Final(error)) => return Err(error),
                Err(Failed::Again { problem, after }) => (problem, after),
                Err(Failed::Range) => {
                    ("the server does not have the requested range".to_owned(), None)
                }
            };
            failures += 1;
            total += 1;
            if let Some(seconds) = after.filter(|seconds| *seconds > MAX_RETRY_AFTER) {
                return Err(HubError::Busy { url: url.to_owned(), seconds });
            }
            if failures >= ATTEMPTS {
                return Err(HubError::Network { url: url.to_owned(), problem, attempts: total });
            }
            (self.observe)(&HubEvent::Retrying(&problem));
            let pause = FIRST_PAUSE * (1 << (failures - 1).min(5));
            let pause = after.map_or(pause, Duration::from_secs);
            (self.options.wait)(pause, &self.options.cancel);
        }
    }

    /// What an error of hf-hub's means.
    fn failed(&self, url: &str, error: &HFError, name: Option<&ModelName>) -> Failed {
        let (context, after) = match error {
            HFError::RateLimited { retry_after, context } => {
                (context, retry_after.map(|after| after.as_secs()))
            }
            HFError::Http { context }
            | HFError::AuthRequired { context }
            | HFError::Forbidden { context }
            | HFError::Conflict { context }
            | HFError::RepoNotFound { context: Some(context), .. }
            | HFError::RevisionNotFound { context: Some(context), .. }
            | HFError::EntryNotFound { context: Some(context), .. } => (context, None),
            HFError::Request { source, .. } => return failed(url, source),
            HFError::Xet { .. } | HFError::Io(_) => {
                return Failed::Again { problem: chain(error), after: None };
            }
            _ => {
                let (url, problem) = (url.to_owned(), chain(error));
                return Failed::Final(HubError::Answer { url, problem });
            }
        };
        if context.status == 416 {
            return Failed::Range;
        }
        self.refusal(
            url,
            context.status.as_u16(),
            context.error_code.as_deref().unwrap_or_default(),
            context.server_message.as_deref().unwrap_or_default(),
            after,
            name,
        )
    }

    /// What an answer other than success means.
    fn refusal(
        &self,
        url: &str,
        status: u16,
        code: &str,
        message: &str,
        after: Option<u64>,
        name: Option<&ModelName>,
    ) -> Failed {
        if matches!(status, 408 | 429 | 500 | 502 | 503 | 504) {
            return Failed::Again { problem: format!("the server answered {status}"), after };
        }
        let of = name.map(ToString::to_string);
        Failed::Final(match (status, code, of) {
            (_, "GatedRepo", Some(name)) | (403, _, Some(name)) => {
                HubError::Gated { page: format!("{}/{name}", self.options.endpoint), name }
            }
            (404, "RevisionNotFound", Some(of)) => HubError::Revision {
                name: of,
                revision: name.map(|name| name.revision.clone()).unwrap_or_default(),
            },
            (401, "", Some(name)) if self.options.token.is_some() => HubError::Token { name },
            (401 | 404, _, Some(name)) => {
                HubError::NotFound { name, endpoint: self.options.endpoint.clone() }
            }
            _ => {
                let after =
                    if message.is_empty() { String::new() } else { format!(": {message:.200}") };
                HubError::Status { url: url.to_owned(), status, after }
            }
        })
    }

    /// Whether an address is of the hub itself: only there the token may go.
    fn is_own(&self, url: &str) -> bool {
        let place = |url: &str| Url::parse(url).ok().map(|url| url.origin());
        place(&self.options.endpoint).is_some_and(|own| Some(own) == place(url))
    }
}

/// What a request that got no answer means. A certificate will not be another one next time.
fn failed(url: &str, error: &reqwest::Error) -> Failed {
    let problem = chain(error);
    let url = url.to_owned();
    if error.is_redirect() {
        return Failed::Final(HubError::Answer { url, problem });
    }
    let mut source = error.source();
    while let Some(error) = source {
        let io = error.downcast_ref::<io::Error>();
        if io.is_some_and(|error| error.kind() == io::ErrorKind::InvalidData) {
            return Failed::Final(HubError::Tls { url, problem });
        }
        source = error.source();
    }
    Failed::Again { problem, after: None }
}

/// An error with what caused it.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

/// The certificates of a file, or Mozilla's.
fn authorities(path: Option<&Path>) -> Result<Vec<Certificate>, HubError> {
    let Some(path) = path else {
        let roots = webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter();
        return Ok(roots.filter_map(|root| Certificate::from_der(root).ok()).collect());
    };
    let wrong = |problem: String| {
        let path = path.display();
        HubError::Option(format!("{path}: {problem}; SSL_CERT_FILE names a file of certificates"))
    };
    let size = fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if size > MAX_AUTHORITIES_BYTES {
        return Err(wrong(format!("{size} bytes, at most {MAX_AUTHORITIES_BYTES}")));
    }
    let text = fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let found = Certificate::from_pem_bundle(&text).map_err(|error| wrong(chain(&error)))?;
    if found.is_empty() {
        return Err(wrong("it holds no certificate".to_owned()));
    }
    Ok(found)
}

/// In the clear only on this machine.
fn check_scheme(url: &Url) -> Result<(), String> {
    match url.scheme() {
        "https" => Ok(()),
        "http" if is_loopback(url) => Ok(()),
        _ => Err(format!("{url}: only https is allowed for other hosts")),
    }
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The address of the next page, of a `Link` header.
fn next_page(headers: &header::HeaderMap) -> Option<String> {
    let link = headers.get(header::LINK)?.to_str().ok()?;
    link.split(',').find_map(|link| {
        let (url, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        rest.contains("rel=\"next\"").then(|| url.to_owned())
    })
}
