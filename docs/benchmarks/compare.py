#!/usr/bin/env python3
"""shardpack against llama.cpp on one model, alternately, on the same two threads.

    cargo build --release -p shardpack && cargo build --release -p shardpack-engine --example speed
    docs/benchmarks/compare.py FOLDER [--rounds 5] [--threads 2]

FOLDER keeps what takes long to make: the random 1.1 B model, its sets at 4, 6 and 8 bits, and
llama.cpp's files. Needs the packages that make_model.py, to_gguf.py and llama.py name. Figures
are the best of the rounds; ratios are of those, taken in one run, since a machine's speed drifts.
What is read against the limit is the middle of the rounds, each of which takes both in turns. The
most that any program could reach is that limit by the bytes of our weights, against the peer.
"""
import argparse, json, os, statistics, subprocess, sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PEERS = {4: ["Q4_0", "Q4_K_M"], 6: ["Q6_K"], 8: ["Q8_0"]}
AT_LEAST = {4: (1.8, 2.0), 6: (1.6, 1.5), 8: (1.5, 1.5)}  # decode, prefill


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def here(script, *arguments):
    return run(sys.executable, os.path.join(HERE, script), *arguments)


def prepare(folder, program):
    at = lambda name: os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    if not os.path.exists(at("model-1b/config.json")):
        here("make_model.py", at("model-1b"))
    for bits in PEERS:
        if not os.path.exists(at(f"set-{bits}/set.json")):
            run(program, "convert", at("model-1b"), "-o", at(f"set-{bits}"), "--bits", str(bits))
    if not os.path.exists(at("f16.gguf")):
        here("to_gguf.py", at("model-1b"), at("f16.gguf.part"))
        os.rename(at("f16.gguf.part"), at("f16.gguf"))
    for kind in sum(PEERS.values(), []):
        if not os.path.exists(at(f"{kind}.gguf")):
            here("llama.py", "quantize", at("f16.gguf"), at(f"{kind}.part"), kind)
            os.rename(at(f"{kind}.part"), at(f"{kind}.gguf"))
    return at


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", default=os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target")))
    a = parser.parse_args()
    release = os.path.join(a.target, "release")
    at = prepare(a.folder, os.path.join(release, "shardpack"))
    speed = os.path.join(release, "examples", "speed")
    best, shares = {}, {}

    def note(name, text):
        figures = json.loads(text.strip().splitlines()[-1])
        for key, value in figures.items():
            best.setdefault(name, {})[key] = max(value, best.get(name, {}).get(key, 0))
        if "read_limit_gb_s" in figures:
            shares.setdefault(name, []).append(figures["read_gb_s"] / figures["read_limit_gb_s"])

    for number in range(a.rounds):
        for bits, kinds in PEERS.items():
            note(f"shardpack {bits}", run(speed, at(f"set-{bits}"), str(a.threads)))
            for kind in kinds:
                note(kind, here("llama.py", "measure", at(f"{kind}.gguf"), str(a.threads)))
        print(f"round {number + 1} of {a.rounds}", file=sys.stderr)
    print("| | decode tok/s | prefill tok/s | read GB/s | of the read limit |\n|---|---|---|---|---|")
    for name, figures in best.items():
        limit = figures.get("read_limit_gb_s")
        read = f"{figures['read_gb_s']:.1f} | {statistics.median(shares[name]):.2f}" if limit else " | "
        print(f"| {name} | {figures['decode']:.1f} | {figures['prefill']:.0f} | {read} |")
    for bits, kinds in PEERS.items():
        ours = best[f"shardpack {bits}"]
        ratio = {what: ours[what] / max(best[kind][what] for kind in kinds) for what in ("decode", "prefill")}
        most = ours["read_limit_gb_s"] / ours["read_gb_s"] * ratio["decode"]
        print(f"{bits} bits: decode {ratio['decode']:.2f} times (at least {AT_LEAST[bits][0]}; memory allows "
              f"{most:.2f}), prefill {ratio['prefill']:.2f} times (at least {AT_LEAST[bits][1]})")


main()
