"""Renders the conversations below with jinja2 as transformers sets it up and writes golden.json. What
DeepSeek V3.2 and V4 are to render is told by their publisher's programs: mlx-lm has a copy of the first, the
second one stands in the model's repository (encoding/encoding_dsv4.py).

    pip install jinja2==3.1.6 mlx-lm==0.32.2 && python make.py ENCODING_DSV4
"""
import datetime
import importlib.util
import json
import pathlib
import sys

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.chat_templates import deepseek_v32

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[4]
# The moment that the Rust test gives to strftime_now, in UTC.
NOW = datetime.datetime(2026, 10, 5, 9, 7, 3)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(line)

    def _support(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return env


def normalise(message, parse=True):
    """What the server does to a message before it is rendered; the program parses arguments itself."""
    message = dict(message)
    if isinstance(message.get("content"), list):
        message["content"] = "\n".join(part["text"] for part in message["content"])
    elif message.get("content") is None:
        message["content"] = ""
    for call in message.get("tool_calls") or []:
        if not parse:
            break
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (TypeError, ValueError):
            continue
        if isinstance(arguments, dict):
            call["function"]["arguments"] = arguments
    return message


SYSTEM = {"role": "system", "content": "  Be brief; say \"no\" to ü & <b>.\n"}
USER = {"role": "user", "content": "What is the weather in Zürich? 🙂"}
HELLO = {"role": "assistant", "content": "Hello!\n\nHow are you?"}
AGAIN = {"role": "user", "content": [{"type": "text", "text": "And in"}, {"type": "text", "text": "Bern?"}]}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Zürich\", \"at\": 1.0, \"days\": [1, 2.50], \"exact\": true, \"why\": null, \"a\": {\"z\": 1e-7}}"},
    }],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "{\"temperature\": 21}"}
THOUGHT = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nIt is 21 degrees."}
REASONED = {"role": "assistant", "reasoning_content": "\nI know.\n", "content": "21 degrees."}
TWO_CALLS = {
    "content": "Let me look.",
    "role": "assistant",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"arguments": "{\"city\":\"Bern\"}", "name": "get_weather"}},
        {"id": "bcdefghij", "type": "function", "function": {"name": "get_time", "arguments": "not json"}},
    ],
}
RESULT_2 = {"role": "tool", "tool_call_id": "bcdefghij", "content": "09:30"}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Current weather: \"now\" & <here>.\n", "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "Bern"]}, "at": {"type": "number", "default": 1.0, "minimum": 1e-7}}, "required": ["city"]}}},
    {"function": {"parameters": {"properties": {}, "type": "object"}, "name": "get_time"}, "type": "function"},
]

CONVERSATIONS = {
    "one question": ([USER], None, {}),
    "system": ([SYSTEM, USER], None, {}),
    "several turns": ([SYSTEM, USER, HELLO, AGAIN], None, {}),
    "tools": ([USER], TOOLS, {}),
    "system and tools": ([SYSTEM, USER], TOOLS, {}),
    "a call": ([USER, CALL], TOOLS, {}),
    "a call and its result": ([SYSTEM, USER, CALL, RESULT], TOOLS, {}),
    "an answer after a call": ([USER, CALL, RESULT, THOUGHT, AGAIN], TOOLS, {}),
    "two calls": ([USER, TWO_CALLS, RESULT, RESULT_2], TOOLS, {}),
    "thinking in text": ([USER, THOUGHT], None, {}),
    "thinking apart": ([USER, REASONED, AGAIN, REASONED], None, {}),
    "no thinking": ([USER], None, {"enable_thinking": False, "date_string": "1 May 2026", "tools_in_user_message": False}),
    "tools elsewhere": ([SYSTEM, USER], TOOLS, {"tools_in_user_message": False}),
    "late system": ([USER, HELLO, SYSTEM, AGAIN], None, {}),
    "two of the user": ([USER, AGAIN], None, {}),
    "nothing said": ([{"role": "user", "content": ""}], None, {}),
}

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

cases = []
for name in ["kjv-4m", "llama3", "qwen3", "mistral", "coder", "features"]:
    path = ROOT / "tests/data/kjv-4m/chat_template.jinja" if name == "kjv-4m" else HERE / f"{name}.jinja"
    template = environment().from_string(path.read_text())
    for title, (messages, tools, kwargs) in CONVERSATIONS.items():
        if name == "features" and title not in ("one question", "several turns"):
            continue
        case = {"template": name, "title": title, "messages": messages, "tools": tools or [], "kwargs": kwargs}
        normal = [normalise(json.loads(json.dumps(message))) for message in messages]
        try:
            case["expected"] = template.render(
                messages=normal, tools=tools, documents=None, add_generation_prompt=True, **{**SPECIALS, **kwargs}
            )
        except jinja2.exceptions.TemplateError as error:
            case["refused"] = str(error)
        except TypeError:
            case["refused"] = ""  # the template fails rather than refuses
        cases.append(case)

# Thinking is asked for; the program refuses answers without any behind the last question.
THINKS = {"thinking": True}
ASKS_TWICE = {**CALL, "reasoning_content": "Look it up."}
MORE = {
    "thinks": ([SYSTEM, USER], TOOLS, THINKS),
    "thinks by its other name": ([USER], None, {"enable_thinking": True}),
    "thinks between calls": ([SYSTEM, USER, ASKS_TWICE, RESULT, ASKS_TWICE, RESULT], TOOLS, THINKS),
    "thinking of past turns is dropped": ([USER, ASKS_TWICE, RESULT, REASONED, AGAIN], TOOLS, THINKS),
    "thinks and answers": ([USER, ASKS_TWICE, RESULT, REASONED], TOOLS, THINKS),
    "a call without arguments": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]}],
        TOOLS,
        {},
    ),
    "a result of nothing": ([USER, HELLO, RESULT], None, {}),
}
for title, (messages, tools, kwargs) in {**CONVERSATIONS, **MORE}.items():
    case = {"template": "deepseek_v32", "title": title, "messages": messages, "tools": tools or [], "kwargs": kwargs}
    given = [normalise(json.loads(json.dumps(message)), parse=False) for message in messages]
    if tools and given[0]["role"] != "system":
        given.insert(0, {"role": "system", "content": ""})
    if tools:
        given[0]["tools"] = tools
    thinks = kwargs.get("thinking", kwargs.get("enable_thinking", False))
    try:
        case["expected"] = deepseek_v32.encode_messages(given, "thinking" if thinks else "chat")
    except json.JSONDecodeError:
        case["refused"] = "the arguments of a call are no object of JSON"
    except AssertionError:
        case["refused"] = "a result without a call before it"
    cases.append(case)

spec = importlib.util.spec_from_file_location("encoding_dsv4", sys.argv[1])
deepseek_v4 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(deepseek_v4)

SWAPPED = [RESULT_2, RESULT]
MORE_V4 = {
    "results in another order": ([USER, TWO_CALLS, *SWAPPED], TOOLS, {}),
    "results and a question": ([USER, TWO_CALLS, *SWAPPED, AGAIN], TOOLS, THINKS),
    "thinking of past turns stays with tools": ([USER, REASONED, AGAIN], TOOLS, THINKS),
    "two turns of thinking": ([SYSTEM, USER, REASONED, AGAIN, REASONED, USER], None, THINKS),
    "as much as possible": ([SYSTEM, USER], None, {"thinking": True, "reasoning_effort": "max"}),
    "much": ([USER], TOOLS, {"thinking": True, "reasoning_effort": "high"}),
    "a result whose call is not there": ([USER, TWO_CALLS, {**RESULT, "tool_call_id": "other"}, RESULT_2, RESULT], TOOLS, {}),
}
for title, (messages, tools, kwargs) in {**CONVERSATIONS, **MORE, **MORE_V4}.items():
    case = {"template": "deepseek_v4", "title": title, "messages": messages, "tools": tools or [], "kwargs": kwargs}
    given = [normalise(json.loads(json.dumps(message)), parse=False) for message in messages]
    if tools and given[0]["role"] != "system":
        given.insert(0, {"role": "system", "content": ""})
    if tools:
        given[0]["tools"] = tools
    thinks = kwargs.get("thinking", kwargs.get("enable_thinking", False))
    mode = "thinking" if thinks else "chat"
    effort = kwargs.get("reasoning_effort")
    case["expected"] = deepseek_v4.encode_messages(given, mode, reasoning_effort=effort)
    cases.append(case)

text = json.dumps(cases, ensure_ascii=False, indent=1)
(HERE / "golden.json").write_text(text + "\n")
print(len(cases), "cases,", sum("refused" in case for case in cases), "refused")
