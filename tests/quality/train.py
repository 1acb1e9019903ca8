"""Trains the models that are compared, on public-domain text: one from nothing, one that is fine-tuned.

    train.py new OUT TEXT STEPS               a Llama of 21 M parameters with kjv-4m's tokenizer
    train.py tune OUT TEXT STEPS CHECKPOINT   a Llama checkpoint in floats, moved off the grid of its source

Numbers of steps decide, not the clock. The last line is JSON: the loss on text that was left out, before
and after, and for `tune` how far the weights have moved, in steps of their 4-bit grid.
"""

import json
import math
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

KJV_4M = Path(__file__).resolve().parents[1] / "data/kjv-4m"
# Every side is a multiple of 256, so that llama.cpp's K-quants take every matrix.
NEW = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def shapes(config):
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = (hidden,)
        for name, rows, columns in (
            ("self_attn.q_proj", heads, hidden), ("self_attn.k_proj", kv_heads, hidden),
            ("self_attn.v_proj", kv_heads, hidden), ("self_attn.o_proj", hidden, heads),
            ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            found[f"{at}{name}.weight"] = (rows, columns)
    return found


def start(config):
    torch.manual_seed(7)
    spread = {"o_proj": 1, "down_proj": 1}
    weights = {}
    for name, shape in shapes(config).items():
        deep = any(it in name for it in spread)
        scale = 0.02 / (math.sqrt(2 * config["num_hidden_layers"]) if deep else 1)
        weights[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * scale
    return weights


def norm(x, weight, epsilon):
    return F.rms_norm(x, weight.shape, weight, epsilon)


def rotate(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def logits(weights, config, tokens):
    """[batch, tokens] to [batch, tokens, vocabulary]."""
    head, epsilon = config["head_dim"], config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    steps = theta ** (-torch.arange(0, head, 2) / head)
    angles = torch.arange(tokens.shape[1])[:, None] * torch.cat((steps, steps))
    cosine, sine = angles.cos(), angles.sin()
    x = F.embedding(tokens, weights["model.embed_tokens.weight"])
    split = lambda y: y.unflatten(-1, (-1, head)).transpose(1, 2)
    for layer in range(config["num_hidden_layers"]):
        w = lambda name: weights[f"model.layers.{layer}.{name}.weight"]
        y = norm(x, w("input_layernorm"), epsilon)
        q, k, v = (split(F.linear(y, w(f"self_attn.{it}_proj"))) for it in "qkv")
        y = F.scaled_dot_product_attention(
            rotate(q, cosine, sine), rotate(k, cosine, sine), v, is_causal=True, enable_gqa=True
        )
        x = x + F.linear(y.transpose(1, 2).flatten(2), w("self_attn.o_proj"))
        y = norm(x, w("post_attention_layernorm"), epsilon)
        y = F.silu(F.linear(y, w("mlp.gate_proj"))) * F.linear(y, w("mlp.up_proj"))
        x = x + F.linear(y, w("mlp.down_proj"))
    x = norm(x, weights["model.norm.weight"], epsilon)
    return F.linear(x, weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))


def loss_of(weights, config, batch):
    found = logits(weights, config, batch[:, :-1])
    return F.cross_entropy(found.flatten(0, 1), batch[:, 1:].flatten())


def train(weights, config, tokens, steps, peak, length, rows):
    held, tokens = tokens[: 8 * (length + 1)].view(8, -1), tokens[8 * (length + 1) :]
    for it in weights.values():
        it.requires_grad_(True)
    matrices = [it for it in weights.values() if it.dim() == 2]
    vectors = [it for it in weights.values() if it.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0}], betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        before = loss_of(weights, config, held).item()
    began = time.monotonic()
    for step in range(steps):
        rate = peak * min(1, (step + 1) / 20) * (1 - 0.97 * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        at = torch.randint(len(tokens) - length - 1, (rows,), generator=generator)
        loss = loss_of(weights, config, torch.stack([tokens[i : i + length + 1] for i in at]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"{time.monotonic() - began:.0f} s, step {step}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        after = loss_of(weights, config, held).item()
    return {"steps": steps, "tokens": steps * rows * length, "loss_before": before, "loss_after": after}


def moved(before, after):
    """Per matrix, the mean change of a weight by the step of a 4-bit grid in groups of 32: least, mean."""
    found = []
    for name, old in before.items():
        if old.dim() == 2:
            groups = old.flatten().view(-1, 32)
            step = (groups.amax(1) - groups.amin(1)).clamp_min(1e-9)[:, None] / 15
            found.append((((after[name].float().flatten().view(-1, 32) - groups) / step).abs().mean()).item())
    return {"least_moved": min(found), "mean_moved": sum(found) / len(found)}


def main(kind, out, text, steps, checkpoint=None):
    out, steps = Path(out), int(steps)
    source = Path(checkpoint) if kind == "tune" else KJV_4M
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    lines = Path(text).read_text().splitlines(keepends=True)
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(7)).tolist()
    encoded = tokenizer.encode_batch([lines[i] for i in order], add_special_tokens=False)
    tokens = torch.tensor([token for it in encoded for token in it.ids])
    if kind == "new":
        config, weights = NEW, start(NEW)
        figures = train(weights, config, tokens, steps, peak=2e-3, length=256, rows=4)
    else:
        config = json.loads((source / "config.json").read_text())
        weights = {k: v.float() for it in source.glob("*.safetensors") for k, v in load_file(it).items()}
        old = {name: it.clone() for name, it in weights.items()}
        figures = train(weights, config, tokens, steps, peak=2e-4, length=128, rows=2)
    weights = {name: it.detach().bfloat16().contiguous() for name, it in weights.items()}
    if kind == "tune":
        figures |= moved(old, weights)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copy(source / name, part / name)
    figures |= {"parameters": sum(it.numel() for it in weights.values())}
    (part / "training.json").write_text(json.dumps(figures))
    part.rename(out)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
