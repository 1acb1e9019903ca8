//! Where `engine install` downloads from, of a flag and of variables that pip, uv and curl read.

use std::env;

use shardpack_mlx::runtime::DownloadOptions;

/// Where the wheel comes from: the flag, then what pip and uv read, then the public index.
pub(super) fn options(index_url: Option<&str>) -> DownloadOptions {
    options_of(index_url, |name| env::var(name).ok())
}

fn options_of(
    index_url: Option<&str>,
    variable: impl Fn(&str) -> Option<String>,
) -> DownloadOptions {
    let first = |names: &[&str]| {
        names.iter().filter_map(|name| variable(name)).find(|value| !value.trim().is_empty())
    };
    let index_url = index_url
        .map(ToOwned::to_owned)
        .or_else(|| first(&["PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"]))
        .unwrap_or_else(|| DownloadOptions::INDEX_URL.to_owned());
    DownloadOptions {
        index_url,
        proxy: first(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"]),
        no_proxy: first(&["NO_PROXY", "no_proxy"]).unwrap_or_default(),
        authorities: first(&["SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
            .map(Into::into),
    }
}

#[cfg(test)]
mod tests {
    #[track_caller]
    fn check(flag: Option<&str>, variables: &[(&str, &str)], expected: [&str; 4]) {
        let options = super::options_of(flag, |name| {
            let found = variables.iter().find(|(variable, _)| *variable == name)?;
            Some(found.1.to_owned())
        });
        let authorities = options.authorities.unwrap_or_default();
        let found = [
            options.index_url,
            options.proxy.unwrap_or_default(),
            options.no_proxy,
            authorities.display().to_string(),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_environment_names_the_index_and_the_way_to_it() {
        check(None, &[], ["https://pypi.org/simple", "", "", ""]);
        let all = [
            ("UV_DEFAULT_INDEX", "https://uv.example/simple"),
            ("PIP_INDEX_URL", "https://pip.example/simple"),
            ("HTTPS_PROXY", ""),
            ("all_proxy", "socks5://proxy.example"),
            ("no_proxy", "a,b"),
            ("PIP_CERT", "/pip.pem"),
        ];
        let rest = ["socks5://proxy.example", "a,b", "/pip.pem"];
        check(None, &all, ["https://pip.example/simple", rest[0], rest[1], rest[2]]);
        check(Some("http://me"), &all, ["http://me", rest[0], rest[1], rest[2]]);
        check(None, &all[..1], ["https://uv.example/simple", "", "", ""]);
    }
}
