"""Writes rope.json: position embeddings by the formulas of transformers 5.23
(modeling_rope_utils.py), in float32 step by step as torch evaluates them there ("f32") and in
float64 rounded once ("f64"). Needs numpy. Values are the hex of their bits."""
import json
import math
import sys

import numpy as np

CASES = {
    "default": (32, 512, {"rope_theta": 10000.0}),
    "qwen3": (128, 40960, {"rope_theta": 1000000, "rope_scaling": None}),
    "narrow": (2, 512, {"rope_theta": 10000.0}),
    "newer": (32, 4096, {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
    "linear": (64, 4096, {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": (64, 4096, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama3": (128, 131072, {"rope_theta": 500000.0, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
    "llama3-short": (32, 512, {"rope_theta": 50000.0, "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 32, "rope_type": "llama3"}}),
    "llama3-newer": (64, 131072, {"rope_parameters": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_theta": 500000.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}}),
    "yarn": (128, 131072, {"rope_theta": 1000000, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}),
    "yarn-betas": (128, 262144, {"rope_parameters": {
        "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 4.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "rope_theta": 1000000.0}}),
    "yarn-mscale": (64, 163840, {"rope_theta": 10000, "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707}}),
    "yarn-untruncated": (64, 131072, {"rope_theta": 150000, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}),
    "yarn-stated": (64, 16384, {"rope_theta": 10000.0, "rope_scaling": {
        "rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048,
        "attention_factor": 1.25, "beta_fast": 0, "beta_slow": None}}),
    "yarn-equal-betas": (32, 4096, {"rope_theta": 50000.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 128,
        "beta_fast": 1.0, "beta_slow": 1.0}}),
}


def frequencies(width, longest, config, real):
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    exponent = np.arange(0, width, 2).astype(real) / real(width)
    powers = np.power(real(theta), exponent)
    plain = real(1) / powers
    if kind in ("default", "dynamic"):
        return plain, 1.0
    factor = scaling.get("factor")
    if kind == "linear":
        return plain / real(factor), 1.0
    original = scaling.get("original_max_position_embeddings", longest)
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        waves = real(2 * math.pi) / plain
        out = np.where(waves > real(original / low), plain / real(factor), plain)
        smooth = (real(original) / waves - real(low)) / real(high - low)
        smoothed = (real(1) - smooth) * out / real(factor) + smooth * out
        medium = ~(waves < real(original / high)) & ~(waves > real(original / low))
        return np.where(medium, smoothed, out), 1.0
    assert kind == "yarn"
    if factor is None:
        factor = longest / original

    def get_mscale(scale, mscale=1):
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention = get_mscale(factor, mscale) / get_mscale(factor, all_dim)
        else:
            attention = get_mscale(factor)

    def dimension(turns):
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(width // 2).astype(real) - real(low)) / real(high - low), 0, 1)
    kept = real(1) - ramp
    interpolated = real(1) / (real(factor) * powers)
    return interpolated * (real(1) - kept) + plain * kept, attention


def bits(values):
    return [f"{int(value):08x}" for value in np.asarray(values, np.float32).view(np.uint32).reshape(-1)]


out = {}
for name, (width, longest, config) in CASES.items():
    single, attention = frequencies(width, longest, config, np.float32)
    double, _ = frequencies(width, longest, config, np.float64)
    out[name] = {"width": width, "max_positions": longest, "config": config,
                 "attention_factor": bits([attention])[0], "f32": bits(single), "f64": bits(double)}
json.dump(out, sys.stdout, indent=1)
print()
