//! What a browser may do on a server without API keys. Such a server trusts whoever reaches it, and a
//! browser reaches it for every page that somebody looks at: it must tell pages of strangers from its
//! own. A page cannot choose the headers `Host`, `Origin` and `Sec-Fetch-Site`.
//!
//! With keys a page of a stranger has none, and nothing is asked here.

use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderValue, Method, Uri, header, uri::Authority};

use super::AppState;
use crate::error::{ApiError, ErrorKind};

/// Ends of names that nobody on the internet can register, so that none of theirs leads here.
const PRIVATE_ENDS: [&str; 5] = [".localhost", ".local", ".internal", ".home.arpa", ".test"];

/// Schemes of pages that programs on this machine bring along.
const OWN_SCHEMES: [&str; 5] = ["app", "file", "tauri", "vscode-webview", "vscode-file"];

impl AppState {
    /// Refuses a request that a stranger's page may have caused.
    pub(super) fn check_browser(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<(), ApiError> {
        if self.keys.is_some() {
            return Ok(());
        }
        let host = host_of(uri, headers);
        if let Some(host) = host.as_ref().map(Authority::host)
            && !self.answers_for(host)
        {
            // A name of a stranger's that leads to this address, so that its page counts as one of ours.
            let message = format!(
                "this server has no API keys and does not answer for the name {host:?}: use its \
                 address, add the name with --allow-host, or serve with --keys"
            );
            return Err(ApiError::new(ErrorKind::Forbidden, message).with_code("host_not_allowed"));
        }
        if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
            // Nothing is computed, and without CORS no page can read the answer.
            return Ok(());
        }
        let origin = headers.get(header::ORIGIN).map(|origin| origin.to_str().unwrap_or_default());
        if let Some(origin) = origin
            && self.allowed_origin(uri, headers).is_none()
        {
            let message = format!(
                "this server has no API keys and takes no requests of pages from {origin:?}: allow \
                 them with --cors"
            );
            let error = ApiError::new(ErrorKind::Forbidden, message);
            return Err(error.with_code("origin_not_allowed"));
        }
        let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
        if origin.is_none() && site == Some(b"cross-site") {
            let message = "this server has no API keys and takes no requests of other sites' pages";
            let error = ApiError::new(ErrorKind::Forbidden, message);
            return Err(error.with_code("origin_not_allowed"));
        }
        check_content_type(headers, origin.is_some() || site.is_some())
    }

    /// The request's origin, if its page may read answers: an origin that `--cors` names, this server's
    /// origin, or an origin of this machine. A browser shows an answer to a page only with this header.
    pub(super) fn allowed_origin(&self, uri: &Uri, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        let text = origin.to_str().ok()?;
        let is_listed = self.origins.iter().any(|allowed| allowed == text || allowed == "*");
        (is_listed || is_own(text, host_of(uri, headers).as_ref())).then(|| origin.clone())
    }

    /// Whether a host's name can only be meant by somebody who knows this machine.
    fn answers_for(&self, host: &str) -> bool {
        let host = host.trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase();
        let is_private = || PRIVATE_ENDS.iter().any(|end| host.ends_with(end));
        let is_added = || self.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(&host));
        // No name leads here that is none, or has one part alone.
        host.parse::<IpAddr>().is_ok() || !host.contains('.') || is_private() || is_added()
    }
}

/// Where a request says that it goes.
fn host_of(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    let sent = || headers.get(header::HOST)?.to_str().ok()?.parse().ok();
    uri.authority().cloned().or_else(sent)
}

/// A request says at most once where it goes, and with a name that is one (RFC 9112, 3.2): what can be
/// read in two ways is for nobody. No page can leave it away, and small probes do.
pub(super) fn check_host(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut sent = headers.get_all(header::HOST).iter();
    let (first, second) = (sent.next(), sent.next());
    let is_name = |sent: &HeaderValue| {
        let name = sent.to_str().ok().and_then(|name| name.parse::<Authority>().ok());
        name.is_some_and(|name| !name.host().is_empty() && !name.as_str().contains('@'))
    };
    if second.is_none() && first.is_none_or(is_name) {
        return Ok(());
    }
    let message = "a request has one header Host, with a name or an address";
    Err(ApiError::new(ErrorKind::Invalid, message).with_code("host"))
}

/// Whether a page is the server's own, or of this machine.
fn is_own(origin: &str, host: Option<&Authority>) -> bool {
    let Some((scheme, rest)) = origin.split_once("://") else { return false };
    if OWN_SCHEMES.contains(&scheme) {
        return true;
    }
    let Ok(from) = rest.parse::<Authority>() else { return false };
    let name = from.host().trim_matches(['[', ']']);
    let is_loopback = name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    is_loopback
        || name == "localhost"
        || name.ends_with(".localhost")
        || host.is_some_and(|host| host.as_str().eq_ignore_ascii_case(from.as_str()))
}

/// What browsers send without asking first is refused: forms and plain text. Other programs may leave the
/// type away, or send what their tool sends by default.
fn check_content_type(headers: &HeaderMap, is_browser: bool) -> Result<(), ApiError> {
    let sent = headers.get(header::CONTENT_TYPE).map(|kind| kind.to_str().unwrap_or_default());
    let kind = sent.map(|kind| kind.split(';').next().unwrap_or_default().trim());
    let is_json = kind.is_none_or(|kind| {
        kind.eq_ignore_ascii_case("application/json")
            || kind.to_ascii_lowercase().ends_with("+json")
    });
    if is_json || !is_browser {
        return Ok(());
    }
    let message = format!(
        "a page has to send content-type: application/json, and sent {:?}",
        sent.unwrap_or_default()
    );
    Err(ApiError::new(ErrorKind::Invalid, message).with_code("content_type"))
}
