//! Files of both forms, honest and hostile.

use proptest::prelude::*;

use super::*;

/// A file of the older form.
fn legacy(entries: &[(&str, i32, &[f32])], tail: &[u8]) -> Vec<u8> {
    let mut bytes = (entries.len() as i32).to_le_bytes().to_vec();
    for (name, calls, figures) in entries {
        bytes.extend((name.len() as i32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(calls.to_le_bytes());
        bytes.extend((figures.len() as i32).to_le_bytes());
        bytes.extend(figures.iter().flat_map(|figure| figure.to_le_bytes()));
    }
    bytes.extend(tail);
    bytes
}

/// Chunk count and text's name, as they end a file.
fn tail(chunks: i32, name: &str) -> Vec<u8> {
    [&chunks.to_le_bytes(), &(name.len() as i32).to_le_bytes(), name.as_bytes()].concat()
}

/// A GGUF file of F32 tensors (name, dimensions, values).
fn gguf(kind: &str, tensors: &[(&str, &[u64], &[f32])]) -> Vec<u8> {
    fn put(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend(3_u64.to_le_bytes());
    put(&mut bytes, "general.type");
    bytes.extend(8_u32.to_le_bytes());
    put(&mut bytes, kind);
    put(&mut bytes, "imatrix.datasets");
    bytes.extend([9_u32, 8].iter().flat_map(|value| value.to_le_bytes()));
    bytes.extend(1_u64.to_le_bytes());
    put(&mut bytes, "wiki.txt");
    put(&mut bytes, "imatrix.chunk_count");
    bytes.extend([4_u32, 20].iter().flat_map(|value| value.to_le_bytes()));
    let mut offset = 0_u64;
    for (name, dims, values) in tensors {
        put(&mut bytes, name);
        bytes.extend((dims.len() as u32).to_le_bytes());
        bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += (values.len() as u64 * 4).next_multiple_of(32);
    }
    for (_, _, values) in tensors {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    bytes
}

fn dense() -> Vec<u8> {
    gguf(
        "imatrix",
        &[
            ("blk.0.attn_q.weight.in_sum2", &[4, 1], &[0.0, 20.0, 40.0, 20.0]),
            ("blk.0.attn_q.weight.counts", &[1, 1], &[10.0]),
            ("blk.0.attn_q.weight.in_sum", &[4, 1], &[0.0, -1.0, 2.0, 1.0]),
        ],
    )
}

/// Written by gguf-py, see `make_imatrix.py` beside it.
#[test]
fn a_file_of_another_writer_reads_the_same() {
    let bytes = include_bytes!("../../tests/data/imatrix.gguf");
    let importance = Importance::parse(bytes).unwrap();
    let columns = |module: &str| importance.columns[module].as_slice();
    for part in ["q_proj", "k_proj", "v_proj"] {
        assert_eq!(columns(&format!("model.layers.0.self_attn.{part}")), [0.5, 1.0, 1.5]);
    }
    let experts = columns("model.layers.0.mlp.switch_mlp.down_proj");
    assert_eq!(experts, [0.5, 1.5, 1.0, 1.0, 1.5, 0.5]);
    assert_eq!(columns("lm_head"), [1.0; 4]);
    assert_eq!(importance.columns.len(), 5);
    assert_eq!(importance.unmapped, ["blk.3.ssm_out.weight"]);
    assert_eq!(importance.chunks, Some(50));
    assert_eq!(importance.datasets, ["first.txt", "zweite Datei.txt"]);
}

const QUERY: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn both_forms_of_one_calibration_agree() {
    let old = legacy(&[("blk.0.attn_q.weight", 3, &[0.0, 6.0, 12.0, 6.0])], &tail(20, "wiki.txt"));
    let (old, new) = (Importance::parse(&old).unwrap(), Importance::parse(&dense()).unwrap());
    assert_eq!(old, new);
    assert_eq!(new.of(QUERY, 1, 4).unwrap(), Some([1e-6, 1.0, 2.0, 1.0].as_slice()));
    assert_eq!((new.chunks, new.datasets), (Some(20), vec!["wiki.txt".to_owned()]));
    assert_eq!(old.of("model.layers.0.self_attn.k_proj", 1, 4).unwrap(), None);
}

#[test]
fn what_is_written_is_read() {
    let of = |module: &str, columns: &[f32]| MeanSquares {
        module: module.to_owned(),
        columns: columns.to_vec(),
    };
    let written = write(
        &[
            of(QUERY, &[0.0, 2.0, 4.0, 2.0]),
            of("model.layers.0.mixer.in_proj", &[1.0]),
            of("lm_head", &[1.0, 3.0]),
        ],
        20,
    );
    let importance = Importance::parse(&written).unwrap();
    assert_eq!(importance.of(QUERY, 1, 4).unwrap(), Some([1e-6, 1.0, 2.0, 1.0].as_slice()));
    assert_eq!(importance.columns["lm_head"], [0.5, 1.5]);
    assert_eq!((importance.columns.len(), importance.chunks), (2, Some(20)));
}

#[test]
fn a_file_may_end_before_its_trailer() {
    let entries: &[(&str, i32, &[f32])] = &[("output.weight", 0, &[1.0, 3.0])];
    for (tail, chunks, texts) in [
        (vec![], None, 0),
        (7_i32.to_le_bytes().to_vec(), Some(7), 0),
        (tail(7, ""), Some(7), 0),
        (tail(7, "x"), Some(7), 1),
    ] {
        let importance = Importance::parse(&legacy(entries, &tail)).unwrap();
        assert_eq!(importance.columns["lm_head"], [0.5, 1.5]);
        assert_eq!((importance.chunks, importance.datasets.len()), (chunks, texts));
    }
}

#[test]
fn experts_are_normalised_each_and_those_without_tokens_are_even() {
    let file = gguf(
        "imatrix",
        &[
            ("blk.1.ffn_down_exps.weight.counts", &[1, 3], &[5.0, 0.0, 1.0]),
            ("blk.1.ffn_down_exps.weight.in_sum2", &[2, 3], &[1.0, 3.0, 0.0, 0.0, 3e9, 1e9]),
        ],
    );
    let importance = Importance::parse(&file).unwrap();
    let columns = importance.of("model.layers.1.mlp.switch_mlp.down_proj", 3, 2).unwrap();
    assert_eq!(columns, Some([0.5, 1.5, 1.0, 1.0, 1.5, 0.5].as_slice()));
}

#[test]
fn what_cannot_be_used_is_listed() {
    let file = legacy(
        &[
            ("blk.0.ssm_out.weight", 1, &[1.0]),
            ("blk.0.attn_q.weight", 1, &[0.0, 0.0]),
            ("blk.0.attn_k.weight", 1, &[f32::MAX, f32::MAX]),
        ],
        &[],
    );
    let importance = Importance::parse(&file).unwrap();
    assert_eq!(importance.unmapped, ["blk.0.ssm_out.weight"]);
    assert_eq!(importance.silent, ["blk.0.attn_q.weight"]);
    assert_eq!(importance.columns.len(), 1);
    assert_eq!(importance.columns["model.layers.0.self_attn.k_proj"], [1.0, 1.0]);
}

#[test]
fn figures_for_another_model_name_the_module() {
    let error = Importance::parse(&dense()).unwrap().of(QUERY, 1, 5).unwrap_err().to_string();
    assert!(error.contains(QUERY) && error.contains("5 inputs") && error.contains("4 figures"));
    assert!(Importance::parse(&dense()).unwrap().of(QUERY, u64::MAX, 2).is_err());
}

#[track_caller]
fn check_refused(bytes: &[u8], expected: &str) {
    let error = Importance::parse(bytes).unwrap_err().to_string();
    assert!(error.contains(expected), "{error:?} does not contain {expected:?}");
}

#[test]
fn impossible_entries_are_refused_by_name() {
    let one = |name, calls, figures: &[f32]| legacy(&[(name, calls, figures)], &[]);
    check_refused(
        &one("blk.0.attn_q.weight", 1, &[1.0, f32::NAN]),
        "attn_q.weight\": the sum of squares of input 1 is NaN",
    );
    check_refused(&one("blk.0.attn_q.weight", 1, &[-1.0]), "input 0 is -1");
    check_refused(&one("blk.0.attn_q.weight", -1, &[1.0]), "blk.0.attn_q.weight: ncall is -1");
    check_refused(&one("x", 1, &[]), "\"x\": it has no figures");
    check_refused(
        &legacy(&[("x", 1, &[1.0]), ("x", 1, &[1.0])], &[]),
        "\"x\": it stands in the file twice",
    );
    check_refused(
        &legacy(&[("blk.0.attn_q.weight", 1, &[1.0]), ("blk.0.attn_qkv.weight", 1, &[1.0])], &[]),
        "a second entry for model.layers.0.self_attn.q_proj",
    );
    let pair = |sums: &[f32], counts: &[f32]| {
        let dims = [counts.len() as u64];
        let sum_dims = [sums.len() as u64];
        gguf("imatrix", &[("x.in_sum2", &sum_dims, sums), ("x.counts", &dims, counts)])
    };
    check_refused(&pair(&[1.0; 5], &[1.0; 2]), "\"x\": 5 figures for 2 matrices");
    check_refused(&pair(&[1.0; 4], &[1.0, -2.0]), "\"x\": matrix 1 saw -2 tokens");
    check_refused(
        &gguf("imatrix", &[("x.in_sum2", &[1], &[1.0])]),
        "\"x\": its tensor counts is missing",
    );
    check_refused(
        &gguf("imatrix", &[("x.counts", &[1], &[1.0]), ("x.counts", &[1], &[1.0])]),
        "\"x.counts\": it stands in the file twice",
    );
}

#[test]
fn files_of_another_kind_are_refused() {
    check_refused(&gguf("model", &[]), "GGUF file of type \"model\"");
    check_refused(b"GGUF\x01\0\0\0", "GGUF version 1");
    check_refused(b"GGUF\0\0\0\x03", "big-endian");
    check_refused(b"{\"a\": 1}", "entries, expected 1 to");
    check_refused(&[0; 4], "0 entries");
    check_refused(&[0xff; 8], "the number of entries is -1");
    check_refused(&[], "the number of entries of 4 bytes, 0 are left");
}

#[test]
fn promises_beyond_the_file_take_no_memory() {
    let mut bytes = legacy(&[("x", 1, &[1.0])], &[]);
    let at = bytes.len() - 8;
    bytes[at..at + 4].copy_from_slice(&i32::MAX.to_le_bytes());
    check_refused(&bytes, "x: figures of 8589934588 bytes, 4 are left");
    let counts = |dims: &[u64]| gguf("imatrix", &[("x.counts", dims, &[])]);
    check_refused(&counts(&[1 << 40]), "\"x.counts\": it does not lie inside the file");
    check_refused(&counts(&[1 << 40, 1 << 40]), "too many elements");
    check_refused(&counts(&[1 << 63]), "it is too large");
    let mut many = b"GGUF\x03\0\0\0".to_vec();
    many.extend([0xff; 16]);
    check_refused(&many, "tensors and");
}

#[test]
fn tensors_that_share_bytes_are_refused() {
    let values = [1.0; 64];
    let mut bytes = gguf("imatrix", &[("x.in_sum2", &[64], &values), ("y.in_sum2", &[64], &[])]);
    // The second tensor's offset is put on the first one's data.
    let at = bytes.windows(9).position(|window| window == b"y.in_sum2").unwrap() + 9 + 4 + 8 + 4;
    assert_eq!(bytes[at..at + 8], 256_u64.to_le_bytes());
    bytes[at..at + 8].fill(0);
    check_refused(&bytes, "\"y.in_sum2\": it shares its bytes with another");
}

#[test]
fn every_shorter_file_is_refused_or_lacks_only_its_trailer() {
    let old = legacy(&[("output.weight", 1, &[1.0, 3.0])], &tail(7, "text"));
    let whole = old.len() - tail(7, "text").len();
    for len in 0..old.len() {
        let parsed = Importance::parse(&old[..len]);
        assert_eq!(parsed.is_ok(), len == whole || len == whole + 4, "{len} bytes");
    }
    // The last tensor of the file is `in_sum`, which is not read.
    let new = dense();
    let needed = new.len() - 32 - 4 * 4 + 4;
    for len in 0..new.len() {
        let parsed = Importance::parse(&new[..len]);
        assert!(parsed.is_err() || len >= needed - 4, "{len} bytes");
    }
}

proptest! {
    #[test]
    fn damaged_files_give_errors_or_usable_figures(
        newer in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = if newer {
            dense()
        } else {
            legacy(&[("blk.0.attn_q.weight", 3, &[0.0, 6.0, 12.0, 6.0])], &tail(20, "t"))
        };
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(importance) = Importance::parse(&bytes) {
            for columns in importance.columns.values() {
                prop_assert!(columns.iter().all(|column| column.is_finite() && *column > 0.0));
            }
        }
    }
}
