"""lm-eval's loglikelihood and generation tasks on the served package and on llama.cpp with the same
file: the same answers within the noise of 8-bit activations.

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
from model import llama, served

# How far the accuracies may be apart, in standard errors of their difference.
ERRORS_MAX = 2
# The least share of questions to which both choose the same answer, or say the same.
SAME_MIN = 0.9
# The mean difference of a choice's log-likelihood, in nats.
NATS_MAX = 0.1


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


def compare(task, metric, ours, theirs):
    a, b = (results[task] for results, _ in [ours, theirs])
    error = numpy.hypot(a[f"{metric}_stderr,none"], b[f"{metric}_stderr,none"])
    a, b = a[f"{metric},none"], b[f"{metric},none"]
    pairs = list(zip(ours[1][task], theirs[1][task], strict=True))
    if metric == "acc":
        likelihoods = numpy.array([[[choice[0] for choice in answer] for answer in pair] for pair in pairs])
        same = float((likelihoods[:, 0].argmax(axis=1) == likelihoods[:, 1].argmax(axis=1)).mean())
        nats = float(numpy.abs(likelihoods[:, 0] - likelihoods[:, 1]).mean())
        more = f", log-likelihoods differ by {nats:.4f} nats"
        assert nats <= NATS_MAX, f"{task}: log-likelihoods differ by {nats} nats"
    else:
        same, more = sum(one == other for one, other in pairs) / len(pairs), ""
    print(f"smollm2: lm-eval {task}: {metric} {a:.3f}, llama.cpp {b:.3f}; {same:.0%} of {len(pairs)} the same{more}")
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
        theirs = evaluate(folder, Llama(gguf), None)
    compare("facts", "acc", ours, theirs)
    compare("capitals", "exact_match", ours, theirs)
    print(f"smollm2: lm-eval {importlib.metadata.version('lm-eval')}, tasks of our own: the hub's are not asked for")


main()
