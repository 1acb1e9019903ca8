"""lm-eval against the scripted server: a generation task of its own, since the published ones need
the hub. Chat completions and completions; of four answers one is wrong, and lm-eval must see it.

    lm_eval_tasks.py SHARDPACK LM_EVAL
"""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from served import Served, equal, tried

CAPITALS = {"France": "Paris", "Italy": "Rome", "Norway": "Oslo", "Japan": "Tokyo"}
TASK = """task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: "{{{{capital}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 40}}
metric_list: [{{metric: exact_match}}]
"""


def main():
    shardpack, program = sys.argv[1:]
    said = {**CAPITALS, "Japan": "Kyoto"}
    answers = [{"when": f"capital of {country} is", "text": f"{capital}. It is large."} for country, capital in said.items()]
    with tempfile.TemporaryDirectory() as name, Served(shardpack, [*answers, {"text": "Nothing."}]) as server:
        folder = pathlib.Path(name)
        lines = [json.dumps({"country": country, "capital": capital}) for country, capital in CAPITALS.items()]
        (folder / "capitals.jsonl").write_text("\n".join(lines))
        (folder / "capitals.yaml").write_text(TASK.format(data=folder / "capitals.jsonl"))
        environment = os.environ | {"OPENAI_API_KEY": server.key, "HF_HUB_OFFLINE": "1", "HF_HOME": name}
        ways = {
            "local-chat-completions": f"model=m,base_url={server.url}/chat/completions",
            "local-completions": f"model=m,base_url={server.url}/completions,tokenizer_backend=none",
        }
        for model, arguments in ways.items():
            run = [program, "--model", model, "--model_args", arguments, "--tasks", "capitals"]
            run += ["--include_path", name, "--output_path", folder / model]
            run += ["--apply_chat_template"] if "chat" in model else []
            done = subprocess.run(run, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(f"{run}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}")
            (report,) = (folder / model).glob("**/results_*.json")
            found = json.loads(report.read_text())["results"]["capitals"]["exact_match,none"]
            equal(found, 0.75, f"{model}: the share of right answers")
    version = importlib.metadata.version("lm-eval")
    tried("lm-eval", version, "generation", "chat completions and completions")


main()
