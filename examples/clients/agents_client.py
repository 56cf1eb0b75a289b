"""OpenAI's Agents SDK over both of OpenAI's APIs: an answer, a schema, and a tool that is called."""

from __future__ import annotations

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["URL"], os.environ["MODEL"]
called: list[str] = []


class City(BaseModel):
    name: str
    inhabitants: int


@function_tool
def weather(city: str) -> str:
    """Says the weather of a city."""
    called.append(city)
    return f"It rains in {city}."


async def main() -> None:
    set_tracing_disabled(True)  # it goes to OpenAI
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(MODEL, openai_client=client)

        def agent(force: str | None = None, **more: object) -> Agent:
            one = False if force else None  # a small model would call until its tokens run out
            settings = ModelSettings(max_tokens=256, temperature=0, tool_choice=force, parallel_tool_calls=one)
            return Agent(name="a", model=model, model_settings=settings, **more)  # noqa: B023

        assert (await Runner.run(agent(), "Say hello.")).final_output
        streamed = Runner.run_streamed(agent(), "Say hello.")
        assert [event.type async for event in streamed.stream_events()] and streamed.final_output
        assert isinstance((await Runner.run(agent(output_type=City), "Name a city.")).final_output, City)
        called.clear()
        assert (
            await Runner.run(
                agent("required", tools=[weather], tool_use_behavior="stop_on_first_tool"),
                "How is the weather in Rome?",
            )
        ).final_output
        assert called
        print(f"{kind.__name__}: text, stream, schema, tool")


asyncio.run(main())
