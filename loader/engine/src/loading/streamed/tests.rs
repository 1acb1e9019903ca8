//! Packages over socket pairs: whole, cut at any byte, damaged, refused.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::mpsc::{SyncSender, sync_channel},
    thread,
};

use super::{
    super::{
        OpenOptions, Package, Packing,
        tests::{package, package_of, packed, tensor},
    },
    *,
};

/// A connection whose other side sends the package, and ends after some bytes if told.
fn connect(folder: &Path, cut: Option<usize>) -> Box<dyn WeightStream> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let folder = folder.to_owned();
    let mut theirs = Cut { stream: theirs, left: cut.unwrap_or(usize::MAX) };
    // Its error is the cut.
    thread::spawn(move || send_package(&folder, &mut theirs));
    Box::new(ours)
}

/// A connection that ends after some bytes.
struct Cut {
    stream: UnixStream,
    left: usize,
}

impl Read for Cut {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read(into)
    }
}

impl Write for Cut {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        if self.left == 0 {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let count = self.stream.write(&from[..from.len().min(self.left)])?;
        self.left -= count;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn streams(count: usize) -> (SyncSender<Box<dyn WeightStream>>, WeightStreams) {
    let (arrive, arriving) = sync_channel(64);
    (arrive, WeightStreams::new(arriving, count))
}

fn stream(folder: &Path, count: usize, packing: Packing) -> Result<Package, OpenError> {
    let (arrive, streams) = streams(count);
    (0..count).for_each(|_| arrive.send(connect(folder, None)).unwrap());
    let manifest = streams.manifest()?;
    Package::stream(manifest, &streams, packing, &|_| {})
}

/// Whether two packages have the same bytes in memory.
fn assert_same(found: &Package, expected: &Package) {
    assert_eq!(found.manifest().tensors, expected.manifest().tensors);
    for entry in &expected.manifest().tensors {
        let [found, expected] =
            [found, expected].map(|package| package.tensor(&entry.name).unwrap());
        assert_eq!(found.packing(), expected.packing());
        assert!(found.bytes() == expected.bytes(), "tensor {}", entry.name);
    }
    assert!(found.documents().eq(expected.documents()));
}

fn large() -> (tempfile::TempDir, PathBuf) {
    let tensors = vec![
        tensor("a", 3),
        packed("b.weight", &[16_000]),
        packed("c.weight", &[3, 8]),
        tensor("d", 3_000_000),
    ];
    package_of(tensors, [4, 64])
}

#[test]
fn a_streamed_package_is_the_package() {
    for (_directory, folder) in [package(), large()] {
        fs::write(folder.join("unlisted"), "").unwrap();
        for (count, packing) in
            [(1, Packing::Stored), (2, Packing::Interleaved), (5, Packing::Stored)]
        {
            let options = OpenOptions { threads: 2, packing };
            let expected = Package::open(&folder, &options, &|_| {}).unwrap();
            let found = stream(&folder, count, packing).unwrap();
            assert_same(&found, &expected);
            assert_eq!(found.report().bytes, expected.report().bytes);
        }
    }
}

#[test]
fn connections_that_end_anywhere_are_replaced_and_nothing_is_lost() {
    let (_directory, folder) = large();
    let options = OpenOptions { threads: 2, packing: Packing::Interleaved };
    let expected = Package::open(&folder, &options, &|_| {}).unwrap();
    let manifest_bytes = fs::metadata(folder.join(MANIFEST_FILE)).unwrap().len() as usize;
    let total = expected.report().bytes as usize;
    for seed in 0..24_usize {
        let (arrive, streams) = streams(2);
        let cuts = (0..6).map(|at| match (seed + at) % 3 {
            // Within the manifest, a head, a chunk.
            0 => (seed * 97 + at * 13) % manifest_bytes,
            1 => manifest_bytes + 9 + (seed + at) % 9,
            _ => manifest_bytes + (seed * 7_919_317 + at * 104_729) % total,
        });
        cuts.for_each(|cut| arrive.send(connect(&folder, Some(cut))).unwrap());
        (0..2).for_each(|_| arrive.send(connect(&folder, None)).unwrap());
        let manifest = streams.manifest().unwrap();
        let found = Package::stream(manifest, &streams, options.packing, &|_| {}).unwrap();
        assert_same(&found, &expected);
    }
}

#[test]
fn damage_at_the_source_is_named_and_never_given_away() {
    let (_directory, folder) = package();
    let weights = folder.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    bytes[5_000_000] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let error = stream(&folder, 2, Packing::Stored).unwrap_err().to_string();
    assert!(error.contains(r#"file "model.safetensors", chunk 1 "#), "{error}");
}

#[test]
fn what_the_source_cannot_read_is_told_at_once() {
    let (_directory, folder) = package();
    fs::remove_file(folder.join("config.json")).unwrap();
    let error = stream(&folder, 2, Packing::Stored).unwrap_err();
    let OpenError::Chunk { file, source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(file, "config.json");
    assert!(source.to_string().contains("config.json: No such file"), "{source}");
}

#[test]
fn without_a_connection_there_is_an_error() {
    let (_directory, folder) = package();
    let (arrive, streams) = streams(1);
    arrive.send(connect(&folder, Some(100))).unwrap();
    drop(arrive);
    let error = streams.manifest().unwrap_err();
    assert!(matches!(error, OpenError::ManifestStream { .. }), "{error:?}");
}

#[test]
fn what_is_no_answer_ends_the_stream() {
    for (answer, expected) in [
        (&b"\x07\0\0\0\0\0\0\0\0"[..], "an answer of kind 7"),
        (b"\0\xff\xff\xff\xff\xff\xff\xff\xff", "larger than any"),
        (b"\x01\x04\0\0\0\0\0\0\0busy", "busy"),
    ] {
        let (arrive, streams) = streams(1);
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        arrive.send(Box::new(ours)).unwrap();
        theirs.write_all(answer).unwrap();
        let OpenError::ManifestStream { source } = streams.manifest().unwrap_err() else {
            panic!("another error")
        };
        assert!(source.to_string().contains(expected), "{source}");
    }
}

#[test]
fn what_is_no_request_ends_the_sender() {
    let (_directory, folder) = package();
    for request in [[9, 0, 0, 0, 0, 0, 0, 0, 0], *b"GET / HTT"] {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.write_all(&request).unwrap();
        assert!(send_package(&folder, &mut theirs).unwrap_err().to_string().contains("of kind"));
    }
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    ours.write_all(&[CHUNK, 99, 0, 0, 0, 1, 0, 0, 0]).unwrap();
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    send_package(&folder, &mut theirs).unwrap();
    drop(theirs);
    let mut answered = Vec::new();
    ours.read_to_end(&mut answered).unwrap();
    let text = String::from_utf8_lossy(&answered[HEAD_BYTES..]);
    assert!(answered[0] == REFUSED && text.contains("no chunk 1 of a file 99"), "{text}");
}
