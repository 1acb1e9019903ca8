"""The package served: chat, tool calls by the generic format, structured output. Every call and every
object is held against its JSON schema by jsonschema.

    answers.py SHARDPACK SET GGUF
"""

import json
import sys

import jsonschema
import openai
from model import served
from questions import OBJECTS, QUESTIONS

# Greedy, and one draw at the default sampling.
SAMPLINGS = [{"temperature": 0}, {"seed": 1}]


def user(text):
    return [{"role": "user", "content": text}]


def ask(client, messages, **more):
    answer = client.chat.completions.create(model="smol", messages=messages, **more)
    return answer.choices[0]


def chat(client):
    messages = user("What is the capital of France?")
    greedy = {"temperature": 0, "max_tokens": 60}
    text = ask(client, messages, **greedy).message.content
    assert "Paris" in text, text
    stream = client.chat.completions.create(model="smol", messages=messages, stream=True, **greedy)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == text, f"streamed {streamed!r}, whole {text!r}"
    messages += [{"role": "assistant", "content": text}, *user("And the capital of Italy?")]
    again = ask(client, messages, **greedy).message.content
    assert "Rome" in again, again
    print("smollm2: chat: whole, streamed, a second turn")


def functions(*tools):
    return [{"type": "function", "function": tool} for tool in tools]


def hand_back(client, question, tool, call):
    """The result goes back, and an answer comes."""
    made = {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude_none=True)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages = [*user(question), made, result]
    answer = ask(client, messages, tools=functions(tool), tool_choice="none", temperature=0, max_tokens=40)
    assert answer.message.content and not answer.message.tool_calls, answer


def tools(client):
    """Each question with its tool and its neighbour's: forced, and left to the model."""
    calls = own = willing = 0
    for index, (question, tool) in enumerate(QUESTIONS):
        offered = [tool, QUESTIONS[index - 1][1]]
        schemas = {each["name"]: each["parameters"] for each in offered}
        for sampling in SAMPLINGS:
            asking = {"tools": functions(*offered), **sampling}
            forced = ask(client, user(question), tool_choice="required", max_tokens=400, **asking)
            assert forced.finish_reason == "tool_calls", f"{question}: {forced}"
            free = ask(client, user(question), max_tokens=100, **asking)
            # What the limit cuts off is no call yet.
            freely = free.message.tool_calls if free.finish_reason == "tool_calls" else []
            for call in [*forced.message.tool_calls, *freely]:
                jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
                calls += 1
            own += forced.message.tool_calls[0].function.name == tool["name"]
            willing += bool(freely)
        hand_back(client, question, tool, forced.message.tool_calls[0])
    asked = len(QUESTIONS) * len(SAMPLINGS)
    print(f"smollm2: tools: {len(QUESTIONS)} prompts, {asked} forced and {asked} free answers: {calls} calls, all valid;")
    print(f"         {own} of {asked} forced calls choose the tool that is meant, {willing} of {asked} free answers call")


def structured(client):
    for question, schema in OBJECTS:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        for sampling in SAMPLINGS:
            answer = ask(client, user(question), response_format=form, max_tokens=300, **sampling)
            assert answer.finish_reason == "stop", answer
            jsonschema.validate(json.loads(answer.message.content), schema)
    print(f"smollm2: structured output: {len(OBJECTS) * len(SAMPLINGS)} answers, all valid")


def main():
    shardpack, set_, _ = sys.argv[1:]
    with served(shardpack, set_) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
        chat(client)
        tools(client)
        structured(client)


main()
