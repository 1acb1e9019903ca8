"""Quality for each bit of this program, llama.cpp and mlx-lm: one model, one text, one evaluation.

    compare.py MODEL OUT CALIBRATION EVALUATION PROGRAM LLAMA [--context N] [--tokens N] [--peers ours,mlx_lm]

MODEL is a checkpoint in 16 bits, LLAMA the folder with llama-quantize and llama-imatrix. Everybody measures on
CALIBRATION; KL divergence is from the model's own 16-bit logits over EVALUATION. What everybody has made is
decoded to 32-bit floats and judged by the same arithmetic (logits.py). Each figure stays in OUT/figures.json, so
that a run that was interrupted goes on.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import checkpoint
import logits
from tokenizers import Tokenizer

KINDS = ("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "IQ4_NL")
BUDGETS = ("4.5", "4.8", "5.0", "5.5", "5.7", "6.5")


class Comparison:
    def __init__(self, arguments):
        self.__dict__.update(vars(arguments))
        self.model = self.model.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.figures_file = self.out / "figures.json"
        self.figures = json.loads(self.figures_file.read_text()) if self.figures_file.exists() else []
        weights = checkpoint.floats(checkpoint.load(self.model))
        self.parameters = sum(it.size for it in weights.values())
        text = self.out / "evaluation.txt"
        text.write_text(self.evaluation.read_text()[: self.characters])
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        tokens = tokenizer.encode(text.read_text(), add_special_tokens=False).ids
        self.judge = logits.Judge(self.model, weights, tokens, int(self.context))
        counted, (itself, _, perplexity) = len(self.judge.right), self.judge.judge(weights)
        assert abs(itself) < 1e-8, f"the model is {itself} from itself"
        print(
            f"{self.model.name}: {self.parameters / 1e6:.2f} M parameters; of {len(tokens)} tokens, {counted} in "
            f"{len(self.judge.windows)} windows count; perplexity at 16 bits {perplexity:.3f}", flush=True,
        )  # fmt: skip

    def known(self, peer, name):
        return any((it["peer"], it["name"]) == (peer, name) for it in self.figures)

    def run(self, *command, **more):
        """Runs a command with its output in a log; the log's end is part of the error."""
        log = self.out / "log.txt"
        with log.open("a") as file:
            print("$", *command, file=file, flush=True)
            done = subprocess.run([str(it) for it in command], stdout=file, stderr=file, **more)
        if done.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{end}")

    def convert(self, source, out, *options):
        command = [self.program, "convert", source, "--output", out, "--threads", self.threads, *options]
        self.run(*command, env=self.with_blas if "--distill" in options else None)

    @property
    def with_blas(self):
        """MLX's build for Linux computes products with the reference BLAS, twenty times as slow as it need be."""
        return os.environ | ({"LD_PRELOAD": self.blas} if self.blas else {})

    def add(self, peer, name, weights, size, seconds, **more):
        kl, error, perplexity = self.judge.judge(weights)
        figure = {
            "peer": peer, "name": name, "bits_per_weight": 8 * size / self.parameters, "kl": kl, "kl_error": error,
            "perplexity": perplexity, "tokens": len(self.judge.right), "seconds": round(seconds, 1), **more,
        }  # fmt: skip
        self.figures.append(figure)
        self.figures_file.write_text(json.dumps(self.figures, indent=1))
        print(f"{self.model.name}: {peer} {name}: {figure['bits_per_weight']:.3f} bits, KL {kl:.6f}", flush=True)

    def evaluate(self, set_, *options):
        """What the program's own `eval` says of a set against the same text and model."""
        saved = self.out / "logits"
        threads = ["--threads", self.threads]
        if not saved.exists():
            set_16 = self.out / "16-bit"
            shutil.rmtree(set_16, ignore_errors=True)
            self.convert(self.model, set_16, "--bits", "16")
            vocabulary = self.judge.config["vocab_size"]
            text = ["--text", self.out / "evaluation.txt", "--context", self.context]
            self.run(self.program, "eval", set_16, *text, *threads, "--save-logits", saved, "--top", vocabulary)
        command = [self.program, "eval", set_, *threads, "--logits", saved, "--json", *options]
        done = subprocess.run([str(it) for it in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"eval of {set_}: {done.stderr[-500:]}")
        return json.loads(done.stdout)["sets"][0]

    def ours(self):
        stats = self.out / "stats"
        if not stats.exists():
            self.run(
                self.program, "calibrate", self.model, "--output", stats, "--text", self.calibration, "--tokens",
                self.tokens, "--context", self.context, "--sensitivity", *self.sensitivity, "--threads", self.threads,
            )  # fmt: skip
        ways = [(f"refined {bits}", ["--bits", bits]) for bits in "4568"]
        ways += [(f"gptq {bits}", ["--bits", bits, "--rounding", "gptq", "--stats", stats]) for bits in "4568"]
        ways += [(f"--bpw {it}", ["--bpw", it, "--stats", stats]) for it in BUDGETS]
        learned = ["--calibrate", self.calibration, "--calibration-tokens", self.tokens]
        learned += ["--calibration-context", self.context, "--distill", self.distill]
        ways += [(f"distilled {bits}", ["--bits", bits, *learned]) for bits in self.distilled]
        for name, options in ways:
            if self.known("shardpack", name):
                continue
            set_, exported = self.out / "set", self.out / "exported"
            for folder in (set_, exported):
                shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            self.convert(self.model, set_, *options)
            seconds = time.monotonic() - began
            self.run(self.program, "export", set_, "--hf", "--dtype", "f32", "--output", exported)
            weights = checkpoint.floats(checkpoint.load(exported))
            own = self.evaluate(set_)
            activations = own["against"]["kl_mean"]["value"]
            self.add("shardpack", name, weights, own["bytes"], seconds, kl_8_bit_activations=activations)
            if name == "gptq 4":
                same, found = self.evaluate(set_, "--exact")["against"]["kl_mean"]["value"], self.figures[-1]["kl"]
                # Orders of summation are all that may differ.
                assert abs(same / found - 1) < 1e-3, f"eval says {same} and the exported weights are at {found}"

    def llama_cpp(self):
        floats, importance = self.out / "f32.gguf", self.out / "imatrix.gguf"
        if not floats.exists():
            checkpoint.write_gguf(self.model, floats, self.pre_tokenizer)
        if not importance.exists():
            chunks = max(1, int(self.tokens) // int(self.context))
            self.run(
                self.llama / "llama-imatrix", "-m", floats, "-f", self.calibration, "-o", importance, "--parse-special",
                "-c", self.context, "-b", self.context, "-ub", self.context, "--chunks", chunks, "-t", self.threads,
                "-ngl", "0",
            )  # fmt: skip
        for kind in KINDS:
            if self.known("llama.cpp", kind):
                continue
            file = self.out / f"{kind}.gguf"
            began = time.monotonic()
            self.run(self.llama / "llama-quantize", "--imatrix", importance, floats, file, kind, self.threads)
            seconds = time.monotonic() - began
            self.add("llama.cpp", kind, *checkpoint.read_gguf(file, self.model), seconds)
            file.unlink()

    def mlx_lm(self):
        home = self.out / "mlx-home"
        cache = home / ".cache/mlx-lm"
        cache.mkdir(parents=True, exist_ok=True)
        # Where mlx-lm looks for its calibration text before it downloads one.
        text = self.calibration.read_text()
        (cache / "calibration_v5.txt").write_text(text)
        (home / "data").mkdir(exist_ok=True)
        lines = [text[at : at + 400] for at in range(0, len(text), 400)]
        # Distillation takes more samples than the text has such pieces.
        (home / "data/train.jsonl").write_text("".join(json.dumps({"text": it}) + "\n" for it in lines) * 2)
        length = ["--sequence-length", self.context]
        distillation = ["--bits", "4", "--data-path", home / "data", "--num-samples", "128", "--max-seq-length"]
        distillation += [str(int(self.context) + 1), "--model"]
        ways = [(f"{bits} bits", ["convert", "-q", "--q-bits", bits, "--hf-path"]) for bits in "4568"]
        ways += [("gptq 4", ["gptq", "--bits", "4", *length, "--model"])]
        dynamic = ["--low-bits", "4", "--high-bits", "6", "--target-bpw"]
        ways += [(f"dynamic {bpw}", ["dynamic_quant", *dynamic, bpw, "--model"]) for bpw in ("4.8", "5.0", "5.5")]
        # On a CPU its search takes minutes for each layer even so.
        ways += [("awq 4, 16 windows", ["awq", "--bits", "4", *length, "--num-samples", "16", "--model"])]
        ways += [("dwq 4", ["dwq", *distillation])]
        for name, (tool, *options) in ways:
            if self.known("mlx-lm", name):
                continue
            quantized = self.out / "mlx"
            shutil.rmtree(quantized, ignore_errors=True)
            # Measured once for all of its sizes.
            measured = [] if tool != "dynamic_quant" else [*home.glob("*_sensitivities.json")]
            options = ["--sensitivities", *measured, *options] if measured else options
            began = time.monotonic()
            try:
                self.run(
                    sys.executable, "-m", "mlx_lm", tool, *options, self.model, "--mlx-path", quantized, cwd=home,
                    env=self.with_blas | {"HOME": str(home), "HF_HUB_OFFLINE": "1"}, timeout=self.share,
                )  # fmt: skip
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                # A quantizer of theirs that fails or takes longer than its share is named, not left out in silence.
                print(f"{self.model.name}: mlx-lm {name}: no figure: {error}", flush=True)
                continue
            self.add("mlx-lm", name, *checkpoint.read_mlx(quantized), time.monotonic() - began)


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "out", "calibration", "evaluation", "program", "llama"):
        parser.add_argument(name, type=lambda it: Path(it).resolve())
    parser.add_argument("--context", default="128")
    parser.add_argument("--tokens", default="65536")
    parser.add_argument("--threads", default=str(os.cpu_count()))
    parser.add_argument("--sensitivity", nargs="*", default=[])
    parser.add_argument("--blas", help="a library that MLX's products come from in a distillation")
    parser.add_argument("--pre-tokenizer", default="gpt-2")
    parser.add_argument("--distill", default="150", help="steps of 2,048 tokens")
    parser.add_argument("--distilled", nargs="*", default=["4"], help="bits")
    parser.add_argument("--share", type=float, default=600, help="seconds for each of mlx-lm's quantizers")
    parser.add_argument("--characters", type=int, default=32768, help="of the text to evaluate")
    parser.add_argument("--peers", default="ours,llama_cpp,mlx_lm")
    arguments = parser.parse_args()
    comparison = Comparison(arguments)
    for peer in arguments.peers.split(","):
        getattr(comparison, peer)()


if __name__ == "__main__":
    main()
