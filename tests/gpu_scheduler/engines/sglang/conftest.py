from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_scheduler.engines.sglang import checkpoints

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
