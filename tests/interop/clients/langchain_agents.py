"""LangChain and LangGraph against the scripted server: its OpenAI, Anthropic and Ollama packages,
whole and streamed.

    langchain_agents.py SHARDPACK
"""

import importlib.metadata
import sys
import warnings

import pydantic
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from served import ANSWER, BOTH, HELLO, MISSING_ANSWER, MISSING_ERROR, MISSING_QUESTION, QUESTION
from served import SCHEMA_ANSWER, SCHEMA_QUESTION, THANKS, WELCOME, Served, Weather, equal, tried, weather

asked = Weather()


@tool
def get_weather(city: str) -> str:
    "Weather of a city."
    try:
        return asked(city)
    except ValueError:
        return MISSING_ERROR


class City(pydantic.BaseModel):
    "A city."

    city: str
    degrees: int


def models(server):
    openai = {"model": "m", "base_url": server.url, "api_key": server.key, "max_retries": 0}
    bearer = {"headers": {"Authorization": f"Bearer {server.key}"}}
    yield "chat completions", ChatOpenAI(**openai)
    yield "responses", ChatOpenAI(**openai, use_responses_api=True)
    yield "messages", ChatAnthropic(model_name="m", base_url=server.root, api_key=server.key, max_retries=0)
    yield "Ollama", ChatOllama(model="m", base_url=server.root, client_kwargs=bearer)


def loops(name, model):
    agent = create_agent(model, [get_weather])
    messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    equal((asked.take(), messages[-1].text), (BOTH, ANSWER), f"{name}: whole")
    text = ""
    for chunk, _ in agent.stream({"messages": [("user", QUESTION)]}, stream_mode="messages"):
        text += chunk.text if chunk.type == "AIMessageChunk" else ""
    equal((asked.take(), text), (BOTH, ANSWER), f"{name}: streamed")
    later = agent.invoke({"messages": [*messages, ("user", THANKS)]})["messages"]
    equal(later[-1].text, WELCOME, f"{name}: a further turn with the history")
    failed = agent.invoke({"messages": [("user", MISSING_QUESTION)]})["messages"]
    equal((asked.take(), failed[-1].text), (["Atlantis"], MISSING_ANSWER), f"{name}: a tool that fails")
    if name != "messages":
        found = model.with_structured_output(City, method="json_schema").invoke(SCHEMA_QUESTION)
        equal(found.model_dump(), SCHEMA_ANSWER, f"{name}: structured output")
    answers = model.batch(["Hi"] * 4)
    equal([answer.text for answer in answers], [HELLO] * 4, f"{name}: four at once")


def main():
    warnings.filterwarnings("ignore")
    with Served(sys.argv[1], weather()) as server:
        for name, model in models(server):
            loops(name, model)
    dialects = "chat completions, responses, messages and Ollama"
    tried("LangChain", importlib.metadata.version("langchain"), dialects, "whole and streamed", "LangGraph's agent")


main()
