//! What a file is by what it holds, whatever its name is.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use shardpack_containers::{container, gguf};

/// Endings of files that are no weights, whatever they hold.
const NO_WEIGHTS: &[&str] = &[".json", ".txt", ".md", ".jinja", ".model", ".py"];

/// Whether a file of any name is one of safetensors: its first bytes are the length of a header in
/// JSON that describes all of it.
pub(crate) fn is_safetensors(folder: &Path, name: &str) -> bool {
    let path = folder.join(name);
    if NO_WEIGHTS.iter().any(|ending| name.ends_with(ending)) || !path.is_file() {
        return false;
    }
    let parsed = || -> io::Result<bool> {
        let mut file = File::open(&path)?;
        let size = file.metadata()?.len();
        let mut header = Vec::new();
        file.by_ref().take(9).read_to_end(&mut header)?;
        if header.get(8) != Some(&b'{') {
            return Ok(false);
        }
        let length = container::header_bytes(&header, size);
        file.take(length.saturating_sub(9)).read_to_end(&mut header)?;
        Ok(container::parse_header(&header, size).is_ok())
    };
    parsed().unwrap_or(false)
}

/// Whether a file of any name begins as GGUF files do.
pub(crate) fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; gguf::MAGIC.len()];
    path.is_file()
        && File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
        && magic == gguf::MAGIC
}
