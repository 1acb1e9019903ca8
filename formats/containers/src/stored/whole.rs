//! Tables of whole numbers, stored as floats of the same value: the tables of hash routing.

use std::ops::Range;

use super::{Damage, Layout, Logical, Window};
use crate::container::TensorInfo;
use shardpack_quantize::dtype::Dtype;

/// Endings of tables' names.
const TABLES: &[&str] = &[".tid2eid"];

/// Numbers below this are floats without loss.
const BELOW: i64 = 1 << 24;

/// Words of 32 or 64 bits.
#[derive(Clone, Debug)]
struct Whole {
    dtype: Dtype,
    width: u64,
}

/// What a stored table stands for; none for any other tensor.
pub(super) fn table(tensor: &TensorInfo) -> Option<Logical> {
    let is_table = TABLES.iter().any(|ending| tensor.name.ends_with(ending))
        && matches!(tensor.dtype, Dtype::I32 | Dtype::I64);
    let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
    let layout = Whole { dtype: tensor.dtype, width: shape.last().copied().unwrap_or(1) };
    is_table.then(|| Logical::reordered(name.clone(), shape, Dtype::F32, vec![name], layout))
}

impl Layout for Whole {
    fn windows(&self, rows: Range<u64>) -> Vec<Window> {
        vec![Window::rows(rows, self.width * self.dtype.size_bytes() as u64)]
    }

    fn decode(&self, rows: Range<u64>, parts: &[&[u8]], out: &mut [f32]) -> Result<(), Damage> {
        let words = parts[0].chunks_exact(self.dtype.size_bytes());
        for (index, (word, out)) in words.zip(out).enumerate() {
            let number = match self.dtype {
                Dtype::I32 => word.try_into().map_or(-1, i32::from_le_bytes).into(),
                _ => word.try_into().map_or(-1, i64::from_le_bytes),
            };
            if !(0..BELOW).contains(&number) {
                let at = rows.start * self.width + index as u64;
                let problem = format!("element {at} is {number}, expected a number from 0 to 2^24");
                return Err(Damage(problem));
            }
            *out = number as f32;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(name: &str, dtype: Dtype) -> TensorInfo {
        TensorInfo { name: name.to_owned(), dtype, shape: vec![2, 3], offset: 0, size: 0 }
    }

    #[test]
    fn tables_are_floats_of_the_same_value() {
        assert!(table(&stored("a.tid2eid", Dtype::F32)).is_none());
        assert!(table(&stored("a.weight", Dtype::I64)).is_none());
        let numbers = [0_i64, 255, (1 << 24) - 1, 3, 4, 5];
        let long: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let short: Vec<u8> =
            numbers.iter().flat_map(|number| (*number as i32).to_le_bytes()).collect();
        for (dtype, bytes) in [(Dtype::I64, long), (Dtype::I32, short)] {
            let table = table(&stored("a.tid2eid", dtype)).unwrap();
            assert_eq!((table.dtype, table.native), (Dtype::F32, Dtype::F32));
            let [window] = table.windows(1..2).try_into().unwrap();
            let row = 3 * dtype.size_bytes();
            assert_eq!((window.rows, window.row_bytes), (1..2, row as u64));
            let mut out = Vec::new();
            table.decode(0..2, &[&bytes], &mut out).unwrap();
            assert_eq!(out, [0.0, 255.0, 16_777_215.0, 3.0, 4.0, 5.0]);
            // Neither what a float rounds nor what is below zero.
            for bad in [1 << 24, -1_i64] {
                let bad: Vec<u8> = [&bad.to_le_bytes()[..dtype.size_bytes()], &bytes[..]].concat();
                let problem = table.decode(1..2, &[&bad[..row]], &mut out).unwrap_err();
                assert!(problem.to_string().starts_with("element 3 is "), "{problem}");
            }
        }
    }
}
