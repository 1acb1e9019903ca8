"""A served model for a client's test: scripted answers, behind an API key.

Every client gets the same story. It asks for the weather of two cities, calls a tool for both,
and must end with what the model says after both results. It knows nothing of the clients.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

QUESTION = "Weather in Rome and Paris?"
WEATHER = {"Rome": "sunny in Rome", "Paris": "rainy in Paris"}
ANSWER = "Rome is sunny, Paris is rainy."
MISSING_QUESTION = "Weather in Atlantis?"
MISSING_ERROR = "there is no such city"
MISSING_ANSWER = "No city has that name."
HELLO = "Hello there."
THANKS = "Thanks for both."
WELCOME = "You are welcome."
THOUGHT = "Two cities, two calls."
SCHEMA_QUESTION = "It is 21 degrees in Rome, as JSON."
SCHEMA_ANSWER = {"city": "Rome", "degrees": 21}


def call(name, /, **arguments):
    """A tool call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def weather(tool="get_weather"):
    """The script: thought and two calls, their end, a call that fails, JSON, a greeting."""
    both = call(tool, city="Rome") + "\n" + call(tool, city="Paris")
    return [
        {"when": QUESTION, "text": f"<think>\n{THOUGHT}\n</think>\n\n{both}"},
        # The results stand in the order of the calls, or in another one.
        {"when": WEATHER["Rome"], "text": ANSWER},
        {"when": WEATHER["Paris"], "text": ANSWER},
        {"when": MISSING_QUESTION, "text": call(tool, city="Atlantis")},
        {"when": MISSING_ERROR, "text": MISSING_ANSWER},
        {"when": SCHEMA_QUESTION, "text": json.dumps(SCHEMA_ANSWER)},
        {"when": THANKS, "text": WELCOME},
        {"text": HELLO},
    ]


class Weather:
    """The tool that clients are given. It remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, city):
        self.asked.append(city)
        if city not in WEATHER:
            raise ValueError(MISSING_ERROR)
        return WEATHER[city]

    def take(self):
        """The cities since the last time, in alphabetical order: calls may run side by side."""
        asked, self.asked = sorted(self.asked), []
        return asked


BOTH = sorted(WEATHER)


class Served:
    """A server with these answers and one API key, which ends with its block."""

    def __init__(self, shardpack, answers, *arguments):
        self.shardpack, self.answers, self.arguments = pathlib.Path(shardpack).absolute(), answers, arguments

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self.folder.name)
        script, keys = folder / "script.json", folder / "keys.json"
        script.write_text(json.dumps({"answers": self.answers}))
        add = [self.shardpack, "keys", keys, "add", "client"]
        self.key = subprocess.run(add, capture_output=True, text=True, check=True).stdout.strip()
        serve = [self.shardpack, "serve", "--engine", "scripted", script, "--keys", keys]
        serve += ["--name", "m", "--listen", "127.0.0.1:0", "--json", *self.arguments]
        self.log = open(folder / "serve.log", "w+")
        self.process = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"the server did not start: {self.log.read()}")
        self.url = json.loads(line)["url"]
        self.root = self.url.removesuffix("/v1")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        assert self.process.wait(60) == 0, "a server that is asked to stop succeeds"
        self.log.close()
        self.folder.cleanup()


def equal(found, expected, what):
    """Fails with both sides."""
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r}, found {found!r}")


def tried(client, version, *what):
    """One line for a client that did everything."""
    print(f"client: {client} {version}: {', '.join(what)}", flush=True)


def skip(capability, reason):
    """Says why something is not tested; fails where $SHARDPACK_SKIPS does not name the capability."""
    print(f"skipped: {reason} [{capability}]", file=sys.stderr)
    announced = os.environ.get("SHARDPACK_SKIPS")
    if announced is not None and capability not in announced.replace(",", " ").split():
        sys.exit(f"error: $SHARDPACK_SKIPS does not announce {capability!r}")
