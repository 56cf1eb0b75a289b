"""Transfers of numbers to and from a GPU, with stand-ins for its pinned memory and its events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpu_scheduler.engines.sglang.kv import slot_transfer
from gpu_scheduler.engines.sglang.kv.slot_transfer import CudaIds


class Event:
    """An event of a device that does nothing before it is waited for."""

    device_waits = False

    def record(self) -> None:
        self.done = not self.device_waits

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Transfers:
    """Transfers of a device that is the host, and the bytes that were pinned for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned_bytes = self.pinned = 0
        empty = torch.empty

        def counted(*shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
            made = empty(*shape, **how)
            self.pinned_bytes += made.nbytes if pin_memory else 0
            self.pinned += pin_memory
            return made

        monkeypatch.setattr(torch, "empty", counted)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        self.ids = CudaIds(torch.device("cpu"))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    return Transfers(monkeypatch)


def test_numbers_arrive_sorted_and_each_once_when_the_device_is_done(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "device_waits", True)
    chance, expected, arrived = np.random.default_rng(0), [], []
    for count in (1, 64, 65, 512, 513, 4096, 4097, 9000):
        numbers = chance.integers(0, count, count)
        assert transfers.ids.send(numbers).tolist() == numbers.tolist()
        transfers.ids.fetch(torch.from_numpy(numbers), lambda some: arrived.append(some.tolist()))
        expected.append(sorted(set(numbers.tolist())))
    transfers.ids.poll()
    assert arrived == [] and transfers.ids.arrived() == 0
    transfers.ids.settle()
    assert arrived == expected


def test_buffers_are_used_again_when_their_copies_are_done(transfers: Transfers) -> None:
    arrived: list[int] = []
    for count in (1, 100, 4096) * 100:
        transfers.ids.send(np.arange(count))
        transfers.ids.fetch(torch.arange(count), lambda some: arrived.append(len(some)))
        transfers.ids.poll()
    assert arrived == [1, 100, 4096] * 100
    assert transfers.pinned <= slot_transfer._BUFFERS + 2


def test_many_short_prefixes_freed_at_once_pin_little_memory(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "device_waits", True)
    before, arrived = transfers.pinned_bytes, []
    for first in range(0, 20_000, 20):
        transfers.ids.fetch(torch.arange(first, first + 20), lambda some: arrived.extend(some.tolist()))
    transfers.ids.settle()
    assert arrived == list(range(20_000))
    assert transfers.pinned_bytes - before <= 4 * 8 * 20_000


def test_numbers_of_a_large_move_pin_no_memory(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "device_waits", True)
    numbers, before = np.arange(2_000_000), transfers.pinned_bytes
    assert torch.equal(transfers.ids.send(numbers), torch.from_numpy(numbers))
    assert transfers.pinned_bytes == before
