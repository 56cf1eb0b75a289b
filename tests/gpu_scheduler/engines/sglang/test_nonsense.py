"""Requests that no gateway sends, to a real engine: each ends, and none takes another's answer along."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2, engine_pb2
from testing.engines.harness import KV_EXTENT, load, node
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = list(range(20, 60))
LIMIT = 200 * KV_EXTENT
ROUNDS, TOGETHER = 20, 12
_BAD = (-1.0, 1e308, -1e308, math.inf, -math.inf, math.nan)
_REALS = {
    "temperature": (0.0, 1e-300, 1e-38, 1e-6, 1.0, 1e10, 1e308),
    "top_p": (0.0, 1e-300, 1e-45, 0.5, 1.0),
    "min_p": (0.0, 1e-300, 0.5, 1.0),
    "frequency_penalty": (-2.0, 2.0, 1e-300),
    "presence_penalty": (-2.0, 2.0, 1e-300),
    "repetition_penalty": (0.0, 1e-300, 1e-45, 0.5, 2.0),
}
"""At the edges of what may be, for each."""
_WHOLE = (0, 1, -1, 2, 20, 511, 512, 1 << 20, (1 << 31) - 1, -(1 << 31))
_LONG = (*_WHOLE, 1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, -(1 << 63))
_GRAMMARS = ({"regex": "[a-z]{3}"}, {"json_schema": '{"type": "boolean"}'}, {"ebnf": 'root ::= "a"'}, {"regex": ""})


def nonsense(draw: random.Random) -> dict[str, Any]:
    """Of Sampling, most of it left out."""
    made: dict[str, Any] = {
        name: draw.choice(edges if draw.random() < 0.95 else _BAD)
        for name, edges in _REALS.items()
        if draw.random() < 0.3
    }
    for name, values in (("top_k", _WHOLE), ("top_logprobs", _WHOLE), ("seed", _LONG)):
        if draw.random() < 0.3:
            made[name] = draw.choice(values)
    if draw.random() < 0.2:
        made["min_new_tokens"] = draw.choice((1, 2, 5, *_LONG))
    made |= {name: draw.random() < 0.5 for name in ("logprobs", "ignore_eos") if draw.random() < 0.4}
    if draw.random() < 0.3:
        made["stop_token_ids"] = draw.choices(range(512) if draw.random() < 0.8 else _LONG, k=draw.choice((1, 4, 400)))
    return made | (draw.choice(_GRAMMARS) if draw.random() < 0.1 else {})


def prompt(draw: random.Random) -> list[int]:
    how = draw.random()
    if how < 0.7:
        return PROMPT[: draw.randrange(1, len(PROMPT))]
    if how < 0.8:
        return [7] * draw.choice((0, CONTEXT - 1, CONTEXT, CONTEXT + 1, 4 * CONTEXT))
    return [*PROMPT[:5], draw.choice(_LONG)]


async def test_an_engine_outlives_requests_that_make_no_sense(
    tmp_path: Path, engines: Engines, models: dict[str, Path]
) -> None:
    draw, ends = random.Random(1), Counter[common_pb2.Finish]()
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama", floor_bytes=LIMIT)
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT))
        end.ask("before", PROMPT, 20)
        before = await end.answer("before")
        for turn in range(ROUNDS):
            names = [f"{turn}-{number}" for number in range(TOGETHER)]
            for name in names:
                most = draw.choice(range(1, 30) if draw.random() < 0.96 else _LONG)
                tokens = prompt(draw)
                told = tokens[-draw.randrange(1, 4) :] if draw.random() < 0.1 else []
                end.ask(name, tokens[: len(tokens) - len(told)], most, resumed=told, **nonsense(draw))
            end.ask(f"beside-{turn}", PROMPT, 20)
            for name in names:
                if draw.random() < 0.1:
                    end.send(abort=engine_pb2.Abort(request_id=name))
            assert (await end.answer(f"beside-{turn}")).tokens == before.tokens
            for name in names:
                answer = await end.answer(name)
                assert answer.finish != common_pb2.FAILED, (name, answer.error)
                ends[answer.finish] += 1
        assert min(ends[finish] for finish in (common_pb2.STOP, common_pb2.LENGTH, common_pb2.REJECTED)) > 3
        await end.do(unload=engine_pb2.Unload())
