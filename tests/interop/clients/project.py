"""A folder with a wrong function and a test of it, for coding agents. It knows no client."""

import os
import pathlib
import subprocess
import sys

from served import equal

PROMPT = "Mend the function add of calc.py."
DONE = "Now add adds."
WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\n    return a + b\n"
FAILED, PASSED = "THE SUM IS WRONG", "THE SUM IS RIGHT"
# What the test prints does not stand in its source, so that reading it says nothing.
TEST = """import calc

right = calc.add(2, 3) == 5
with open("runs", "a") as runs:
    runs.write("passed\\n" if right else "failed\\n")
print("THE SUM IS", "RIGHT" if right else "WRONG")
raise SystemExit(not right)
"""
RUN = "python3 -B test_calc.py"
DEADLINE_S = 180


class Project:
    """The folder that a client works in, and a home of its own beside it."""

    def __init__(self, folder):
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.file = self.work / "calc.py"
        self.begin()
        # An MCP server that clients may start.
        self.mcp = [sys.executable, str(pathlib.Path(__file__).with_name("weather_mcp.py")), str(folder / "asked")]
        self.environment = {"HOME": str(self.home), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8"}

    def begin(self):
        self.file.write_text(WRONG)
        (self.work / "test_calc.py").write_text(TEST)
        (self.work / "runs").write_text("")

    def asked(self):
        """What the MCP server was asked, since the last time."""
        file = pathlib.Path(self.mcp[-1])
        asked = file.read_text().split() if file.exists() else []
        file.unlink(missing_ok=True)
        return asked

    def run(self, command):
        """What a client prints, if it succeeds."""
        how = {"cwd": self.work, "env": self.environment, "timeout": DEADLINE_S}
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **how)
        if run.returncode:
            raise AssertionError(f"{command}: {run.returncode}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}")
        return run.stdout

    def solve(self, command):
        """The whole task, done by tools, and the answer that came through."""
        self.begin()
        said = self.run(command)
        equal(self.file.read_text(), RIGHT, "calc.py")
        equal((self.work / "runs").read_text().split(), ["failed", "passed"], "runs of the test")
        assert DONE in said, f"the answer {DONE!r} is not in {said!r}"
