"""One-node packages of every reference model are read by transformers: its configuration of a package says what its
configuration of the source says.

    transformers_reads.py SHARDPACK
"""

import pathlib
import subprocess
import sys
import tempfile

from transformers import AutoConfig
from transformers.utils import logging

# Of these transformers has no class; the published repositories bring their own.
UNKNOWN = {"kimi_k2"}

# What a forward pass depends on. Factors of positions that the source leaves to the class are written out in packages.
SAME = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "layer_types",
        "sliding_window", "tie_word_embeddings")

# transformers puts the whole length there, although the source has this one at its top.
ELSEWHERE = {("phimoe", "original_max_position_embeddings")}

logging.set_verbosity_error()
data = pathlib.Path(__file__).parent.parent / "data" / "models"
shardpack = pathlib.Path(sys.argv[1]).absolute()


def values(config, key):
    """What a configuration says under a key; of one whose layers differ, what each of them says."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [getattr(layer, key, None) for layer in layers]


def check(folder, family):
    package_set = folder / family
    command = [shardpack, "convert", data / family, "-o", package_set, "--bits", "4"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ours = AutoConfig.from_pretrained(package_set / "node-0").get_text_config()
    theirs = AutoConfig.from_pretrained(data / family).get_text_config()
    for key in SAME:
        found, expected = values(ours, key), values(theirs, key)
        # A class without KV heads of its own has as many as heads, and packages write the number out.
        if key == "num_key_value_heads" and expected == [None]:
            expected = values(theirs, "num_attention_heads")
        assert found == expected, (family, key, found, expected)
    found, expected = (getattr(config, "rope_parameters", None) or {} for config in (ours, theirs))
    # `type` is the old name of `rope_type`, which transformers adds.
    for key, value in expected.items():
        if key == "type" or (family, key) in ELSEWHERE:
            continue
        assert found.get(key) == value, (family, "rope_parameters", key, found.get(key), value)


families = sorted(path.name for path in data.iterdir() if path.is_dir() and path.name not in UNKNOWN)
assert len(families) > 40, families
with tempfile.TemporaryDirectory() as folder:
    for family in families:
        check(pathlib.Path(folder), family)
print(f"interop: transformers reads the packages of {len(families)} families as their sources")
