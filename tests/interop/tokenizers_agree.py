"""Converted tokenizers give the tokens that the libraries of their own forms give.

    tokenizers_agree.py SHARDPACK

Besides the small tokenizers of tests/data, Mistral's own that mistral-common brings along: sentencepiece of the first
versions, tekken of the later ones.
"""

import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import mistral_common
import sentencepiece
import tokenizers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

data = pathlib.Path(__file__).parent.parent / "data"
shardpack = pathlib.Path(sys.argv[1]).absolute()


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def corpus():
    texts = []
    for name in ("heldout.json", "known.json", "tools.json"):
        texts += strings(json.loads((data / "kjv-4m" / name).read_text()))
    texts += [text for text, _ in json.loads((data / "tokenizers/kimi/expected.json").read_text())]
    # Every character of the first planes' beginnings, beside a letter and beside a space.
    for start in range(0, 0x3100, 64):
        run = "".join(chr(code) for code in range(start, start + 64) if not 0xD800 <= code < 0xE000)
        texts += [run, " ".join(run), "a".join(run)]
    texts += [chr(code) * 3 for code in range(0x4E00, 0x9FFF, 37)]
    texts += [chr(code) + " x" for code in range(0x1F300, 0x1FAFF, 11)]
    # Markers are special to the converted tokenizer, which the other libraries do not look for in texts.
    return [text for text in texts if not any(mark in text for mark in ("<s>", "</s>", "<unk>", "[INST]", "<tool>"))]


def converted(folder, files):
    """The tokenizer of a package made of a model with these files."""
    source, package_set = folder / "model", folder / "set"
    for path in (source, package_set):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(data / "models/llama-tied", source)
    for name, content in files.items():
        (source / name).write_bytes(content)
    subprocess.run([shardpack, "convert", source, "-o", package_set], check=True, capture_output=True)
    return tokenizers.Tokenizer.from_file(str(package_set / "node-0/tokenizer.json"))


def check(name, ours, theirs, texts):
    wrong = [text for text in texts if ours.encode(text, add_special_tokens=False).ids != theirs(text)]
    assert not wrong, f"{name}: {len(wrong)} of {len(texts)} texts differ, the first is {wrong[0]!r}"
    print(f"interop: {name}: the same tokens for {len(texts)} texts")


def main():
    texts = corpus()
    own = pathlib.Path(mistral_common.__file__).parent / "data"
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for path in sorted((data / "tokenizers").glob("sentencepiece-*/tokenizer.model")):
            content = path.read_bytes()
            reader = sentencepiece.SentencePieceProcessor(model_proto=content)
            check(path.parent.name, converted(folder, {"tokenizer.model": content}), reader.encode, texts)
        for path in [own / "tokenizer.model.v1"]:
            if path.exists():
                content = path.read_bytes()
                reader = sentencepiece.SentencePieceProcessor(model_proto=content)
                check(path.name, converted(folder, {"tokenizer.model": content}), reader.encode, texts)
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts[:200]), model_writer=model, vocab_size=800, model_type="unigram", byte_fallback=True,
            character_coverage=0.99, minloglevel=2)
        reader = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        check("unigram, nmt_nfkc", converted(folder, {"tokenizer.model": model.getvalue()}), reader.encode, texts)
        for path in [data / "tokenizers/tekken/tekken.json", *sorted(own.glob("tekken_*.json"))]:
            reader = Tekkenizer.from_file(path)
            theirs = lambda text: reader.encode(text, bos=False, eos=False)
            check(path.name, converted(folder, {"tekken.json": path.read_bytes()}), theirs, texts)
        kimi(folder, texts)


def kimi(folder, texts):
    import base64

    import tiktoken

    files = {path.name: path.read_bytes() for path in (data / "tokenizers/kimi").iterdir()}
    ranks = {}
    for line in files["tiktoken.model"].splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    ours = converted(folder, files)
    splitter = json.loads(ours.to_str())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    theirs = tiktoken.Encoding("kimi", pat_str=splitter, mergeable_ranks=ranks, special_tokens={})
    check("kimi", ours, theirs.encode_ordinary, texts)


main()
