//! Requests to a package index: proxies, certificates, deadlines, redirects. What comes back is not
//! trusted: whoever downloads compares it with a pinned digest, so plain HTTP is allowed.

use std::{fs, io, path::PathBuf, time::Duration};

use ureq::{
    Agent, Body, Proxy,
    http::{Response, Uri, header},
    tls::{PemItem, RootCerts, TlsConfig, parse_pem},
};

use super::download::{DownloadError, Pace};

/// Until a connection stands.
const CONNECT: Duration = Duration::from_secs(15);

/// Redirects of one request; the public index needs none.
const MAX_REDIRECTS: usize = 8;

/// Bytes of a file of authorities: a system's list has about 300 kB.
const MAX_AUTHORITIES_BYTES: u64 = 16 << 20;

/// JSON of PEP 691; HTML from indexes that have nothing else.
const ACCEPT: &str = "application/vnd.pypi.simple.v1+json, \
                      application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1";

/// Where a wheel comes from. The environment is read by whoever makes these options.
#[derive(Clone, Debug)]
pub struct DownloadOptions {
    /// Base of a package index's simple API.
    pub index_url: String,
    /// A proxy for connections to other machines.
    pub proxy: Option<String>,
    /// Hosts that are reached without the proxy, separated by commas; they and what is below them.
    pub no_proxy: String,
    /// PEM certificates of the authorities to trust instead of Mozilla's.
    pub authorities: Option<PathBuf>,
}

impl DownloadOptions {
    /// The Python package index.
    pub const INDEX_URL: &str = "https://pypi.org/simple";
}

/// Why a request gave no usable answer.
pub(super) enum Failed {
    /// It may be made again.
    Again(String),
    /// It may not.
    Final(DownloadError),
}

/// Makes requests.
pub(super) struct Client {
    direct: Agent,
    proxied: Option<Agent>,
    no_proxy: String,
}

/// An answer, and the address that gave it after redirects.
pub(super) struct Answer {
    pub(super) response: Response<Body>,
    pub(super) url: String,
}

impl Answer {
    /// The status code.
    pub(super) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// A header; empty where there is none.
    pub(super) fn header(&self, name: header::HeaderName) -> &str {
        self.response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

impl Client {
    pub(super) fn new(options: &DownloadOptions, pace: &Pace) -> Result<Self, DownloadError> {
        let proxy = options.proxy.as_deref().map(Proxy::new).transpose();
        let proxy = proxy.map_err(|error| DownloadError::Option(format!("proxy: {error}")))?;
        let roots = match &options.authorities {
            Some(path) => authorities(path)?,
            None => RootCerts::WebPki,
        };
        let tls = TlsConfig::builder().root_certs(roots).build();
        let agent = |proxy: Option<Proxy>| -> Agent {
            let config = Agent::config_builder()
                .tls_config(tls.clone())
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .proxy(proxy)
                .user_agent(concat!("shardpack/", env!("CARGO_PKG_VERSION")))
                .accept(ACCEPT)
                .accept_encoding("identity")
                .timeout_resolve(Some(CONNECT))
                .timeout_connect(Some(CONNECT))
                .timeout_send_request(Some(pace.silence))
                .timeout_recv_response(Some(pace.silence))
                .timeout_per_read(Some(pace.silence))
                .build();
            config.into()
        };
        let proxied = proxy.map(|proxy| agent(Some(proxy)));
        Ok(Self { direct: agent(None), proxied, no_proxy: options.no_proxy.clone() })
    }

    /// Sends one GET, following redirects; with `from`, for the bytes from there on.
    pub(super) fn get(&self, url: &str, from: Option<u64>) -> Result<Answer, Failed> {
        let wrong = |problem: &str| {
            let url = shown(url);
            Failed::Final(DownloadError::Answer { url, problem: problem.to_owned() })
        };
        let mut at = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let uri: Uri = at.parse().map_err(|_| wrong("not a URL"))?;
            if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
                return Err(wrong("only URLs with http and https are read"));
            }
            let mut request = self.agent(&uri).get(&at);
            if let Some(from) = from {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let response = request.call().map_err(|error| failed(&at, &error))?;
            let answer = Answer { response, url: at };
            match answer.status() {
                200 | 206 | 416 => return Ok(answer),
                301 | 302 | 303 | 307 | 308 => {
                    let target = answer.header(header::LOCATION);
                    let target = super::index::join(&answer.url, target);
                    at = target.ok_or_else(|| wrong("a redirect to no URL"))?;
                }
                status @ (408 | 429 | 500 | 502 | 503 | 504) => {
                    return Err(Failed::Again(format!("the server answered {status}")));
                }
                status => return Err(wrong(&format!("the server answered {status}"))),
            }
        }
        Err(wrong("too many redirects"))
    }

    fn agent(&self, uri: &Uri) -> &Agent {
        let host = uri.host().unwrap_or_default();
        match &self.proxied {
            Some(agent) if !is_loopback(host) && !bypasses(host, &self.no_proxy) => agent,
            _ => &self.direct,
        }
    }
}

/// A request that got no answer. A certificate will not be another one next time.
fn failed(url: &str, error: &ureq::Error) -> Failed {
    let is_tls = match error {
        ureq::Error::Io(error) => error.kind() == io::ErrorKind::InvalidData,
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
        _ => false,
    };
    if is_tls {
        let problem = format!(
            "TLS: {error}; behind a proxy that inspects TLS, SSL_CERT_FILE names its authorities"
        );
        return Failed::Final(DownloadError::Answer { url: shown(url), problem });
    }
    Failed::Again(error.to_string())
}

/// The certificates of a file.
fn authorities(path: &PathBuf) -> Result<RootCerts, DownloadError> {
    let wrong = |problem: String| DownloadError::Option(format!("{}: {problem}", path.display()));
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
        return Err(wrong("no certificate in it".to_owned()));
    }
    Ok(RootCerts::new_with_certs(&found))
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether `NO_PROXY` names a host, or a domain above it.
fn bypasses(host: &str, no_proxy: &str) -> bool {
    let host = host.to_ascii_lowercase();
    no_proxy.split(',').map(|entry| entry.trim().to_ascii_lowercase()).any(|entry| {
        let domain = entry.trim_start_matches('*').trim_start_matches('.');
        let below = host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'));
        entry == "*" || (!domain.is_empty() && (host == domain || below))
    })
}

/// An address without the name and password that it may hold.
pub(super) fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let end = rest.find('/').unwrap_or(rest.len());
    let host = rest[..end].rsplit_once('@').map_or(&rest[..end], |(_, host)| host);
    format!("{scheme}://{host}{}", &rest[end..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_proxy_names_hosts_and_what_is_below_them() {
        let list = "localhost, .corp.example,*.lab.example,pypi.org";
        for host in ["pypi.org", "files.pypi.org", "a.corp.example", "LAB.example", "localhost"] {
            assert!(bypasses(host, list), "{host}");
        }
        for host in ["notpypi.org", "example", "pypi.org.example", ""] {
            assert!(!bypasses(host, list), "{host}");
        }
        assert!(bypasses("anything", "*"));
        assert!(!bypasses("anything", ""));
    }

    #[test]
    fn passwords_are_not_shown() {
        assert_eq!(shown("https://me:p%40ss@host:8/simple/x"), "https://host:8/simple/x");
        assert_eq!(shown("https://host/a@b"), "https://host/a@b");
    }
}
