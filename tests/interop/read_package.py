"""A reader of packages that shares no code with shardpack: it follows docs/guide/src/reference/package-format.md.

    read_package.py SHARDPACK

Converts the small model, reads the packages as the page says, and checks: canonical JSON, ids, sizes, chunk values
and digests of files and tensors, the safetensors headers, and dequantized weights against the checkpoint's own and
against what `shardpack export --hf` writes. Only the standard library; BLAKE3 is written out below.
"""

import functools
import json
import math
import multiprocessing
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

data = pathlib.Path(__file__).parent.parent / "data"

FORMAT = 2
CHUNK_BYTES = 4 << 20
DATA_ALIGNMENT = 16 << 10
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "U8": 1, "I8": 1}
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
FILE_NAME = re.compile(r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,253}[A-Za-z0-9_-])?")
MATRIX = "model.layers.1.self_attn.q_proj"
# Relative RMSE that a matrix of this model stays below; each bit about halves it.
LARGEST_RMSE = {2: 0.4, 3: 0.2, 4: 0.1, 5: 0.05, 6: 0.025, 8: 0.007}

# BLAKE3 (the reference algorithm of its paper).

IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
COLUMNS_AND_DIAGONALS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8
LEAF_BYTES = 1024
# Leaves that a process is given together.
AT_ONCE = 64
MASK = 0xFFFFFFFF


def compress(value, block, counter, length, flags):
    """The chaining value (8 words) after one block of 64 bytes."""
    v = [*value, *IV[:4], counter & MASK, counter >> 32, length, flags]
    words = struct.unpack("<16I", block)
    for _ in range(7):
        for index, (a, b, c, d) in enumerate(COLUMNS_AND_DIAGONALS):
            va, vb, vc, vd = v[a], v[b], v[c], v[d]
            va = (va + vb + words[2 * index]) & MASK
            vd ^= va
            vd = vd >> 16 | vd << 16 & MASK
            vc = (vc + vd) & MASK
            vb ^= vc
            vb = vb >> 12 | vb << 20 & MASK
            va = (va + vb + words[2 * index + 1]) & MASK
            vd ^= va
            vd = vd >> 8 | vd << 24 & MASK
            vc = (vc + vd) & MASK
            vb ^= vc
            v[a], v[b], v[c], v[d] = va, vb >> 7 | vb << 25 & MASK, vc, vd
        words = [words[index] for index in PERMUTATION]
    return tuple(v[index] ^ v[index + 8] for index in range(8))


def leaf(part, counter, root):
    value = IV
    starts = range(0, max(len(part), 1), 64)
    for start in starts:
        block = part[start : start + 64]
        flags = (CHUNK_START if start == 0 else 0) | (CHUNK_END | root if start == starts[-1] else 0)
        value = compress(value, block.ljust(64, b"\0"), counter, len(block), flags)
    return value


def parent(left, right, root):
    return compress(IV, struct.pack("<16I", *left, *right), 0, 64, PARENT | root)


def merge(values, root):
    """The value of the tree over `values`: the left subtree has the largest power of two below their number."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    return parent(merge(values[:left], 0), merge(values[left:], 0), root)


@functools.cache
def processes():
    """One for each processor: a second of Python hashes little more than 100 KB."""
    return multiprocessing.get_context("fork").Pool()


def subtree(part, offset, root):
    """The value of bytes that begin at `offset` of their file; with ROOT, of a whole file."""
    starts = range(0, max(len(part), 1), LEAF_BYTES)
    first = offset // LEAF_BYTES
    if len(starts) == 1:
        return leaf(part, first, root)
    leaves = ((part[start : start + LEAF_BYTES], first + i, 0) for i, start in enumerate(starts))
    if len(starts) < 4 * AT_ONCE:
        return merge([leaf(*it) for it in leaves], root)
    return merge(processes().starmap(leaf, leaves, AT_ONCE), root)


def hexed(value):
    return struct.pack("<8I", *value).hex()


def unhexed(text):
    return struct.unpack("<8I", bytes.fromhex(text))


def blake3(part):
    return hexed(subtree(part, 0, ROOT))


def chunk_values(content):
    if len(content) <= CHUNK_BYTES:
        return [blake3(content)]
    starts = range(0, len(content), CHUNK_BYTES)
    return [hexed(subtree(content[start : start + CHUNK_BYTES], start, 0)) for start in starts]


# Documents.


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def read_document(path):
    """A document in canonical JSON and the digest of its file."""
    content = path.read_bytes()
    value = json.loads(content, parse_float=lambda text: refuse(f"{path}: the float {text}"))
    assert content == canonical(value).encode() + b"\n", f"{path}: not canonical JSON"
    assert value["format"] == FORMAT, f"{path}: format {value['format']}"
    # Operators do not matter to a reader of weights; stages would, as a package then holds some layers only.
    assert "stages" not in value["requires"], f"{path}: has pipeline stages"
    return value, blake3(content)


def refuse(problem):
    raise AssertionError(problem)


def digest_of(value):
    return blake3(canonical(value).encode())


def check_ids(manifest):
    files = {file["name"]: file["blake3"] for file in manifest["files"]}
    text = {name: files[name] for name in TEXT_FILES if name in files}
    ids = manifest["ids"]
    assert ids["model"] == digest_of({"text": text, "weights": ids["weights"]}), "model id"
    assert ids["layout"] == digest_of({"layout": manifest["layout"], "model": ids["model"]}), "layout id"
    if manifest["layout"]["ranks"] > 1:
        return
    # With one rank, every tensor is whole.
    names = {tensor["name"] for tensor in manifest["tensors"]}
    tensors = []
    for tensor in manifest["tensors"]:
        module, _, part = tensor["name"].rpartition(".")
        affine = format_of(manifest, module)
        is_quantized = part in ("weight", "scales", "biases") and f"{module}.scales" in names
        bits, group = (affine["bits"], affine["group_size"]) if is_quantized else (0, 0)
        identity = {key: tensor[key] for key in ("name", "dtype", "shape", "blake3")}
        tensors.append({**identity, "bits": bits, "group": group})
    tensors.sort(key=lambda tensor: tensor["name"].encode())
    expected = digest_of({"architecture": manifest["architecture"], "tensors": tensors})
    assert ids["weights"] == expected, "weights id"


def format_of(manifest, module):
    """Bits and group size of a matrix, or None where it is stored as floats."""
    quantization = manifest["quantization"]
    override = quantization.get("overrides", {}).get(module)
    if override is not None:
        return None if override == "plain" else override["affine"]
    if "group_size" not in quantization:
        return None
    return {"bits": quantization["bits"], "group_size": quantization["group_size"]}


# Weights.


def read_header(content):
    """Name, dtype, shape and bytes of each tensor of a safetensors file, and where its data begins."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {}
    for name, info in header.items():
        first, end = info["data_offsets"]
        tensors[name] = (info["dtype"], info["shape"], content[start + first : start + end])
    return tensors, start


def floats(dtype, content):
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + content[at : at + 2])[0] for at in range(0, len(content), 2)]
    return [value for (value,) in struct.iter_unpack("<f" if dtype == "F32" else "<e", content)]


def dequantize(tensors, module, bits, group):
    """The rows of a matrix: scale · q + bias, q from a little-endian bit stream in each row."""
    dtype, (rows, words), packed = tensors[f"{module}.weight"]
    assert dtype == "U32"
    width = words * 32 // bits
    scales, biases = (floats(tensors[f"{module}.{part}"][0], tensors[f"{module}.{part}"][2]) for part in ("scales", "biases"))
    result = []
    for row in range(rows):
        stream = int.from_bytes(packed[row * words * 4 : (row + 1) * words * 4], "little")
        values = []
        for column in range(width):
            q = stream >> column * bits & (1 << bits) - 1
            at = row * (width // group) + column // group
            values.append(scales[at] * q + biases[at])
        result.append(values)
    return result


def read_package(directory, expected=None):
    """Checks a package and returns its manifest and tensors."""
    manifest, digest = read_document(directory / "manifest.json")
    assert expected in (None, digest), f"{directory}: another manifest than the set lists"
    check_ids(manifest)
    contents, stored = {}, {}
    for file in manifest["files"]:
        assert FILE_NAME.fullmatch(file["name"]), file["name"]
        content = (directory / file["name"]).read_bytes()
        assert len(content) == file["size"], f"{file['name']}: {len(content)} bytes"
        values = chunk_values(content)
        assert values == file["chunks"], f"{file['name']}: chunk values"
        merged = values[0] if len(values) == 1 else hexed(merge([unhexed(value) for value in values], ROOT))
        assert merged == file["blake3"], f"{file['name']}: its chunk values do not merge to its digest"
        contents[file["name"]] = content
        if file["name"].endswith(".safetensors"):
            tensors, start = read_header(content)
            assert start % DATA_ALIGNMENT == 0, f"{file['name']}: data begins at {start}"
            stored.update(tensors)
    names = {entry.name for entry in directory.iterdir() if not entry.name.startswith(".")}
    assert names - {"model.sig"} == {*contents, "manifest.json"}, names
    tensors = {}
    for tensor in manifest["tensors"]:
        name, start, end = tensor["name"], tensor["offset"], tensor["offset"] + tensor["size"]
        elements = math.prod(tensor["shape"])
        assert tensor["size"] == elements * DTYPE_BYTES[tensor["dtype"]], name
        content = contents[tensor["file"]][start:end]
        assert blake3(content) == tensor["blake3"], f"{name}: its digest"
        assert stored[name] == (tensor["dtype"], tensor["shape"], content), f"{name}: the file's header"
        tensors[name] = stored[name]
    return manifest, tensors


def read_set(directory):
    package_set, _ = read_document(directory / "set.json")
    packages = []
    for rank, package in enumerate(package_set["packages"]):
        manifest, tensors = read_package(directory / package["directory"], package["manifest"])
        assert manifest["rank"] == rank and manifest["ids"] == package_set["ids"]
        assert sum(file["size"] for file in manifest["files"]) == package["size_bytes"]
        packages.append((manifest, tensors))
    return packages


def join(packages, name):
    """A tensor of all packages put together again along the dimension that is sharded; as bytes."""
    found = []
    for manifest, tensors in packages:
        entry = next((tensor for tensor in manifest["tensors"] if tensor["name"] == name), None)
        if entry is not None:
            found.append((entry, tensors[name][2]))
    entry, content = found[0]
    if entry["shard"] in ("replicated", "once"):
        return content
    shard = entry["shard"]["range"]
    outer = math.prod(entry["shape"][: shard["dim"]])
    pieces = {}
    for entry, content in found:
        part = len(content) // outer
        pieces[entry["shard"]["range"]["start"]] = [content[i * part : (i + 1) * part] for i in range(outer)]
    return b"".join(pieces[start][i] for i in range(outer) for start in sorted(pieces))


def main():
    program = pathlib.Path(sys.argv[1]).absolute()
    source, _ = read_header((data / "kjv-4m/model.safetensors").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)

        def run(*args):
            subprocess.run([program, *map(str, args)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def convert(*options):
            output = folder / "-".join(map(str, options)).replace("--", "")
            if not output.exists():
                run("convert", data / "kjv-4m", "-o", output, *options)
            return output

        # Whole packages: small files at 4 bits, one of several chunks at 8, shards on two ranks.
        four = convert("--bits", 4)
        ((manifest, whole),) = read_set(four)
        read_set(convert("--bits", 8))
        two = read_set(convert("--bits", 4, "--nodes", 2))
        for name, (_, _, content) in whole.items():
            assert join(two, name) == content, f"{name}: two packages put together"
        print(f"interop: packages read by their documentation: {len(manifest['files'])} files, {len(whole)} tensors")

        # Every width of integers, against the checkpoint.
        dtype, _, content = source[f"{MATRIX}.weight"]
        true = floats(dtype, content)
        for bits, limit in LARGEST_RMSE.items():
            package = convert("--bits", bits)
            tensors = {}
            for path in (package / "node-0").glob("*.safetensors"):
                tensors.update(read_header(path.read_bytes())[0])
            found = sum(dequantize(tensors, MATRIX, bits, 64), [])
            assert len(found) == len(true)
            error = math.sqrt(sum((a - b) ** 2 for a, b in zip(found, true)) / sum(b * b for b in true))
            assert error < limit, f"{bits} bits: relative RMSE {error:.4f}"
            if bits == 4:
                run("export", package, "-o", folder / "hf", "--hf", "--dtype", "f32")
                exported = {}
                for path in (folder / "hf").glob("*.safetensors"):
                    exported.update(read_header(path.read_bytes())[0])
                dtype, _, content = exported[f"{MATRIX}.weight"]
                assert dtype == "F32" and content == struct.pack(f"<{len(found)}f", *found), "other floats than export's"
            print(f"interop: {bits} bits dequantize within {error:.4f} of the checkpoint")


if __name__ == "__main__":
    main()
