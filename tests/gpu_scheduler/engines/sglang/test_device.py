"""The stack of a GPU's threads: what the driver is asked for, and what it refuses."""

import pytest
import torch

from balloond.driver import private
from gpu_scheduler.engines.sglang import device

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


def test_the_stack_is_what_it_was_however_often_it_was_lowered(stack):
    for _ in range(2):
        device.lower_stack(GPU)
        device.lower_stack(GPU)
        assert stack["bytes"] == 128
        device.restore_stack(GPU)
        device.restore_stack(GPU)
        assert stack["bytes"] == 1024


def test_what_it_was_is_known_after_the_driver_refused_it(stack):
    device.lower_stack(GPU)
    stack["refuses"] = True
    device.restore_stack(GPU)
    stack["refuses"] = False
    device.lower_stack(GPU)
    device.restore_stack(GPU)
    assert stack["bytes"] == 1024
