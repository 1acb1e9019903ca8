//! Requests: deadlines, redirects, proxies, the token's only destination, retries.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use ureq::{
    Agent, AsSendBody, Body, Proxy, SendBody,
    http::{self, Response, Uri, header},
    tls::{PemItem, RootCerts, TlsConfig, parse_pem},
};

use crate::{
    Cleartext, Failed, HttpError, HttpOptions, Retries,
    address::{bypasses, is_loopback, join, origin, parse, without_password},
};

/// Until a connection stands.
const CONNECT: Duration = Duration::from_secs(15);
/// Redirects of one request; the hub needs two.
const MAX_REDIRECTS: usize = 8;
/// Bytes of a file of authorities: a system's list has about 300 kB.
const MAX_AUTHORITIES_BYTES: u64 = 16 << 20;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Reads.
    Get,
    /// Calls.
    Post,
    /// Stores.
    Put,
}

/// Body of a request. A redirect sends it once more.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// None.
    Empty,
    /// Bytes in memory.
    Bytes(&'a [u8]),
    /// Bytes `start..end` of a file.
    File(&'a Path, u64, u64),
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// What it does.
    pub method: Method,
    /// Where.
    pub url: &'a str,
    /// Headers beyond the client's own.
    pub headers: Vec<(&'static str, String)>,
    /// Body.
    pub payload: Payload<'a>,
    /// Deadline for the whole answer; `None` if only silence ends it.
    pub deadline: Option<Duration>,
    /// Deadline for the answer's first byte, if it is longer than the client's silence.
    pub patience: Option<Duration>,
}

impl<'a> Request<'a> {
    /// A GET without a deadline of its own.
    #[must_use]
    pub const fn get(url: &'a str) -> Self {
        let (method, payload) = (Method::Get, Payload::Empty);
        Self { method, url, headers: Vec::new(), payload, deadline: None, patience: None }
    }

    /// A GET of a range of bytes.
    #[must_use]
    pub fn range(url: &'a str, range: &Range<u64>) -> Self {
        let value = format!("bytes={}-{}", range.start, range.end.saturating_sub(1));
        Self { headers: vec![("range", value)], ..Self::get(url) }
    }
}

/// An answer, and the URL that gave it after redirects.
pub struct Answer {
    response: Response<Body>,
    /// The last URL.
    pub url: String,
}

impl Answer {
    /// Status code.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// A header's value; empty if it is absent.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        self.response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The body, as it arrives.
    pub fn body(&mut self) -> impl Read + '_ {
        self.response.body_mut().as_reader()
    }

    /// The whole body, of at most `limit` bytes.
    pub fn read(&mut self, limit: u64) -> Result<Vec<u8>, Failed> {
        let mut bytes = Vec::new();
        let read = self.body().take(limit + 1).read_to_end(&mut bytes);
        read.map_err(|error| Failed::again(error.to_string()))?;
        if bytes.len() as u64 > limit {
            let problem = format!("the answer has over {limit} bytes");
            return Err(Failed::answer(&without_password(&self.url), problem));
        }
        Ok(bytes)
    }

    /// What an answer other than success means: some pass, the others stay.
    #[must_use]
    pub fn refusal(&self) -> Failed {
        let status = self.status();
        if matches!(status, 408 | 429 | 500 | 502 | 503 | 504) {
            let problem = format!("the server answered {status}");
            return Failed::Again {
                problem,
                after: self.header("retry-after").trim().parse().ok(),
                is_lasting: false,
            };
        }
        let (code, message) = (self.header("x-error-code"), self.header("x-error-message"));
        Failed::Final(HttpError::Status {
            url: without_password(&self.url),
            status,
            code: code.to_owned(),
            message: message.to_owned(),
        })
    }
}

/// Makes requests, from any thread.
pub struct Client {
    direct: Agent,
    proxied: Option<Agent>,
    options: HttpOptions,
    own: Option<(String, String, u16)>,
    /// Ends the thread that watches for a cancellation.
    dropped: Arc<AtomicBool>,
}

impl Client {
    /// Checks the options; nothing is sent yet.
    pub fn new(options: HttpOptions) -> Result<Self, HttpError> {
        let option = |problem: &str| HttpError::Option(problem.to_owned());
        let own = match &options.bearer {
            None => None,
            Some(bearer) if !bearer.token.bytes().all(|byte| (b'!'..=b'~').contains(&byte)) => {
                return Err(option("the token has characters that no token has"));
            }
            Some(bearer) => {
                Some(origin(&bearer.origin).ok_or_else(|| option("the token's server is no URL"))?)
            }
        };
        let proxy = options.proxy.as_deref().map(Proxy::new).transpose();
        let proxy = proxy.map_err(|error| HttpError::Option(format!("proxy: {error}")))?;
        let roots = options.authorities.as_ref().map(authorities).transpose()?;
        let tls = TlsConfig::builder().root_certs(roots.unwrap_or(RootCerts::WebPki)).build();
        let agent = |proxy: Option<Proxy>| -> Agent {
            let config = Agent::config_builder()
                .tls_config(tls.clone())
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .proxy(proxy)
                .user_agent(concat!("shardpack/", env!("CARGO_PKG_VERSION")))
                .accept(options.accept)
                .accept_encoding("identity")
                .timeout_resolve(Some(CONNECT))
                .timeout_connect(Some(CONNECT))
                .timeout_send_request(Some(options.silence))
                .timeout_recv_response(Some(options.silence))
                .timeout_per_read(Some(options.silence))
                .timeout_per_write(Some(options.silence))
                .build();
            config.into()
        };
        let proxied = proxy.map(|proxy| agent(Some(proxy)));
        let dropped = Arc::new(AtomicBool::new(false));
        let client = Self { direct: agent(None), proxied, options, own, dropped };
        client.watch()?;
        Ok(client)
    }

    /// Closes every connection once another thread asks to stop.
    fn watch(&self) -> Result<(), HttpError> {
        let Some(cancelled) = self.options.cancelled.clone() else { return Ok(()) };
        let dropped = Arc::clone(&self.dropped);
        let agents: Vec<Agent> = self.proxied.iter().chain([&self.direct]).cloned().collect();
        let watch = move || {
            while !dropped.load(Ordering::Relaxed) {
                if cancelled() {
                    agents.into_iter().for_each(Agent::shutdown);
                    return;
                }
                thread::park_timeout(HttpOptions::CANCEL_POLL);
            }
        };
        let started = thread::Builder::new().name("http-cancel".to_owned()).spawn(watch);
        started.map(|_| ()).map_err(|error| HttpError::Option(format!("threads: {error}")))
    }

    /// Whether a URL may be requested: `https`, or `http` where the options allow it.
    pub fn check_url(&self, url: &str) -> Result<Uri, String> {
        check_scheme(url, self.options.cleartext)
    }

    /// Whether a URL is of the server that the token belongs to.
    #[must_use]
    pub fn is_own(&self, url: &str) -> bool {
        self.own.is_some() && self.own == origin(url)
    }

    /// How requests are repeated.
    #[must_use]
    pub const fn retries(&self) -> Retries {
        self.options.retries
    }

    /// Sends a request once, following redirects; any status is an answer.
    pub fn send(&self, request: &Request) -> Result<Answer, Failed> {
        let mut url = request.url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let uri = self
                .check_url(&url)
                .map_err(|problem| Failed::answer(&without_password(request.url), problem))?;
            let response = self.send_to(&uri, &url, request)?;
            let answer = Answer { response, url };
            if !matches!(answer.status(), 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            url = join(&answer.url, answer.header("location")).ok_or_else(|| {
                let problem = "a redirect without a location".to_owned();
                Failed::answer(&without_password(&answer.url), problem)
            })?;
        }
        let problem = format!("more than {MAX_REDIRECTS} redirects");
        Err(Failed::answer(&without_password(request.url), problem))
    }

    fn send_to(&self, uri: &Uri, url: &str, request: &Request) -> Result<Response<Body>, Failed> {
        let method = match request.method {
            Method::Get => http::Method::GET,
            Method::Post => http::Method::POST,
            Method::Put => http::Method::PUT,
        };
        let mut builder = http::Request::builder().method(method).uri(uri.clone());
        for (name, value) in &request.headers {
            builder = builder.header(*name, value);
        }
        if let Some(bearer) = self.options.bearer.as_ref().filter(|_| self.is_own(url)) {
            builder = builder.header(header::AUTHORIZATION, format!("Bearer {}", bearer.token));
        }
        let unreadable =
            |path: &Path, source| Failed::Final(HttpError::Write { path: path.to_owned(), source });
        let mut source = match request.payload {
            Payload::Empty => Source::Bytes(&[]),
            Payload::Bytes(bytes) => {
                builder = builder.header(header::CONTENT_LENGTH, bytes.len());
                Source::Bytes(bytes)
            }
            Payload::File(path, start, end) => {
                let mut file = File::open(path).map_err(|error| unreadable(path, error))?;
                file.seek(SeekFrom::Start(start)).map_err(|error| unreadable(path, error))?;
                builder = builder.header(header::CONTENT_LENGTH, end - start);
                Source::File(file.take(end - start))
            }
        };
        let shown = without_password(url);
        let agent = self.agent(uri);
        let patience = request.patience.unwrap_or(self.options.silence);
        let sent = if request.method == Method::Get {
            let built =
                builder.body(()).map_err(|error| Failed::answer(&shown, error.to_string()))?;
            agent.run(with_deadlines(agent, built, request.deadline, patience))
        } else {
            let body = SendBody::from_reader(&mut source);
            let built =
                builder.body(body).map_err(|error| Failed::answer(&shown, error.to_string()))?;
            agent.run(with_deadlines(agent, built, request.deadline, patience))
        };
        sent.map_err(|error| failed(&shown, &error))
    }

    fn agent(&self, uri: &Uri) -> &Agent {
        let host = uri.host().unwrap_or_default();
        match &self.proxied {
            Some(agent) if !is_loopback(host) && !bypasses(host, &self.options.no_proxy) => agent,
            _ => &self.direct,
        }
    }

    /// Whether another thread has asked to stop.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.options.cancelled.as_ref().is_some_and(|cancelled| cancelled())
    }

    /// Repeats a request until it succeeds or there is no sense in going on. The argument of `request`
    /// counts failures in a row: a request that got further than those before sets it to 0.
    pub fn retry<T>(
        &self,
        url: &str,
        observe: &dyn Fn(&str),
        request: &mut dyn FnMut(&mut u32) -> Result<T, Failed>,
    ) -> Result<T, HttpError> {
        self.retry_by(self.options.retries, url, observe, request)
    }

    /// The same by other rules than the client's own.
    pub fn retry_by<T>(
        &self,
        retries: Retries,
        url: &str,
        observe: &dyn Fn(&str),
        request: &mut dyn FnMut(&mut u32) -> Result<T, Failed>,
    ) -> Result<T, HttpError> {
        let url = || without_password(url);
        let (mut failures, mut attempts) = (0, 0);
        loop {
            if self.is_cancelled() {
                return Err(HttpError::Cancelled);
            }
            let (problem, after, is_lasting) = match request(&mut failures) {
                Ok(value) => return Ok(value),
                // A closed connection has many names.
                Err(_) if self.is_cancelled() => return Err(HttpError::Cancelled),
                Err(Failed::Final(error)) => return Err(error),
                Err(Failed::Again { problem, after, is_lasting }) => (problem, after, is_lasting),
            };
            failures += 1;
            attempts += 1;
            if let Some(seconds) = after.filter(|it| *it > retries.max_retry_after.as_secs()) {
                return Err(HttpError::Busy { url: url(), seconds });
            }
            let most = if is_lasting { retries.attempts.div_ceil(2) } else { retries.attempts };
            if failures >= most {
                return Err(HttpError::Network { url: url(), problem, attempts });
            }
            let pause = retries.pause * (1 << (failures - 1).min(5));
            let pause = after.map_or(pause, Duration::from_secs);
            let next = failures + 1;
            observe(&format!(
                "{problem}; try {next} of {most} in {} s",
                pause.as_secs_f32().ceil()
            ));
            (retries.wait)(pause, &|| self.is_cancelled());
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

/// A request with its own deadlines.
fn with_deadlines<B: AsSendBody>(
    agent: &Agent,
    request: http::Request<B>,
    whole: Option<Duration>,
    patience: Duration,
) -> http::Request<B> {
    agent
        .configure_request(request)
        .timeout_global(whole)
        .timeout_recv_response(Some(patience))
        .timeout_per_read(Some(patience))
        .build()
}

/// What a body is read from.
enum Source<'a> {
    Bytes(&'a [u8]),
    File(io::Take<File>),
}

impl Read for Source<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Bytes(bytes) => bytes.read(buffer),
            Self::File(file) => file.read(buffer),
        }
    }
}

/// In the clear only where it is allowed.
fn check_scheme(url: &str, cleartext: Cleartext) -> Result<Uri, String> {
    let shown = without_password(url);
    let uri = parse(url).ok_or_else(|| format!("{shown:?} is not a URL"))?;
    let host = uri.host().unwrap_or_default();
    match uri.scheme_str() {
        Some("https") => Ok(uri),
        Some("http") if cleartext == Cleartext::Anywhere || is_loopback(host) => Ok(uri),
        Some("http") => Err(format!("{shown}: only https is allowed for other hosts")),
        _ => Err(format!("{shown}: only URLs with http and https are read")),
    }
}

/// What a request that got no answer means. A certificate will not be another one next time.
fn failed(url: &str, error: &ureq::Error) -> Failed {
    let is_tls = match error {
        ureq::Error::Io(error) => error.kind() == io::ErrorKind::InvalidData,
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
        _ => false,
    };
    if is_tls {
        let (url, problem) = (url.to_owned(), error.to_string());
        return Failed::Final(HttpError::Tls { url, problem });
    }
    let is_lookup = match error {
        ureq::Error::HostNotFound => true,
        // The standard library has no kind for it.
        ureq::Error::Io(error) => error.to_string().starts_with("failed to lookup address"),
        _ => false,
    };
    if is_lookup {
        let host = url.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned));
        let problem = format!(
            "the name {} cannot be looked up: is this machine online?",
            host.unwrap_or_default()
        );
        return Failed::Again { problem, after: None, is_lasting: true };
    }
    Failed::again(error.to_string())
}

/// The certificates of a file.
fn authorities(path: &PathBuf) -> Result<RootCerts, HttpError> {
    let wrong = |problem: String| {
        let path = path.display();
        HttpError::Option(format!("{path}: {problem}; SSL_CERT_FILE names a file of certificates"))
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
