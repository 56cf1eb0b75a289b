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


def test_settled_garbage_is_collected_only_when_all_objects_are_looked_at() -> None:
    collector.pause()
    there = cycle()
    collector.settle()
    assert gc.isenabled()
    gc.collect()
    assert there() is not None
    collector.look_at_all()
    assert there() is None


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
