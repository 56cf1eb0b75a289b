"""The elastic KV memory of one model, on the engine's own thread: an address range and the accounting of its
envelopes.

Everything here happens between two steps of the event loop. What `available` counts is mapped: SGLang's scheduler
dies when an allocation that it was promised fails, so memory is never promised before balloond gave it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpu_scheduler.engines.sglang.errors import NoMemory
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory import KvRange

DUMMY = 0
"""The envelope that SGLang lets padded tokens write to. Held while the model is active, never handed out."""
_RETRY_S = 0.02
"""After balloond had nothing, how long growth is answered from the reserve alone."""


class ElasticKv:
    """The range of one model and who uses what of it."""

    def __init__(
        self, memory: KvRange, envelope_bytes: int, count: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory = memory
        self.envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=memory.extent_bytes, count=count)
        self.has_dummy = False
        self._clock = clock
        self._no_wait_before = 0.0
        self._emptied: dict[int, float] = {}
        """Since when an extent has been empty."""

    def __repr__(self) -> str:
        return f"ElasticKv({self.envelopes!r})"

    # --- sizes

    @property
    def available(self) -> int:
        return self.envelopes.available

    @property
    def used(self) -> int:
        """Live envelopes of requests and cached prefixes."""
        return self.envelopes.live - self.has_dummy

    @property
    def balloon(self) -> int:
        """What SGLang believes to own and has no memory: its own count of a pool of fixed size holds if this is
        added."""
        return self.envelopes.total - 1 - self.used - self.available

    def bytes_of(self, envelopes: int) -> int:
        return envelopes * self.envelopes.envelope_bytes

    # --- growing

    def grow(self, envelopes: int, wait_s: float) -> bool:
        """Makes at least `envelopes` more available. Waits for balloond at most `wait_s`, and not at all shortly
        after it had nothing. Whatever came is kept; False when it was less."""
        target = self.envelopes.available + envelopes
        deadline = self._clock() + wait_s
        while self.envelopes.available < target:
            now = self._clock()
            left = max(0.0, deadline - now) if now >= self._no_wait_before and self.memory.headroom() > 0 else 0.0
            extents = self.memory.acquire(self.envelopes.needed_for(target - self.envelopes.available), timeout_s=left)
            if not extents:
                if left > 0:
                    self._no_wait_before = self._clock() + _RETRY_S
                return False
            self._hold(extents)
        return True

    def may_wait_again(self) -> None:
        """Memory may have come: the next growth asks balloond again."""
        self._no_wait_before = 0.0

    def _hold(self, extents: list[int]) -> None:
        self.envelopes.hold(extents)
        now = self._clock()
        for extent in extents:
            self._emptied[extent] = now

    def hold_dummy(self, wait_s: float) -> None:
        """Maps the dummy envelope. Raises NoMemory."""
        if self.has_dummy:
            return
        wanted = set(self.envelopes.extents_of(DUMMY))
        deadline = self._clock() + wait_s
        # The driver chooses the addresses, the lowest first; what it gives beyond the wanted ones goes back.
        while not all(self.envelopes.is_held(extent) for extent in wanted):
            extents = self.memory.acquire(len(wanted), timeout_s=max(0.0, deadline - self._clock()))
            if not extents:
                self.give_up_empties()
                raise NoMemory(
                    f"no KV memory for the first envelope ({self.envelopes.envelope_bytes} bytes) within {wait_s:.1f} s"
                )
            self._hold(extents)
        self.envelopes.take_exactly(DUMMY)
        self.has_dummy = True

    # --- giving back

    def give_up_empties(self, older_than_s: float = 0.0) -> int:
        """Returns empty extents to the driver; how many."""
        empties = self.envelopes.empties()
        now = self._clock()
        for extent in empties:
            self._emptied.setdefault(extent, now)
        if older_than_s > 0:
            held = set(empties)
            self._emptied = {extent: since for extent, since in self._emptied.items() if extent in held}
            empties = [extent for extent in empties if now - self._emptied[extent] >= older_than_s]
        if empties:
            self.envelopes.give_up(empties)
            self.memory.release(empties)
            for extent in empties:
                self._emptied.pop(extent, None)
        return len(empties)

    def give_up_everything(self) -> None:
        """For hibernation: nothing is live but the dummy; afterwards not one extent is mapped."""
        if self.has_dummy:
            self.envelopes.give(self.envelopes.all_live())
            self.has_dummy = False
        self.give_up_empties()
        self.memory.empty()

    def free_all(self) -> None:
        """Every envelope but the dummy is free."""
        live = self.envelopes.all_live()
        self.envelopes.give(live[live != DUMMY] if self.has_dummy else live)
