"""Checkpoints in floats and the files of llama.cpp and MLX: written, and read back as 32-bit floats.

What a peer has quantized is decoded by the peer's own library.
"""

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
CONTROL = gguf.TokenType.CONTROL


def load(folder):
    """Every tensor of a checkpoint, as MLX arrays."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= mx.load(str(file))
    return found


def floats(tensors):
    return {name: np.array(it.astype(mx.float32)) for name, it in tensors.items()}


def gguf_name(name):
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[name]}.weight"


def heads_of(name, config):
    """How many heads' rows llama.cpp has in another order than the checkpoint; none for most matrices."""
    if name.endswith("q_proj.weight"):
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if name.endswith("k_proj.weight") else 0


def interleaved(rows, heads):
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def halved(rows, heads):
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(source, out, pre_tokenizer):
    """The checkpoint in 32-bit floats, so that llama.cpp quantizes the very weights."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["head_dim"])
    add_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()), config, pre_tokenizer)
    for name, rows in floats(load(source)).items():
        heads = heads_of(name, config)
        writer.add_tensor(gguf_name(name), interleaved(rows, heads) if heads else rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, tokenizer, config, pre_tokenizer):
    tokens = {token: at for token, at in tokenizer["model"]["vocab"].items()}
    special = {it["id"] for it in tokenizer["added_tokens"] if it["special"]}
    tokens |= {it["content"]: it["id"] for it in tokenizer["added_tokens"]}
    ordered = sorted(tokens, key=tokens.get)
    assert [tokens[it] for it in ordered] == list(range(config["vocab_size"])), "the vocabulary has gaps"
    merges = [it if isinstance(it, str) else " ".join(it) for it in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(ordered)
    writer.add_token_types([CONTROL if at in special else gguf.TokenType.NORMAL for at in range(len(ordered))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def read_gguf(file, source):
    """The tensors of a GGUF file in 32-bit floats, by the checkpoint's names, and how many bytes they took."""
    config = json.loads((source / "config.json").read_text())
    stored = {it.name: it for it in gguf.GGUFReader(file).tensors}
    found = {}
    for name, tensor in load(source).items():
        it = stored.pop(gguf_name(name))
        rows = gguf.quants.dequantize(it.data, it.tensor_type).reshape(tensor.shape).astype(np.float32)
        heads = heads_of(name, config)
        found[name] = halved(rows, heads) if heads else rows
    size = sum(int(it.n_bytes) for it in gguf.GGUFReader(file).tensors if it.name not in stored)
    assert not stored, f"{file} has tensors that the checkpoint has not: {list(stored)}"
    return found, size


def read_mlx(folder):
    """The same of a model that mlx-lm has quantized."""
    config = json.loads((folder / "config.json").read_text())
    rules, stored = config["quantization"], load(folder)
    found = {}
    for name, tensor in stored.items():
        base = name.removesuffix(".weight")
        if f"{base}.scales" in stored and name.endswith(".weight"):
            rule = rules.get(base)
            rule = rule if isinstance(rule, dict) else rules
            scales, biases = (stored[f"{base}.{it}"].astype(mx.float32) for it in ("scales", "biases"))
            found[name] = mx.dequantize(tensor, scales, biases, rule["group_size"], rule["bits"])
        elif not name.endswith((".scales", ".biases")):
            found[name] = tensor
    return floats(found), sum(it.nbytes for it in stored.values())
