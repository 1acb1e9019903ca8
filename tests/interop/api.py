"""Requests made up from the server's own OpenAPI description: whatever is sent, no answer is a 5xx.

    api.py SHARDPACK SCHEMATHESIS

The scripted engine answers. Examples are few and their seed is fixed, so that it takes seconds and
tells the same each time; more of them belong to a soak.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

shardpack, schemathesis = (pathlib.Path(argument).absolute() for argument in sys.argv[1:3])
SCRIPT = {"answers": [{"text": "Hello there."}]}
LIMIT_SECONDS = 120


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        script = folder / "script.json"
        script.write_text(json.dumps(SCRIPT))
        serve = [shardpack, "serve", "--engine", "scripted", script]
        serve += ["--listen", "127.0.0.1:0", "--json"]
        process = subprocess.Popen([*map(str, serve)], stdout=subprocess.PIPE, text=True)
        try:
            url = json.loads(process.stdout.readline())["url"].removesuffix("v1") + "openapi.json"
            run = [schemathesis, "run", url, "--checks", "not_a_server_error", "--seed", "1"]
            run += ["--phases", "coverage,fuzzing", "--max-examples", "25", "--request-timeout", "20"]
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS)
            assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
            assert process.poll() is None, "the server has ended"
        finally:
            process.terminate()
            assert process.wait(60) == 0
    cases = next(line.strip() for line in done.stdout.splitlines() if "generated" in line and "passed" in line)
    print("api:", cases, "and no answer is a 5xx")


main()
