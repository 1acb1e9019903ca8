"""Writes the seeds of the corpora: small valid inputs of every target.

    python make_seeds.py SHARDPACK      (the program, which makes the package set)

The `crash-*` and other files in the corpora are what fuzzing has found.
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
CORPUS = HERE / "corpus"
HIDDEN, INNER, VOCAB, HEADS, KV, HEAD = 64, 128, 64, 2, 1, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": HEAD, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": [VOCAB, HIDDEN],
    LAYER + "input_layernorm.weight": [HIDDEN],
    LAYER + "self_attn.q_proj.weight": [HEADS * HEAD, HIDDEN],
    LAYER + "self_attn.k_proj.weight": [KV * HEAD, HIDDEN],
    LAYER + "self_attn.v_proj.weight": [KV * HEAD, HIDDEN],
    LAYER + "self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD],
    LAYER + "post_attention_layernorm.weight": [HIDDEN],
    LAYER + "mlp.gate_proj.weight": [INNER, HIDDEN],
    LAYER + "mlp.up_proj.weight": [INNER, HIDDEN],
    LAYER + "mlp.down_proj.weight": [HIDDEN, INNER],
    "model.norm.weight": [HIDDEN],
}


def put(target, name, data):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def safetensors(shapes, fill):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = 2
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + (fill * (end // len(fill) + 1))[:end]


def model():
    tensors = {name: ["BF16", shape] for name, shape in SHAPES.items()}
    put("model", "llama.json", json.dumps({"config": CONFIG, "tensors": tensors}))
    newer = dict(CONFIG, model_type="qwen3", architectures=["Qwen3ForCausalLM"],
                 tie_word_embeddings=False, num_hidden_layers=0)
    del newer["rope_scaling"]
    newer["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                "original_max_position_embeddings": 32}
    tensors = {name: ["F32", shape] for name, shape in SHAPES.items() if LAYER not in name}
    tensors["lm_head.weight"] = ["F16", [VOCAB, HIDDEN]]
    put("model", "qwen3.json", json.dumps({"config": newer, "tensors": tensors}))


def containers():
    small = safetensors({"a": [2, 3], "b": [], "c": [0, 4]}, b"\x80\x3f")
    put("container", "small", small)
    put("container", "empty", struct.pack("<Q", 2) + b"{}")
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": "model.safetensors"}}
    parts = [json.dumps({"model_type": "llama"}).encode(), json.dumps(index).encode(), small]
    put("source", "indexed", b"\xff".join(parts))
    put("source", "other", b"\xff".join([b"{}", b'{"weight_map":{"a":"../a"}}']))


def texts():
    rules = """schema = 1
id = "t"
strip = [{ from = "m.", to = "" }]
ignore = [{ pattern = "*.inv_freq", reason = "r" }]
[config]
used = ["h", "n", "v"]
ignored = ["dtype"]
[let]
s = "h ?? 64"
[[require]]
that = "(n ?? 1) >= 1 && L < 9"
message = "no"
[families.llama]
architectures = ["LlamaForCausalLM"]
[spec]
layers = "1"
hidden_size = "s"
vocab_size = "64"
max_positions = "64"
tied_embeddings = "true"
norm = { kind = "rms", eps = "1e-6" }
attention = { heads = "2", kv_heads = "1", head_dim = "32", qkv_bias = "false", o_bias = "false", qk_norm = "'none'" }
rope = { style = "half", width = "32", default_theta = "10000.0" }
ffn = { size = "128", activation = "silu_glu", bias = "false" }
layer = { window = "null", rope = true }
[axes]
q = { len = "2", unit = "32", align = "group" }
kv = { len = "1", unit = "32", follow = "q" }
vocab = { len = "64" }
[[tensors]]
name = "model.layers.{L}.q.weight"
shape = ["64", "s"]
cut = "column(q)"
role = "linear"
required = "n == null"
"""
    put("rules", "small.toml", rules)
    for number, text in enumerate([
        "head_dim ?? hidden_size / num_attention_heads",
        "(a > 2 && !(b == 1.5)) ? d[1] : e.f[0] % -3",
        "a in [1, 2.0, 'x'] || c?.x == null",
        "1e308 * 10.0", "-9223372036854775808 / -1", "e['f'] ?? L * (2 + 3) - 4",
    ]):
        put("expression", str(number), text)


def importance():
    def entry(name, calls, figures):
        return (struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(figures))
                + struct.pack(f"<{len(figures)}f", *figures))

    entries = [entry("blk.0.attn_q.weight", 3, [0, 6, 12, 6]), entry("output.weight", 1, [1, 3])]
    tail = struct.pack("<ii", 20, 4) + b"text"
    put("imatrix", "legacy", struct.pack("<i", len(entries)) + b"".join(entries) + tail)
    put("imatrix", "gguf", (HERE.parent / "formats/containers/tests/data/imatrix.gguf").read_bytes())


def frame(kind, payload):
    return b"SPTF" + bytes([1, kind, 0, 0]) + struct.pack("<I", len(payload)) + payload


def counted(data):
    return struct.pack("<I", len(data)) + data


def packages(program):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        source, output = folder / "source", folder / "set"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(CONFIG))
        (source / "generation_config.json").write_text("{}")
        (source / "model.safetensors").write_bytes(safetensors(SHAPES, b"\x80\x3f\x00\xbf"))
        subprocess.run([program, "convert", source, "-o", output, "--nodes", "2"], check=True)
        manifest = (output / "node-1/manifest.json").read_bytes()
        document = (output / "set.json").read_bytes()
        put("manifest", "small", manifest)
        put("manifest", "with-map", manifest.rstrip() + b"\n" + bytes(len(json.loads(manifest)["files"])))
        put("set", "small", document)
        hello = frame(1, struct.pack("<H", 1) + counted(b"seed"))
        offer = frame(2, b"\0" + counted(manifest) + counted(document) + counted(b""))
        files = json.loads(manifest)["files"]
        small = [number for number, file in enumerate(files) if file["size"] < 1000]
        chunks = [frame(4, struct.pack("<II", number, 0) + (output / "node-1" / files[number]["name"]).read_bytes())
                  for number in small]
        put("transfer", "push", hello + offer + b"".join(chunks) + frame(7, b""))
        key = bytes(32) + struct.pack("<I", 1)
        talk = [frame(9, key), frame(12, b""), frame(14, key + counted(b"{}"))]
        others = [frame(3, bytes(17)), frame(5, bytes(8)), frame(6, bytes(8) + counted(b"no")),
                  frame(8, b""), frame(10, b"\1" + key), frame(11, bytes(16)), frame(13, counted(b"{}")),
                  frame(15, counted(b"{}")), frame(16, b"\1\0" + counted(b"why"))]
        put("transfer", "talk", hello + b"".join(talk))
        for number, other in enumerate(others):
            put("transfer", f"answer-{number}", other)


def collectives():
    def header(op, size):
        return b"SPCF" + bytes([1, op, 0, 0]) + struct.pack("<IIQQ", 1, size, 7, 9)

    put("collectives", "sum", header(1, 8) + bytes(8))
    reason = struct.pack("<I", 2) + "rank 2 is lost: é".encode()
    put("collectives", "abort", header(7, len(reason)) + reason)


model()
containers()
texts()
importance()
packages(sys.argv[1])
collectives()
