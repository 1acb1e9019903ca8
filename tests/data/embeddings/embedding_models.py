#!/usr/bin/env python3
"""Tiny random embedding models and the vectors that sentence-transformers computes for them.

    python embedding_models.py OUT

For each model OUT/<name>/ holds the files that publishers have: the decoder without an LM head,
`modules.json` and the configurations and weights of its modules, and `expected.safetensors` with
tokens_a, tokens_b (i32) and embedding_a, embedding_b (f32). Weights are bf16, those of dense layers
f32. Made with sentence-transformers 6.2.0, transformers 5.23.0, torch 2.15.0 (CPU, eager attention).
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import Gemma3TextConfig, Gemma3TextModel, MistralConfig, MistralModel
from transformers import Qwen3Config, Qwen3Model

V, H = 64, 96
BASE = dict(
    vocab_size=V, hidden_size=H, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    pad_token_id=0, use_cache=False, attn_implementation="eager",
)
OLD = "sentence_transformers.models."


def dense(width, to):
    return Dense(width, to, bias=False, activation_function=torch.nn.Identity())


MODELS = {
    # As Qwen3-Embedding: names without `model.`, the class of the whole, a tied head that is absent.
    "qwen3_embedding": dict(
        model=(
            Qwen3Model,
            Qwen3Config(
                **BASE, tie_word_embeddings=True,
                rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
            ),
        ),
        config=dict(architectures=["Qwen3ForCausalLM"], rope_theta=1000000.0),
        modules=[Pooling(H, pooling_mode="lasttoken"), Normalize()],
        prompts={"query": "Instruct: retrieve\nQuery:", "document": ""},
    ),
    # As e5-mistral: no head at all, and no word of one.
    "e5_mistral": dict(
        model=(MistralModel, MistralConfig(**BASE, tie_word_embeddings=False, sliding_window=None)),
        config=dict(architectures=["MistralModel"], rope_theta=10000.0),
        modules=[Pooling(H, pooling_mode="lasttoken"), Normalize()],
        prompts={},
    ),
    # As EmbeddingGemma: attention in both directions, within windows in every other layer.
    "embedding_gemma": dict(
        model=(
            Gemma3TextModel,
            Gemma3TextConfig(
                **dict(BASE, num_hidden_layers=3), use_bidirectional_attention=True,
                sliding_window=14, query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
        ),
        config=dict(architectures=["Gemma3TextModel"], rope_theta=1000000.0, rope_local_base_freq=10000.0),
        modules=[Pooling(H, pooling_mode="mean"), dense(H, 80), dense(80, 48), Normalize()],
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
    ),
}


def randomise(module, seed):
    gen = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if not value.is_floating_point():
            continue
        noise = torch.randn(value.shape, generator=gen)
        norm = value.dim() == 1
        value.copy_((1.0 if norm else 0.0) + noise * (0.2 if norm else 0.5 / value.shape[-1] ** 0.5 * 2))
        if not isinstance(module, Dense):
            value.copy_(value.bfloat16().float())


@torch.no_grad()
def make(out, name, spec):
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    cls, config = spec["model"]
    model = cls(config).float().eval()
    randomise(model, len(name))
    state = {key: value.bfloat16().contiguous() for key, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads(config.to_json_string(use_diff=False))
    keep = set(BASE) | {
        "model_type", "rms_norm_eps", "hidden_act", "hidden_activation", "attention_bias", "tie_word_embeddings",
        "sliding_window", "layer_types", "query_pre_attn_scalar", "use_bidirectional_attention",
    }
    keep -= {"attn_implementation"}
    written = {key: value for key, value in written.items() if key in keep and value is not None}
    written.update(spec["config"], torch_dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    modules = [dict(idx=0, name="0", path="", type=OLD + "Transformer")]
    for index, module in enumerate(spec["modules"], 1):
        kind = type(module).__name__
        path = f"{index}_{kind}"
        modules.append(dict(idx=index, name=str(index), path=path, type=OLD + kind))
        if kind == "Pooling":
            (folder / path).mkdir(exist_ok=True)
            # The older spelling, which nearly all published models have.
            modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "lasttoken"}
            flags = {f"pooling_mode_{key}": module.pooling_mode == mode for key, mode in modes.items()}
            pooling = dict(word_embedding_dimension=H, include_prompt=True, **flags)
            (folder / path / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")
        elif kind == "Dense":
            (folder / path).mkdir(exist_ok=True)
            randomise(module, index)
            weights = {key: value.contiguous() for key, value in module.state_dict().items()}
            save_file(weights, folder / path / "model.safetensors")
            width = dict(in_features=module.in_features, out_features=module.out_features, bias=False)
            width["activation_function"] = "torch.nn.modules.linear.Identity"
            (folder / path / "config.json").write_text(json.dumps(width, indent=2) + "\n")
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    document = dict(prompts=spec["prompts"], default_prompt_name=None, similarity_fn_name="cosine")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(document, indent=2) + "\n")
    expected = {}
    gen = torch.Generator().manual_seed(7)
    for label, length in [("a", 13), ("b", 80)]:
        tokens = torch.randint(3, V, (1, length), generator=gen)
        features = dict(
            token_embeddings=model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state,
            attention_mask=torch.ones_like(tokens),
        )
        for module in spec["modules"]:
            features = module(features)
        expected[f"tokens_{label}"] = tokens[0].int()
        expected[f"embedding_{label}"] = features["sentence_embedding"][0].contiguous()
    save_file(expected, folder / "expected.safetensors")
    print(name, expected["embedding_a"].shape, expected["embedding_b"][:4])


if __name__ == "__main__":
    for name, spec in MODELS.items():
        make(pathlib.Path(sys.argv[1]), name, spec)
