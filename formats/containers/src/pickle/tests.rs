//! Programs and archives that are cut, lie, or want more than tensors.

use proptest::prelude::*;

use super::*;
use shardpack_quantize::dtype::Dtype;

const FIXTURE: &[u8] =
    include_bytes!("../../../../tests/data/sources/pickle_bin/pytorch_model.bin");
const MALICIOUS: &[u8] =
    include_bytes!("../../../../tests/data/sources/pickle_malicious/pytorch_model.bin");

fn entries(archive: &[u8]) -> Result<Vec<zip::Entry>, PickleError> {
    let size = archive.len() as u64;
    let tail = &archive[archive.len() - archive.len().min(zip::TAIL_BYTES as usize)..];
    let directory = zip::find_directory(tail, size)?;
    let bytes = &archive[directory.offset as usize..][..directory.size as usize];
    zip::parse_directory(bytes, directory)
}

fn program(archive: &[u8]) -> Vec<u8> {
    let entries = entries(archive).unwrap();
    let pickle = entries.iter().find(|entry| entry.name.ends_with("data.pkl")).unwrap();
    let local = &archive[pickle.offset as usize..][..zip::LOCAL_BYTES as usize];
    let start = zip::data_offset(pickle, local, archive.len() as u64).unwrap() as usize;
    archive[start..start + pickle.size as usize].to_vec()
}

#[test]
fn a_dictionary_of_tensors_is_understood() {
    let saved = parse(&program(FIXTURE)).unwrap();
    let of = |name: &str| saved.iter().find(|tensor| tensor.name.ends_with(name)).unwrap();
    let gate = of("gate_proj.weight");
    assert_eq!((&*gate.shape, &*gate.strides), ([96, 64].as_slice(), [1, 96].as_slice()));
    assert_eq!(gate.dtype, Dtype::BF16);
    let (keys, values) = (of("k_proj.weight"), of("v_proj.weight"));
    assert_eq!(keys.storage, values.storage);
    assert_ne!(keys.offset, values.offset);
}

#[track_caller]
fn check_refused(program: &[u8], expected: &str) {
    let error = parse(program).unwrap_err().to_string();
    assert!(error.contains(expected), "{error:?} does not contain {expected:?}");
}

#[test]
fn what_no_weights_need_is_refused_by_name() {
    check_refused(&program(MALICIOUS), "posix.system");
    check_refused(b"\x80\x02cos\nsystem\n.", "calls os.system");
    check_refused(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "calls builtins.eval");
    check_refused(b"\x80\x02ctorch\nload\n.", "calls torch.load");
    // INST, OBJ, NEWOBJ, EXT1 and the persistent id of protocol 0.
    for opcode in [b'i', b'o', 0x81, 0x82, b'P'] {
        check_refused(&[0x80, 2, opcode], "which no weights need");
    }
    check_refused(b"\x80\x01.", "protocol 1");
    check_refused(b"\x80\x02K\x01.", "it is a number, expected a dictionary");
    check_refused(b"\x80\x02}X\x01\0\0\0aK\x01s.", "\"a\" is a number, expected a tensor");
    check_refused(b"\x80\x02}(X\x01\0\0\0au.", "a key has no value");
    check_refused(b"\x80\x02h\x07.", "remembers what it never saw");
    check_refused(b"\x80\x02(t0", "which no weights need");
    check_refused(b"\x80\x02}((.", "takes a value");
    check_refused(b"\x80\x02Q", "takes a value");
    check_refused(b"\x80\x02)Q", "no storage");
    check_refused(b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R", "unknown arguments");
    check_refused(b"\x80\x02K\x01)R", "it calls a number");
    check_refused(b"", "ends too early");
}

#[test]
fn every_shorter_program_is_refused() {
    let whole = program(FIXTURE);
    for len in 0..whole.len() {
        assert!(parse(&whole[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn every_shorter_archive_is_refused() {
    for len in (FIXTURE.len() - 3000)..FIXTURE.len() {
        assert!(entries(&FIXTURE[..len]).is_err(), "{len} bytes");
    }
}

fn saved(shape: &[u64], strides: &[u64], offset: u64) -> Saved {
    Saved {
        name: "x".to_owned(),
        dtype: Dtype::F32,
        storage: "0".to_owned(),
        storage_len: 24,
        offset,
        shape: shape.to_vec(),
        strides: strides.to_vec(),
    }
}

#[track_caller]
fn check_placed(saved: &Saved, expected: Result<(u64, bool), &str>) {
    match (place(saved, 1000, 96), expected) {
        (Ok(found), Ok(wanted)) => assert_eq!((found.stored.offset, found.is_turned), wanted),
        (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
        (found, wanted) => panic!("{found:?}, expected {wanted:?}"),
    }
}

#[test]
fn tensors_lie_inside_their_storage_in_one_of_two_orders() {
    check_placed(&saved(&[4, 6], &[6, 1], 0), Ok((1000, false)));
    check_placed(&saved(&[2, 6], &[6, 1], 12), Ok((1048, false)));
    check_placed(&saved(&[4, 6], &[1, 4], 0), Ok((1000, true)));
    check_placed(&saved(&[1, 24], &[7, 1], 0), Ok((1000, false)));
    check_placed(&saved(&[], &[], 3), Ok((1012, false)));
    check_placed(&saved(&[0, 5], &[5, 1], 24), Ok((1096, false)));
    check_placed(&saved(&[4, 6], &[6, 1], 1), Err("does not lie inside its storage"));
    check_placed(&saved(&[4, 6], &[6, 1], u64::MAX), Err("does not lie inside its storage"));
    check_placed(&saved(&[4, 6], &[0, 1], 0), Err("neither one after the other"));
    check_placed(&saved(&[2, 3], &[1, 4], 0), Err("neither one after the other"));
    check_placed(&saved(&[1 << 40, 1 << 40, 0], &[0, 0, 0], 0), Err("too many elements"));
    let other = place(&saved(&[4, 6], &[6, 1], 0), 1000, 92).unwrap_err().to_string();
    assert!(other.contains("another size"), "{other}");
}

proptest! {
    #[test]
    fn damaged_programs_and_archives_give_errors_or_tensors(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = program(FIXTURE);
        let mut archive = MALICIOUS.to_vec();
        for (at, byte) in changes {
            let (in_program, in_archive) = (at.index(bytes.len()), at.index(archive.len()));
            bytes[in_program] = byte;
            archive[in_archive] = byte;
        }
        if let Ok(saved) = parse(&bytes) {
            for tensor in &saved {
                let size = tensor.storage_len.saturating_mul(tensor.dtype.size_bytes() as u64);
                if let Ok(placed) = place(tensor, 0, size) {
                    prop_assert!(placed.stored.offset + placed.stored.size <= size);
                }
            }
        }
        let size = archive.len() as u64;
        for entry in entries(&archive).unwrap_or_default() {
            if let Some(local) = archive.get(entry.offset.min(size) as usize..)
                && let Ok(start) = zip::data_offset(&entry, local, size)
            {
                prop_assert!(start + entry.size <= size);
            }
        }
    }
}
