"""The official OpenAI and Anthropic packages as ordinary programs, against a served model.

    clients.py SHARDPACK

The scripted engine says what the model would, so that every ending and every failure occurs;
a small trained model says verses of its own.
"""

import asyncio
import json
import os
import pathlib
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import anthropic
import httpx2
import openai

data = pathlib.Path(__file__).parent.parent / "data"
shardpack = pathlib.Path(sys.argv[1]).absolute()

TOOL = {
    "name": "get_weather",
    "description": "Current weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPT = {
    "answers": [
        {"when": "Weather in Rome?", "text": CALL},
        {"when": "sunny in Rome", "text": "It is sunny in Rome."},
        {"when": "long answer", "text": "word ", "repeat": 3000},
        {"when": "slow answer", "text": "slow ", "repeat": 50, "prefill_ms": 1500},
        {"when": "as JSON", "text": '{"city": "Rome", "degrees": 21}'},
        {"when": "rank that dies", "text": "half an ans", "fail": "rank 1 is gone", "retryable": True},
        {"when": "rank that is dead", "fail": "rank 1 is gone", "retryable": True},
        {"when": "garbage", "text": "<tool_call>{\"name\": 7, <tool_call></tool_call>}\ufffd <think>"},
        {"text": "Hello there."},
    ]
}


class Served:
    """A server that ends with its block."""

    def __init__(self, *args):
        self.args = [shardpack, "serve", *map(str, args), "--listen", "127.0.0.1:0", "--json"]

    def __enter__(self):
        self.process = subprocess.Popen(self.args, stdout=subprocess.PIPE, text=True)
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.root = self.url.removesuffix("/v1")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        assert self.process.wait(60) == 0, "a server that is asked to stop succeeds"


def user(text):
    return [{"role": "user", "content": text}]


def raises(kind, call, *words):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError(f"expected {kind}")


def openai_chat(client):
    answer = client.chat.completions.create(model="m", messages=user("Hi"))
    assert answer.choices[0].message.content == "Hello there."
    assert answer.usage.completion_tokens > 1 and answer.usage.prompt_tokens > 1
    stream = client.chat.completions.create(
        model="m", messages=user("Hi"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Hello there." and chunks[-1].usage.total_tokens > 3
    answer = client.chat.completions.create(model="m", messages=user("Hi"), n=3, seed=1, logprobs=True, top_logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    logprobs = answer.choices[0].logprobs.content
    assert "".join(token.token for token in logprobs) == "Hello there."
    answer = client.chat.completions.create(model="m", messages=user("a long answer"), max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    answer = client.chat.completions.create(model="m", messages=user("Hi"), stop=[" there"])
    assert answer.choices[0].message.content == "Hello"
    completion = client.completions.create(model="m", prompt="Once", max_tokens=50)
    assert completion.choices[0].text == "Hello there."
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    raw = client.chat.completions.with_raw_response.create(model="m", messages=user("Hi"), extra_body={"mystery": 1})
    assert raw.headers["x-shardpack-ignored-params"] == "mystery"
    for word in ["garbage"]:
        answer = client.chat.completions.create(model="m", messages=user(word))
        assert answer.choices[0].finish_reason == "stop"


def openai_responses(client):
    answer = client.responses.create(model="m", input="Hi", instructions="Be brief.")
    assert answer.output_text == "Hello there." and answer.status == "completed"
    with client.responses.stream(model="m", input="Hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Hello there."
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == "Hello there."
    answer = client.responses.create(model="m", input="a long answer", max_output_tokens=5)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


def anthropic_messages(client):
    answer = client.messages.create(model="m", max_tokens=50, messages=user("Hi"))
    assert answer.content[0].text == "Hello there." and answer.stop_reason == "end_turn"
    with client.messages.stream(model="m", max_tokens=50, messages=user("Hi"), system="Be brief.") as stream:
        assert "".join(stream.text_stream) == "Hello there."
        final = stream.get_final_message()
    assert final.usage.output_tokens > 1 and final.stop_reason == "end_turn"
    count = client.messages.count_tokens(model="m", messages=user("Hi"))
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    answer = client.messages.create(model="m", max_tokens=50, messages=user("Hi"), stop_sequences=[" there"])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == " there"


def going_on(client, claude):
    """Answers that go on from an earlier response, from a prompt, from the model's own turn."""
    first = client.responses.create(model="m", input="Hi")
    again = client.responses.create(model="m", input="And again?", previous_response_id=first.id)
    assert again.previous_response_id == first.id and again.usage.input_tokens > first.usage.input_tokens + 9
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(first.id), first.id)
    echoed = client.completions.create(model="m", prompt="Once", max_tokens=50, echo=True)
    assert echoed.choices[0].text == "OnceHello there."
    begun = [*user("Hi"), {"role": "assistant", "content": "Well,"}]
    answer = claude.messages.create(model="m", max_tokens=50, messages=begun)
    assert answer.content[0].text == "Hello there."


def structured_output(client):
    """What was asked for in a schema comes back as an object of it."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}}, "required": ["city", "degrees"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="m", messages=user("as JSON"), response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"city": "Rome", "degrees": 21}
    text = {"format": {"type": "json_schema", "name": "weather", "schema": schema, "strict": True}}
    assert json.loads(client.responses.create(model="m", input="as JSON", text=text).output_text)["degrees"] == 21
    schema["properties"]["all"] = {"type": "array", "uniqueItems": True}
    refused = lambda: client.chat.completions.create(model="m", messages=user("as JSON"), response_format=form)
    raises(openai.BadRequestError, refused, "uniqueItems")


def skip(capability, reason):
    """Says why something is not tested; fails where $SHARDPACK_SKIPS does not name the capability."""
    print(f"skipped: {reason} [{capability}]", file=sys.stderr)
    announced = os.environ.get("SHARDPACK_SKIPS")
    if announced is not None and capability not in announced.replace(",", " ").split():
        sys.exit(f"error: $SHARDPACK_SKIPS does not announce {capability!r}")


def encrypted(set_, script, folder):
    """The same over TLS, with a certificate that the client checks."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    try:
        subprocess.run([*map(str, make)], check=True, capture_output=True)
    except FileNotFoundError:
        return skip("openssl", "clients: TLS: there is no openssl to make a certificate")
    with Served(set_, "--script", script, "--name", "m", "--tls-cert", certificate, "--tls-key", key) as server:
        assert server.url.startswith("https://")
        body = json.dumps({"messages": user("Hi")}).encode()
        ask = urllib.request.Request(server.url + "/chat/completions", body, {"content-type": "application/json"})
        trusting = ssl.create_default_context(cafile=certificate)
        answer = json.load(urllib.request.urlopen(ask, context=trusting, timeout=30))
        assert answer["choices"][0]["message"]["content"] == "Hello there."
        careful = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        raises(openai.APIConnectionError, lambda: careful.models.list())


def tools(client, claude):
    """A call, its result, and the sentence after it, in each dialect, whole and streamed."""
    function = {"type": "function", "function": TOOL}
    for stream in [False, True]:
        messages = user("Weather in Rome?")
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, tools=[function]) as events:
                answer = events.until_done().get_final_completion()
        else:
            answer = client.chat.completions.create(model="m", messages=messages, tools=[function])
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls", choice
        call = choice.message.tool_calls[0]
        assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Rome"}
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny in Rome"})
        final = client.chat.completions.create(model="m", messages=messages, tools=[function])
        assert final.choices[0].message.content == "It is sunny in Rome."
    flat = {"type": "function", **TOOL}
    answer = client.responses.create(model="m", input="Weather in Rome?", tools=[flat])
    call = next(item for item in answer.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Rome"}
    items = [*user("Weather in Rome?"), call.model_dump(exclude_none=True)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny in Rome"})
    assert client.responses.create(model="m", input=items, tools=[flat]).output_text == "It is sunny in Rome."
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    for stream in [False, True]:
        request = {"model": "m", "max_tokens": 100, "messages": user("Weather in Rome?"), "tools": [tool]}
        if stream:
            with claude.messages.stream(**request) as events:
                answer = events.get_final_message()
        else:
            answer = claude.messages.create(**request)
        call = next(block for block in answer.content if block.type == "tool_use")
        assert answer.stop_reason == "tool_use" and call.input == {"city": "Rome"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny in Rome"}
        request["messages"] = [
            *user("Weather in Rome?"),
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]},
            {"role": "user", "content": [result]},
        ]
        assert claude.messages.create(**request).content[-1].text == "It is sunny in Rome."


def errors(client, claude):
    messages = user("Hi")
    error = raises(openai.BadRequestError, lambda: client.chat.completions.create(model="m", messages=messages, temperature=3), "temperature")
    assert error.param == "temperature"
    raises(openai.NotFoundError, lambda: client.chat.completions.create(model="gpt-9", messages=messages), "gpt-9")
    long = user("word " * 5000)
    error = raises(openai.BadRequestError, lambda: client.chat.completions.create(model="m", messages=long))
    assert error.code == "context_length_exceeded"
    raises(anthropic.BadRequestError, lambda: claude.messages.create(model="m", max_tokens=5, messages=long), "prompt is too long")
    raises(anthropic.NotFoundError, lambda: claude.messages.create(model="c", max_tokens=5, messages=messages))
    error = raises(openai.InternalServerError, lambda: client.chat.completions.create(model="m", messages=user("a rank that is dead")))
    assert error.status_code == 503 and error.response.headers["retry-after"]
    dying = lambda: list(client.chat.completions.create(model="m", messages=user("a rank that dies"), stream=True))
    raises(openai.APIError, dying, "rank 1 is gone")

    def half():
        with claude.messages.stream(model="m", max_tokens=50, messages=user("a rank that dies")) as stream:
            list(stream)

    raises(anthropic.APIStatusError, half, "rank 1 is gone")


def keys_and_retries(set_, script, folder):
    file = folder / "keys.json"
    add = [shardpack, "keys", file, "add", "me", "--requests-per-minute", "120"]
    key = subprocess.run([*map(str, add)], capture_output=True, text=True, check=True).stdout.strip()
    assert key not in file.read_text()
    with Served(set_, "--script", script, "--name", "m", "--keys", file, "--queue", 1) as server:
        stranger = openai.OpenAI(base_url=server.url, api_key="sp-wrong", max_retries=0)
        raises(openai.AuthenticationError, lambda: stranger.models.list())
        client = openai.OpenAI(base_url=server.url, api_key=key, max_retries=5)
        claude = anthropic.Anthropic(base_url=server.root, api_key=key, max_retries=5)
        assert client.models.list().data[0].id == "m"
        # The only place is taken for a while: clients wait as they are told and then succeed.
        slow = threading.Thread(
            target=lambda: client.chat.completions.create(model="m", messages=user("a slow answer"))
        )
        slow.start()
        time.sleep(0.3)
        once = openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)
        error = raises(openai.InternalServerError, lambda: once.chat.completions.create(model="m", messages=user("Hi")))
        assert error.code == "queue_full" and error.response.headers["x-should-retry"] == "true"
        assert claude.messages.create(model="m", max_tokens=9, messages=user("Hi")).content[0].text == "Hello there."
        slow.join()


def real_model(set_):
    known = json.loads((data / "kjv-4m/known.json").read_text())
    with Served(set_, "--name", "m") as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        claude = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0)
        for reference, words in list(known.items())[:5]:
            ask = {"model": "m", "messages": user(reference), "temperature": 0}
            assert client.chat.completions.create(**ask).choices[0].message.content == words
            # Its newest package no longer has the parameter, its API does.
            greedy = {"extra_body": {"temperature": 0}, "max_tokens": 200}
            answer = claude.messages.create(model="m", messages=user(reference), **greedy)
            assert answer.content[0].text == words
            assert client.responses.create(model="m", input=reference, temperature=0).output_text == words


def over_http2(url):
    """The same client over one HTTP/2 connection, many requests at once."""
    versions = []

    async def note(reply):
        versions.append(reply.http_version)

    async def at_once():
        # Threads that share its connection may take the same stream's number; tasks do not.
        http = httpx2.AsyncClient(http1=False, http2=True, event_hooks={"response": [note]})
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
            ask = lambda: client.chat.completions.create(model="m", messages=user("Hi"))
            answers = await asyncio.gather(*(ask() for _ in range(32)))
        return [answer.choices[0].message.content for answer in answers]

    http = httpx2.Client(http1=False, http2=True, event_hooks={"response": [lambda reply: versions.append(reply.http_version)]})
    openai_chat(openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http))
    answers = asyncio.run(at_once())
    assert answers == ["Hello there."] * 32, answers
    assert set(versions) == {"HTTP/2"}, set(versions)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        set_, script = folder / "set", folder / "script.json"
        convert = [shardpack, "convert", data / "kjv-4m", "--output", set_, "--nodes", "2"]
        subprocess.run([*map(str, convert)], check=True, capture_output=True)
        script.write_text(json.dumps(SCRIPT))
        with Served(set_, "--script", script, "--name", "m") as server:
            client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
            claude = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0)
            openai_chat(client)
            openai_responses(client)
            anthropic_messages(client=claude)
            errors(client, claude)
            tools(client, claude)
            going_on(client, claude)
            structured_output(client)
            over_http2(server.url)
            json.load(urllib.request.urlopen(server.root + "/openapi.json"))
        encrypted(set_, script, folder)
        keys_and_retries(set_, script, folder)
        real_model(set_)
    print("clients: openai", openai.__version__, "and anthropic", anthropic.__version__, "are content")


main()
