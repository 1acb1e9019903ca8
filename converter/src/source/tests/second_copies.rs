//! Files beside a model that are no part of it, and weights under other names.

use shardpack_containers::container;
use shardpack_quantize::Dtype;

use super::*;

/// A safetensors file of vectors of F32, each with a value.
fn weights(tensors: &[(&str, f32)]) -> Vec<u8> {
    let info = |(name, _): &(&str, f32)| TensorInfo {
        name: (*name).to_owned(),
        dtype: Dtype::F32,
        shape: vec![1],
        offset: 0,
        size: 4,
    };
    let mut bytes = container::header(&tensors.iter().map(info).collect::<Vec<_>>());
    bytes.extend(tensors.iter().flat_map(|(_, value)| value.to_le_bytes()));
    bytes
}

fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn value(source: &Source, tensor: &str) -> f32 {
    f32::from_le_bytes(source.read_tensor(tensor).unwrap().unwrap().try_into().unwrap())
}

#[track_caller]
fn check(files: &[(&str, &[u8])], expected: &[(&str, f32)], left_aside: &[&str]) {
    let folder = folder(files);
    let source = Source::open(folder.path()).unwrap();
    for (tensor, expected) in expected {
        assert_eq!(value(&source, tensor), *expected, "{tensor}");
    }
    assert_eq!(source.tensors().count(), expected.len());
    for name in left_aside {
        let note = |note: &String| note.contains(name) && note.contains("left aside");
        assert!(source.notes.iter().any(note), "{name}: {:?}", source.notes);
    }
    assert_eq!(source.notes.len(), left_aside.len(), "{:?}", source.notes);
}

#[test]
fn a_second_copy_is_left_aside_as_transformers_chooses() {
    let (first, second) = (weights(&[("a", 1.0), ("b", 2.0)]), weights(&[("a", 3.0), ("b", 4.0)]));
    let (one, two) = (weights(&[("a", 5.0)]), weights(&[("b", 6.0)]));
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    let shards = [
        ("model-00001-of-00002.safetensors", one.as_slice()),
        ("model-00002-of-00002.safetensors", two.as_slice()),
    ];
    let single = ("model.safetensors", first.as_slice());
    let of_shards = [("a", 5.0), ("b", 6.0)];
    let variant = ("model.fp16.safetensors", second.as_slice());
    check(&[single, variant], &[("a", 1.0), ("b", 2.0)], &[variant.0]);
    let vendors = ("consolidated.safetensors", second.as_slice());
    check(&[single, vendors], &[("a", 1.0), ("b", 2.0)], &[vendors.0]);
    let with_index = [shards[0], shards[1], (INDEX, index.as_slice())];
    check(&[&shards[..], &[vendors]].concat(), &of_shards, &[vendors.0]);
    check(&[&with_index[..], &[vendors]].concat(), &of_shards, &[vendors.0]);
    check(&[&with_index[..], &[variant]].concat(), &of_shards, &[variant.0]);
    // The single file comes first where it is whole, with the shards and without.
    let both = [&with_index[..], &[single]].concat();
    check(&both, &[("a", 1.0), ("b", 2.0)], &[shards[0].0, shards[1].0]);
    check(&[with_index[2], single], &[("a", 1.0), ("b", 2.0)], &[]);
    // A part of it is no whole model.
    let part = ("model.safetensors", one.as_slice());
    check(&[&with_index[..], &[part]].concat(), &of_shards, &[part.0]);
    // What holds some tensors twice and others once belongs to nothing that is known.
    let mixed = weights(&[("b", 7.0), ("c", 8.0)]);
    let folder = folder(&[single, ("model-other.safetensors", &mixed)]);
    let error = Source::open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("model-other.safetensors") && error.contains("\"b\""), "{error}");
}

#[test]
fn files_of_other_programs_are_not_those_of_the_model() {
    let whole = weights(&[("a", 1.0)]);
    let stray: [(&str, &[u8]); 4] = [
        ("._model.safetensors", b"\0\x05\x16\x07"),
        (".DS_Store", b"\0\0\0\x01Bud1"),
        ("Thumbs.db", b"\xd0\xcf\x11\xe0"),
        ("model.safetensors.part", b"half of it"),
    ];
    check(&[&[("model.safetensors", whole.as_slice())], &stray[..]].concat(), &[("a", 1.0)], &[]);
    let refused = |files: &[(&str, &[u8])], words: &[&str]| {
        let folder = folder(files);
        let error = words_of(Source::open(folder.path()));
        for word in words {
            assert!(error.contains(word), "{word}: {error}");
        }
    };
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n";
    refused(&[("model.safetensors", pointer)], &["git lfs pull", "model.safetensors"]);
    let unfinished = ("model.safetensors.aria2", b"state".as_slice());
    refused(&[("model.safetensors", &whole), unfinished], &["unfinished", ".aria2"]);
}

fn words_of(source: Result<Source, SourceError>) -> String {
    words(&source.err().unwrap())
}

#[test]
fn weights_are_told_by_what_they_hold() {
    let whole = weights(&[("a", 1.0)]);
    check(&[("pytorch_model.bin", &whole), ("readme", b"text")], &[("a", 1.0)], &[]);
    let folder = folder(&[("weights.bin", &whole), ("model.safetensors", &weights(&[("a", 2.0)]))]);
    let named = Source::open(&folder.path().join("weights.bin")).unwrap();
    assert_eq!(value(&named, "a"), 1.0);
    let error = words_of(Source::open(&folder.path().join("config.json")));
    assert!(error.contains("neither a GGUF file nor one of safetensors"), "{error}");
    // A folder's one GGUF file among what is called so, and one of any name.
    let gguf = fs::read(fixture("gguf_q8_0").join("model.gguf")).unwrap();
    for (name, other) in [("m.gguf", "._m.gguf"), ("m.gguf", "broken.gguf"), ("sha256-0a", "x")] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(name), &gguf).unwrap();
        fs::write(folder.path().join(other), b"\0\x05\x16\x07").unwrap();
        let source = Source::open(folder.path()).unwrap();
        assert_eq!(source.weights.files[0].name, name);
        let file = Source::open(&folder.path().join(name)).unwrap();
        assert_eq!(file.tensors().count(), source.tensors().count());
    }
}
