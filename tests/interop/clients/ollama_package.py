"""Ollama's Python package against the scripted server, whole and streamed.

    ollama_package.py SHARDPACK
"""

import importlib.metadata
import json
import sys

import ollama
from served import ANSWER, BOTH, HELLO, QUESTION, SCHEMA_ANSWER, SCHEMA_QUESTION, THOUGHT, Served, Weather, equal
from served import tried, weather

asked = Weather()


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: the city
    """
    return asked(city)


def one(client, messages, stream):
    answer = client.chat("m", messages=messages, tools=[get_weather], think=True, stream=stream)
    if not stream:
        return answer.message
    whole = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
    for part in answer:
        whole.content += part.message.content or ""
        whole.thinking += part.message.thinking or ""
        whole.tool_calls = [*whole.tool_calls, *(part.message.tool_calls or [])]
    return whole


def loop(client, stream):
    messages = [{"role": "user", "content": QUESTION}]
    message = one(client, messages, stream)
    equal(message.thinking.strip(), THOUGHT, f"thinking, stream={stream}")
    messages.append(message)
    for call in message.tool_calls:
        found = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": found})
    answer = one(client, messages, stream)
    equal((asked.take(), answer.content), (BOTH, ANSWER), f"stream={stream}")


def main():
    with Served(sys.argv[1], weather()) as server:
        client = ollama.Client(server.root, headers={"Authorization": f"Bearer {server.key}"})
        equal(client.list().models[0].model.split(":")[0], "m", "list")
        assert "tools" in client.show("m").capabilities
        loop(client, stream=False)
        loop(client, stream=True)
        hello = [{"role": "user", "content": "Hi"}]
        equal(client.chat("m:latest", messages=hello).message.content, HELLO, "with a tag")
        parts = client.generate("m", "Hi", stream=True)
        equal("".join(part.response for part in parts), HELLO, "generate, streamed")
        schema = {"type": "object", "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}}}
        question = [{"role": "user", "content": SCHEMA_QUESTION}]
        found = client.chat("m", messages=question, format=schema).message.content
        equal(json.loads(found), SCHEMA_ANSWER, "format")
        try:
            client.chat("nobody", messages=hello)
            raise AssertionError("a model that is not served is refused")
        except ollama.ResponseError as error:
            equal(error.status_code, 404, "a model that is not served")
    tried("ollama (PyPI)", importlib.metadata.version("ollama"), "chat, generate, think, format", "whole and streamed")


main()
