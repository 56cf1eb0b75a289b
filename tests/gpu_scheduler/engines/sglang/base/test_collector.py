"""What Python's collector looks at in an engine, and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from gpu_scheduler.engines.sglang.base import collector
from tests.gpu_scheduler.engines.sglang.forks import Imported

CAPTURING = """
import gc
from gpu_scheduler.engines.sglang import plugin
from gpu_scheduler.engines.sglang.base import collector
from sglang.srt.model_executor.runner import decode_cuda_graph_runner, prefill_cuda_graph_runner

plugin.load()
collector.settle()
settled = gc.get_freeze_count()
assert settled > 100_000
for runner in (decode_cuda_graph_runner, prefill_cuda_graph_runner):
    with runner.freeze_gc(False):
        assert not gc.isenabled()
    assert gc.isenabled()
assert gc.get_freeze_count() >= settled - 100  # some may have gone by themselves
"""


class Thing:
    pass


def cycle() -> weakref.ref[Thing]:
    """Of one that nobody refers to but itself."""
    one = Thing()
    one.itself = one  # type: ignore[attr-defined]
    return weakref.ref(one)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_of_imports_is_never_looked_at_and_that_of_a_model_when_it_leaves() -> None:
    collector.pause()
    of_imports = cycle()
    collector.settle()
    assert gc.isenabled()
    collector.pause()
    of_model = cycle()
    collector.settle_model()
    assert gc.isenabled()
    collector.look_at_model()
    assert of_imports() is not None and of_model() is None


def test_many_objects_of_a_model_are_frozen_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_MANY", 0)
    collector.settle()
    there = cycle()
    collector.settle_model()
    gc.collect()
    assert there() is not None
    collector.look_at_model()
    assert there() is None
    collector.settle()


def test_collector_pause_within_a_pause_does_not_end_the_outer_one() -> None:
    collector.pause()
    with collector.paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
    collector.settle()
    with collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.sglang
def test_graph_capture_collects_nothing_and_leaves_settled_objects_settled(imported: Imported) -> None:
    imported.run(CAPTURING)
