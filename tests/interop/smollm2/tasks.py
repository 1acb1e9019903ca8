"""lm-eval's loglikelihood and generation tasks on the served package and on llama.cpp, with the same
file and with the 16-bit file that it makes of it. How far llama.cpp is from itself there, by rounding
activations to 8 bits, is its noise: the package may be no further from the 16-bit file.

    tasks.py SHARDPACK SET GGUF
"""

import importlib.metadata
import pathlib
import sys
import tempfile

import facts
import lm_eval
import numpy
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from model import at_16_bits, llama, served

# How far the accuracies may be apart, in standard errors of their difference.
ERRORS_MAX = 2
# The least share of questions to which both choose the same answer, or say the same.
SAME_MIN = 0.9


class Llama(LM):
    """llama.cpp as lm-eval asks a model."""

    def __init__(self, gguf):
        super().__init__()
        self.model = llama(gguf)

    def tokens(self, text):
        return self.model.tokenize(text.encode(), add_bos=False, special=False)

    def loglikelihood(self, requests):
        return [self.one(*request.args) for request in requests]

    def one(self, context, continuation):
        whole, begun = self.tokens(context + continuation), len(self.tokens(context))
        self.model.reset()
        self.model.eval(whole)
        logits = self.model.scores[begun - 1 : len(whole) - 1].astype(numpy.float64)
        normal = numpy.log(numpy.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
        expected = whole[begun:]
        likelihood = (logits[numpy.arange(len(expected)), expected] - normal).sum()
        return float(likelihood), bool((logits.argmax(axis=1) == expected).all())

    def generate_until(self, requests):
        return [self.say(*request.args) for request in requests]

    def say(self, context, settings):
        most, stop = settings["max_gen_toks"], settings["until"]
        answer = self.model.create_completion(self.tokens(context), max_tokens=most, stop=stop, temperature=0)
        return answer["choices"][0]["text"]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError


def evaluate(folder, model, arguments):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model, model_args=arguments, tasks=list(facts.TASKS), task_manager=manager)
    samples = {}
    for task, answers in found["samples"].items():
        ordered = sorted(answers, key=lambda sample: sample["doc_id"])
        samples[task] = [sample["filtered_resps"] for sample in ordered]
    return found["results"], samples


def nats(one, other):
    """The mean difference of a choice's log-likelihood."""
    likelihoods = [[[choice[0] for choice in answer] for answer in samples["facts"]] for _, samples in (one, other)]
    return float(numpy.abs(numpy.subtract(*likelihoods)).mean())


def compare(task, metric, ours, theirs, kind):
    a, b = (results[task] for results, _ in [ours, theirs])
    error = numpy.hypot(a[f"{metric}_stderr,none"], b[f"{metric}_stderr,none"])
    a, b = a[f"{metric},none"], b[f"{metric},none"]
    pairs = list(zip(ours[1][task], theirs[1][task], strict=True))
    if metric == "acc":
        pairs = [[max(range(len(it)), key=lambda n: it[n][0]) for it in pair] for pair in pairs]
    same = sum(one == other for one, other in pairs) / len(pairs)
    print(f"smollm2: lm-eval {task}: {metric} {a:.3f}, llama.cpp with the file {kind} {b:.3f}; {same:.0%} the same")
    assert abs(a - b) <= ERRORS_MAX * error, f"{task}: {a} and {b} are more than the noise {error} apart"
    assert same >= SAME_MIN, f"{task}: {same:.0%} of the answers are the same"


def main():
    shardpack, set_, gguf = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        facts.write(folder)
        with served(shardpack, set_) as url:
            arguments = {"base_url": f"{url}/completions", "model": "smol"}
            ours = evaluate(folder, "local-completions", arguments)
        whole = evaluate(folder, Llama(at_16_bits(gguf, folder / "16-bit.gguf")), None)
        as_it_is = evaluate(folder, Llama(gguf), None)
    off, noise, between = nats(ours, whole), nats(as_it_is, whole), nats(ours, as_it_is)
    print(f"smollm2: lm-eval facts: log-likelihoods differ by {off:.4f} nats from llama.cpp at 16 bits, by {between:.4f}")
    print(f"  from it with the file as it is; these two by {noise:.4f}")
    for kind, theirs in {"at 16 bits": whole, "as it is": as_it_is}.items():
        compare("facts", "acc", ours, theirs, kind)
        compare("capitals", "exact_match", ours, theirs, kind)
    assert off <= noise, f"the package is {off} nats from the 16-bit file, llama.cpp's own noise is {noise}"
    print(f"smollm2: lm-eval {importlib.metadata.version('lm-eval')}, tasks of our own: the hub's are not asked for")


main()
