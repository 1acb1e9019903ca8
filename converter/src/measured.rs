//! Folders of what was measured or learned: an index, and safetensors files that it names.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
    path::Path,
};

use shardpack_containers::container::{self, ContainerError, TensorInfo};

/// The bytes of an index, unless they are more than any has.
pub(crate) fn read_index(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let size = fs::metadata(path)?.len();
    if size > most {
        return Err(io::Error::other(format!("{size} bytes are no index")));
    }
    fs::read(path)
}

/// The tensors of a safetensors file, or what is wrong with its header.
pub(crate) fn tensors(file: &File) -> io::Result<Result<Vec<TensorInfo>, ContainerError>> {
    let size = file.metadata()?.len();
    let mut start = [0; 8];
    file.read_exact_at(&mut start, 0)?;
    let mut header = vec![0; container::header_bytes(&start, size) as usize];
    file.read_exact_at(&mut header, 0)?;
    Ok(container::parse_header(&header, size))
}
