//! The guide's reference pages against the sources: what the code has, the pages have. What needs
//! the program is in `tests/cli/reference_docs.rs`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::documents::{REFERENCE, demand, reference_page, root};

/// Every source file of the program: no tests, no build output.
fn sources() -> Vec<(PathBuf, String)> {
    fn walk(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let skipped = ["target", "tests", "tests.rs", "fuzz", "docs", "examples", "benches"];
            if name.starts_with('.') || skipped.contains(&name.as_str()) {
                continue;
            }
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|it| it == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                // Tests at the end of a file are no part of the program.
                let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
                found.push((path, text[..end].to_owned()));
            }
        }
    }
    let mut found = Vec::new();
    walk(&root(), &mut found);
    found
}

/// Sources whose path ends so, within a folder of that name.
fn sources_at(folder: &str, ends: &[&str]) -> String {
    let root = root();
    let is_there = |path: &Path| {
        let path = path.strip_prefix(&root).unwrap().to_str().unwrap();
        path.split('/').any(|part| part == folder) && ends.iter().any(|end| path.ends_with(end))
    };
    let found: Vec<String> =
        sources().into_iter().filter(|(path, _)| is_there(path)).map(|(_, text)| text).collect();
    assert!(!found.is_empty(), "no source {ends:?} in a folder {folder}");
    found.concat()
}

/// Texts between quotes of one line that consist of such characters.
fn literals(source: &str, allowed: fn(char) -> bool) -> BTreeSet<&str> {
    source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split('"').skip(1).step_by(2))
        .filter(|text| !text.is_empty() && text.chars().all(allowed))
        .collect()
}

#[test]
fn every_environment_variable_is_on_the_files_page() {
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let reads = |text: &str| {
        ["env::var", "env = \"", "_VARIABLE", "variables", ".env("]
            .iter()
            .any(|it| text.contains(it))
    };
    let mut sources = sources();
    // Build scripts read Cargo's.
    sources.retain(|(path, _)| !path.ends_with("build.rs"));
    let mut names = BTreeSet::new();
    for (_, text) in sources.iter().filter(|(_, text)| reads(text)) {
        let found = literals(text, |c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        names.extend(found.into_iter().filter(|name| *name == "HOME" || name[1..].contains('_')));
    }
    // Proxies are known by their lower-case names too; prefixes tell ours and the hub's anywhere.
    for (_, text) in &sources {
        for prefix in ["SHARDPACK_", "HF_", "XDG_"] {
            let found = text.match_indices(prefix).map(|(at, _)| {
                let rest = &text[at..];
                &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())]
            });
            names.extend(found.filter(|name| name.len() > prefix.len()));
        }
    }
    demand("files.md", "environment variables", names);
}

#[test]
fn every_route_and_parameter_is_on_the_http_page() {
    let routes = sources_at("server", &["routes.rs"]);
    let paths = literals(&routes, |c| c.is_ascii_alphanumeric() || "/{}*._-".contains(c));
    // `/api/` alone is a prefix.
    let is_route = |path: &&str| path.starts_with('/') && (*path == "/" || !path.ends_with('/'));
    demand("http-api.md", "routes", paths.into_iter().filter(is_route));

    let described = sources_at("server", &["openapi.rs"]);
    let is_field = |c: char| c.is_ascii_lowercase() || c == '_';
    // `("temperature", TEMPERATURE, false),`
    let first_of_tuples =
        described.split("(\"").skip(1).filter_map(|rest| rest.split_once("\",")).map(|it| it.0);
    let fields = first_of_tuples.filter(|it| it.chars().all(is_field));
    demand("http-api.md", "fields of the OpenAPI description", fields);

    let dialects = sources_at("dialect", &[".rs"]);
    let refused = dialects.split("(\"").skip(1).filter_map(|rest| rest.split_once("\", Neutral::"));
    demand("http-api.md", "refused fields", refused.map(|it| it.0).filter(|it| !it.contains('"')));

    let server = sources_at("server", &[".rs"]);
    let codes = server.split("with_code(\"").skip(1).filter_map(|rest| rest.split_once('"'));
    demand("http-api.md", "error codes", codes.map(|(code, _)| code));
}

#[test]
fn every_metric_is_on_the_metrics_page() {
    let source = sources_at("server", &["metrics.rs", "metrics/drafts.rs", "metrics/ranks.rs"]);
    let names = literals(&source, |c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let page = reference_page("metrics.md");
    let is_missing = |name: &&str| {
        let forms = ["shardpack_", "shardpack_rank_", "vllm:", ""];
        !name.ends_with('_') && !forms.iter().any(|it| page.contains(&format!("`{it}{name}`")))
    };
    assert!(names.len() > 20, "{names:?}");
    let missing: Vec<&str> = names.into_iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "{REFERENCE}/metrics.md lacks metrics or labels: {missing:?}");
}

#[test]
fn every_feature_is_on_the_package_page() {
    let source = sources_at("spec", &["features.rs"]);
    let features = literals(&source, |c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    demand("package-format.md", "features", features.into_iter().chain(["stages"]));
}

#[test]
fn every_field_of_the_architecture_is_on_the_package_page() {
    let fields = sources_at("spec", &[".rs"]) + &sources_at("formats", &["src/spec.rs"]);
    let mut names = BTreeSet::new();
    let mut renamed = None;
    for line in fields.lines() {
        if let Some((_, rest)) = line.split_once("rename = \"") {
            renamed = rest.split_once('"').map(|it| it.0);
        }
        let item = line.strip_prefix("    ").unwrap_or_default();
        let field = item.strip_prefix("pub ").and_then(|it| it.split_once(": ")).map(|it| it.0);
        let field = field.filter(|name| !name.contains(' '));
        let is_variant = item.starts_with(char::is_uppercase);
        if field.is_some() || is_variant {
            names.extend(renamed.take().or(field));
        }
    }
    assert!(names.len() > 100, "{names:?}");
    demand("package-format.md", "fields of the architecture", names);
}

#[test]
fn every_message_is_on_the_protocol_pages() {
    let transfer = sources_at("transfer", &["message.rs"]);
    let page = reference_page("transfer-protocol.md");
    // `Self::Hello { .. } => 1,`
    let numbered = transfer.lines().filter_map(|line| {
        let (name, number) = line.trim().strip_prefix("Self::")?.split_once(" => ")?;
        let number: u8 = number.strip_suffix(',')?.parse().ok()?;
        let end = name.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(name.len());
        Some(format!("| {number} | `{}` |", &name[..end]))
    });
    let rows: Vec<String> = numbered.collect();
    assert!(rows.len() >= 18, "{rows:?}");
    let missing: Vec<&String> = rows.iter().filter(|row| !page.contains(*row)).collect();
    assert!(missing.is_empty(), "{REFERENCE}/transfer-protocol.md lacks {missing:?}");

    let ranks = sources_at("cluster", &["message.rs"]);
    let variants = ranks.lines().filter_map(|line| {
        let line = line.strip_prefix("    ").filter(|it| it.starts_with(char::is_uppercase))?;
        let name = &line[..line.find(|c: char| !c.is_ascii_alphanumeric())?];
        line[name.len()..].starts_with([' ', '(', ',']).then(|| snake_case(name))
    });
    let variants: Vec<String> = variants.collect();
    demand("rank-protocol.md", "messages", variants.iter().map(String::as_str));
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for (index, c) in name.chars().enumerate() {
        if c.is_ascii_uppercase() && index > 0 {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

#[test]
fn every_key_of_rule_files_is_on_their_page() {
    let source = sources_at("rules", &["file.rs", "from.rs", "parts.rs"]);
    let mut keys = BTreeSet::new();
    for line in source.lines() {
        let Some(field) = line.trim().strip_prefix("pub(crate) ") else { continue };
        let Some((name, _)) = field.split_once(": ") else { continue };
        if name.chars().all(|c| c.is_ascii_lowercase() || c == '_') {
            keys.insert(if name == "lets" { "let" } else { name });
        }
    }
    assert!(keys.len() > 80, "{keys:?}");
    demand(
        "rule-files.md",
        "keys",
        keys.into_iter().chain(["extends", "parts", "without", "after"]),
    );
}
