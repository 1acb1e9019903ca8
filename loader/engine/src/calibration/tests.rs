//! Moments of a reference model, against what its layers are known to read.

use shardpack_engine_api::TokenId;

use super::*;
use crate::testing::{package::Recipe, streams::InMemory};

/// Moments of all layers and the head, and the streams before the head.
fn run(model: &'static str, threads: usize) -> (Vec<Moments>, Vec<Vec<f32>>) {
    let folder = tempfile::tempdir().unwrap();
    let package = Recipe::plain(model, 1).write(folder.path()).remove(0);
    let sequences: Vec<Vec<TokenId>> =
        (0..3).map(|at| (0..11 + at).map(|k| TokenId((7 * k + at) % 50 + 1)).collect()).collect();
    let mut run = CalibrationRun::open(&package, &sequences, threads).unwrap();
    let mut streams = InMemory::default();
    run.embed(&mut streams).unwrap();
    let mut moments = Vec::new();
    for layer in 0..run.layers() {
        streams.turn();
        moments.extend(run.layer(layer, &mut streams, &mut |_| {}).unwrap());
    }
    streams.turn();
    moments.extend(run.head(&mut streams).unwrap());
    (moments, streams.from)
}

#[test]
fn inputs_that_are_shared_are_summed_once_and_threads_change_no_bit() {
    let (moments, _) = run("llama-tied", 1);
    let layer = |name: &str| format!("model.layers.0.{name}");
    let names: Vec<&[String]> = moments.iter().map(|it| &it.modules[..]).collect();
    let qkv = ["q_proj", "k_proj", "v_proj"].map(|name| layer(&format!("self_attn.{name}")));
    assert_eq!(names[0], qkv);
    assert_eq!(names[1], [layer("self_attn.o_proj")]);
    assert_eq!(names[2], [layer("mlp.gate_proj"), layer("mlp.up_proj")]);
    assert_eq!(names[3], [layer("mlp.down_proj")]);
    assert_eq!(*names.last().unwrap(), ["model.embed_tokens"]);
    assert!(moments.iter().all(|it| it.tokens == [11 + 12 + 13]));
    assert_eq!(run("llama-tied", 2).0, moments);
}

#[test]
fn moments_are_symmetric_and_their_trace_is_that_of_normalised_vectors() {
    let (moments, _) = run("llama-tied", 2);
    for it in &moments {
        let (inputs, sums) = (it.inputs, &it.sums[0]);
        assert_eq!((it.block, sums.len()), (inputs, inputs * inputs));
        for i in 0..inputs {
            assert!(sums[i * inputs + i] >= 0.0);
            for j in 0..i {
                let (one, other) = (sums[i * inputs + j], sums[j * inputs + i]);
                // Dot products of the same vectors in the same order.
                assert_eq!(one.to_bits(), other.to_bits(), "{:?} {i} {j}", it.modules);
            }
        }
    }
}

#[test]
fn a_part_of_a_package_holds_what_was_wanted_alone() {
    let folder = tempfile::tempdir().unwrap();
    let package = Recipe::plain("llama-tied", 1).write(folder.path()).remove(0);
    let options = OpenOptions::stored(1);
    let part = Package::open_some(&package, &options, &|it| layer_of(it) == Some(1)).unwrap();
    let whole = Package::open(&package, &options, &|_| {}).unwrap();
    let mut found = 0;
    for tensor in &whole.manifest().tensors {
        let held = part.tensor(&tensor.name).map(|held| held.bytes().to_vec());
        let expected = whole.tensor(&tensor.name).map(|held| held.bytes().to_vec());
        let wanted = layer_of(tensor) == Some(1);
        assert_eq!(held, expected.filter(|_| wanted), "{}", tensor.name);
        found += usize::from(wanted);
    }
    assert!(found > 5);
}
