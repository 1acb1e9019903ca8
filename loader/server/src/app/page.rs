//! The web page: one compressed file that `loader/server/web` is built into, and what a browser may
//! do with it.

use std::sync::LazyLock;

use axum::{
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};

/// The page, compressed with gzip: browsers take brotli over TLS only.
const PAGE: &[u8] = include_bytes!("../page.html.gz");
/// Content security policy of the page: its own script and style by their hashes, and no other host.
const POLICY: HeaderValue = HeaderValue::from_static(include_str!("../page.policy"));
/// Names the page's bytes, so that a browser fetches them once.
static TAG: LazyLock<HeaderValue> = LazyLock::new(|| {
    let tag = format!("\"{}\"", &blake3::hash(PAGE).to_hex()[..32]);
    HeaderValue::from_str(&tag).expect("digits of a hash may stand in a header")
});

/// The page, or 304 where the browser has it. Only as gzip, which every browser takes; others get a
/// line of text.
pub(super) async fn page(request: HeaderMap) -> Response {
    let common = [
        (header::ETAG, TAG.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::VARY, HeaderValue::from_static("accept-encoding")),
    ];
    if has(&request, header::IF_NONE_MATCH, |tag| {
        tag == "*" || tag.trim_start_matches("W/").as_bytes() == TAG.as_bytes()
    }) {
        return (StatusCode::NOT_MODIFIED, common).into_response();
    }
    let is_gzip = |coding: &str| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, "q=1"));
        let weight = weight.trim().strip_prefix("q=").and_then(|weight| weight.parse::<f32>().ok());
        matches!(name.trim(), "gzip" | "*") && weight.is_none_or(|weight| weight > 0.0)
    };
    if !has(&request, header::ACCEPT_ENCODING, is_gzip) {
        // Probes ask so, and people with curl.
        let text = "shardpack answers. The page is sent compressed, to browsers and to curl \
                    --compressed; /stats and /v1/models have what it shows.\n";
        return ([(header::VARY, HeaderValue::from_static("accept-encoding"))], text)
            .into_response();
    }
    let page = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_ENCODING, HeaderValue::from_static("gzip")),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (common, page, PAGE).into_response()
}

/// Whether one of the entries of a list in a header is `wanted`.
fn has(request: &HeaderMap, name: header::HeaderName, wanted: impl Fn(&str) -> bool) -> bool {
    let lists = request.get_all(name);
    lists
        .iter()
        .filter_map(|list| list.to_str().ok())
        .flat_map(|list| list.split(','))
        .any(|entry| wanted(entry.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(headers: &[(header::HeaderName, &str)]) -> Response {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()))
            .collect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(page(headers))
    }

    #[test]
    fn a_browser_fetches_the_page_once() {
        let first = asked(&[(header::ACCEPT_ENCODING, "gzip, deflate")]);
        assert_eq!(first.status(), StatusCode::OK);
        assert_eq!(first.headers()[header::CONTENT_ENCODING], "gzip");
        let tag = first.headers()[header::ETAG].to_str().unwrap().to_owned();
        for known in [tag.clone(), format!("W/{tag}"), format!("\"x\", {tag}"), "*".to_owned()] {
            let again = asked(&[(header::IF_NONE_MATCH, &known)]);
            assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{known}");
        }
        let other = asked(&[(header::IF_NONE_MATCH, "\"x\""), (header::ACCEPT_ENCODING, "gzip")]);
        assert_eq!(other.status(), StatusCode::OK);
    }

    #[test]
    fn whoever_takes_no_gzip_is_told() {
        for refused in ["", "identity", "br", "gzip;q=0", "gzip; q=0.0"] {
            let reply = asked(&[(header::ACCEPT_ENCODING, refused)]);
            assert_eq!(reply.status(), StatusCode::OK, "{refused}");
            let headers = reply.headers();
            assert!(!headers.contains_key(header::CONTENT_ENCODING), "{refused}");
            assert!(!headers.contains_key(header::ETAG), "it is not the page: {refused}");
        }
    }

    #[test]
    fn the_policy_allows_no_inline_script_and_no_other_host() {
        let policy = POLICY;
        let policy = policy.to_str().unwrap();
        for part in [
            "default-src 'none'",
            "script-src 'sha256-",
            "connect-src 'self'",
            "frame-ancestors 'none'",
        ] {
            assert!(policy.contains(part), "{part}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        assert!(PAGE.len() < 600 << 10, "{} bytes", PAGE.len());
    }
}
