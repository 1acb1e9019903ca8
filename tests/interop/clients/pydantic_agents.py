"""pydantic-ai against the scripted server: chat completions, responses, messages and its Ollama
provider, whole and streamed.

    pydantic_agents.py SHARDPACK
"""

import asyncio
import sys

import anthropic
import pydantic
import pydantic_ai
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider
from served import ANSWER, BOTH, MISSING_ANSWER, MISSING_QUESTION, QUESTION, SCHEMA_ANSWER, SCHEMA_QUESTION
from served import THANKS, WELCOME, Served, Weather, equal, tried, weather

asked = Weather()


class City(pydantic.BaseModel):
    city: str
    degrees: int


def get_weather(city: str) -> str:
    "Weather of a city."
    try:
        return asked(city)
    except ValueError as error:
        raise pydantic_ai.ModelRetry(str(error)) from error


def models(server):
    openai = OpenAIProvider(base_url=server.url, api_key=server.key)
    client = anthropic.AsyncAnthropic(base_url=server.root, api_key=server.key, max_retries=0)
    yield OpenAIChatModel("m", provider=openai)
    yield OpenAIResponsesModel("m", provider=openai)
    yield AnthropicModel("m", provider=AnthropicProvider(anthropic_client=client))
    yield OpenAIChatModel("m", provider=OllamaProvider(base_url=server.url, api_key=server.key))


async def loops(model):
    agent = pydantic_ai.Agent(model, system_prompt="Be brief.", tools=[get_weather])
    result = await agent.run(QUESTION)
    equal((asked.take(), result.output), (BOTH, ANSWER), f"{model.system}: whole")
    async with agent.run_stream(QUESTION) as stream:
        text = "".join([part async for part in stream.stream_text(delta=True)])
    equal((asked.take(), text), (BOTH, ANSWER), f"{model.system}: streamed")
    later = await agent.run(THANKS, message_history=result.all_messages())
    equal(later.output, WELCOME, f"{model.system}: a further turn with the history")
    failed = await agent.run(MISSING_QUESTION)
    equal((asked.take(), failed.output), (["Atlantis"], MISSING_ANSWER), f"{model.system}: a tool that fails")
    native = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(City), retries=0)
    if model.profile.get("supports_json_schema_output"):
        found = (await native.run(SCHEMA_QUESTION)).output.model_dump()
        equal(found, SCHEMA_ANSWER, f"{model.system}: structured output")


async def main():
    with Served(sys.argv[1], weather()) as server:
        for model in models(server):
            await loops(model)
    dialects = "chat completions, responses, messages, its Ollama provider"
    tried("pydantic-ai", pydantic_ai.__version__, dialects, "whole and streamed")


asyncio.run(main())
