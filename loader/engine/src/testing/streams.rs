//! Hidden states between layers, for tests.

use std::io;

use crate::calibration::Streams;

/// Streams in memory.
#[derive(Default)]
pub(crate) struct InMemory {
    /// What was written last.
    pub(crate) from: Vec<Vec<f32>>,
    to: Vec<Vec<f32>>,
}

impl InMemory {
    /// What was written is read from now on.
    pub(crate) fn turn(&mut self) {
        self.from = std::mem::take(&mut self.to);
    }
}

impl Streams for InMemory {
    fn read(&mut self, sequence: usize) -> io::Result<Vec<f32>> {
        Ok(self.from[sequence].clone())
    }

    fn write(&mut self, _: usize, values: &[f32]) -> io::Result<()> {
        self.to.push(values.to_vec());
        Ok(())
    }
}
