"""JavaScript clients against the scripted server: the Vercel AI SDK and Ollama's npm package.

    javascript.py SHARDPACK NODE AI_SDK_FOLDER OLLAMA_FOLDER
"""

import json
import pathlib
import subprocess
import sys

from served import Served, tried, weather

here = pathlib.Path(__file__).parent


def version(folder, package):
    return json.loads((folder / "node_modules" / package / "package.json").read_text())["version"]


def main():
    shardpack, node, ai, ollama = sys.argv[1:]
    ai, ollama = pathlib.Path(ai).absolute(), pathlib.Path(ollama).absolute()
    with Served(shardpack, weather()) as server:
        run = [node, here / "ai_sdk.mjs", server.url, server.key, ai]
        subprocess.run(run, check=True, timeout=120)
        providers = ["openai", "openai-compatible", "anthropic"]
        versions = " ".join(f"@ai-sdk/{name} {version(ai, f'@ai-sdk/{name}')}" for name in providers)
        dialects = "chat completions, responses, messages"
        tried("Vercel AI SDK", version(ai, "ai"), versions, dialects, "whole and streamed")
        run = [node, here / "ollama_js.mjs", server.root, server.key, ollama]
        subprocess.run(run, check=True, timeout=120)
        tried("ollama (npm)", version(ollama, "ollama"), "chat, generate, list", "whole and streamed")


main()
