//! The guide and the pages around it as text: marks of shell blocks, links, places, messages. What
//! needs the program is in `tests/cli/guide.rs`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Component, Path, PathBuf},
};

use crate::documents::{blocks, book, guide, pages, root, shown};

/// Why a block does not run here.
const NEEDS: &[&str] = &["needs-mac", "needs-hub", "needs-machines", "needs-software"];

/// A page's text without its fenced blocks and code spans.
fn prose(page: &Path) -> String {
    let text = fs::read_to_string(page).unwrap();
    let mut is_code = false;
    let mut found = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            // Every second part stands between backticks.
            found.extend(line.split('`').step_by(2));
            found.push('\n');
        }
    }
    found
}

#[test]
fn every_shell_block_says_whether_it_runs_here() {
    let (mut tested, mut others) = (0, 0);
    for page in guide() {
        for block in blocks(&page) {
            let place = format!("{}:{}", shown(&page), block.line);
            assert!(!block.info[0].is_empty(), "{place}: a block without a language");
            if !block.is_shell() {
                continue;
            }
            let needs = NEEDS.iter().filter(|mark| block.has(mark)).count();
            let marks = usize::from(block.has("test")) + needs;
            assert_eq!(marks, 1, "{place}: write `sh,test`, or one of {NEEDS:?} and why");
            let known = |it: &String| {
                ["sh", "test", "background"].contains(&it.as_str()) || NEEDS.contains(&it.as_str())
            };
            assert!(block.info.iter().all(known), "{place}: unknown marks {:?}", block.info);
            if block.has("test") { tested += 1 } else { others += 1 }
        }
    }
    assert!(tested >= 30, "only {tested} blocks run here: was a mark lost?");
    assert!(others >= 10, "only {others} blocks are marked as not running here");
}

#[test]
fn every_link_resolves() {
    let mut files = pages(&root().join("docs"));
    files.extend(["README.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    let mut checked = 0;
    let mut broken = Vec::new();
    for page in &files {
        for link in links(&prose(page)) {
            checked += 1;
            if let Err(problem) = resolve(page, &link) {
                broken.push(format!("{}: {link}: {problem}", shown(page)));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(checked >= 80, "only {checked} links were found");
}

/// The targets of a page's links and pictures, those of the web apart.
fn links(prose: &str) -> Vec<String> {
    let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let is_web = |target: &&str| target.contains("://") || target.starts_with("mailto:");
    targets.filter(|target| !is_web(target)).map(str::to_owned).collect()
}

fn resolve(page: &Path, link: &str) -> Result<(), String> {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target =
        if file.is_empty() { page.to_owned() } else { plain(&page.parent().unwrap().join(file)) };
    if page.starts_with(book()) && !target.starts_with(book()) {
        return Err("leaves the book".to_owned());
    }
    if !target.exists() {
        return Err("no such file".to_owned());
    }
    if !anchor.is_empty() && !anchors(&target).contains(anchor) {
        return Err("no such heading".to_owned());
    }
    Ok(())
}

/// A path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                found.pop();
            }
            part => found.push(part),
        }
    }
    found
}

/// The names by which a page's headings are linked to, as mdBook and code hosts make them.
fn anchors(page: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(page).unwrap();
    let mut is_code = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if is_code || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = heading.trim().chars().filter_map(|it| match it {
            ' ' => Some('-'),
            '-' | '_' => Some(it),
            it if it.is_alphanumeric() => Some(it),
            _ => None,
        });
        let name = kept.collect::<String>().to_lowercase();
        let mut numbered = name.clone();
        for number in 1.. {
            if found.insert(numbered) {
                break;
            }
            numbered = format!("{name}-{number}");
        }
    }
    found
}

#[test]
fn every_place_for_a_contribution_exists() {
    let mut pages = pages(&book().join("contributing"));
    pages.push(root().join("CONTRIBUTING.md"));
    let mut places = 0;
    for page in &pages {
        let text = fs::read_to_string(page).unwrap();
        // Every second part stands between backticks.
        for span in text.split('`').skip(1).step_by(2) {
            let is_code = Path::new(span).extension().is_some_and(|it| it == "rs");
            let is_path = span.contains('/') && (span.ends_with('/') || is_code);
            if is_path && !span.contains(' ') {
                places += 1;
                assert!(root().join(span).exists(), "{}: there is no {span}", shown(page));
            }
        }
    }
    assert!(places >= 15, "only {places} places were found");
}

#[test]
fn the_summary_names_every_page_once() {
    let summary = book().join("SUMMARY.md");
    let mut named: Vec<PathBuf> =
        links(&prose(&summary)).iter().map(|link| book().join(link)).collect();
    named.sort();
    let mut there = pages(&book());
    there.retain(|page| *page != summary);
    let show = |pages: &[PathBuf]| pages.iter().map(|page| shown(page)).collect::<Vec<_>>();
    assert_eq!(show(&named), show(&there));
}

#[test]
fn every_message_in_troubleshooting_is_in_the_code() {
    let page = book().join("operate/troubleshooting.md");
    let mut code = String::new();
    for folder in
        ["src", "formats", "http", "manifests", "converter", "transfer", "loader", "identity"]
    {
        read_code(&root().join(folder), &mut code);
    }
    let text = fs::read_to_string(&page).unwrap();
    let mut messages = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("### `")) {
        let message = line.trim_end().trim_end_matches('`');
        messages += 1;
        for part in message.split('…').map(str::trim).filter(|part| part.len() > 3) {
            assert!(code.contains(part), "no code says {part:?} (of {message:?})");
        }
    }
    assert!(messages >= 30, "only {messages} messages are explained");
}

/// Adds all code below a folder, with strings on one line and without escapes.
fn read_code(folder: &Path, code: &mut String) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            read_code(&path, code);
        } else if path.extension().is_some_and(|it| it == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for (index, piece) in text.split("\\\n").enumerate() {
                let piece = if index == 0 { piece } else { piece.trim_start() };
                code.push_str(&piece.replace("\\\"", "\""));
            }
            code.push('\n');
        }
    }
}
