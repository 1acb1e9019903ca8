//! The files of a checkpoint by their names, and the small ones among them: the same in a folder of
//! this machine and in a repository of the hub. Knows nothing of either, nor of what weights mean.

mod magic;
mod subfolder;

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

pub(crate) use magic::{is_gguf, is_safetensors};
pub use subfolder::Subfolder;

/// The file that says which weight file holds which tensor.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The same for files of `torch.save`.
pub(crate) const PICKLE_INDEX: &str = "pytorch_model.bin.index.json";

/// Endings of the files of `torch.save`.
const PICKLE_ENDINGS: &[&str] = &[".bin", ".pt", ".pth"];

/// What `torch.save` writes beside models: the state of a training run.
const TRAINING_FILES: &[&str] =
    &["training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin"];

/// The ending of GGUF files.
pub(crate) const GGUF: &str = ".gguf";

/// GGUF files with this prefix hold a model's vision tower, which is not read.
pub(crate) const VISION_PREFIX: &str = "mmproj";

/// Largest JSON or text file that is read whole: the largest published `tokenizer.json` has
/// 33 MB.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Files that are copied into every package when the source has them. Weights, configs and
/// documentation have their own places.
pub(crate) const TEXT_FILES: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// The folder of chat templates with names, as transformers saves them.
pub(crate) const TEMPLATE_FOLDER: &str = "additional_chat_templates/";

/// The ending of their names.
pub(crate) const TEMPLATE_ENDING: &str = ".jinja";

/// Of those, the files that a fine-tune may bring along.
pub(crate) const TOKENIZER_FILES: &[&str] = &[
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Whether files of `torch.save` are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pickles {
    /// They are refused.
    Refuse,
    /// They are read where there are no `.safetensors`; nothing of them is run.
    Read,
}

/// Where a source came from, as manifests record it.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// `org/model`; `None` for a folder.
    pub repo: Option<String>,
    /// The commit.
    pub commit: Option<String>,
    /// The part of the repository that it is.
    pub subfolder: Option<String>,
    /// SHA-256 of files for which the hub states it; the files were checked against it.
    pub sha256: BTreeMap<String, [u8; 32]>,
}

/// The mark that some editors put before a text.
pub(crate) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A text without the mark before it.
pub(crate) fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// Whether a name is that of a file that other programs leave beside those of a model: hidden files,
/// such as `._model.gguf` (`AppleDouble`) and `.DS_Store`, and locks of editors.
pub(crate) fn is_stray(name: &str) -> bool {
    name.starts_with('.') || name.starts_with("~$")
}

/// Whether a file of this name may be one of `torch.save` that holds weights.
pub(crate) fn is_pickle(name: &str) -> bool {
    let own = PICKLE_ENDINGS.iter().any(|ending| name.ends_with(ending));
    own && !TRAINING_FILES.contains(&name) && !name.starts_with("rng_state")
}

/// Beginning, number and count of a file's name such as `model-00001-of-00003.gguf`.
pub(crate) fn gguf_part(name: &str) -> Option<(&str, u64, u64)> {
    let (rest, count) = name.strip_suffix(GGUF)?.rsplit_once("-of-")?;
    let (stem, index) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let right = digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
        right.then(|| digits.parse().ok()).flatten()
    };
    Some((stem, number(index)?, number(count)?))
}

/// Whether the file is part of what makes text of tokens.
pub(crate) fn is_tokenizer_file(name: &str) -> bool {
    TEXT_FILES.contains(&name)
        && !["config_sentence_transformers.json", "generation_config.json"].contains(&name)
}

/// Whether there is a tokenizer among files of these names; its companion files do not count.
pub(crate) fn has_tokenizer<'a>(mut names: impl Iterator<Item = &'a str>) -> bool {
    const WHOLE: &[&str] =
        &["tekken.json", "tiktoken.model", "tokenizer.json", "tokenizer.model", "vocab.json"];
    names.any(|name| WHOLE.contains(&name))
}

/// Why a small file is not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TextError {
    /// It cannot be read.
    #[error("{}: cannot be read", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is larger than any text of a model.
    #[error("{}: {problem}", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size and the limit.
        problem: String,
    },
}

/// A JSON or text file, whole.
pub(crate) fn read_text(path: &Path) -> Result<Vec<u8>, TextError> {
    let read = |source| TextError::Read { path: path.to_owned(), source };
    let size = fs::metadata(path).map_err(read)?.len();
    if size > MAX_TEXT_BYTES {
        let problem = format!("{size} bytes; at most {MAX_TEXT_BYTES} are read");
        return Err(TextError::TooLarge { path: path.to_owned(), problem });
    }
    fs::read(path).map_err(read)
}
