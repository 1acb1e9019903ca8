//! The diagonals of moments as llama.cpp's importance matrix.

use std::{fs::File, os::unix::fs::FileExt as _, path::Path};

use anyhow::Context;
use shardpack_containers::{
    container::{header_bytes, parse_header},
    imatrix::MeanSquares,
};
use shardpack_formats::{Calibration, calibration::InputMoments};

use crate::failure::Failure;

/// Mean squares of the inputs of every module.
pub(super) fn figures(folder: &Path, index: &Calibration) -> Result<Vec<MeanSquares>, Failure> {
    let mut figures = Vec::new();
    for entry in &index.inputs {
        let path = folder.join(&entry.file);
        let columns = diagonal(&path, entry).with_context(|| path.display().to_string())?;
        let of = |module: &String| MeanSquares { module: module.clone(), columns: columns.clone() };
        figures.extend(entry.modules.iter().map(of));
    }
    Ok(figures)
}

fn diagonal(path: &Path, entry: &InputMoments) -> anyhow::Result<Vec<f32>> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut start = [0; 8];
    file.read_exact_at(&mut start, 0)?;
    let mut header = vec![0; header_bytes(&start, size) as usize];
    file.read_exact_at(&mut header, 0)?;
    let tensors = parse_header(&header, size)?;
    let tensor = tensors.iter().find(|tensor| tensor.name == entry.modules[0]);
    let tensor = tensor.context("a tensor of the index is missing")?;
    let mut columns = Vec::new();
    let mut row = vec![0; entry.block as usize * 4];
    for (matrix, tokens) in entry.tokens.iter().enumerate() {
        for input in 0..entry.inputs {
            let at = (matrix as u64 * entry.inputs + input) * entry.block * 4;
            file.read_exact_at(&mut row, tensor.offset + at)?;
            let within = (input % entry.block) as usize * 4;
            let four = [row[within], row[within + 1], row[within + 2], row[within + 3]];
            columns.push(f32::from_le_bytes(four) / (*tokens).max(1) as f32);
        }
    }
    Ok(columns)
}
