"""A lease without a balloond: a capacity, a limit, and answers in the order of the questions."""

import itertools
import threading

from balloond.backends.cpu import PAGE_BYTES, CpuMaker, CpuMapper
from balloond.driver.connection.lease import Granted, GrowRefused, LeaseLimit
from balloond.driver.connection.loop import DescriptorLoop
from tests.balloond.conftest import TIMEOUT_S


class FakeLease:
    def __init__(self, capacity=100, extent=PAGE_BYTES):
        self.loop = DescriptorLoop("fake lease")
        self.loop.start()
        self.extent = extent
        self.capacity = capacity
        self.limit = LeaseLimit(0, capacity * extent)
        self.sizes = {}
        """By id, of what is held: in extents of the usual size."""
        self.reports = []
        self.asked = []
        self.asked_of = []
        """(size, count, what follows), in extents of the usual size."""
        self.cached = []
        """What the engine could evict, as was said with each."""
        self.returned_extents = 0
        self.silent = False
        """Questions are kept instead of answered."""
        self.kept = []
        self._ids = itertools.count(1)

    @property
    def held(self):
        return set(self.sizes)

    @property
    def held_extents(self):
        return sum(self.sizes.values())

    def on_limit(self): ...
    def on_reclaim(self, reclaim_id, nbytes, deep): ...
    def on_attached(self): ...

    def request(
        self, kind, extent_bytes, count, done, *, min_count=None, only_free=False, behind_bytes=0, cached_bytes=0
    ):
        self.asked.append((count, min_count, only_free))
        self.asked_of.append((extent_bytes // self.extent, count, behind_bytes // self.extent))
        self.cached.append(cached_bytes // self.extent)
        answer = (lambda: self._answer(extent_bytes, count, done),)[0]
        self.kept.append(answer) if self.silent else self.loop.call(answer)

    def _answer(self, extent_bytes, count, done):
        size = extent_bytes // self.extent
        fits = min(count, (self.capacity - self.held_extents) // size)
        if fits < 1:
            done([], GrowRefused("exhausted", 1, "all gone"))
            return
        extents = [Granted(next(self._ids), extent_bytes, CpuMaker().create(extent_bytes)) for _ in range(fits)]
        self.sizes |= {extent.id: size for extent in extents}
        done(extents, None)

    def speak(self):
        """Answers what was kept."""
        self.silent = False
        kept, self.kept = self.kept, []
        for answer in kept:
            self.loop.call(answer)

    def give_back(self, ids):
        ids = set(ids)
        assert ids <= self.held, "given back twice"
        self.returned_extents += sum(self.sizes.pop(id) for id in ids)

    def report(self, usage):
        self.reports.append(usage)

    # --- what tests do

    def set_limit(self, extents):
        self.limit = LeaseLimit(self.limit.revision + 1, extents * self.extent)
        self.loop.call(lambda: self.on_limit())

    def reclaim(self, reclaim_id, extents, deep=False):
        self.loop.call(lambda: self.on_reclaim(reclaim_id, extents * self.extent, deep))

    def at_rest(self, what):
        """Calls it on the thread, between two of its callbacks, and returns what it returns."""
        answers, done = [], threading.Event()
        self.loop.call(lambda: (answers.append(what()), done.set()))
        assert done.wait(TIMEOUT_S)
        return answers[0]

    def settle(self):
        """Returns when the thread has done everything there is to do now."""
        for _ in range(10):
            done = threading.Event()
            self.loop.call(done.set)
            assert done.wait(TIMEOUT_S)


class Gate:
    """A fence that opens when the test says so."""

    def __init__(self):
        self.open = False

    def done(self):
        return self.open


class GatedMapper(CpuMapper):
    """Counts what is mapped; its fences may be closed."""

    def __init__(self):
        self.gates = []
        self.closed = False

    def fence(self):
        if not self.closed:
            return super().fence()
        self.gates.append(Gate())
        return self.gates[-1]


def readable(fd):
    """Whether an eventfd was signalled; leaves it as it is."""
    import select

    return bool(select.select([fd], [], [], 0)[0])
