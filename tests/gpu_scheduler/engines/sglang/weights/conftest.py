from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """As in an engine, what is there already is not looked at for tensors: it would take a third of a second each
    time."""
    gc.freeze()
