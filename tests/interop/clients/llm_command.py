"""The command `llm` against the scripted server, with its OpenAI models as its documentation
configures them, whole and streamed, tools included.

    llm_command.py SHARDPACK LLM
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from served import ANSWER, BOTH, HELLO, QUESTION, SCHEMA_ANSWER, SCHEMA_QUESTION, THANKS, WELCOME, Served
from served import equal, tried, weather

# The function runs in llm's process and leaves its arguments in a file.
FUNCTIONS = """
def get_weather(city: str) -> str:
    "Weather of a city."
    with open({asked!r}, "a") as asked:
        asked.write(city + "\\n")
    return {{"Rome": "sunny in Rome", "Paris": "rainy in Paris"}}[city]
"""
MODEL = {"model_name": "m", "supports_tools": True, "supports_schema": True, "can_stream": True}


def main():
    with Served(sys.argv[1], weather()) as server, tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        # YAML is a superset of JSON.
        models = [{"model_id": "mine", "api_base": server.url, "api_key_name": "mine", **MODEL}]
        (folder / "extra-openai-models.yaml").write_text(json.dumps(models))
        (folder / "keys.json").write_text(json.dumps({"mine": server.key}))
        asked = folder / "asked"

        def llm(*arguments):
            environment = {**os.environ, "LLM_USER_PATH": name}
            run = subprocess.run(
                [sys.argv[2], *arguments], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
            if run.returncode:
                raise AssertionError(f"llm {arguments}: {run.stderr}")
            return run.stdout.strip()

        for option in [["--no-stream"], []]:
            equal(llm("-m", "mine", "Hi", *option), HELLO, f"a greeting, {option}")
            tools = ["--functions", FUNCTIONS.format(asked=str(asked))]
            equal(llm("-m", "mine", QUESTION, *tools, *option), ANSWER, f"a tool loop, {option}")
            equal(sorted(asked.read_text().split()), BOTH, "the arguments")
            asked.unlink()
            schema = ["--schema", "city, degrees int"]
            equal(json.loads(llm("-m", "mine", SCHEMA_QUESTION, *schema, *option)), SCHEMA_ANSWER, "a schema")
        equal(llm("-m", "mine", "--continue", THANKS), WELCOME, "a further turn")
        version = llm("--version").split()[-1]
    tried("llm", version, "chat completions", "whole and streamed", "tools", "schema", "--continue")


main()
