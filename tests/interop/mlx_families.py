"""One-node packages of every reference model are model directories of mlx-lm: they load strictly and compute what our
own float32 evaluation of the same weights computes.

    mlx_families.py SHARDPACK [FAMILY…]

Families on which mlx-lm and transformers differ are listed with the reason; that their packages load is tested too,
where mlx-lm has the architecture. Names behind SHARDPACK leave all other families out.
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

# Families on which mlx-lm agrees on the short sequence alone. (On phi3 it agrees on the long one alone: it has the
# frequencies of long sequences for all.)
SHORT = {
    "deepseek_v3": "mlx-lm gives experts of left-out groups the score 0, which beats negative ones",
    "gemma2": "mlx-lm has no sliding windows for it",
    "mistral": "mlx-lm has no sliding windows for it",
    "qwen2": "mlx-lm has no sliding windows for it",
}

# Families whose packages mlx-lm 0.32.2 loads strictly and computes otherwise than transformers does. Each reason was
# checked: with that line of mlx-lm changed it agrees, or its source has nothing of the kind.
OTHERWISE = {
    "ernie4_5_moe": "mlx-lm drops the correction by which experts are chosen",
    "gemma": "mlx-lm computes the exact gelu, the config's hidden_act, which Gemma has never meant",
    "gemma3_text": "mlx-lm rounds the factor on embeddings to bf16",
    "glm": "mlx-lm rotates whole heads, not half of each",
    "gpt_oss": "mlx-lm rounds the ends of yarn's range, which truncate = false forbids",
    "laguna": "mlx-lm computes yarn's factor on scores itself, whatever attention_factor says (as it says, 6e-6)",
    "mimo_v2_flash": "mlx-lm has windows of one key less",
    "phimoe": "mlx-lm has the frequencies of long sequences for all (with those of short ones, 6e-6)",
    "qwen3_5_vl": "mlx-lm rounds gains to bf16 after it has added one to them",
    "smollm3": "mlx-lm has no sliding windows for it",
    "solar_open": "mlx-lm does not stretch its positions",
    "starcoder2": "mlx-lm computes the exact gelu where the config asks for tanh, and has no sliding windows for it",
    "step3p5": "mlx-lm adds one to gains only where experts have the names of the checkpoint",
}

# Families that mlx-lm 0.32.2 does not have, or not as packages do.
WITHOUT = {
    "apertus": "mlx-lm asks for mlp_bias, which this config leaves out",
    "arcee": "mlx-lm does not have it",
    "axk1": "mlx-lm does not have it",
    "bailing_hybrid": "packages have other names for the projections of linear attention",
    "cohere2_moe": "mlx-lm does not have it",
    "cwm": "mlx-lm does not have it",
    "deepseek_v2": "mlx-lm keeps the up-projection of its latent in one matrix, which packages hold turned, for each head",
    "falcon_h1": "mlx-lm keeps the projections of Mamba in one matrix, which packages cut apart",
    "falcon_h1_norm": "mlx-lm keeps the projections of Mamba in one matrix, which packages cut apart",
    "flex_olmo": "mlx-lm does not have it",
    "gemma4_moe": "packages have Gemma's experts under another name",
    "glm_moe_dsa_shared": "mlx-lm has no layers that go by the keys of an earlier one",
    "gpt_neox": "mlx-lm keeps queries, keys and values of each head in one matrix, which packages hold apart",
    "granite_swa": "mlx-lm does not have it",
    "granitemoe_swa": "mlx-lm does not have it",
    "granitemoehybrid": "mlx-lm keeps the projections of Mamba in one matrix, which packages cut apart",
    "granitemoehybrid_dense": "mlx-lm keeps the projections of Mamba in one matrix, which packages cut apart",
    "granitemoeshared": "mlx-lm does not have it",
    "hunyuan_v1_moe": "mlx-lm does not have it",
    "hy_v3": "mlx-lm does not have it",
    "deepseek_v4": "mlx-lm does not have it",
    "hy_v4": "mlx-lm does not have it",
    "hyperclovax": "mlx-lm does not have it",
    "iquestcoder": "mlx-lm does not have it",
    "jais2": "mlx-lm does not have it",
    "kimi_linear": "packages have other names for the projections of linear attention",
    "kolibri1": "mlx-lm does not have it",
    "lfm2": "mlx-lm keeps the projections of a convolution in one matrix, which packages cut apart",
    "lfm2_moe": "mlx-lm keeps the projections of a convolution in one matrix, which packages cut apart",
    "llama4_text": "mlx-lm has another model of this name, and Llama 4 within one that reads pictures alone",
    "mellum": "mlx-lm asks for num_experts, which this config has under another name",
    "minimax_m3_vl_text": "mlx-lm knows the model within one that reads pictures alone",
    "ministral": "mlx-lm does not have it",
    "mixtral": "mlx-lm takes the width of a head from the hidden size, which is another one here",
    "nanochat": "mlx-lm has other names for its tensors",
    "nemotron_h": "mlx-lm keeps the projections of Mamba in one matrix, which packages cut apart",
    "olmo": "mlx-lm asks for the publisher's own package",
    "qwen2_moe": "mlx-lm has no layers without experts for it",
    "qwen3_5": "mlx-lm knows the model within one that reads pictures alone",
    "qwen3_5_moe": "mlx-lm knows the model within one that reads pictures alone",
    "qwen3_next": "mlx-lm keeps the projections of linear attention by key heads in one matrix, which packages cut apart",
    "vaultgemma": "mlx-lm does not have it",
    "youtu": "mlx-lm knows it as youtu_llm",
}

data = pathlib.Path(__file__).parent.parent / "data" / "models"
shardpack = pathlib.Path(sys.argv[1]).absolute()


def run(*args):
    subprocess.run([shardpack, *map(str, args)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def in_float32(model):
    widen = lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x
    model.update(tree_map(widen, model.parameters()))
    return model


def load(folder, family, bits):
    package_set = folder / f"{family}-{bits}"
    run("convert", data / family, "-o", package_set, "--bits", bits)
    model, _ = load_model(package_set / "node-0", strict=True)
    return package_set, model


def difference(folder, family, bits):
    package_set, model = load(folder, family, bits)
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
    wrong, agreed, loaded = [], 0, 0
    families = sorted(path.name for path in data.iterdir() if (path / "config.json").is_file())
    assert not set().union(SHORT, OTHERWISE, WITHOUT) - set(families), "a list names what is not there"
    families = [family for family in families if family in sys.argv[2:] or not sys.argv[2:]]
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            if family in WITHOUT:
                print(f"interop: mlx-lm, {family}: left out, {WITHOUT[family]}")
                continue
            for bits in (4, 8):
                try:
                    if family in OTHERWISE:
                        load(pathlib.Path(folder), family, bits)
                        loaded += 1
                        print(f"interop: mlx-lm, {family} at {bits} bits: loaded; {OTHERWISE[family]}")
                        continue
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
    print(f"interop: mlx-lm agrees on {agreed} packages and loads {loaded} more")


main()
