import os

import pytest

from balloond import records
from balloond.backends.cpu import PAGE_BYTES, CpuMaker
from balloond.custody import Custody
from balloond.policy.ledger import Extent


class Keeper:
    """Remembers what it was told."""

    def __init__(self):
        self.kept, self.forgotten = [], []

    def keep(self, kept):
        self.kept += kept
        return "kept"

    def forget_soon(self, ids):
        self.forgotten += ids


class FailingMaker(CpuMaker):
    def __init__(self, after):
        self.left = after

    def create(self, nbytes):
        if not self.left:
            raise OSError(12, "Cannot allocate memory")
        self.left -= 1
        return super().create(nbytes)


def extents(*ids):
    return [Extent(id, PAGE_BYTES, "kv", "lease") for id in ids]


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_what_is_created_is_kept_and_what_is_destroyed_is_closed_and_forgotten():
    before = open_descriptors()
    keeper = Keeper()
    custody = Custody({"cpu:0": CpuMaker()}, keeper)
    assert custody.create("cpu:0", "token", extents(1, 2)) == "kept"
    assert [(records.decode(record).id, fd) for record, fd in keeper.kept] == [
        (1, custody.descriptors(extents(1))[0]),
        (2, custody.descriptors(extents(2))[0]),
    ]
    custody.take(3, os.memfd_create("x"))
    assert all(extent in custody for extent in extents(1, 2, 3))
    custody.destroy(extents(1, 2, 3, 99))
    assert keeper.forgotten == ["extent/1", "extent/2", "extent/3", "extent/99"]
    assert open_descriptors() == before


def test_extents_are_created_all_or_none():
    before = open_descriptors()
    custody = Custody({"cpu:0": FailingMaker(after=2)}, Keeper())
    with pytest.raises(OSError, match="Cannot allocate memory"):
        custody.create("cpu:0", "token", extents(1, 2, 3))
    assert open_descriptors() == before
    assert not any(extent in custody for extent in extents(1, 2, 3))
