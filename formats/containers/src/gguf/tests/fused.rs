//! Fused matrices, taken apart.

use super::*;
use crate::stored::{Logical, group_gguf};

fn parts_of(keys: &[(String, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)]) -> Vec<Part> {
    let header = header(keys, tensors, 1 << 16);
    Model::new(&header).unwrap().parts(&header.tensors).unwrap()
}

/// The values of a tensor in a file whose floats count from zero.
fn values(tensor: &Logical) -> Vec<f32> {
    let rows = 0..tensor.row_count();
    let [window] = tensor.windows(rows.clone()).try_into().unwrap();
    let row = window.row_bytes / 4;
    let columns = window.columns.start / 4..window.columns.end / 4;
    let bytes: Vec<u8> = window
        .rows
        .clone()
        .flat_map(|at| columns.clone().map(move |column| at * row + column))
        .flat_map(|index| (index as f32).to_le_bytes())
        .collect();
    let mut out = Vec::new();
    tensor.decode(rows, &[&bytes], &mut out).unwrap();
    out
}

#[test]
fn queries_keys_and_values_are_rows_of_one_after_the_other() {
    // Four heads of 16 for queries, two for keys and values: 64, 32 and 32 rows.
    let more = [("attention.head_count_kv", count(2))];
    let mut keys = keys("llama", &more);
    for (_, value) in keys.iter_mut().filter(|(key, _)| key.ends_with("head_count")) {
        *value = count(4);
    }
    let tensors: [(&str, &[u64], u32, u64); 2] =
        [("blk.0.attn_qkv.weight", &[64, 128], 8, 0), ("blk.0.attn_qkv.bias", &[128], 0, 8704)];
    let parts = parts_of(&keys, &tensors);
    let turned = Rows::Rotary { head: 16 };
    let expected = [
        ("q_proj.weight", turned, vec![64, 64], 0, 64 * 68),
        ("k_proj.weight", turned, vec![32, 64], 64 * 68, 32 * 68),
        ("v_proj.weight", Rows::Same, vec![32, 64], 96 * 68, 32 * 68),
        ("q_proj.bias", turned, vec![64], 8704, 256),
        ("k_proj.bias", turned, vec![32], 8960, 128),
        ("v_proj.bias", Rows::Same, vec![32], 9088, 128),
    ];
    assert_eq!(parts.len(), expected.len());
    for (part, (name, rows, shape, offset, size)) in parts.iter().zip(expected) {
        let name = format!("model.layers.0.self_attn.{name}");
        assert_eq!(part.name.as_deref(), Some(name.as_str()));
        let found = (part.rows, part.offset - parts[0].offset, part.size);
        assert_eq!((found, &part.shape), ((rows, offset, size), &shape), "{name}");
    }
    let header = header(&keys, &[("blk.0.attn_qkv.weight", &[64, 96], 8, 0)], 1 << 16);
    let error = Model::new(&header).unwrap().parts(&header.tensors).unwrap_err().to_string();
    assert!(error.contains("attn_qkv") && error.contains("96 rows, expected 64"), "{error}");
    // Where the checkpoint has one matrix too, it stays one.
    let phi = parts_of(&self::keys("phi3", &[]), &[("blk.0.attn_qkv.weight", &[64, 96], 8, 0)]);
    assert_eq!(phi[0].name.as_deref(), Some("model.layers.0.self_attn.qkv_proj.weight"));
}

#[test]
fn gate_and_up_of_every_expert_are_rows_of_its_matrix() {
    let tensors: [(&str, &[u64], u32, u64); 1] =
        [("blk.0.ffn_gate_up_exps.weight", &[32, 6, 2], 8, 0)];
    let parts = parts_of(&keys("qwen3moe", &[]), &tensors);
    let found: Vec<_> = parts.iter().map(|part| part.name.clone().unwrap()).collect();
    let name = |expert, matrix| format!("model.layers.0.mlp.experts.{expert}.{matrix}.weight");
    let expected = [(0, "gate_proj"), (0, "up_proj"), (1, "gate_proj"), (1, "up_proj")];
    assert_eq!(found, expected.map(|(expert, matrix)| name(expert, matrix)));
    for (place, part) in parts.iter().enumerate() {
        assert_eq!((part.shape.as_slice(), part.size), ([3, 32].as_slice(), 3 * 34));
        assert_eq!(part.offset - parts[0].offset, place as u64 * 3 * 34);
    }
    let odd = header(&keys("qwen3moe", &[]), &[(tensors[0].0, &[32, 5, 2], 8, 0)], 1 << 10);
    let error = Model::new(&odd).unwrap().parts(&odd.tensors).unwrap_err().to_string();
    assert!(error.contains("ffn_gate_up_exps"), "{error}");
}

#[test]
fn experts_that_stay_in_stacks_are_halves_of_theirs() {
    let tensors: [(&str, &[u64], u32, u64); 2] = [
        ("blk.0.ffn_gate_up_exps.weight", &[3, 4, 2], 0, 0),
        ("blk.0.ffn_gate_up_exps.bias", &[4, 2], 0, 96),
    ];
    let parts = parts_of(&keys("gpt-oss", &[]), &tensors);
    assert!(parts.iter().all(|part| part.info().size == part.size));
    let shapes: Vec<_> = parts.iter().map(|part| part.info().shape).collect();
    assert_eq!(shapes, [vec![2, 4, 3], vec![2, 4, 3], vec![2, 4], vec![2, 4]]);
    let grouped = group_gguf(&parts).unwrap();
    let tensor = |name: &str| {
        let name = format!("model.layers.0.mlp.experts.{name}");
        grouped.tensors.iter().find(|tensor| tensor.name == name).unwrap()
    };
    let rows = |rows: [u64; 4]| rows.map(|row| [row * 3, row * 3 + 1, row * 3 + 2]).concat();
    let floats = |indices: Vec<u64>| indices.iter().map(|it| *it as f32).collect::<Vec<f32>>();
    assert_eq!(tensor("gate_proj.weight").shape, [2, 2, 3]);
    assert_eq!(values(tensor("gate_proj.weight")), floats(rows([0, 1, 4, 5])));
    assert_eq!(values(tensor("up_proj.weight")), floats(rows([2, 3, 6, 7])));
    assert_eq!(values(tensor("gate_proj.bias")), [0.0, 1.0, 4.0, 5.0]);
    assert_eq!(values(tensor("up_proj.bias")), [2.0, 3.0, 6.0, 7.0]);
}
