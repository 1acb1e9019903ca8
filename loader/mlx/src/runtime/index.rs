//! Pages of a package index's simple API: JSON (PEP 691) and HTML (PEP 503). Only the address of a
//! file is taken from them; hashes that they state are not believed.

use serde::Deserialize;
use shardpack_http::join;

/// A project's page.
#[derive(Deserialize)]
struct Page {
    files: Vec<File>,
}

#[derive(Deserialize)]
struct File {
    filename: String,
    url: String,
}

/// The address of `file` on the page that came from `page_url`.
pub(super) fn find(page: &str, page_url: &str, file: &str) -> Option<String> {
    let target = if page.trim_start().starts_with('{') {
        let page: Page = serde_json::from_str(page).ok()?;
        page.files.into_iter().find(|found| found.filename == file)?.url
    } else {
        links(page).map(unescape).find(|link| name(link) == file)?
    };
    let (target, _) = target.split_once('#').unwrap_or((&target, ""));
    join(page_url, target)
}

/// What every `href` of a page says.
fn links(page: &str) -> impl Iterator<Item = &str> {
    page.split("href=").skip(1).filter_map(|rest| {
        let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        rest[1..].split_once(quote).map(|(link, _)| link)
    })
}

fn unescape(text: &str) -> String {
    text.replace("&#38;", "&").replace("&amp;", "&")
}

/// The last part of a link's path.
fn name(link: &str) -> &str {
    let path = link.split(['#', '?']).next().unwrap_or_default();
    path.rsplit('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "https://mirror.example/root/simple/mlx-metal/";

    #[test]
    fn a_file_is_found_by_its_exact_name_in_json_and_html() {
        let json = r#"{"meta": {"api-version": "1.1"}, "files": [
            {"filename": "a-1-cp39.whl", "url": "https://f.example/a-1-cp39.whl", "hashes": {}},
            {"filename": "a-1.whl", "url": "../../files/a-1.whl#sha256=12", "hashes": {"sha256": "12"}}]}"#;
        let html = "<!DOCTYPE html><a href='../../files/a-1-cp39.whl'>a</a>\n\
                    <a data-x=\"y\" href=\"../../files/a-1.whl#sha256=12\">a-1.whl</a>";
        for page in [json, html] {
            let found = find(page, PAGE, "a-1.whl");
            assert_eq!(found.as_deref(), Some("https://mirror.example/root/files/a-1.whl"));
            assert_eq!(find(page, PAGE, "b-1.whl"), None);
        }
        let html = "<a href=\"/d/a-1.whl?sign=1&amp;b=2#sha256=12\">";
        let expected = "https://mirror.example/d/a-1.whl?sign=1&b=2";
        assert_eq!(find(html, PAGE, "a-1.whl").as_deref(), Some(expected));
        for page in ["", "{", "{\"files\": 1}", "<a href=", "<a href=\"a-1.whl"] {
            assert_eq!(find(page, PAGE, "a-1.whl"), None, "{page}");
        }
    }
}
