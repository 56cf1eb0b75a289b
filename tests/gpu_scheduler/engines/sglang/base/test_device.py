"""The stack of a GPU's threads: what the driver is asked for, and what it refuses."""

import pytest
import torch

from balloond.driver import private
from gpu_scheduler.engines.sglang.base import device
from tests.gpu_scheduler.engines.sglang.forks import Imported

GPU = torch.device("cuda:0")


@pytest.fixture
def stack(monkeypatch):
    """What the driver has; None: it refuses."""
    has = {"bytes": 1024, "refuses": False}

    def set_stack(nbytes):
        if has["refuses"]:
            raise OSError("no")
        before, has["bytes"] = has["bytes"], nbytes
        return before

    monkeypatch.setattr(private, "set_stack", set_stack)
    monkeypatch.setattr(device, "_stack_bytes", {})
    return has


def test_gpu_stack_lowered_twice_is_restored_to_its_first_size(stack):
    for _ in range(2):
        device.lower_stack(GPU)
        device.lower_stack(GPU)
        assert stack["bytes"] == 128
        device.restore_stack(GPU)
        device.restore_stack(GPU)
        assert stack["bytes"] == 1024


def test_gpu_stack_whose_restoring_was_refused_is_later_restored_to_its_first_size(stack):
    device.lower_stack(GPU)
    stack["refuses"] = True
    device.restore_stack(GPU)
    stack["refuses"] = False
    device.lower_stack(GPU)
    device.restore_stack(GPU)
    assert stack["bytes"] == 1024


WAKE = """
from types import SimpleNamespace
import torch
from balloond.driver import private
from gpu_scheduler.engines.sglang.base import device
from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.model.lifecycle import Lifecycle
from gpu_scheduler.engines.sglang.model.loaded_model import LoadedModel
from gpu_scheduler.engines.sglang.ranks.ranks import Alone
from gpu_scheduler.engines.sglang.base.states import EngineState

has = {"stack": 1024, "mapped": 0}

def set_stack(nbytes):
    before, has["stack"] = has["stack"], nbytes
    return before

told = []

def refuse():
    assert told == [""], "the weights can be filled meanwhile"
    raise NoMemory("none for the graphs")

private.set_stack = set_stack
model = LoadedModel.__new__(LoadedModel)
lifecycle = Lifecycle(model)
model.device, model.ranks = torch.device("cuda:0"), Alone()
model.options = SimpleNamespace(small_stack=1)
model.memory = SimpleNamespace(map_weights=lambda: has.update(mapped=1), unmap_weights=lambda: has.update(mapped=0))
graphs = SimpleNamespace(come_back=refuse, save=lambda: None, leave=lambda: None)
model.graphs, model.adapters, model.state = graphs, None, EngineState.HIBERNATING
model.kv = SimpleNamespace(give_up_everything=lambda: None)
model.tell_weights_mapped = told.append
device.finish = lambda of: None
device.lower_stack(model.device)
lifecycle.wake()
assert (model.state, has, told) == (EngineState.FILLING, {"stack": 1024, "mapped": 1}, [""]), has
try:
    lifecycle.verify()
except NoMemory:
    pass
assert (model.state, has) == (EngineState.HIBERNATING, {"stack": 128, "mapped": 0}), has

def none_for_weights():
    raise NoMemory("none for the weights")

model.memory.map_weights = none_for_weights
try:
    lifecycle.wake()
except NoMemory:
    pass
assert (model.state, has, told) == (EngineState.HIBERNATING, {"stack": 128, "mapped": 0}, [""]), has
"""


@pytest.mark.sglang
def test_a_refused_wake_up_leaves_nothing_mapped_and_the_stack_small(
    imported: Imported,
) -> None:
    imported.run(WAKE)
