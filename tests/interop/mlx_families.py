"""One-node packages of every reference model are model directories of mlx-lm: they load strictly and compute what our
own float32 evaluation of the same weights computes.

    mlx_families.py SHARDPACK

Families on which mlx-lm and transformers differ are listed with the reason; that their packages load is tested too,
where mlx-lm has the architecture.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import load_model

# Both sides add up products in float32 in different orders.
TOLERANCE = 1e-3

# Tokens of the sequence for families on which mlx-lm agrees on short sequences alone.
SHORT = {
    "deepseek_v3": "mlx-lm has no yarn of this kind beyond the original length",
    "gemma2": "mlx-lm has no sliding windows for it",
    "mistral": "mlx-lm has no sliding windows for it",
    "qwen2": "mlx-lm has no sliding windows for it",
}

# Families on which mlx-lm 0.32.2 and transformers do not agree, or that it does not have as packages do.
DIFFERENT = {
    "arcee": "mlx-lm does not have it",
    "deepseek_v2": "mlx-lm keeps the up-projection of its latent in one matrix",
    "dots1": "mlx-lm reads other names of experts",
    "ernie4_5_moe": "mlx-lm chooses experts without the correction",
    "exaone4": "mlx-lm reads the pattern of layers as a text alone",
    "gemma3_text": "mlx-lm scales the positions of windowed layers too",
    "glm": "mlx-lm keeps gate and up in one matrix, which packages cut apart",
    "glm4": "mlx-lm keeps gate and up in one matrix, which packages cut apart",
    "gpt_oss": "mlx-lm computes other logits on both sequences",
    "hunyuan_v1_dense": "mlx-lm asks for another spelling of its stretched positions",
    "hunyuan_v1_moe": "mlx-lm has it under another name, with fused projections",
    "mixtral": "mlx-lm takes the width of a head from the hidden size",
    "phi3": "mlx-lm keeps queries, keys and values, and gate and up, in one matrix each",
    "qwen2_moe": "mlx-lm has no layers without experts for it",
    "qwen3_5": "mlx-lm has the model within one that reads pictures",
    "qwen3_5_moe": "mlx-lm has the model within one that reads pictures",
    "qwen3_5_vl": "mlx-lm has the model within one that reads pictures",
    "qwen3_next": "mlx-lm keeps the projections of linear attention in one matrix",
    "smollm3": "mlx-lm has no sliding windows for it",
    "starcoder2": "mlx-lm has no sliding windows for it",
}

data = pathlib.Path(__file__).parent.parent / "data" / "models"
shardpack = pathlib.Path(sys.argv[1]).absolute()


def run(*args):
    subprocess.run([shardpack, *map(str, args)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def in_float32(model):
    widen = lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x
    model.update(tree_map(widen, model.parameters()))
    return model


def difference(folder, family, bits):
    package_set = folder / f"{family}-{bits}"
    run("convert", data / family, "-o", package_set, "--bits", bits)
    model, _ = load_model(package_set / "node-0", strict=True)
    expected = mx.load(str(data / family / "expected.safetensors"))
    tokens = expected["tokens_a" if family in SHORT else "tokens_b"].tolist()
    ids, out = folder / "ids.json", folder / "logits.safetensors"
    ids.write_text(json.dumps(tokens))
    run("logits", package_set, "--tokens", ids, "-o", out, "--exact")
    ours = mx.load(str(out))["logits"]
    theirs = in_float32(model)(mx.array([tokens]))[0]
    assert ours.shape == theirs.shape, (family, ours.shape, theirs.shape)
    return mx.abs(ours - theirs).max().item()


def main():
    wrong, agreed = [], 0
    families = sorted(path.name for path in data.iterdir() if (path / "config.json").is_file())
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            if family in DIFFERENT:
                print(f"interop: mlx-lm, {family}: left out, {DIFFERENT[family]}")
                continue
            for bits in (4, 8):
                try:
                    worst = difference(pathlib.Path(folder), family, bits)
                except Exception as error:
                    wrong.append(f"{family} at {bits} bits: {type(error).__name__}: {str(error)[:300]}")
                    continue
                if not worst < TOLERANCE:
                    wrong.append(f"{family} at {bits} bits: logits differ by {worst}")
                else:
                    agreed += 1
                    print(f"interop: mlx-lm, {family} at {bits} bits: logits within {worst:.1e}")
    assert not wrong, "\n".join(wrong)
    print(f"interop: mlx-lm agrees on {agreed} packages")


main()
