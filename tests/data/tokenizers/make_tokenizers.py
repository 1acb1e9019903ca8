"""Makes the small tokenizers of tests/data/tokenizers and the tokens that their own libraries give.

    python make_tokenizers.py TEXT.json OUT      # pip install sentencepiece tiktoken tokenizers mistral-common

TEXT.json is any JSON with texts to train on.
"""
import base64, io, json, pathlib, sys

import sentencepiece
import tiktoken
import tokenizers
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
TEKKEN = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
TEXTS = [
    "", " ", "  ", "a", " a", "In the beginning God created the heaven and the earth.",
    "  And   the earth was without form,\tand void;\n\n and darkness ", "\nThou shalt not kill.\r\n\r\n",
    "I'm, you'LL, they'Ve, it's he'd", "1 12 123 1234567 3.14 ½ ²", "fn main() { println!(\"{}\", a/b); } // x\n\t\treturn 0;",
    "http://example/a/b?c=d&e=f#g", "Straße ÄÖÜ naïve café ﬁ Å", "Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย",
    "中文字符和English混合，还有123。日本語かなカナ 한국어", "😀👩‍👩‍👧‍👦🏳️‍🌈 é é", "aaaaaaaaaaaaaaaaaaaa     bbbb", "﻿\u200bzero\u00a0width\u3000space",
    "CamelCaseHTTPServer snake_case __init__", "...!!!???---", "\u0000\u0007", "▁under▁score▁", "call<tool>now <tool> x<tool>",
]


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def main():
    corpus = list(strings(json.loads(pathlib.Path(sys.argv[1]).read_text()))) + [t for t in TEXTS if t]
    out = pathlib.Path(sys.argv[2])

    def write(name, file, data, config, ids):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        cases = [[text, ids(text)] for text in TEXTS]
        (folder / "expected.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")

    for kind in ("bpe", "unigram"):
        # As Llama's, as those that tidy spaces, as Gemma's.
        for name, prefix, tidy, user in (("prefix", True, False, []), ("tidy", True, True, []),
                                         ("user", False, False, ["<tool>"])):
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(corpus), model_writer=model, vocab_size=600, model_type=kind, byte_fallback=True,
                normalization_rule_name="identity", remove_extra_whitespaces=tidy, add_dummy_prefix=prefix,
                character_coverage=0.999, minloglevel=2, user_defined_symbols=user)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
            write(f"sentencepiece-{kind}-{name}", "tokenizer.model", model.getvalue(),
                  dict(tokenizer_class="LlamaTokenizer", add_bos_token=False), processor.encode)

    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(corpus, vocab_size=700, min_frequency=2)
    table = {c: b for b, c in enumerate_bytes()}
    vocab = json.loads(trained.to_str())["model"]["vocab"]
    ranks, rest = {}, []
    for token, _ in sorted(vocab.items(), key=lambda item: item[1]):
        data = bytes(table[c] for c in token)
        (ranks.setdefault(data, len(ranks)) if len(data) == 1 else rest.append(data))
    for data in rest:
        ranks.setdefault(data, len(ranks))
    lines = b"".join(base64.b64encode(data) + b" " + str(rank).encode() + b"\n" for data, rank in ranks.items())
    base = len(ranks)
    special = {str(base): dict(content="[BOS]", special=True), str(base + 1): dict(content="[EOS]", special=True),
               str(base + 2): dict(content="<think>", special=False)}
    kimi = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens={})
    config = dict(tokenizer_class="TikTokenTokenizer", added_tokens_decoder=special,
                  auto_map=dict(AutoTokenizer=["tokenization_kimi.TikTokenTokenizer", None]))
    write("kimi", "tiktoken.model", lines, config, kimi.encode_ordinary)

    count = 30
    # tekken has the bytes in their order.
    ranks = {data: rank for rank, data in enumerate([bytes([b]) for b in range(256)] + rest)}
    tekken = dict(config=dict(pattern=TEKKEN, num_vocab_tokens=base, default_vocab_size=base + count,
                              default_num_special_tokens=count, version="v3"),
                  vocab=[dict(rank=rank, token_bytes=base64.b64encode(data).decode(),
                              token_str=data.decode("utf-8", errors="ignore") or None) for data, rank in ranks.items()])
    (out / "tekken").mkdir(parents=True, exist_ok=True)
    path = out / "tekken" / "tekken.json"
    path.write_text(json.dumps(tekken))
    reader = Tekkenizer.from_file(path)
    write("tekken", "tekken.json", path.read_bytes(), {}, lambda text: reader.encode(text, bos=False, eos=False))


def enumerate_bytes():
    taken = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [b for b in range(256) if b not in taken]
    return [(b, chr(b)) for b in taken] + [(b, chr(256 + i)) for i, b in enumerate(others)]


main()
