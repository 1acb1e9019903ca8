//! The older form: a plain list, recognised by not being GGUF. All integers are little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | i32 number of entries |
//! | … | per entry: i32 length of the name, the name, i32 `ncall`, i32 number of figures, f32 each |
//! | 4 | i32 chunks of text; absent in files of before 2024 |
//! | … | i32 length of the text's file name, the name; may be absent |
//!
//! A figure is the mean square of an input times `ncall`. Experts that saw no tokens are stored
//! as if every input had a mean square of 1; they cannot be told from others.

use std::collections::BTreeSet;

use super::{
    Entry, ImatrixError, MAX_ENTRIES, Raw,
    cursor::{Cursor, floats},
};

/// Longest file name of a calibration text.
const MAX_DATASET_BYTES: u32 = 4096;

pub(super) fn parse(bytes: &[u8]) -> Result<Raw, ImatrixError> {
    let mut cursor = Cursor::new(bytes);
    let entries = cursor.i32("the number of entries")?;
    if entries == 0 || u64::from(entries) > MAX_ENTRIES {
        return Err(cursor.wrong(format!("{entries} entries, expected 1 to {MAX_ENTRIES}")));
    }
    let mut raw = Raw::default();
    let mut seen = BTreeSet::new();
    for _ in 0..entries {
        let entry = parse_entry(&mut cursor)?;
        if !seen.insert(entry.name.clone()) {
            let problem = "it stands in the file twice".to_owned();
            return Err(ImatrixError::Entry { entry: entry.name, problem });
        }
        raw.entries.push(entry);
    }
    if cursor.left() > 0 {
        raw.chunks = Some(cursor.i32("the number of chunks")?);
    }
    if cursor.left() > 0 {
        let len = cursor.i32("the length of the text's name")?;
        if len > MAX_DATASET_BYTES {
            return Err(cursor.wrong(format!("a text's name of {len} bytes")));
        }
        let name = cursor.take(len.into(), "the text's name")?;
        raw.datasets.extend((len > 0).then(|| String::from_utf8_lossy(name).into_owned()));
    }
    match cursor.left() {
        0 => Ok(raw),
        left => Err(cursor.wrong(format!("{left} bytes after the end"))),
    }
}

fn parse_entry(cursor: &mut Cursor) -> Result<Entry, ImatrixError> {
    let len = cursor.i32("the length of a name")?;
    let name = cursor.name(len.into())?;
    // As llama.cpp does, a count of 0 is taken to mean that nothing need be divided.
    cursor.i32(&format!("{name}: ncall"))?;
    let figures = cursor.i32(&format!("{name}: the number of figures"))?;
    let bytes = cursor.take(u64::from(figures) * 4, &format!("{name}: figures"))?;
    Ok(Entry { name, sums: floats(bytes), counts: vec![1.0] })
}
