"""Writes imatrix.gguf with gguf-py, as llama-imatrix lays it out (needs: pip install gguf).

    python make_imatrix.py imatrix.gguf
"""
import sys

import gguf
import numpy as np

writer = gguf.GGUFWriter(sys.argv[1], arch="")
writer.kv_data[0].pop("general.architecture", None)
writer.add_type("imatrix")
writer.add_array("imatrix.datasets", ["first.txt", "zweite Datei.txt"])
writer.add_uint32("imatrix.chunk_count", 50)
writer.add_uint32("imatrix.chunk_size", 512)


def add(name, sums, counts):
    """Sums [matrices, in] and tokens [matrices, 1]; numpy's last axis is gguf's first."""
    writer.add_tensor(name + ".in_sum2", np.array(sums, dtype=np.float32))
    writer.add_tensor(name + ".counts", np.array(counts, dtype=np.float32).reshape(-1, 1))
    writer.add_tensor(name + ".in_sum", np.zeros_like(sums, dtype=np.float32))


add("blk.0.attn_qkv.weight", [[256.0, 512.0, 768.0]], [25600])
add("blk.0.ffn_down_exps.weight", [[1.0, 3.0], [0.0, 0.0], [6.0, 2.0]], [4, 0, 2])
add("blk.3.ssm_out.weight", [[1.0, 1.0]], [25600])
add("output.weight", [[2.0, 2.0, 2.0, 2.0]], [25600])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
