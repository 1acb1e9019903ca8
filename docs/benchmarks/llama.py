#!/usr/bin/env python3
"""llama.cpp's side of a comparison: quantizes a GGUF, or measures one.

    llama.py quantize IN.gguf OUT.gguf TYPE          # Q4_0, Q4_K_M, Q6_K or Q8_0
    llama.py measure FILE.gguf THREADS               # one line of JSON: tokens per second

Needs: pip install llama-cpp-python (built from its source, so that it uses this processor).
"""
import ctypes, json, sys, time
import llama_cpp

TYPES = {"Q4_0": 2, "Q4_K_M": 15, "Q6_K": 18, "Q8_0": 7}
PROMPT, STEPS = 256, 32


def quantize(source, target, kind):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = TYPES[kind], 2
    failed = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    sys.exit(f"cannot quantize to {kind}" if failed else 0)


def measure(path, threads):
    model = llama_cpp.Llama(path, n_ctx=512, n_batch=PROMPT, n_ubatch=PROMPT, n_threads=threads,
                            n_threads_batch=threads, verbose=False)
    tokens = [(i * 7919 + 5) % 31000 + 3 for i in range(PROMPT)]
    model.eval(tokens[:32])  # touches every weight once
    model.reset()
    begun = time.perf_counter()
    model.eval(tokens)
    prefill = PROMPT / (time.perf_counter() - begun)
    model.reset()
    model.eval(tokens[:8])
    begun = time.perf_counter()
    for step in range(STEPS):
        model.eval([tokens[step]])
    print(json.dumps({"prefill": prefill, "decode": STEPS / (time.perf_counter() - begun)}))


if __name__ == "__main__":
    if sys.argv[1] == "quantize":
        quantize(*sys.argv[2:5])
    measure(sys.argv[2], int(sys.argv[3]))
