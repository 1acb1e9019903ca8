//! Models as people paste them: addresses of the hub's pages (`https://huggingface.co/org/model/tree/main`,
//! `hf.co/org/model`, `hf://org/model`, `git@hf.co:org/model`) and names with the tag of a quantization
//! (`org/model:Q8_0`).
//!
//! Knows text only; nothing is asked.

use super::ModelName;
use crate::checkpoint::{GGUF, Subfolder};

/// Names of the public hub.
const HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];
/// What the hub has besides models, by the first part of an address.
const OTHER_KINDS: [&str; 5] = ["datasets", "spaces", "collections", "papers", "docs"];
/// The tag that means no quantization in particular.
const LATEST: &str = "latest";

/// A model, and what of it an address shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelAddress {
    /// The model, at the revision of the page.
    pub name: ModelName,
    /// The folder of the page.
    pub subfolder: Option<Subfolder>,
    /// The GGUF file of the page.
    pub gguf: Option<String>,
    /// The tag of a quantization, such as `Q4_K_M`.
    pub tag: Option<String>,
}

impl ModelAddress {
    /// Parses an address, or a name with a tag; `None` if the text is neither. `endpoint` is the hub's own
    /// address. An address of something else is an error.
    pub fn parse(text: &str, endpoint: &str) -> Result<Option<Self>, String> {
        let Some(parts) = parts_of(text, endpoint)? else { return Ok(tagged(text)) };
        let wrong = |found: &str| {
            format!(
                "{text}: expected the address of a model, such as {endpoint}/organisation/model, found {found}"
            )
        };
        let mut parts: &[&str] = &parts;
        for prefix in ["api", "models"] {
            parts = if parts.len() > 2 {
                parts.strip_prefix(&[prefix]).unwrap_or(parts)
            } else {
                parts
            };
        }
        let [owner, model, rest @ ..] = parts else {
            return Err(wrong("no organisation with a model"));
        };
        if OTHER_KINDS.contains(owner) {
            return Err(wrong(&format!("one of {owner}")));
        }
        let (model, tag) = model.split_once(':').unwrap_or((model, ""));
        let (model, own_revision) = model.split_once('@').unwrap_or((model, ""));
        let model = model.strip_suffix(".git").unwrap_or(model);
        let page = Page::of(rest);
        let revision = [own_revision, &page.revision].into_iter().find(|it| !it.is_empty());
        let name = format!("{owner}/{model}@{}", revision.unwrap_or(ModelName::MAIN));
        let name = name.parse().map_err(|_| wrong(&format!("{name:?}")))?;
        let subfolder = (!page.folder.is_empty()).then(|| page.folder.parse()).transpose()?;
        let tag = Some(tag).filter(|tag| !tag.is_empty() && *tag != LATEST).map(str::to_owned);
        Ok(Some(Self { name, subfolder, gguf: page.gguf, tag }))
    }
}

/// `organisation/model:TAG`, as llama.cpp has it.
fn tagged(text: &str) -> Option<ModelAddress> {
    let (name, tag) = text.split_once(':')?;
    let is_tag =
        !tag.is_empty() && tag.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c));
    let name = name.parse().ok().filter(|_| is_tag)?;
    let tag = Some(tag.to_owned()).filter(|tag| tag != LATEST);
    Some(ModelAddress { name, subfolder: None, gguf: None, tag })
}

/// The parts of an address of the hub, behind its host; `None` if the text is no address.
fn parts_of<'a>(text: &'a str, endpoint: &str) -> Result<Option<Vec<&'a str>>, String> {
    let own = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest).trim_end_matches('/');
    let behind_host = |rest: &'a str| {
        let hosts = HOSTS.iter().copied().chain([own]);
        hosts
            .filter_map(|host| rest.strip_prefix(host))
            .find_map(|rest| if rest.is_empty() { Some("") } else { rest.strip_prefix(['/', ':']) })
    };
    let path = if let Some(path) = text.strip_prefix("hf://") {
        path
    } else if let Some(rest) = text.strip_prefix("git@") {
        behind_host(rest).ok_or_else(|| format!("{text}: not a repository of the hub"))?
    } else if let Some((_, rest)) =
        text.split_once("://").filter(|(scheme, _)| ["http", "https"].contains(scheme))
    {
        behind_host(rest).ok_or_else(|| {
            format!("{text}: not an address of the hub, which is {endpoint}; give organisation/model, or set HF_ENDPOINT")
        })?
    } else if let Some(path) = behind_host(text) {
        path
    } else {
        return Ok(None);
    };
    let path = path.split(['?', '#']).next().unwrap_or_default();
    Ok(Some(path.split('/').filter(|part| !part.is_empty()).collect()))
}

/// What a page shows of a repository.
#[derive(Default)]
struct Page {
    revision: String,
    folder: String,
    gguf: Option<String>,
}

impl Page {
    fn of(parts: &[&str]) -> Self {
        let (kind, rest) = match parts {
            [kind @ ("tree" | "blob" | "resolve" | "raw" | "commit" | "commits"), rest @ ..] => {
                (*kind, rest)
            }
            // Discussions and the like are of the whole.
            _ => return Self::path("", parts, parts.last().is_some_and(|name| name.contains('.'))),
        };
        let revision = rest.first().copied().unwrap_or_default();
        // Pull requests and converted files have branches with slashes.
        let (revision, path) = match rest {
            ["refs", kind @ ("pr" | "convert"), name, path @ ..] => {
                (format!("refs/{kind}/{name}"), path)
            }
            [_, path @ ..] => (decoded(revision), path),
            [] => (String::new(), rest),
        };
        if kind == "commit" || kind == "commits" {
            return Self { revision, ..Self::default() };
        }
        Self::path(&revision, path, kind != "tree")
    }

    /// A folder, or the folder of a file.
    fn path(revision: &str, parts: &[&str], is_file: bool) -> Self {
        let path = parts.iter().map(|part| decoded(part)).collect::<Vec<_>>().join("/");
        let (folder, gguf) = match path.rsplit_once('/') {
            _ if is_file && path.ends_with(GGUF) => ("", Some(path)),
            Some((folder, _)) if is_file => (folder, None),
            None if is_file => ("", None),
            _ => (path.as_str(), None),
        };
        Self { revision: revision.to_owned(), folder: folder.to_owned(), gguf }
    }
}

/// A part of an address without its percent signs.
fn decoded(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let [first, more @ ..] = rest {
        let digits =
            more.get(..2).filter(|_| *first == b'%').and_then(|it| str::from_utf8(it).ok());
        let value =
            digits.and_then(|digits| shardpack_formats::hex::decode(&digits.to_ascii_lowercase()));
        if let Some(value) = value {
            bytes.extend(value);
            rest = &more[2..];
        } else {
            bytes.push(*first);
            rest = more;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: &str = "http://127.0.0.1:4567/hub";

    #[test]
    fn an_address_is_the_model_revision_and_part_that_its_page_shows() {
        let check = |text: &str, name: &str, part: &str| {
            let found = ModelAddress::parse(text, ENDPOINT).unwrap().expect(text);
            assert_eq!(format!("{}@{}", found.name, found.name.revision), name, "{text}");
            let subfolder = found.subfolder.map(|it| it.to_string());
            assert_eq!(subfolder.or(found.gguf).or(found.tag).unwrap_or_default(), part, "{text}");
        };
        for whole in [
            "https://huggingface.co/org/model",
            "http://www.huggingface.co/org/model/",
            "hf.co/org/model",
            "https://hf.co/org/model?library=transformers#usage",
            "hf://org/model",
            "hf://models/org/model",
            "https://huggingface.co/org/model.git",
            "git@hf.co:org/model",
            "huggingface.co/org/model/tree/main",
            "https://huggingface.co/org/model/blob/main/model.safetensors",
            "hf.co/org/model:latest",
            "http://127.0.0.1:4567/hub/org/model",
            "https://huggingface.co/api/models/org/model",
        ] {
            check(whole, "org/model@main", "");
        }
        check("https://huggingface.co/org/model/tree/v1.0", "org/model@v1.0", "");
        check("https://huggingface.co/org/model/tree/refs%2Fpr%2F3", "org/model@refs/pr/3", "");
        check("https://huggingface.co/org/model/tree/refs/pr/3/sub", "org/model@refs/pr/3", "sub");
        check("https://huggingface.co/org/model/commit/abc123", "org/model@abc123", "");
        check("hf://org/model@v2/parts/llm", "org/model@v2", "parts/llm");
        check("hf.co/org/model/tree/main/parts/llm", "org/model@main", "parts/llm");
        check("hf.co/org/model/blob/main/parts/llm/config.json", "org/model@main", "parts/llm");
        check(
            "hf.co/org/model/resolve/main/m%20a-Q8_0.gguf?download=true",
            "org/model@main",
            "m a-Q8_0.gguf",
        );
        check("hf://org/model/q/m.gguf", "org/model@main", "q/m.gguf");
        check("hf.co/org/model:Q4_K_M", "org/model@main", "Q4_K_M");
        check("org/model:Q4_K_M", "org/model@main", "Q4_K_M");
    }

    #[test]
    fn other_addresses_are_refused_and_names_are_none() {
        for (text, word) in [
            ("https://example.com/org/model", "not an address of the hub"),
            ("https://huggingface.co/datasets/org/data", "datasets"),
            ("https://huggingface.co/org", "organisation"),
            ("hf.co/org/..%2Fx", "organisation/model"),
            ("hf.co/org/model/tree/main/..", "folder"),
        ] {
            let error = ModelAddress::parse(text, ENDPOINT).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        for text in ["org/model", "model", "folder/file.gguf", "C:/models", "a:b", "hf.cologne/x/y"]
        {
            assert_eq!(ModelAddress::parse(text, ENDPOINT), Ok(None), "{text}");
        }
    }
}
