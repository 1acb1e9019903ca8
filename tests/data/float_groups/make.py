"""Writes vectors.safetensors: weights, and what `mx.quantize` of MLX 0.32.4 makes of them on its CPU backend.

    make.py        needs mlx[cpu]==0.32.4

For each type of weights T: `T`, `[rows, 64]`; for each mode M: `T.M.weight` and `T.M.scales`, and for
f32 `T.M.floats`, what MLX reads back.
"""

import pathlib

import mlx.core as mx
import numpy as np

WIDTH = 64
TYPES = {"bf16": mx.bfloat16, "f16": mx.float16, "f32": mx.float32}
MODES = ("mxfp4", "nvfp4", "mxfp8")

# Values of E2M1, the middles between them, and numbers next to those.
MIDDLES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
AWKWARD = [0.0, -0.0, 6.0, -6.0, 7.0, -7.5, 448.0, 464.0, -463.9, 2**-9, 1.5 * 2**-9, 2**-10, -(2**-10), 2**-6, 0.0624]
AWKWARD += MIDDLES + [-it for it in MIDDLES] + [it * (1 + 2**-7) for it in MIDDLES] + [-it * (1 - 2**-8) for it in MIDDLES]


def rows(rng, largest, smallest):
    normal = lambda: rng.standard_normal(WIDTH)
    yield np.zeros(WIDTH)
    yield -np.zeros(WIDTH)
    # One group of zeros, one of others.
    yield np.concatenate([np.zeros(WIDTH // 2), normal()[: WIDTH // 2]])
    for scale in (1.0, 0.37, 1 / 1024, 100.0):
        yield np.resize(AWKWARD, WIDTH) * scale
        yield np.resize(AWKWARD[::-1], WIDTH) * scale
    # Largest weights on, above and below six and 448 times a power of two.
    for power in (-20, -3, 0, 7):
        for factor in (1, 1 + 2**-7, 1 - 2**-8, 1 + 2**-10, 1 + 2**-23, 1 - 2**-24, 1.17, 1.9):
            yield np.where(np.arange(WIDTH) % 16 == 5, 6 * factor * 2.0**power, normal() * 2.0**power)
            yield np.where(np.arange(WIDTH) % 16 == 7, 7 * factor * 2.0**power, normal() * 2.0**power)
    # Huge and tiny ones, alone and beside others.
    for value in (largest, largest / 3, 60000.0, 3000.0, 2688.0, smallest, smallest * 3):
        yield np.where(np.arange(WIDTH) % 16 == 3, -value, normal())
        yield normal() / 4 * value
    for exponent in (-14, -8, -5, 0, 3):
        yield normal() * 2.0**exponent
        yield normal() * 2.0 ** rng.integers(exponent - 12, exponent + 1, WIDTH)


def main():
    mx.set_default_device(mx.cpu)
    found = {}
    for name, dtype in TYPES.items():
        limits = (60000.0, 2.0**-24) if dtype == mx.float16 else (1e38, 2.0**-110)
        weights = np.stack(list(rows(np.random.default_rng(7), *limits))).astype(np.float32)
        weights = mx.array(weights).astype(dtype)
        assert mx.all(mx.isfinite(weights)).item()
        found[name] = weights
        for mode in MODES:
            words, scales = mx.quantize(weights, mode=mode)
            found[f"{name}.{mode}.weight"], found[f"{name}.{mode}.scales"] = words, scales
            if dtype == mx.float32:
                found[f"{name}.{mode}.floats"] = mx.dequantize(words, scales, mode=mode, dtype=dtype)
    mx.save_safetensors(str(pathlib.Path(__file__).parent / "vectors.safetensors"), found)
    print({name: array.shape for name, array in found.items()})


main()
