//! Files of a zip archive that are stored as they are, as `torch.save` writes them all.
//!
//! | record | bytes | fields that are read |
//! |---|---|---|
//! | end | 22 | `PK\5\6` at 0; u16 entries at 10; u32 size and place of the directory at 12 and 16; u16 length of a comment at 20 |
//! | locator | 20 | `PK\6\7` at 0; u64 place of the large end at 8; stands before the end |
//! | large end | 56 | `PK\6\6` at 0; u64 entries at 32, size at 40, place at 48 |
//! | entry | 46 | `PK\1\2` at 0; u16 flags at 8, method at 10; u32 sizes at 20 and 24; u16 lengths of name, extra, comment at 28, 30, 32; u32 place at 42 |
//! | file | 30 | `PK\3\4` at 0; u16 lengths of name and extra at 26, 28; then both, then the bytes |
//!
//! Sizes and places of 2^32 − 1 stand in the entry's extra field 1 instead. All little-endian.
//!
//! Source: PKWARE's APPNOTE.TXT.

use super::PickleError;

/// Bytes at the end of an archive in which its last records stand, with the longest comment.
pub const TAIL_BYTES: u64 = (1 << 16) + 22 + 20 + 56;
/// Bytes of the record before every file.
pub const LOCAL_BYTES: u64 = 30;

/// Largest directory: 131,072 entries of 256 bytes.
const MAX_DIRECTORY_BYTES: u64 = 32 << 20;
/// Most files: one for each tensor of a shard, which holds some thousands.
const MAX_ENTRIES: u64 = 1 << 17;

/// Where the directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Directory {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Files.
    pub entries: u64,
}

/// A file of the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its path.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Where the record before it stands.
    pub offset: u64,
}

fn wrong(problem: impl Into<String>) -> PickleError {
    PickleError::Archive(problem.into())
}

/// Little-endian number of `size` bytes at `at`.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(size)?)?;
    Some(field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Finds the directory of an archive of `size` bytes by its last [`TAIL_BYTES`] (or all of them).
pub fn find_directory(tail: &[u8], size: u64) -> Result<Directory, PickleError> {
    let cut = || wrong("its end is missing; the download or copy is incomplete");
    let comment_fits = |at: &usize| {
        tail[*at..].starts_with(b"PK\x05\x06")
            && number(tail, at + 20, 2) == Some((tail.len() - at - 22) as u64)
    };
    let last = tail.len().checked_sub(22).ok_or_else(cut)?;
    let at = (0..=last).rev().find(comment_fits).ok_or_else(cut)?;
    let field = |at, size| number(tail, at, size).ok_or_else(cut);
    let (mut entries, mut length, mut offset) =
        (field(at + 10, 2)?, field(at + 12, 4)?, field(at + 16, 4)?);
    let locator = at.checked_sub(20).filter(|at| tail[*at..].starts_with(b"PK\x06\x07"));
    if let Some(locator) = locator {
        let place = field(locator + 8, 8)?;
        let start = place.checked_sub(size - tail.len() as u64);
        let start = start.and_then(|start| usize::try_from(start).ok());
        let start =
            start.filter(|at| tail.get(*at..).is_some_and(|b| b.starts_with(b"PK\x06\x06")));
        let start = start.ok_or_else(|| wrong("its large end is not where it should be"))?;
        (entries, length, offset) =
            (field(start + 32, 8)?, field(start + 40, 8)?, field(start + 48, 8)?);
    }
    if entries > MAX_ENTRIES || length > MAX_DIRECTORY_BYTES {
        return Err(wrong(format!("a directory of {entries} files and {length} bytes")));
    }
    let end = offset.checked_add(length);
    if end.is_none_or(|end| end > size) {
        return Err(wrong("its directory does not lie inside it"));
    }
    Ok(Directory { offset, size: length, entries })
}

/// The files that a directory lists.
pub fn parse_directory(bytes: &[u8], directory: Directory) -> Result<Vec<Entry>, PickleError> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut at = 0;
    for _ in 0..directory.entries {
        let (entry, size) = parse_entry(bytes.get(at..).unwrap_or_default())?;
        entries.push(entry);
        at += size;
    }
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(wrong(format!("file {:?} is in it twice", pair[0]))),
        None => Ok(entries),
    }
}

/// One entry and its bytes in the directory.
fn parse_entry(bytes: &[u8]) -> Result<(Entry, usize), PickleError> {
    let cut = || wrong("its directory is damaged");
    let field = |at, size| number(bytes, at, size).ok_or_else(cut);
    if !bytes.starts_with(b"PK\x01\x02") {
        return Err(cut());
    }
    let length = |at| Ok::<_, PickleError>(field(at, 2)? as usize);
    let (name_len, extra_len, comment_len) = (length(28)?, length(30)?, length(32)?);
    let name = bytes.get(46..46 + name_len).ok_or_else(cut)?;
    let name = std::str::from_utf8(name).map_err(|_| wrong("a file's name is no text"))?.to_owned();
    let extra = bytes.get(46 + name_len..46 + name_len + extra_len).ok_or_else(cut)?;
    if field(8, 2)? & 1 != 0 {
        return Err(wrong(format!("file {name:?} is encrypted")));
    }
    if field(10, 2)? != 0 {
        return Err(wrong(format!("file {name:?} is compressed, which torch.save never does")));
    }
    let mut large = large_fields(extra);
    let mut value = |at: usize| match field(at, 4)? {
        0xffff_ffff => large.next().ok_or_else(cut),
        value => Ok(value),
    };
    let (size, stored, offset) = (value(24)?, value(20)?, value(42)?);
    if size != stored {
        return Err(wrong(format!("file {name:?} has {stored} bytes for {size}")));
    }
    Ok((Entry { name, size, offset }, 46 + name_len + extra_len + comment_len))
}

/// The numbers of the extra field for large ones, in order.
fn large_fields(extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut at = 0;
    let mut found: &[u8] = &[];
    while let (Some(id), Some(size)) = (number(extra, at, 2), number(extra, at + 2, 2)) {
        let Some(field) = extra.get(at + 4..at + 4 + size as usize) else { break };
        if id == 1 {
            found = field;
            break;
        }
        at += 4 + size as usize;
    }
    found.chunks_exact(8).filter_map(|eight| number(eight, 0, 8))
}

/// Where a file's bytes begin, by the [`LOCAL_BYTES`] before it, in an archive of `size` bytes.
pub fn data_offset(entry: &Entry, local: &[u8], size: u64) -> Result<u64, PickleError> {
    let cut = || wrong(format!("file {:?} does not lie inside it", entry.name));
    if !local.starts_with(b"PK\x03\x04") {
        return Err(wrong(format!("file {:?} is not where its directory says", entry.name)));
    }
    let name = number(local, 26, 2).ok_or_else(cut)?;
    let extra = number(local, 28, 2).ok_or_else(cut)?;
    let start = entry.offset.checked_add(LOCAL_BYTES + name + extra);
    let end = start.and_then(|start| start.checked_add(entry.size));
    match (start, end) {
        (Some(start), Some(end)) if end <= size => Ok(start),
        _ => Err(cut()),
    }
}
