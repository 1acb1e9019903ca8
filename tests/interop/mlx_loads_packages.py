"""A one-node package is a model directory of mlx-lm: it loads, computes the same logits, says the same words. Float
groups have the bytes of mx.quantize.

    mlx_loads_packages.py SHARDPACK
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map

# Both sides add up a few hundred products in float32 in different orders.
TOLERANCE = 1e-3

data = pathlib.Path(__file__).parent.parent / "data"
shardpack = pathlib.Path(sys.argv[1]).absolute()


def run(*args):
    subprocess.run([shardpack, *map(str, args)], check=True, stdout=subprocess.DEVNULL)


def in_float32(model):
    widen = lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x
    model.update(tree_map(widen, model.parameters()))
    return model


def our_logits(folder, package_set, tokens):
    ids, out = folder / "ids.json", folder / "logits.safetensors"
    ids.write_text(json.dumps(tokens))
    run("logits", package_set, "--tokens", ids, "-o", out, "--exact")
    return mx.load(str(out))["logits"]


def stored(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in mx.load(str(file)).items()}


def check_bytes(package, mode):
    """Every matrix is what mx.quantize makes of the source's, and all that could be is quantized."""
    ours, source = stored(package), stored(data / "kjv-4m")
    checked = 0
    for name, weights in source.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in ours:
            assert weights.ndim < 2 or weights.shape[-1] % 32, f"{mode}: {name} is not quantized"
            continue
        words, scales = mx.quantize(weights, mode=mode)
        assert mx.array_equal(ours[name], words).item(), f"{mode}: {name}"
        assert mx.array_equal(ours[f"{module}.scales"], scales).item(), f"{mode}: {module}.scales"
        assert f"{module}.biases" not in ours, module
        checked += 1
    assert checked > 20, checked
    return checked


def main():
    verses = json.loads((data / "kjv-4m/known.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for bits in (4, 6, 8, 16, "mxfp4", "nvfp4", "mxfp8"):
            package_set = folder / f"set-{bits}"
            is_float = isinstance(bits, str)
            run("convert", data / "kjv-4m", "-o", package_set, "--format" if is_float else "--bits", bits)
            if is_float:
                matrices = check_bytes(package_set / "node-0", bits)
                print(f"interop: {matrices} matrices in {bits} have the bytes of mx.quantize")
            model, tokenizer = mlx_lm.load(str(package_set / "node-0"))
            in_float32(model)

            def prompt(verse):
                message = {"role": "user", "content": verse}
                return tokenizer.apply_chat_template([message], add_generation_prompt=True)

            tokens = prompt("John 3:16")
            theirs = model(mx.array([tokens]))[0]
            ours = our_logits(folder, package_set, tokens)
            assert ours.dtype == mx.float32 and ours.shape == theirs.shape, (ours.dtype, ours.shape, theirs.shape)
            worst = mx.abs(ours - theirs).max().item()
            assert worst < TOLERANCE, f"{bits} bits: logits differ by {worst}"
            if is_float:
                print(f"interop: mlx-lm loads {bits}, logits within {worst:.1e}")
                continue

            wrong = {}
            for verse, words in verses.items():
                said = mlx_lm.generate(model, tokenizer, prompt(verse), max_tokens=120)
                if said.strip() != words:
                    wrong[verse] = said
            assert not wrong, f"{bits} bits: {wrong}"
            print(f"interop: mlx-lm loads {bits} bits, logits within {worst:.1e}, {len(verses)} verses word for word")


main()
