//! Requests to the hub: deadlines, retries, redirects that never take the token to another host,
//! and readable errors.

use std::{
    fs,
    io::{self, Read},
    path::Path,
    time::Duration,
};

use ureq::{
    Agent, Body, Proxy,
    http::{Response, Uri, header},
    tls::{PemItem, RootCerts, TlsConfig, parse_pem},
};

use super::{
    HubError, HubEvent, HubObserver, HubOptions, ModelName,
    listing::{self, RepoFile, RepoInfo},
};

/// Until a connection stands.
const CONNECT: Duration = Duration::from_secs(15);
/// Until the first byte of an answer, and between two parts of a body.
const SILENCE: Duration = Duration::from_secs(30);
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

/// Makes requests.
pub(super) struct Client {
    agent: Agent,
    options: HubOptions,
    observe: HubObserver,
}

/// Why a request gave no usable answer.
pub(super) enum Failed {
    /// It may be made again: the problem, and how long the server asks to wait.
    Again { problem: String, after: Option<u64> },
    /// It may not.
    Final(HubError),
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
        let uri = parse_url(&options.endpoint).ok_or_else(|| {
            HubError::Option(format!("{:?} is not the URL of a hub", options.endpoint))
        })?;
        check_scheme(&uri).map_err(HubError::Option)?;
        let proxy = options.proxy.as_deref().filter(|_| !is_loopback(&uri));
        let proxy = proxy.map(Proxy::new).transpose();
        let proxy = proxy.map_err(|error| HubError::Option(format!("proxy: {error}")))?;
        let roots = options.authorities.as_deref().map(authorities).transpose()?;
        let tls = TlsConfig::builder().root_certs(roots.unwrap_or(RootCerts::WebPki)).build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(proxy)
            .user_agent(concat!("shardpack/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_resolve(Some(CONNECT))
            .timeout_connect(Some(CONNECT))
            .timeout_send_request(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build();
        Ok(Self { agent: config.into(), options, observe })
    }

    /// Address of a file at a commit.
    pub(super) fn file_url(&self, name: &ModelName, commit: &str, path: &str) -> String {
        format!("{}/{name}/resolve/{commit}/{}", self.options.endpoint, encode(path))
    }

    /// What the hub says of a model's revision.
    pub(super) fn info(&self, name: &ModelName) -> Result<RepoInfo, HubError> {
        let revision = encode(&name.revision).replace('/', "%2F");
        let url = format!("{}/api/models/{name}/revision/{revision}", self.options.endpoint);
        let (text, _) = self.text(&url, name)?;
        listing::parse_info(&text).map_err(|source| HubError::Listing { url, source })
    }

    /// Every file of a model at a commit.
    pub(super) fn tree(&self, name: &ModelName, commit: &str) -> Result<Vec<RepoFile>, HubError> {
        let mut url =
            format!("{}/api/models/{name}/tree/{commit}?recursive=true", self.options.endpoint);
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let (text, next) = self.text(&url, name)?;
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

    /// A whole answer of the API, and the address of its next page.
    fn text(&self, url: &str, name: &ModelName) -> Result<(Vec<u8>, Option<String>), HubError> {
        self.retry(url, |_| {
            let mut response = self.send(url, None, Some(WHOLE))?;
            if response.status() != 200 {
                return Err(self.refusal(url, &mut response, Some(name)));
            }
            let next = next_page(&response);
            let mut text = Vec::new();
            let body = response.body_mut().as_reader();
            let read = body.take(MAX_ANSWER_BYTES + 1).read_to_end(&mut text);
            if let Err(error) = read {
                return Err(Failed::Again { problem: error.to_string(), after: None });
            }
            if text.len() as u64 > MAX_ANSWER_BYTES {
                let problem = format!("the answer has over {MAX_ANSWER_BYTES} bytes");
                return Err(Failed::Final(HubError::Answer { url: url.to_owned(), problem }));
            }
            Ok((text, next))
        })
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
            (self.options.wait)(after.map_or(pause, Duration::from_secs));
        }
    }

    /// Sends one GET, following redirects. `range` is first and last byte.
    pub(super) fn send(
        &self,
        url: &str,
        range: Option<(u64, u64)>,
        whole: Option<Duration>,
    ) -> Result<Response<Body>, Failed> {
        let mut at = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let mut request = self.agent.get(&at);
            if let Some(token) = self.options.token.as_ref().filter(|_| self.is_own(&at)) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some((first, last)) = range {
                request = request.header(header::RANGE, format!("bytes={first}-{last}"));
            }
            let request = request.config().timeout_global(whole).build();
            let response = request.call().map_err(|error| failed(&at, &error))?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let target = response.headers().get(header::LOCATION);
            let target = target.and_then(|target| target.to_str().ok());
            at = target.and_then(|target| join(&at, target)).ok_or_else(|| {
                let problem = "a redirect without a location".to_owned();
                Failed::Final(HubError::Answer { url: at.clone(), problem })
            })?;
            let checked = parse_url(&at).ok_or_else(|| "a redirect to an invalid URL".to_owned());
            if let Err(problem) = checked.and_then(|uri| check_scheme(&uri)) {
                return Err(Failed::Final(HubError::Answer { url: url.to_owned(), problem }));
            }
        }
        let problem = format!("more than {MAX_REDIRECTS} redirects");
        Err(Failed::Final(HubError::Answer { url: url.to_owned(), problem }))
    }

    /// What an answer other than success means.
    pub(super) fn refusal(
        &self,
        url: &str,
        response: &mut Response<Body>,
        name: Option<&ModelName>,
    ) -> Failed {
        let text = |name: &str| {
            response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
        };
        let status = response.status().as_u16();
        let (code, message) = (text("x-error-code").to_owned(), text("x-error-message").to_owned());
        let after = text("retry-after").trim().parse().ok();
        if matches!(status, 408 | 429 | 500 | 502 | 503 | 504) {
            return Failed::Again { problem: format!("the server answered {status}"), after };
        }
        let of = name.map(ToString::to_string);
        Failed::Final(match (status, code.as_str(), of) {
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
        let place = |url: &str| {
            let uri = parse_url(url)?;
            let host = uri.host()?.to_ascii_lowercase();
            let scheme = uri.scheme_str()?.to_owned();
            let default = if scheme == "https" { 443 } else { 80 };
            Some((scheme, host, uri.port_u16().unwrap_or(default)))
        };
        let own = place(&self.options.endpoint);
        own.is_some() && own == place(url)
    }
}

/// What a request that got no answer means. A certificate will not be another one next time.
fn failed(url: &str, error: &ureq::Error) -> Failed {
    let is_tls = match error {
        ureq::Error::Io(error) => error.kind() == io::ErrorKind::InvalidData,
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
        _ => false,
    };
    let problem = error.to_string();
    if is_tls {
        return Failed::Final(HubError::Tls { url: url.to_owned(), problem });
    }
    Failed::Again { problem, after: None }
}

/// The certificates of a file.
fn authorities(path: &Path) -> Result<RootCerts, HubError> {
    let wrong = |problem: String| {
        let path = path.display();
        HubError::Option(format!("{path}: {problem}; SSL_CERT_FILE names a file of certificates"))
    };
    let size = fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if size > MAX_AUTHORITIES_BYTES {
        return Err(wrong(format!("{size} bytes, at most {MAX_AUTHORITIES_BYTES}")));
    }
    let text = fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let mut found = Vec::new();
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| wrong(error.to_string()))? {
            found.push(certificate);
        }
    }
    if found.is_empty() {
        return Err(wrong("it holds no certificate".to_owned()));
    }
    Ok(RootCerts::new_with_certs(&found))
}

fn parse_url(url: &str) -> Option<Uri> {
    let uri: Uri = url.parse().ok()?;
    (uri.scheme_str().is_some() && uri.host().is_some()).then_some(uri)
}

/// In the clear only on this machine.
fn check_scheme(uri: &Uri) -> Result<(), String> {
    match uri.scheme_str() {
        Some("https") => Ok(()),
        Some("http") if is_loopback(uri) => Ok(()),
        _ => Err(format!("{uri}: only https is allowed for other hosts")),
    }
}

fn is_loopback(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Where a redirect from `from` leads.
fn join(from: &str, target: &str) -> Option<String> {
    if target.starts_with("http://") || target.starts_with("https://") {
        return Some(target.to_owned());
    }
    let uri = parse_url(from)?;
    let (scheme, authority) = (uri.scheme_str()?, uri.authority()?);
    match target {
        _ if target.starts_with("//") => Some(format!("{scheme}:{target}")),
        _ if target.starts_with('/') => Some(format!("{scheme}://{authority}{target}")),
        _ => None,
    }
}

/// The address of the next page, of a `Link` header.
fn next_page(response: &Response<Body>) -> Option<String> {
    let link = response.headers().get(header::LINK)?.to_str().ok()?;
    link.split(',').find_map(|link| {
        let (url, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        rest.contains("rel=\"next\"").then(|| url.to_owned())
    })
}

/// A path with everything but plain characters percent-encoded.
fn encode(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push('%');
            out.push_str(&shardpack_formats::hex::encode(&[byte]).to_ascii_uppercase());
        }
    }
    out
}
