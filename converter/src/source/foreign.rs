//! Recognises weight files in formats that are not read, by their first bytes, for a useful error.
//! Nothing of a pickle is executed; the names that it would import are found by scanning.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, Read as _},
    path::Path,
};

/// Endings of weight files in formats that are not read.
const ENDINGS: &[&str] = &[".bin", ".pt", ".pth"];

/// Bytes of a file that are looked at: the pickle stands first in what `torch.save` writes, and
/// that of the largest published model has some hundred kilobytes.
const LOOKED_AT_BYTES: u64 = 1 << 20;

/// Longest name of a module or function that is told from weights.
const MAX_NAME_BYTES: usize = 128;

/// Suspicious names that a message lists.
const MAX_LISTED: usize = 4;

/// What every file of `torch.save` before version 1.6 begins with: a pickled number.
const LEGACY: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// The form that can be read.
const ZIP: &str = "a pickle (torch's zip form)";

/// How.
const FLAG: &str = ", which loads faster and can run nothing, or give --allow-pickle: a restricted unpickler then reads only tensors and runs no code";

/// Says what the first of these files is that holds weights in another format, if one does.
pub(super) fn describe<'a>(
    folder: &Path,
    names: impl IntoIterator<Item = &'a String>,
) -> Option<String> {
    let foreign = |name: &&String| ENDINGS.iter().any(|ending| name.ends_with(ending));
    names.into_iter().find(foreign).map(|name| describe_file(folder, name))
}

/// Says what a file is that is not read.
pub(super) fn describe_file(folder: &Path, name: &str) -> String {
    match head(&folder.join(name)) {
        Ok(bytes) => format!("{name:?} is {}", what(&bytes)),
        Err(error) => format!("{name:?} cannot be read: {error}"),
    }
}

fn head(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LOOKED_AT_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn what(bytes: &[u8]) -> String {
    const CONVERT: &str = "convert it to safetensors first";
    const TAR: &str = "a tar archive (torch's oldest form)";
    let form = if bytes.starts_with(b"PK\x03\x04") {
        ZIP
    } else if bytes.starts_with(LEGACY) {
        "a pickle (torch's legacy form)"
    } else if bytes.first() == Some(&0x80) {
        "a pickle"
    } else if bytes.get(257..262) == Some(b"ustar") {
        return format!("{TAR}, which is not read; {CONVERT}");
    } else {
        return format!("in a format that is not read; {CONVERT}");
    };
    let calls: Vec<String> = imports(bytes).into_iter().filter(|name| !is_usual(name)).collect();
    if calls.is_empty() {
        let flag = if form == ZIP { FLAG } else { "" };
        return format!("{form}, which is not read because pickles can run code; {CONVERT}{flag}");
    }
    let more = if calls.len() > MAX_LISTED { " and more" } else { "" };
    let listed = calls[..calls.len().min(MAX_LISTED)].join(", ");
    format!(
        "{form} that names {listed}{more}, which no weights need; nothing of it was run: do not load it, and take the model from another source as .safetensors"
    )
}

/// Whether `torch.save` writes the name for tensors.
fn is_usual(name: &str) -> bool {
    ["torch.", "collections.", "numpy.", "_codecs."].iter().any(|module| name.starts_with(module))
}

/// What a pickle imports, as `module.name`: the opcode GLOBAL with two lines, and `STACK_GLOBAL`
/// after two short strings. A scan, since all is refused whatever it finds.
fn imports(bytes: &[u8]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let import = match rest[0] {
            b'c' => global(&rest[1..]),
            0x8c => stack_global(rest),
            _ => None,
        };
        match import {
            Some((name, size)) => {
                found.insert(name);
                at += size;
            }
            None => at += 1,
        }
    }
    found
}

/// Two lines, and the bytes that they take with their opcode.
fn global(bytes: &[u8]) -> Option<(String, usize)> {
    let (module, rest) = line(bytes)?;
    let (name, _) = line(rest)?;
    Some((format!("{module}.{name}"), module.len() + name.len() + 3))
}

fn line(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let end = bytes.iter().take(MAX_NAME_BYTES).position(|byte| *byte == b'\n')?;
    Some((identifier(&bytes[..end])?, &bytes[end + 1..]))
}

/// Two short strings, each put into the memo or not, and the opcode that imports them.
fn stack_global(bytes: &[u8]) -> Option<(String, usize)> {
    let (module, rest) = short_string(bytes)?;
    let (name, rest) = short_string(rest)?;
    let rest = rest.strip_prefix(&[0x93])?;
    Some((format!("{module}.{name}"), bytes.len() - rest.len()))
}

fn short_string(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let [0x8c, size, rest @ ..] = bytes else { return None };
    let (text, rest) = rest.split_at_checked(usize::from(*size))?;
    Some((identifier(text)?, rest.strip_prefix(&[0x94]).unwrap_or(rest)))
}

fn identifier(bytes: &[u8]) -> Option<&str> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.');
    let right = !bytes.is_empty() && bytes.iter().all(is_part);
    right.then(|| std::str::from_utf8(bytes).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imports_are_found_in_old_and_new_pickles() {
        let old = imports(b"\x80\x02ccollections\nOrderedDict\nq\0cposix\nsystem\nq\x01.");
        assert!(old.iter().eq(["collections.OrderedDict", "posix.system"]));
        let new = imports(b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.");
        assert!(new.iter().eq(["os.system"]));
    }

    #[test]
    fn a_cut_pickle_is_no_problem() {
        let whole = b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93cposix\nsystem\n";
        for end in 0..whole.len() {
            assert!(imports(&whole[..end]).len() < 2);
        }
    }

    #[test]
    fn each_form_is_named() {
        assert!(what(LEGACY).contains("legacy"));
        assert!(what(b"PK\x03\x04cposix\nsystem\n").contains("names posix.system"));
        assert!(what(b"").contains("not read"));
    }
}
