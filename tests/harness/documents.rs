//! The repository's documents as text. Shared by path with the tests of another crate; knows nothing
//! of the program.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// The guide's reference pages.
pub(crate) const REFERENCE: &str = "docs/guide/src/reference";

/// The repository's root: a crate below it has a folder of its own.
pub(crate) fn root() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let is_root = |folder: &&Path| folder.join("Cargo.lock").is_file();
    folder.ancestors().find(is_root).expect("the workspace has a lock file").to_owned()
}

/// Languages that a shell reads.
const SHELLS: &[&str] = &["sh", "bash", "zsh", "shell", "console"];

/// A fenced block of a page.
pub(crate) struct Block {
    pub(crate) line: usize,
    /// What stands behind the fence: the language and its marks.
    pub(crate) info: Vec<String>,
    pub(crate) text: String,
}

impl Block {
    pub(crate) fn is_shell(&self) -> bool {
        SHELLS.contains(&self.info[0].as_str())
    }

    pub(crate) fn has(&self, mark: &str) -> bool {
        self.info.iter().any(|it| it == mark)
    }
}

pub(crate) fn book() -> PathBuf {
    root().join("docs/guide/src")
}

/// Every Markdown file below a folder, in order.
pub(crate) fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|it| it == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The pages whose commands are held: the guide's own (the reference has tests of its own), and
/// README.md.
pub(crate) fn guide() -> Vec<PathBuf> {
    let reference = root().join(REFERENCE);
    let mut found = pages(&book());
    found.retain(|page| !page.starts_with(&reference));
    found.push(root().join("README.md"));
    found
}

pub(crate) fn shown(page: &Path) -> String {
    page.strip_prefix(root()).unwrap_or(page).display().to_string()
}

/// The fenced blocks of a page.
pub(crate) fn blocks(page: &Path) -> Vec<Block> {
    let text = fs::read_to_string(page).unwrap();
    let mut found: Vec<Block> = Vec::new();
    let mut open = None;
    for (line, text) in (1..).zip(text.lines()) {
        let fence = text.trim_start().starts_with("```");
        match (&mut open, fence) {
            (None, true) => {
                let info = text.trim_start().trim_start_matches('`');
                let info = info.split(',').map(|it| it.trim().to_owned()).collect();
                open = Some(Block { line, info, text: String::new() });
            }
            (None, false) => {}
            (Some(_), true) => found.extend(open.take()),
            (Some(block), false) => {
                block.text.push_str(text);
                block.text.push('\n');
            }
        }
    }
    assert!(open.is_none(), "{}: a block does not end", shown(page));
    found
}

/// A reference page's text.
pub(crate) fn reference_page(name: &str) -> String {
    let path = root().join(REFERENCE).join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Fails with everything that is missing from a page.
pub(crate) fn demand<'a>(name: &str, what: &str, wanted: impl IntoIterator<Item = &'a str>) {
    let page = reference_page(name);
    let mut count = 0;
    let is_missing = |text: &&str| {
        count += 1;
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let found = page.match_indices(*text).any(|(at, _)| {
            let before = page[..at].chars().next_back();
            let after = page[at + text.len()..].chars().next();
            !before.is_some_and(word) && !after.is_some_and(word)
        });
        !found
    };
    let missing: Vec<&str> = wanted.into_iter().filter(is_missing).collect();
    assert!(missing.is_empty(), "{REFERENCE}/{name} lacks {what}: {}", missing.join(", "));
    assert!(count > 0, "{what}: nothing was found in the sources");
}
