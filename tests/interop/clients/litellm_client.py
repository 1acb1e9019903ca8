"""LiteLLM against the scripted server, by the providers that people name for a server of their own,
whole and streamed.

    litellm_client.py SHARDPACK
"""

import asyncio
import importlib.metadata
import json
import os
import sys

# Its table of prices comes from the network otherwise.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # noqa: E402
from served import ANSWER, BOTH, HELLO, QUESTION, Served, Weather, equal, tried, weather

asked = Weather()
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": TOOL}]


def providers(server):
    openai = {"api_base": server.url, "api_key": server.key}
    root = {"api_base": server.root, "api_key": server.key}
    yield "openai", openai
    yield "hosted_vllm", openai
    yield "lm_studio", openai
    yield "openai/responses", openai
    yield "anthropic", root
    yield "ollama_chat", root


def loop(provider, where):
    for stream in [False, True]:
        messages = [{"role": "user", "content": QUESTION}]

        def answer():
            asking = {"messages": messages, "tools": TOOLS, "num_retries": 0, **where}
            reply = litellm.completion(f"{provider}/m", stream=stream, **asking)
            reply = litellm.stream_chunk_builder(list(reply)) if stream else reply
            return reply.choices[0].message

        message = answer()
        messages.append(message.model_dump())
        for call in message.tool_calls:
            found = asked(**json.loads(call.function.arguments))
            result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": found}
            messages.append(result)
        equal((asked.take(), answer().content), (BOTH, ANSWER), f"{provider}, stream={stream}")


def other_calls(server):
    greeting = [{"role": "user", "content": "Hi"}]
    where = {"api_base": server.url, "api_key": server.key}
    answer = litellm.responses(model="openai/m", input="Hi", **where)
    equal(answer.output[-1].content[0].text, HELLO, "responses()")
    asking = {"max_tokens": 50, "messages": greeting, "api_base": server.root, "api_key": server.key}
    answer = asyncio.run(litellm.anthropic.messages.acreate(model="anthropic/m", **asking))
    equal(answer["content"][-1]["text"], HELLO, "anthropic.messages")
    answer = litellm.text_completion(model="text-completion-openai/m", prompt="Hi", **where)
    equal(answer.choices[0].text, HELLO, "text_completion()")
    try:
        litellm.completion("openai/m", greeting, api_base=server.url, api_key="sp-wrong", max_retries=0)
    except litellm.AuthenticationError:
        return
    raise AssertionError("a wrong key is refused")


def main():
    litellm.suppress_debug_info = True
    with Served(sys.argv[1], weather()) as server:
        names = []
        for provider, where in providers(server):
            loop(provider, where)
            names.append(provider)
        other_calls(server)
    tried("LiteLLM", importlib.metadata.version("litellm"), "providers " + " ".join(names), "whole and streamed")


main()
