"""LangChain's chat models of OpenAI's two APIs and of Anthropic's: answers, streams, schemas, tools."""

from __future__ import annotations

import os

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["URL"], os.environ["MODEL"]


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int


def weather(city: str) -> str:
    """Says the weather of a city."""
    return f"It rains in {city}."


def tried(name: str, model: BaseChatModel, force: str) -> None:
    """`force`: the word by which the API has a tool be called."""
    assert model.invoke("Say hello.").text
    assert "".join(chunk.text for chunk in model.stream("Say hello."))
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke("Name a city."), City)
    said: list[BaseMessage] = [HumanMessage("How is the weather in Rome?")]
    called = model.bind_tools([weather], tool_choice=force).invoke(said)
    call = called.tool_calls[0]
    assert call["name"] == "weather" and call["args"]["city"]
    told = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    others = [ToolMessage("no answer", tool_call_id=other["id"]) for other in called.tool_calls[1:]]
    assert model.bind_tools([weather]).invoke([*said, called, told, *others]).response_metadata
    print(f"{name}: text, stream, schema, tool, tool's result")


# At temperature 0 the small model ends its calls.
shared = {"api_key": "none", "model": MODEL, "max_tokens": 256, "temperature": 0}
tried("chat completions", ChatOpenAI(base_url=f"{URL}/v1", **shared), "any")
tried("responses", ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **shared), "any")
tried("messages", ChatAnthropic(base_url=URL, **shared), "any")
