//! A model in a part of a repository or folder, such as the text model of one that reads pictures:
//! its configuration and weights stand there, its tokenizer there or beside the whole.

use std::{fmt, path::Path, str::FromStr};

use super::{Pickles, Source, SourceError, TEXT_FILES, converted_tokenizer, read_texts};

/// Longest path: ten times that of published ones.
const MAX_BYTES: usize = 512;

/// A path below a repository or folder: plain names between single slashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subfolder(String);

impl Subfolder {
    /// The path.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of a file in it, from the whole.
    #[cfg(feature = "hub")]
    pub(crate) fn path_of(subfolder: Option<&Self>, file: &str) -> String {
        subfolder.map_or_else(|| file.to_owned(), |folder| format!("{folder}/{file}"))
    }
}

impl fmt::Display for Subfolder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl FromStr for Subfolder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = text.strip_suffix('/').unwrap_or(text);
        let plain = |name: &str| {
            !name.is_empty()
                && name != "."
                && name != ".."
                && !name.chars().any(|c| c.is_control() || matches!(c, '\\' | ':'))
        };
        if path.len() <= MAX_BYTES && path.split('/').all(plain) {
            return Ok(Self(path.to_owned()));
        }
        Err(format!("{text:?} is no folder below the model's, such as text_model or parts/llm"))
    }
}

/// Whether the file is part of what makes text of tokens.
pub(crate) fn is_tokenizer_file(name: &str) -> bool {
    TEXT_FILES.contains(&name) && name != "generation_config.json"
}

/// Whether there is a tokenizer among files of these names; some of its companions alone are none.
pub(crate) fn has_tokenizer<'a>(mut names: impl Iterator<Item = &'a str>) -> bool {
    const WHOLE: &[&str] =
        &["tekken.json", "tiktoken.model", "tokenizer.json", "tokenizer.model", "vocab.json"];
    names.any(|name| WHOLE.contains(&name))
}

impl Source {
    /// Opens a folder, or the model in a part of it.
    pub fn open_part(
        folder: &Path,
        subfolder: Option<&Subfolder>,
        pickles: Pickles,
    ) -> Result<Self, SourceError> {
        let Some(subfolder) = subfolder else { return Self::open_as(folder, pickles) };
        let mut source = Self::open_as(&folder.join(subfolder.as_str()), pickles)?;
        source.take_tokenizer_of(folder)?;
        Ok(source)
    }

    /// Without a tokenizer of its own the part has that of the whole.
    pub(super) fn take_tokenizer_of(&mut self, whole: &Path) -> Result<(), SourceError> {
        if has_tokenizer(self.text.keys().map(String::as_str)) {
            return Ok(());
        }
        for (name, bytes) in read_texts(whole)? {
            if is_tokenizer_file(&name) {
                self.text.entry(name).or_insert(bytes);
            }
        }
        self.tokenizer = converted_tokenizer(&self.text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_paths_below_are_taken() {
        for (text, path) in [("llm", "llm"), ("a/b", "a/b"), ("a b/c.d/", "a b/c.d")] {
            assert_eq!(text.parse::<Subfolder>().unwrap().as_str(), path);
        }
        for bad in ["", "/", "/llm", "llm//x", "../llm", "llm/..", ".", "a\\b", "c:", "a\n"] {
            assert!(bad.parse::<Subfolder>().is_err(), "{bad:?}");
        }
    }
}
