"""A real keeper and a real balloond on a real GPU. Everything here is marked `gpu` and runs only when that is asked
for (`make test-gpu`)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.balloond.conftest import TIMEOUT_S, Child, Node

MIB = 1 << 20
DEVICE = "cuda:0"
CAPACITY = 1024 * MIB
SPARES = 64 * MIB
SET_ASIDE = SPARES + 2 * MIB
GIVEN_OUT = CAPACITY - SET_ASIDE


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


class GpuChild(Child):
    module = "tests.gpu.child"


def free_bytes():
    """Of the device, as NVML says."""
    from balloond.backends import look

    return look(DEVICE).free_bytes


def taken(before):
    """What was taken since `before` bytes were free, in whole pages: the driver's own tables may be a little more."""
    return (before - free_bytes()) // (2 * MIB) * (2 * MIB)


async def until_free(nbytes):
    """Returns when so much is free: what was given back is, once the driver has closed it. A process that makes extents
    may keep some KiB of the device for the driver."""
    deadline = time.monotonic() + TIMEOUT_S
    while abs((free := free_bytes()) - nbytes) >= MIB:
        assert time.monotonic() < deadline, f"{free} bytes are free, {nbytes} should be"
        await asyncio.sleep(0.02)


@pytest.fixture
async def node(tmp_path):
    node = Node(tmp_path, devices=[(DEVICE, CAPACITY)])
    node.config.write_text(node.config.read_text() + f"\nspare_bytes = {SPARES}\n")
    node.name = DEVICE
    try:
        yield await node.start()
    finally:
        node.end()


@pytest.fixture
def child(node):
    children = []

    def start(model, *marks):
        children.append(GpuChild(node.handoff, DEVICE, model, *marks))
        assert children[-1].answer() == "ready"
        return children[-1]

    yield start
    for one in children:
        one.close()
