//! What shares a scale, by the shapes of weight and scale.

use super::{StoredError, expected, wrong};
use crate::container::TensorInfo;

/// Rows and columns that share a scale, in matrices of this height and width.
pub(super) struct Shares {
    pub(super) height: u64,
    pub(super) width: u64,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) words: String,
}

/// `block` is what the description says; without it the shapes decide.
pub(super) fn shares(
    weight: &TensorInfo,
    scale: &TensorInfo,
    block: Option<[u64; 2]>,
) -> Result<Shares, StoredError> {
    let [leading @ .., width] = weight.shape.as_slice() else {
        return Err(wrong(&weight.name, "a single number is no matrix"));
    };
    let (all, width) = (leading.iter().product::<u64>(), *width);
    let height = leading.last().copied().unwrap_or(1);
    if all == 0 || width == 0 {
        return Err(wrong(&weight.name, format!("it is empty: {:?}", weight.shape)));
    }
    let count: u64 = scale.shape.iter().product();
    let give = |height, rows, columns, words: &str| {
        Ok(Shares { height, width, rows, columns, words: words.to_owned() })
    };
    if count == 1 {
        return give(all, all, width, "one scale");
    }
    let outer = &leading[..leading.len().saturating_sub(1)];
    let with = |tail: &[u64]| [outer, tail].concat();
    if let Some([rows, columns]) = block {
        let wanted = with(&[height.div_ceil(rows), width.div_ceil(columns)]);
        if scale.shape != wanted {
            return Err(expected(
                scale,
                &format!("{wanted:?} for blocks of {rows}×{columns} of {:?}", weight.shape),
            ));
        }
        return give(height, rows, columns, &format!("blocks of {rows}×{columns}"));
    }
    if scale.shape == with(&[height, 1]) || scale.shape == with(&[height]) {
        return give(height, 1, width, "a scale for each row");
    }
    let matrices: u64 = outer.iter().product();
    if count == matrices && scale.shape.iter().zip(outer).all(|(found, wanted)| found == wanted) {
        return give(height, height, width, "a scale for each matrix");
    }
    if let [head @ .., groups] = scale.shape.as_slice()
        && head == leading
        && *groups > 0
        && width.is_multiple_of(*groups)
    {
        let columns = width / groups;
        return give(height, 1, columns, &format!("groups of {columns}"));
    }
    Err(expected(scale, &format!("one scale, or one for each row or group of {:?}", weight.shape)))
}
