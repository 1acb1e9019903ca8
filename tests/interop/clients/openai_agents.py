"""openai-agents against the scripted server: chat completions and responses, whole and streamed.

    openai_agents.py SHARDPACK
"""

import asyncio
import importlib.metadata
import sys

import agents
import openai
import pydantic
from served import ANSWER, BOTH, HELLO, MISSING_ANSWER, MISSING_QUESTION, QUESTION, SCHEMA_ANSWER
from served import SCHEMA_QUESTION, THANKS, WELCOME, Served, Weather, call, equal, tried, weather

asked = Weather()


@agents.function_tool
def get_weather(city: str) -> str:
    "Weather of a city."
    return asked(city)


class City(pydantic.BaseModel):
    city: str
    degrees: int


async def loops(model):
    agent = agents.Agent(name="a", instructions="Be brief.", tools=[get_weather], model=model)
    result = await agents.Runner.run(agent, QUESTION)
    equal((asked.take(), result.final_output), (BOTH, ANSWER), "whole")
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    names = {getattr(event, "name", event.type) async for event in streamed.stream_events()}
    equal((asked.take(), streamed.final_output), (BOTH, ANSWER), "streamed")
    assert {"tool_called", "tool_output", "message_output_created"} <= names, names
    later = await agents.Runner.run(agent, [*streamed.to_input_list(), {"role": "user", "content": THANKS}])
    equal(later.final_output, WELCOME, "a further turn with the history")
    failed = await agents.Runner.run(agent, MISSING_QUESTION)
    equal((asked.take(), failed.final_output), (["Atlantis"], MISSING_ANSWER), "a tool that fails")


async def handoff(model):
    other = agents.Agent(name="other", instructions="Greet.", model=model)
    to_other = agents.handoff(other, tool_name_override="transfer_to_other")
    first = agents.Agent(name="first", instructions="Transfer.", handoffs=[to_other], model=model)
    result = await agents.Runner.run(first, "Transfer me please.")
    equal((result.last_agent.name, result.final_output), ("other", HELLO), "handoff")


async def structured(model):
    agent = agents.Agent(name="s", instructions="Answer.", output_type=City, model=model)
    result = await agents.Runner.run(agent, SCHEMA_QUESTION)
    equal(result.final_output.model_dump(), SCHEMA_ANSWER, "structured output")


async def stored(model):
    """The server keeps the conversation."""
    agent = agents.Agent(name="a", instructions="Be brief.", tools=[get_weather], model=model)
    first = await agents.Runner.run(agent, QUESTION, auto_previous_response_id=True)
    equal((asked.take(), first.final_output), (BOTH, ANSWER), "with previous_response_id")
    then = await agents.Runner.run(agent, THANKS, previous_response_id=first.last_response_id)
    equal(then.final_output, WELCOME, "a further turn with previous_response_id")


async def main():
    agents.set_tracing_disabled(True)
    answers = [
        {"when": "Transfer me please.", "text": call("transfer_to_other")},
        # The client hides a tool's error from the model.
        {"when": "An error occurred while running the tool", "text": MISSING_ANSWER},
        # Its answer to a handoff names the agent.
        {"when": '"assistant": "other"', "text": HELLO},
        *weather(),
    ]
    with Served(sys.argv[1], answers) as server:
        client = openai.AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0)
        responses = agents.OpenAIResponsesModel(model="m", openai_client=client)
        chat = agents.OpenAIChatCompletionsModel(model="m", openai_client=client)
        for model in [chat, responses]:
            await loops(model)
            await handoff(model)
            await structured(model)
        await stored(responses)
    dialects = "chat completions and responses"
    tried("openai-agents", importlib.metadata.version("openai-agents"), dialects, "whole and streamed", "handoff")


asyncio.run(main())
