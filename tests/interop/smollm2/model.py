"""The model, served from its package or by llama.cpp from its file."""

import contextlib
import json
import pathlib
import subprocess

import llama_cpp

CONTEXT = 2048


@contextlib.contextmanager
def served(shardpack, set_):
    """The API's URL while the package is served."""
    command = [shardpack, "serve", set_, "--name", "smol", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        assert process.wait(60) == 0, "a server that is asked to stop succeeds"


def llama(gguf, context=CONTEXT):
    """llama.cpp with the logits of every token."""
    return llama_cpp.Llama(str(gguf), n_ctx=context, n_batch=512, logits_all=True, verbose=False, n_threads=2)


@llama_cpp.llama_log_callback
def quiet(_level, _text, _data):
    """Takes llama.cpp's log."""


def at_16_bits(gguf, target):
    """The file with float16 weights, as llama.cpp makes it."""
    llama_cpp.llama_log_set(quiet, None)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
    assert llama_cpp.llama_model_quantize(str(gguf).encode(), str(target).encode(), options) == 0
    return target


def verses():
    """154 verses of the King James Bible, one a line: 4,800 tokens."""
    data = pathlib.Path(__file__).parent.parent.parent / "data/kjv-4m/heldout.json"
    return "\n".join(verse["text"] for verse in json.loads(data.read_text())) + "\n"
