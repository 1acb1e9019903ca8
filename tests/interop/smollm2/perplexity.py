"""Perplexity of the package at 16 bits against llama.cpp's on the same text: from the same file, and
from the 16-bit file that llama.cpp makes of it.

    perplexity.py SHARDPACK SET GGUF
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
from model import at_16_bits, llama, verses

WINDOW = 512
# The package's weights are rounded to bfloat16, llama.cpp's to float16.
TOLERANCE_16_BITS = 0.001
# With 4-bit weights llama.cpp rounds activations to 8 bits as well.
TOLERANCE = 0.01


def ours(shardpack, set_, text):
    with tempfile.TemporaryDirectory() as name:
        file = pathlib.Path(name) / "text.txt"
        file.write_text(text)
        command = [shardpack, "eval", set_, "--text", file, "--context", str(WINDOW), "--json"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (found,) = found["sets"]
    return found["perplexity"]["value"], found["tokens"]


def theirs(gguf, text):
    """Windows without a beginning token, of which the second half counts."""
    model = llama(gguf, WINDOW)
    tokens = model.tokenize(text.encode(), add_bos=False, special=False)
    losses = []
    for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
        window = tokens[start : start + WINDOW]
        model.reset()
        model.eval(window)
        logits = model.scores[WINDOW // 2 : WINDOW - 1].astype(numpy.float64)
        logits -= logits.max(axis=1, keepdims=True)
        normal = numpy.log(numpy.exp(logits).sum(axis=1))
        expected = window[WINDOW // 2 + 1 :]
        losses.extend(normal - logits[numpy.arange(len(expected)), expected])
    return float(numpy.exp(numpy.mean(losses))), len(losses)


def main():
    shardpack, set_, gguf = sys.argv[1:]
    text = verses()
    value, counted = ours(shardpack, set_, text)
    with tempfile.TemporaryDirectory() as name:
        whole = at_16_bits(gguf, pathlib.Path(name) / "16-bit.gguf")
        kinds = {"at 16 bits": (whole, TOLERANCE_16_BITS), "as it is": (gguf, TOLERANCE)}
        for kind, (file, tolerance) in kinds.items():
            reference, same = theirs(file, text)
            assert counted == same, f"{counted} tokens are counted here and {same} there"
            off = value / reference - 1
            print(f"smollm2: perplexity {value:.4f}, llama.cpp {reference:.4f} with the file {kind}: {off:+.3%}")
            assert abs(off) <= tolerance, f"more than {tolerance:.1%} apart"
    print(f"smollm2: {counted} tokens count")


main()
