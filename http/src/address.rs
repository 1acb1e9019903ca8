//! URLs: where redirects and links lead, which hosts are this machine, what may be shown.

use ureq::http::Uri;

/// A URL with a scheme and a host.
pub(crate) fn parse(url: &str) -> Option<Uri> {
    let uri: Uri = url.parse().ok()?;
    (uri.scheme_str().is_some() && uri.host().is_some()).then_some(uri)
}

/// Scheme, host and port.
pub(crate) fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri = parse(url)?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let default = if scheme == "https" { 443 } else { 80 };
    Some((scheme, uri.host()?.to_ascii_lowercase(), uri.port_u16().unwrap_or(default)))
}

/// Whether a host is this machine.
#[must_use]
pub fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Whether `NO_PROXY` names a host, or a domain above it.
pub(crate) fn bypasses(host: &str, no_proxy: &str) -> bool {
    let host = host.to_ascii_lowercase();
    no_proxy.split(',').map(|entry| entry.trim().to_ascii_lowercase()).any(|entry| {
        let domain = entry.trim_start_matches('*').trim_start_matches('.');
        let below = host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'));
        entry == "*" || (!domain.is_empty() && (host == domain || below))
    })
}

/// A URL without the name and password that it may hold.
#[must_use]
pub fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let end = rest.find('/').unwrap_or(rest.len());
    let host = rest[..end].rsplit_once('@').map_or(&rest[..end], |(_, host)| host);
    format!("{scheme}://{host}{}", &rest[end..])
}

/// Where a link on the page `from`, or a redirect from there, leads.
#[must_use]
pub fn join(from: &str, target: &str) -> Option<String> {
    if target.starts_with("http://") || target.starts_with("https://") {
        return Some(target.to_owned());
    }
    let (scheme, rest) = from.split_once("://")?;
    let path = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (host, path) = rest.split_at(path);
    if let Some(rest) = target.strip_prefix("//") {
        return Some(format!("{scheme}://{rest}"));
    }
    if target.is_empty() {
        return None;
    }
    let (relative, query) = target.find('?').map_or((target, ""), |at| target.split_at(at));
    let mut parts: Vec<&str> = Vec::new();
    if !relative.starts_with('/') {
        let path = path.split(['?', '#']).next().unwrap_or_default();
        parts.extend(path.trim_start_matches('/').split('/'));
        parts.pop();
    }
    for part in relative.trim_start_matches('/').split('/') {
        match part {
            "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    Some(format!("{scheme}://{host}/{}{query}", parts.join("/")))
}

/// A path with everything but letters, digits and `-._~/` percent-encoded.
#[must_use]
pub fn percent_encode(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
            let [high, low] = [byte >> 4, byte & 15].map(|it| char::from(DIGITS[it as usize]));
            out.extend(['%', high, low]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_proxy_names_hosts_and_their_subdomains() {
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
        assert_eq!(
            without_password("https://me:p%40ss@host:8/simple/x"),
            "https://host:8/simple/x"
        );
        assert_eq!(without_password("https://host/a@b"), "https://host/a@b");
    }

    #[test]
    fn links_are_relative_to_their_page() {
        let page = "https://mirror.example/root/simple/mlx-metal/";
        let cases = [
            ("x.whl", "https://mirror.example/root/simple/mlx-metal/x.whl"),
            ("./x.whl", "https://mirror.example/root/simple/mlx-metal/x.whl"),
            ("../x.whl", "https://mirror.example/root/simple/x.whl"),
            ("../../../../../x.whl", "https://mirror.example/x.whl"),
            ("/x.whl", "https://mirror.example/x.whl"),
            ("//files.example/x.whl", "https://files.example/x.whl"),
            ("http://files.example/x.whl", "http://files.example/x.whl"),
        ];
        for (target, expected) in cases {
            assert_eq!(join(page, target).as_deref(), Some(expected), "{target}");
        }
        assert_eq!(join("http://host", "x").as_deref(), Some("http://host/x"));
    }

    #[test]
    fn paths_are_percent_encoded() {
        assert_eq!(percent_encode("a b/ü+.json"), "a%20b/%C3%BC%2B.json");
    }

    #[test]
    fn an_origin_has_the_scheme_s_port() {
        let own = origin("https://Hub.example/api");
        assert_eq!(own, origin("https://hub.example:443/"));
        assert_ne!(own, origin("http://hub.example:443/"));
        assert_ne!(own, origin("https://hub.example:444/"));
        assert_eq!(origin("hub.example"), None);
    }
}
