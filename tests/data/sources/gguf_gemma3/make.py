"""Writes gguf_gemma2, gguf_gemma3, gguf_phi3 and gguf_gpt_oss: what llama.cpp's converter makes of tiny checkpoints, with the
values that gguf-py reads, brought back to the checkpoints' and compared with them.

    make.py LLAMA_CPP SOURCES      (torch, transformers, safetensors)
"""
import hashlib, json, sys, tempfile
from pathlib import Path
root = Path(sys.argv[1]); sources = Path(sys.argv[2])
sys.path[:0] = [str(root), str(root / "gguf-py")]
import numpy as np, torch, gguf
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3TextConfig, Gemma3ForCausalLM, Phi3Config, Phi3ForCausalLM
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import TextModel

COMMON = dict(vocab_size=64, num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0)
FACTORS = [[1 + step * index for index in range(12)] for step in (0.9, 0.11)]
MODELS = {
    "gguf_gemma2": (Gemma2ForCausalLM, Gemma2Config(**COMMON, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32, query_pre_attn_scalar=32, sliding_window=8, attn_logit_softcapping=6.0, final_logit_softcapping=5.0, max_position_embeddings=128)),
    "gguf_gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**COMMON, hidden_size=32, intermediate_size=64, num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, max_position_embeddings=128, rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
    "gguf_phi3": (Phi3ForCausalLM, Phi3Config(**COMMON, hidden_size=64, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=320, original_max_position_embeddings=40, sliding_window=24, tie_word_embeddings=False, rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 40, "long_factor": FACTORS[0], "short_factor": FACTORS[1]})),
}

def checkpoint(name, folder):
    cls, config = MODELS[name]
    model = cls(config).to(torch.bfloat16)
    rng = torch.Generator().manual_seed(5)
    for key, value in sorted(model.state_dict().items()):
        value.copy_(torch.randn(value.shape, generator=rng) * 0.3)
    model.save_pretrained(folder)
    return {key: value.float().numpy() for key, value in load_file(folder / "model.safetensors").items()}

def convert(folder, out):
    cls = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
    cls.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
    if cls.__name__ == "Gemma3Model":
        # Without a tokenizer there is nothing to trim the embedding by.
        def modify(self, data, name, bid):
            yield from TextModel.modify_tensors(self, data + self.norm_shift(name), name, bid)
        cls.modify_tensors = modify
    cls(folder, gguf.LlamaFileType.MOSTLY_BF16, out, eager=True).write()

NAMES = {
    "token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight", "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_sinks": "self_attn.sinks", "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router", "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
}
def name_of(family, stored):
    if stored == "output.weight": return "lm_head.weight"
    if stored in NAMES: return "model." + NAMES[stored]
    _, layer, module, ending = stored.split(".")
    ours = NAMES[module]
    if "gemma" in family and module == "ffn_norm": ours = "pre_feedforward_layernorm"
    if family == "gguf_phi3" and module == "ffn_up": ours = "mlp.gate_up_proj"
    return f"model.layers.{layer}.{ours}" + ("" if module == "attn_sinks" else f".{ending}")

def write(family, folder, original):
    out = sources / family
    out.mkdir(exist_ok=True)
    convert(folder, out / "model.gguf")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config_of_origin.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    tensors = {}
    for tensor in gguf.GGUFReader(out / "model.gguf").tensors:
        if tensor.name.startswith("rope_factors"): continue
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if "gemma" in family and tensor.name.endswith("norm.weight"):
            values = values - np.float32(1)
        name = name_of(family, tensor.name)
        if original is not None:
            assert np.array_equal(values, original[name]), name
        kind = "cast" if tensor.tensor_type in (0, 30) and "norm" not in name else "decoded"
        tensors[name] = {"f32_sha256": hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest(), "first": [float(x) for x in values.reshape(-1)[:4]], "from": kind, "shape": shape}
    assert original is None or tensors.keys() == original.keys()
    text = {"bit_exact": True, "computed_by": "llama.cpp's converter and gguf-py", "consumed_without_output": [], "tensors": dict(sorted(tensors.items()))}
    (out / "expected.json").write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")

with tempfile.TemporaryDirectory() as folder:
    for family in MODELS:
        here = Path(folder) / family
        write(family, here, checkpoint(family, here))
    # The first layer of another fixture.
    here = Path(folder) / "gguf_gpt_oss"
    here.mkdir()
    config = json.loads((sources / "mxfp4_gpt_oss/config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (here / "config.json").write_text(json.dumps(config))
    tensors = load_file(sources / "mxfp4_gpt_oss/model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}, here / "model.safetensors")
    write("gguf_gpt_oss", here, None)
