//! Text files of the user's own.

use std::{fs, path::Path};

use anyhow::{Context as _, anyhow};

/// The mark that some editors put before a text.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// What texts in UTF-16 begin with.
const UTF_16: [&[u8]; 2] = [b"\xff\xfe", b"\xfe\xff"];

/// The text of a file in UTF-8, without a byte order mark.
///
/// # Errors
/// When the file cannot be read, or is in another encoding.
pub(crate) fn read(path: &Path) -> anyhow::Result<String> {
    let shown = || path.display().to_string();
    let bytes = fs::read(path).with_context(shown)?;
    if UTF_16.iter().any(|mark| bytes.starts_with(mark)) {
        return Err(anyhow!(
            "{}: the text is in UTF-16, expected UTF-8; save it as UTF-8",
            shown()
        ));
    }
    let mut text = String::from_utf8(bytes)
        .map_err(|error| anyhow!("{}: not UTF-8: {}", shown(), error.utf8_error()))?;
    if text.starts_with(BYTE_ORDER_MARK) {
        text.drain(..BYTE_ORDER_MARK.len_utf8());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_left_out_and_other_encodings_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.txt");
        let read = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            read(&path).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(read("\u{feff}in \u{feff}".as_bytes()).unwrap(), "in \u{feff}");
        assert_eq!(read(b"in").unwrap(), "in");
        let error = read(b"\xff\xfei\0n\0").unwrap_err();
        assert!(error.contains("UTF-16") && error.contains("text.txt"), "{error}");
        assert!(read(b"in \xff").unwrap_err().contains("not UTF-8"));
    }
}
