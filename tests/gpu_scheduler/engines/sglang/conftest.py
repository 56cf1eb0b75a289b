from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.sharing import throttle
from testing.engines import harness
from testing.engines.harness import EngineEnd, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints, forks
from tests.gpu_scheduler.engines.sglang.shared import Engines

NEW_TOKENS = 40
INDEX = 2
NEIGHBOUR = INDEX + 1
"""An engine that tests speak for."""


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """Requests are neither handed back nor retracted because the machine that grants memory stood still for a moment.
    What it refuses it refuses at once."""
    waits = {"park_after_ms": 10_000, "hard_wait_ms": 10_000}
    harness.OPTIONS.update(waits)
    yield
    for name in waits:
        del harness.OPTIONS[name]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two shapes by name."""
    folder = tmp_path_factory.mktemp("models")
    return {"llama": checkpoints.llama(folder / "llama"), "qwen": checkpoints.qwen(folder / "qwen")}


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return checkpoints.prompts(12)


@pytest.fixture(scope="session")
def said(models: dict[str, Path], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """What Transformers generates for each prompt."""
    return {name: checkpoints.reference(path, prompts, NEW_TOKENS) for name, path in models.items()}


@pytest.fixture(scope="session")
def word() -> Iterator[int]:
    """The shared board, for all of `engines`; each of them has the number INDEX there."""
    fd = shared_board.create()
    yield fd
    os.close(fd)


@pytest.fixture
def turns(word: int) -> Iterator[shared_board.SharedBoard]:
    """Whatever is set there goes with the test."""
    turns = shared_board.SharedBoard(word)
    yield turns
    turns.set_throttle(INDEX, throttle.FREE)
    turns.set_prefill_priority(0.0, 0)
    turns.set_decode_arbitration(0.0)


class Motion:
    """How fast the engines of `engines` decode: as beside a neighbour that prefills for ever. They prefill as ever, act
    on commands at once, and what is told to end does not wait for a step."""

    def __init__(self, turns: shared_board.SharedBoard) -> None:
        self._turns = turns

    def slow(self, step_s: float = 0.2) -> None:
        """So long from one decode step to the next: a test that has something to do between two of them is in time on
        any machine."""
        self._turns.set_prefill_priority(step_s, 0)
        self._turns.claim(NEIGHBOUR, time.monotonic() + 1000.0, 1)

    def still(self) -> None:
        self.slow(1000.0)

    def free(self) -> None:
        self._turns.release(NEIGHBOUR)
        self._turns.set_prefill_priority(0.0, 0)


@pytest.fixture
def motion(turns: shared_board.SharedBoard) -> Iterator[Motion]:
    """Free again when the test ends."""
    motion = Motion(turns)
    yield motion
    motion.free()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(word: int) -> AsyncIterator[Engines]:
    """For tests that run in the session's loop."""
    shared = Engines("--board-fd", str(word), "--board-index", str(INDEX), pass_fds=[word])
    yield shared
    await shared.close()


@pytest_asyncio.fixture(loop_scope="session", params=[False, True], ids=["as on a CPU", "as on a GPU"])
async def llama(
    request: pytest.FixtureRequest, tmp_path: Path, engines: Engines, models: dict[str, Path]
) -> AsyncIterator[EngineEnd]:
    """An engine that holds a model, with what is the default on a CPU and with pages and overlap as on a GPU."""
    options = {"page_size": 16, "overlap": 1} if request.param else {}
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        await end.hold(load(at, "llama", models["llama"], context_tokens=512, **options))
        yield end


@pytest.fixture(scope="session")
def imported() -> Iterator[forks.Imported]:
    """For what looks at SGLang itself and needs no engine."""
    with forks.imported() as process:
        yield process
