"""Writes adapter_model.safetensors with every F32 tensor rounded to F16: half the size, and the
same six answers (known.json), which a test asks for.

    python narrow.py TRAINED/adapter_model.safetensors adapter_model.safetensors
"""

import json
import struct
import sys

import numpy as np

source = open(sys.argv[1], "rb").read()
size = struct.unpack("<Q", source[:8])[0]
header, data = json.loads(source[8 : 8 + size]), source[8 + size :]
out, bodies, end = {"__metadata__": header.pop("__metadata__", {"format": "pt"})}, [], 0
for name, info in sorted(header.items()):
    assert info["dtype"] == "F32", name
    start, stop = info["data_offsets"]
    body = np.frombuffer(data[start:stop], "<f4").astype("<f2").tobytes()
    out[name] = {"dtype": "F16", "shape": info["shape"], "data_offsets": [end, end + len(body)]}
    end += len(body)
    bodies.append(body)
text = json.dumps(out, separators=(",", ":")).encode()
text += b" " * (-len(text) % 8)
open(sys.argv[2], "wb").write(struct.pack("<Q", len(text)) + text + b"".join(bodies))
