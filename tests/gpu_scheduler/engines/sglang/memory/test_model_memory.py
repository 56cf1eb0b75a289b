"""What a model asks of its device's memory."""

import numpy as np
import pytest

from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory
from gpu_scheduler.engines.sglang.memory.shared_range import SharedRange
from gpu_scheduler.engines.sglang.policy.agreement import StepAgreement


class Ranks:
    def __init__(self, size):
        self.size = size

    def gather(self, mine):
        return [mine] * self.size


class Range:
    address, extent_bytes, wake_fd = 4096, 4096, 0
    extents = np.arange(8)


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
    kv = ModelMemory(driver, Ranks(ranks)).open_kv(8 * 4096)
    assert driver.alone == [ranks == 1]
    assert isinstance(kv, SharedRange) == (ranks > 1)


class Refusing(Range):
    """A rank's range of which two extents are there."""

    refused, cached_bytes = True, 0

    def headroom(self):
        return 9

    def offer(self, count, *, timeout_s=0.0, instead_bytes=0):
        self.asked = count, instead_bytes
        return [0, 1]

    def take(self, indices):
        self.taken = list(indices)


class OneRefused(Ranks):
    """Of which the others have all that is wanted."""

    agreed = StepAgreement()

    def gather(self, mine):
        return [mine, ([0, 1, 2], False)] if isinstance(mine, tuple) else [mine] * self.size


def test_growth_refused_to_one_rank_is_refused_to_all_and_each_states_what_it_could_evict():
    own = Refusing()
    shared = SharedRange(own, OneRefused(2), lambda: 9 * own.extent_bytes)
    assert shared.acquire(3, instead_bytes=4096) == [0, 1] == own.taken
    assert own.asked == (3, 4096) and shared.refused
    shared.cached_bytes = 8192
    assert own.cached_bytes == 8192
    assert shared.acquire(0) == [] and not shared.refused
