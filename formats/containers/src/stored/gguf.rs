//! The tensors of GGUF files as the checkpoint had them.

use super::{
    Grouped, Logical, RowMap, StoredError,
    ggml::{Blocks, Columns, Floats, OneLess, TurnedVector},
};
use crate::gguf::{Half, Kind, Part, Rows};
use shardpack_quantize::dtype::Dtype;

/// Why some tensors stand for no weight.
const CONFIGURED: &str = "factors of rotary frequencies, which the configuration says too";

/// What the parts of a model's files stand for.
pub fn group_gguf(parts: &[Part]) -> Result<Grouped, StoredError> {
    let mut grouped = Grouped::default();
    for part in parts {
        match &part.name {
            Some(name) => grouped.tensors.push(logical(name, part)),
            None => grouped.dropped.push((part.stored.clone(), CONFIGURED)),
        }
    }
    grouped.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    grouped.dropped.sort_unstable();
    grouped.check_names()?;
    Ok(grouped)
}

fn logical(name: &str, part: &Part) -> Logical {
    let (name, shape) = (name.to_owned(), part.shape.clone());
    let parts = vec![part.stored.clone()];
    let width = shape.last().copied().unwrap_or(1);
    let mut logical = match (part.kind, part.rows) {
        (Kind::Floats(dtype), Rows::Same) => {
            return Logical { parts, ..Logical::plain(name, dtype, shape) };
        }
        (Kind::Floats(dtype), Rows::OneMore) => {
            let layout = OneLess(Floats { dtype, width });
            return Logical::reordered(name, shape, dtype, parts, layout);
        }
        (Kind::Floats(dtype), Rows::Rotary { head }) if shape.len() == 1 => {
            let layout = TurnedVector { dtype, len: width, head };
            return Logical::reordered(name, shape, dtype, parts, layout);
        }
        (Kind::Floats(dtype), Rows::HalfColumns(half)) => {
            let first = if half == Half::First { 0 } else { width };
            let layout = Columns { dtype, whole: 2 * width, first, width };
            return Logical::reordered(name, shape, dtype, parts, layout);
        }
        (Kind::Floats(dtype), _) => {
            Logical::reordered(name, shape, dtype, parts, Floats { dtype, width })
        }
        (kind, _) => {
            let format = format!("GGUF {kind}");
            Logical::decoded(name, shape, Dtype::F16, format, parts, Blocks { kind, width })
        }
    };
    match part.rows {
        Rows::Rotary { head } => logical.rows = RowMap::Rotary { head },
        Rows::Half(half) => {
            let height = part.shape.get(1).copied().unwrap_or(1).max(1);
            let skipped = if half == Half::First { 0 } else { height };
            logical.rows = RowMap::Half { height, skipped };
        }
        Rows::Same | Rows::OneMore | Rows::HalfColumns(_) => {}
    }
    logical
}
