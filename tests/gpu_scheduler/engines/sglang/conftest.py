from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gpu_scheduler.engines.sglang import checkpoints, forks
from tests.gpu_scheduler.engines.sglang.shared import Engines

NEW_TOKENS = 40


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    """Of a module whose tests run in its loop."""
    shared = Engines()
    yield shared
    await shared.close()


@pytest.fixture(scope="session")
def imported() -> Iterator[forks.Imported]:
    """For what looks at SGLang itself and needs no engine."""
    with forks.imported() as process:
        yield process
