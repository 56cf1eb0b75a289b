"""What a model asks of its device's memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory
from gpu_scheduler.engines.sglang.memory.shared_range import SharedRange
from gpu_scheduler.engines.sglang.policy.agreement import StepAgreement
from testing.patience import PATIENCE_S


class Ranks:
    def __init__(self, size):
        self.size = size

    def gather(self, mine):
        return [mine] * self.size


class Range:
    address, extent_bytes, wake_fd = 4096, 4096, 0

    def extents(self, stretch=0):
        return np.arange(8)


class Driver:
    limit_bytes = 1 << 20

    def __init__(self):
        self.alone = []

    def kv_range(self, span_bytes, *, alone):
        self.alone.append(alone)
        return Range()


@pytest.mark.parametrize("ranks", [1, 2])
def test_kv_range_of_one_rank_may_grow_in_large_extents_and_of_several_ranks_not(ranks):
    """Where one rank got large extents and another none, they would empty different ones."""
    driver = Driver()
    kv = ModelMemory(driver, Ranks(ranks)).open_kv([8 * 4096])
    assert driver.alone == [ranks == 1]
    assert isinstance(kv, SharedRange) == (ranks > 1)


class Refusing(Range):
    """A rank's range of which two extents are there."""

    cached_bytes = 0

    def refused(self, stretch=0):
        return True

    def headroom(self):
        return 9

    def offer(self, count, *, timeout_s=0.0, instead_bytes=0, stretch=0):
        self.asked = count, instead_bytes, stretch
        return [0, 1]

    def take(self, indices, *, stretch=0):
        self.taken = list(indices)


class OneRefused(Ranks):
    """Of which the others have all that is wanted."""

    agreed = StepAgreement()

    def gather(self, mine):
        return [mine, ([0, 1, 2], False)] if isinstance(mine, tuple) else [mine] * self.size


def test_growth_refused_to_one_rank_is_refused_to_all_and_each_states_what_it_could_evict():
    own = Refusing()
    shared = SharedRange(own, OneRefused(2), lambda: 9 * own.extent_bytes)
    assert shared.acquire(3, instead_bytes=4096, stretch=1) == [0, 1] == own.taken
    assert own.asked == (3, 4096, 1) and shared.refused(1) and not shared.refused(0)
    shared.cached_bytes = 8192
    assert own.cached_bytes == 8192
    assert shared.acquire(0, stretch=1) == [] and not shared.refused(1)


class Offering(Range):
    """A rank's range of two stretches, in which `there` are mapped by now."""

    cached_bytes = 0

    def __init__(self, *there):
        self.there = [set(indices) for indices in there]
        self.owned = [set() for _ in there]

    def refused(self, stretch=0):
        return False

    def offer(self, count, *, timeout_s=0.0, instead_bytes=0, stretch=0):
        return sorted(self.there[stretch])

    def take(self, indices, *, stretch=0):
        assert self.there[stretch].issuperset(indices), "it was not offered"
        self.there[stretch] -= set(indices)
        self.owned[stretch] |= set(indices)

    def release(self, indices, *, stretch=0):
        self.owned[stretch] -= set(indices)


class Together:
    """Two ranks whose calls alternate: one waits in `gather` for what the other has to say."""

    def __init__(self):
        self._barrier, self._told = threading.Barrier(2), [None, None]

    def rank(self, number):
        return SimpleNamespace(size=2, agreed=StepAgreement(), gather=lambda mine: self._gather(number, mine))

    def _gather(self, number, mine):
        self._told[number] = mine
        self._barrier.wait(PATIENCE_S)
        told = list(self._told)
        self._barrier.wait(PATIENCE_S)
        return told


def test_ranks_take_the_same_extents_of_each_stretch_within_the_lowest_limit_for_all_stretches():
    own = [Offering({0, 1, 2, 4}, {0, 2, 3}), Offering({1, 2, 4, 5}, {2, 3, 4})]
    together, limits = Together(), [9, 4]

    def work(number):
        limit = limits[number] * Range.extent_bytes
        shared = SharedRange(own[number], together.rank(number), lambda: limit)
        taken = [shared.acquire(count, stretch=stretch) for count, stretch in ((2, 0), (3, 1), (1, 0))]
        room = shared.headroom(0), shared.headroom(1)
        shared.release([1])
        taken.append(shared.acquire(2))
        return taken, room, shared.overage_bytes()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, (0, 1))
    assert first == second == ([[1, 2], [2, 3], [], [4]], (0, 0), 0)
    assert own[0].owned == own[1].owned == [{2, 4}, {2, 3}]
