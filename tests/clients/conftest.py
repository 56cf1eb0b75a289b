"""A gateway with keys, behind which a model says what it is asked to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.access import keys
from gateway.openai.endpoint import Reply
from gpu_scheduler.engines.echo.rule import embedding
from protos import common_pb2
from tests.gateway import tokenizers
from tests.gateway.conftest import World, waits, world  # noqa: F401
from tests.gateway.fakes import Running, place

KEY = "sk-mine"
EMBEDDER, DIMENSIONS = "org/embedder", 8
SLEEPER = "org/sleeper"
"""It wakes while streams that wait for it get comments, and never comes up for others."""
COMMENTS = 3
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor %}"
    "{{ '<|user|>' + message['content'] }}{% endfor %}<|assistant|>"
)
"""The last thing between <|user|> and <|assistant|> is what the last message says."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizers.write(tokenizers.tiny(), tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "me"\nhash = "{keys.digest(KEY)}"\n')
    file.chmod(0o600)
    return {"keys_file": str(file), "waking_comment_s": 0.02}


class Comments:
    """Those that were sent, until `told` is asked."""

    def __init__(self) -> None:
        self._enough = asyncio.Event()
        self._count = 0

    def one(self) -> None:
        self._count += 1
        if self._count >= COMMENTS:
            self._enough.set()

    async def told(self) -> None:
        """Waits until one stream can have been told of its waking several times."""
        await self._enough.wait()
        self._enough.clear()
        self._count = 0


@pytest.fixture
def comments(monkeypatch: pytest.MonkeyPatch) -> Comments:
    told, send = Comments(), Reply.comment

    async def noted(reply: Reply) -> None:
        await send(reply)
        told.one()

    monkeypatch.setattr(Reply, "comment", noted)
    return told


@pytest.fixture
async def parrot(world: World, comments: Comments) -> World:  # noqa: F811
    """Its model repeats the last message, or a prompt; at "for ever" it does not end, and "impossible" is refused.
    Another makes embeddings, and a third does as the first once it is awake."""
    made = common_pb2.Embedding(dimensions=DIMENSIONS, shortens=True)
    there = place(world.groups[0])
    wakes = world.route(place(world.groups[0], common_pb2.WAKING), name=SLEEPER)
    await world.publish(world.route(there), world.route(there, name=EMBEDDER, embedding=made), wakes, key=KEY)

    async def repeat(running: Running) -> None:
        tokenizer, submit = tokenizers.tiny(), running.submit
        if submit.embed:
            running.tokens((), embedding=embedding(submit.token_ids, DIMENSIONS), finish=common_pb2.STOP)
            return
        if submit.model == SLEEPER:
            await comments.told()
        user, assistant, start = (tokenizer.token_to_id(one) for one in ("<|user|>", "<|assistant|>", "<s>"))
        said = [token for token in submit.token_ids if token not in (assistant, start)]
        if user in said:
            said = said[len(said) - said[::-1].index(user) :]
        ids = said[: submit.sampling.max_new_tokens]
        if tokenizer.decode(ids) == "impossible":
            running.finish(common_pb2.REJECTED, "this is impossible")
            return
        running.tokens(ids)
        if tokenizer.decode(ids) == "for ever":
            await running.cancelled.wait()
        cut = len(said) > submit.sampling.max_new_tokens
        running.finish(common_pb2.LENGTH if cut else common_pb2.STOP)

    for group in world.groups:
        group.script = repeat
    return world
