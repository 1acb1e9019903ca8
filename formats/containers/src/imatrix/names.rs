//! llama.cpp's names of matrices in ours.

/// Marks that ggml leaves on names of derived tensors; the importance is the plain one's.
const DERIVED: [&str; 5] = [" (reshaped)", " (view)", " (cont)", " (transposed)", " (permuted)"];

/// Matrices of a layer. A fused matrix has the inputs of each of its parts.
const PER_LAYER: &[(&str, &[&str])] = &[
    ("attn_q", &["self_attn.q_proj"]),
    ("attn_k", &["self_attn.k_proj"]),
    ("attn_v", &["self_attn.v_proj"]),
    ("attn_qkv", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("attn_output", &["self_attn.o_proj"]),
    ("attn_q_a", &["self_attn.q_a_proj"]),
    ("attn_q_b", &["self_attn.q_b_proj"]),
    ("attn_kv_a_mqa", &["self_attn.kv_a_proj_with_mqa"]),
    ("attn_kv_b", &["self_attn.kv_b_proj"]),
    ("attn_k_b", &["self_attn.embed_q"]),
    ("attn_v_b", &["self_attn.unembed_out"]),
    ("ffn_gate", &["mlp.gate_proj"]),
    ("ffn_up", &["mlp.up_proj"]),
    ("ffn_down", &["mlp.down_proj"]),
    ("ffn_gate_inp", &["mlp.gate"]),
    ("ffn_gate_exps", &["mlp.switch_mlp.gate_proj"]),
    ("ffn_up_exps", &["mlp.switch_mlp.up_proj"]),
    ("ffn_gate_up_exps", &["mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj"]),
    ("ffn_down_exps", &["mlp.switch_mlp.down_proj"]),
    ("ffn_gate_shexp", &["mlp.shared_experts.gate_proj"]),
    ("ffn_up_shexp", &["mlp.shared_experts.up_proj"]),
    ("ffn_down_shexp", &["mlp.shared_experts.down_proj"]),
];

/// The modules whose inputs an entry describes; empty for a tensor that is none of them.
pub(super) fn modules(entry: &str) -> Vec<String> {
    let mut name = entry;
    while let Some(plain) = DERIVED.iter().find_map(|mark| name.strip_suffix(mark)) {
        name = plain;
    }
    let Some(name) = name.strip_suffix(".weight") else { return Vec::new() };
    match name {
        "output" => return vec!["lm_head".to_owned()],
        "token_embd" => return vec!["model.embed_tokens".to_owned()],
        _ => {}
    }
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let Some((layer, matrix)) = layer else { return Vec::new() };
    // One spelling per layer: `blk.01` would be a second name for `blk.1`.
    let Some(layer) = layer.parse::<u32>().ok().filter(|number| number.to_string() == layer) else {
        return Vec::new();
    };
    let ours = PER_LAYER.iter().find(|(theirs, _)| *theirs == matrix);
    ours.into_iter()
        .flat_map(|(_, ours)| ours.iter())
        .map(|ours| format!("model.layers.{layer}.{ours}"))
        .collect()
}

/// The entry of a module that llama.cpp stores as a matrix of its own.
pub(super) fn entry(module: &str) -> Option<String> {
    match module {
        "lm_head" => return Some("output.weight".to_owned()),
        "model.embed_tokens" => return Some("token_embd.weight".to_owned()),
        _ => {}
    }
    let (layer, matrix) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let (theirs, _) = PER_LAYER.iter().find(|(_, ours)| *ours == [matrix])?;
    Some(format!("blk.{layer}.{theirs}.weight"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(entry: &str, expected: &[&str]) {
        assert_eq!(modules(entry), expected, "{entry}");
    }

    #[test]
    fn names_of_llama_cpp_are_ours() {
        check("blk.0.attn_q.weight", &["model.layers.0.self_attn.q_proj"]);
        check("blk.31.attn_output.weight", &["model.layers.31.self_attn.o_proj"]);
        check("blk.7.ffn_down.weight", &["model.layers.7.mlp.down_proj"]);
        check("blk.7.ffn_down_exps.weight", &["model.layers.7.mlp.switch_mlp.down_proj"]);
        check("output.weight", &["lm_head"]);
        check("token_embd.weight", &["model.embed_tokens"]);
        check(
            "blk.2.attn_qkv.weight",
            &[
                "model.layers.2.self_attn.q_proj",
                "model.layers.2.self_attn.k_proj",
                "model.layers.2.self_attn.v_proj",
            ],
        );
        check("blk.2.attn_q.weight (reshaped) (view)", &["model.layers.2.self_attn.q_proj"]);
    }

    #[test]
    fn modules_have_the_entries_that_stand_for_them() {
        for (theirs, ours) in PER_LAYER.iter().filter(|(_, ours)| ours.len() == 1) {
            let module = format!("model.layers.7.{}", ours[0]);
            assert_eq!(entry(&module), Some(format!("blk.7.{theirs}.weight")));
            assert_eq!(modules(&entry(&module).unwrap()), [module]);
        }
        assert_eq!(entry("lm_head").as_deref(), Some("output.weight"));
        assert_eq!(entry("model.layers.0.mixer.in_proj"), None);
    }

    #[test]
    fn other_names_are_nobody_s() {
        for entry in [
            "blk.0.attn_q.bias",
            "blk.0.ssm_out.weight",
            "blk.01.attn_q.weight",
            "blk.+1.attn_q.weight",
            "blk.attn_q.weight",
            "blk.4294967296.attn_q.weight",
            "mm.0.weight",
            "",
        ] {
            check(entry, &[]);
        }
    }
}
