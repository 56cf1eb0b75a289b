"""What a model asks of its device's memory."""

import numpy as np
import pytest

from gpu_scheduler.engines.sglang.memory import Memory
from gpu_scheduler.engines.sglang.shared_range import SharedRange


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
def test_only_an_engine_of_one_rank_may_grow_in_large_extents(ranks):
    """Where one rank got large extents and another none, they would empty different ones."""
    driver = Driver()
    kv = Memory(driver, Ranks(ranks)).open_kv(8 * 4096)
    assert driver.alone == [ranks == 1]
    assert isinstance(kv, SharedRange) == (ranks > 1)
