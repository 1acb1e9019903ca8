"""The answers of a Llama checkpoint in 32-bit floats, and how far another's are from them.

Windows as the program's `eval` has them: of each, the second half counts. NumPy alone: neither the program nor
a peer decides what its own weights are worth.
"""

import json

import numpy as np


def norm(x, weight, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rotations(config, length):
    """Cosines and sines, [tokens, head]."""
    head = config["head_dim"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    steps = theta ** (-np.arange(0, head, 2) / head)
    angles = np.arange(length)[:, None] * np.concatenate((steps, steps))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x, rotation):
    first, second = np.split(x, 2, -1)
    return x * rotation[0] + np.concatenate((-second, first), -1) * rotation[1]


def attention(y, weight, config, rotation):
    windows, length, _ = y.shape
    head = config["head_dim"]
    q, k, v = ((y @ weight(f"self_attn.{it}_proj").T).reshape(windows, length, -1, head).swapaxes(1, 2) for it in "qkv")
    share = q.shape[1] // k.shape[1]
    k, v = rotate(k, rotation).repeat(share, 1), v.repeat(share, 1)
    scores = rotate(q, rotation) @ k.swapaxes(2, 3) / np.float32(np.sqrt(head))
    scores += np.triu(np.full((length, length), -np.inf, np.float32), 1)
    mixed = (softmax(scores) @ v).swapaxes(1, 2).reshape(windows, length, -1)
    return mixed @ weight("self_attn.o_proj").T


def answers(weights, config, windows):
    """Log probabilities, [counted tokens, vocabulary], for windows [windows, tokens]."""
    epsilon, length = config["rms_norm_eps"], windows.shape[1]
    rotation = rotations(config, length)
    x = weights["model.embed_tokens.weight"][windows]
    for layer in range(config["num_hidden_layers"]):

        def weight(name, layer=layer):
            return weights[f"model.layers.{layer}.{name}.weight"]

        x = x + attention(norm(x, weight("input_layernorm"), epsilon), weight, config, rotation)
        y = norm(x, weight("post_attention_layernorm"), epsilon)
        gate = y @ weight("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    x = norm(x[:, length // 2 : length - 1], weights["model.norm.weight"], epsilon)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    found = (x.reshape(-1, x.shape[-1]) @ head.T).astype(np.float64)
    found -= found.max(-1, keepdims=True)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


def windows_of(tokens, length):
    whole = len(tokens) // length
    return np.array(tokens[: whole * length]).reshape(whole, length)


class Judge:
    """Holds the 16-bit model's answers."""

    def __init__(self, folder, weights, tokens, context):
        self.config = json.loads((folder / "config.json").read_text())
        self.windows = windows_of(tokens, context)
        self.right = self.windows[:, context // 2 + 1 :].ravel()
        # Each part's logits fit in memory whatever the vocabulary.
        self.parts = np.array_split(self.windows, max(1, len(self.windows) // 4))
        self.reference = [answers(weights, self.config, part).astype(np.float32) for part in self.parts]

    def judge(self, weights):
        """Mean KL divergence from the 16-bit model, its standard error, and perplexity."""
        divergences, losses, at = [], [], 0
        for part, reference in zip(self.parts, self.reference):
            found = answers(weights, self.config, part)
            reference = reference.astype(np.float64)
            divergences.append((np.exp(reference) * (reference - found)).sum(-1))
            right = self.right[at : at + len(found)]
            losses.append(-found[np.arange(len(found)), right])
            at += len(found)
        divergences, losses = np.concatenate(divergences), np.concatenate(losses)
        error = divergences.std() / np.sqrt(len(divergences))
        return float(divergences.mean()), float(error), float(np.exp(losses.mean()))
