#!/usr/bin/env python3
"""`shardpack convert` against mlx_lm.convert and llama.cpp's Q4_0, alternately, on the same machine.

    cargo build --release
    docs/benchmarks/convert.py FOLDER [--rounds 3] [--mlx PYTHON] [--b3sum B3SUM]
    docs/benchmarks/convert.py FOLDER --growth model-2 model-4

FOLDER holds model-1b (make_model.py) and f16.gguf (to_gguf.py); results go to tmpfs, so nothing
is synced to a disk, as the peers do not sync either. Sources are read once before, so that they
come from memory. --mlx names a Python with mlx_lm; this Python needs llama_cpp. --growth gives
seconds per GB and peak memory on larger models in place of the peers.
"""
import argparse, os, shutil, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def measured(command):
    """Seconds, and the largest resident size in MB."""
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed ({status})")
    return time.perf_counter() - begun, usage.ru_maxrss / 1000


def size(folder):
    return sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))


def warm(folder):
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            while file.read(1 << 24):
                pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mlx")
    parser.add_argument("--b3sum")
    parser.add_argument("--growth", nargs="*")
    parser.add_argument("--target", default=os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")))
    a = parser.parse_args()
    program = os.path.join(a.target, "release", "shardpack")
    out = tempfile.mkdtemp(dir="/dev/shm")
    at = lambda name: os.path.join(a.folder, name)
    best = {}

    def ours(model, rounding):
        return [program, "convert", at(model), "-o", os.path.join(out, "o"), "--bits", "4", "--nodes", "2",
                "--rounding", rounding]

    def note(name, command):
        target = os.path.join(out, "o")
        shutil.rmtree(target, ignore_errors=True)
        if os.path.isfile(target):
            os.remove(target)
        seconds, memory = measured(command)
        least, most = best.get(name, (seconds, memory))
        best[name] = (min(least, seconds), max(most, memory))

    try:
        if a.growth is not None:
            for model in ["model-1b", *a.growth]:
                warm(at(model))
                for _ in range(a.rounds):
                    note(model, ours(model, "refined"))
                seconds, memory = best[model]
                gigabytes = size(at(model)) / 1e9
                print(f"{model}: {gigabytes:.2f} GB, {seconds:.2f} s, {seconds / gigabytes:.3f} s/GB, {memory:.0f} MB resident",
                      flush=True)
            return
        warm(at("model-1b"))
        for _ in range(a.rounds):
            for rounding in ("mlx-cpu", "refined"):
                note(rounding, ours("model-1b", rounding))
            if a.b3sum:
                files = [os.path.join(folder, name) for folder, _, names in os.walk(os.path.join(out, "o")) for name in names]
                begun = time.perf_counter()
                measured([program, "verify", os.path.join(out, "o")])
                verify = time.perf_counter() - begun
                b3sum, _ = measured([a.b3sum, *files])
                for name, seconds in (("verify", verify), ("b3sum", b3sum)):
                    best[name] = (min(best.get(name, (seconds, 0))[0], seconds), 0)
            if a.mlx:
                note("mlx_lm.convert", [a.mlx, "-m", "mlx_lm", "convert", "--hf-path", at("model-1b"), "--mlx-path",
                                        os.path.join(out, "o"), "-q", "--q-bits", "4"])
            if os.path.exists(at("f16.gguf")):
                note("llama.cpp Q4_0", [sys.executable, os.path.join(HERE, "llama.py"), "quantize", at("f16.gguf"),
                                        os.path.join(out, "o"), "Q4_0"])
        for name, (seconds, memory) in best.items():
            print(f"{name}: {seconds:.2f} s, {memory:.0f} MB resident")
        for peer, goals in (("mlx_lm.convert", (5, 4)), ("llama.cpp Q4_0", (3, None))):
            if peer in best:
                for rounding, goal in zip(("mlx-cpu", "refined"), goals):
                    wanted = f" (at least {goal})" if goal else ""
                    print(f"{rounding}: {best[peer][0] / best[rounding][0]:.2f} times as fast as {peer}{wanted}")
        if a.b3sum:
            print(f"verify: {best['b3sum'][0] / best['verify'][0]:.2f} of b3sum (at least 0.9)")
    finally:
        shutil.rmtree(out, ignore_errors=True)


main()
