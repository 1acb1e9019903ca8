//! A model in a subfolder of a repository or folder, such as the text model of a vision-language
//! model: its configuration and weights are there, its tokenizer there or at the top.

use std::{fmt, str::FromStr};

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
