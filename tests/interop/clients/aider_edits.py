"""aider against the scripted server: it edits by text, in both of its common formats, whole and
streamed, and runs the test itself.

    aider_edits.py SHARDPACK AIDER
"""

import pathlib
import sys
import tempfile

from project import DONE, FAILED, PROMPT, RIGHT, RUN, WRONG, Project
from served import Served, tried

# The first edit is wrong, so that what the failed test prints goes to the model.
WORSE = WRONG.replace("-", "*")


def whole(_, new):
    return f"calc.py\n```\n{new}```\n"


def diff(old, new):
    return f"calc.py\n```python\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"


def main():
    shardpack, program = sys.argv[1:]
    for edit in [whole, diff]:
        answers = [
            {"when": PROMPT, "text": edit(WRONG, WORSE)},
            {"when": FAILED, "text": DONE + "\n\n" + edit(WORSE, RIGHT)},
            {"text": "A summary."},
        ]
        with tempfile.TemporaryDirectory() as folder, Served(shardpack, answers) as server:
            project = Project(pathlib.Path(folder))
            project.environment |= {"OPENAI_API_KEY": server.key, "OPENAI_API_BASE": server.url}
            # Its table of prices and its news come from the network otherwise.
            project.environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AIDER_ANALYTICS": "false"}
            command = [program, "--model", "openai/m", "--edit-format", edit.__name__, "--no-git", "--yes-always"]
            command += ["--no-check-update", "--no-show-model-warnings", "--auto-test", "--test-cmd", RUN]
            version = project.run([program, "--version"]).split()[-1]
            for stream in ["--no-stream", "--stream"]:
                project.solve([*command, stream, "--message", PROMPT, "calc.py"])
    tried("aider", version, "chat completions", "formats whole and diff", "whole and streamed", "a failed test")


main()
