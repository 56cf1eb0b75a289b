"""The elastic KV memory of one model, on the engine's own thread: an address range and the accounting of its KV blocks
(envelopes).

Everything here happens between two steps of the event loop. What `available` counts is mapped: SGLang's scheduler dies
when an allocation that it counted on fails, so memory is counted only once balloond has given it.

SGLang counts tokens; an envelope holds `page_size` of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.kv.slot_transfer import HostIds, Ids
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes, Indices

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.memory.ranges import KvRange

DUMMY = 0
"""The envelope that SGLang lets padded tokens write to. It is held while the model is active, never handed out."""
_RETRY_S = 0.02
"""Seconds after balloond had nothing in which growth does not wait for it."""
_MOST_POLITE_S = 1.28
"""Longest time in seconds in which growth that evicting own prefixes could replace does not wait for balloond: it
doubles with every refusal, up to this. A step that waits in vain has lost a millisecond, and then the device's queue,
since nothing was evicted ahead of it."""


class ElasticKv:
    """The KV range of one model, and which of its envelopes are in use."""

    def __init__(
        self,
        memory: KvRange,
        envelope_bytes: int,
        count: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        page_size: int = 1,
        ids: Ids | None = None,
    ) -> None:
        """`count` envelopes of `envelope_bytes` over `memory`. `ids`: how envelopes' numbers come from the device; by
        default at once, for devices whose memory is the host's."""
        self.memory = memory
        self.rows: torch.Tensor
        """The KV as bytes, (envelopes, bytes of one); only held memory may be touched. Set by the pool."""
        self.page_size = page_size
        self.ids = ids or HostIds()
        self.envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=memory.extent_bytes, count=count)
        self.has_dummy = False
        self._clock = clock
        self._no_wait_before = 0.0
        self._polite_before = 0.0
        """Time (`clock`) before which growth that evicting own prefixes could replace does not wait for balloond."""
        self._polite_s = _RETRY_S
        self._emptied: dict[int, float] = {}
        """Time (`clock`) since when each held extent has been empty, as far as known."""
        self._leaving = 0
        """Number of envelopes that SGLang freed and whose numbers are on their way here: neither used nor available."""

    def __repr__(self) -> str:
        return f"ElasticKv({self.envelopes!r})"

    # --- sizes

    @property
    def available(self) -> int:
        """Tokens that can be placed now."""
        return self.envelopes.available * self.page_size

    @property
    def coming(self) -> int:
        """Tokens whose places were freed and whose numbers are on their way here."""
        return self._leaving * self.page_size

    @property
    def used(self) -> int:
        """Tokens of requests and of cached prefixes that have a place."""
        return (self.envelopes.live - self.has_dummy - self._leaving) * self.page_size

    @property
    def in_a_row(self) -> int:
        """Tokens that would find a place in the held extents if those were the lowest, and empty."""
        nbytes = self.envelopes.held * self.memory.extent_bytes
        return (nbytes // self.envelopes.envelope_bytes - 1) * self.page_size

    @property
    def balloon(self) -> int:
        """Tokens that SGLang believes to have room for and that have no memory: with these added, its own count of a
        pool of fixed size holds."""
        return (self.envelopes.total - 1) * self.page_size - self.used - self.available

    def beyond(self, extents: int) -> int:
        """Tokens that have a place now and would find none once `extents` of the held extents have left."""
        nbytes = max(0, self.envelopes.held - extents) * self.memory.extent_bytes
        return max(0, self.envelopes.live - nbytes // self.envelopes.envelope_bytes) * self.page_size

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the KV of `tokens`."""
        return tokens * self.envelopes.envelope_bytes // self.page_size

    def units(self) -> Indices:
        """The first of the extents that leave together, for each extent of `envelopes`; (extents,). Several are mapped
        as one where much was requested at once. A snapshot, true of held extents."""
        mapped, count = self.memory.extents, self.envelopes.n_extents
        return np.append(mapped, np.arange(len(mapped), count))[:count]

    # --- freeing

    def free(self, envelopes: torch.Tensor) -> None:
        """Frees envelopes by their numbers on the device, in any order, repeats allowed. They are available once the
        numbers have arrived here (`settle`)."""
        expected = len(envelopes)
        self._leaving += expected

        def arrived(numbers: Indices) -> None:
            self._leaving -= expected
            self.envelopes.give(numbers)

        self.ids.fetch(envelopes, arrived)

    def poll(self, most: int | None = None) -> None:
        """Books the numbers that have arrived, at most the first `most` copies since the start; never waits."""
        self.ids.poll(most)

    def settle(self) -> None:
        """Waits until all freed numbers have arrived. The device's queue may be a forward pass long."""
        self.ids.settle()

    # --- growing

    def grow(self, tokens: int, wait_s: float, instead: int = 0) -> bool:
        """Makes room for at least `tokens` more; whatever comes is kept. Waits for balloond at most `wait_s` seconds,
        and not at all shortly after it had nothing. False if less came. `instead`: cached tokens that could be evicted
        for these; memory of other leases is taken only for what is beyond that, or where their prefixes are older."""
        target = self.envelopes.available - (-tokens // self.page_size)
        deadline = self._clock() + wait_s
        while self.envelopes.available < target:
            now = self._clock()
            left = max(0.0, deadline - now) if self.may_grow() else 0.0
            wanted = self.envelopes.needed_for(target - self.envelopes.available)
            extents = self.memory.acquire(wanted, timeout_s=left, instead_bytes=self.bytes_of(instead))
            if not extents:
                if left > 0:
                    self._no_wait_before = self._clock() + _RETRY_S
                return False
            self._hold(extents)
        return True

    def grow_or_evict(self, tokens: int, wait_s: float, instead: int) -> bool:
        """Makes room as `grow` does, where evicting `instead` tokens would do. While other leases have nothing older,
        balloond is asked as often but rarely waited for."""
        waited = self._clock() >= self._polite_before
        there = self.grow(tokens, wait_s if waited else 0.0, instead)
        if waited and there:
            self._polite_s = _RETRY_S
        elif waited and wait_s > 0 and self.memory.refused:
            self._polite_s = min(_MOST_POLITE_S, 2 * self._polite_s)
            self._polite_before = self._clock() + self._polite_s
        return there

    def tell_cached(self, tokens: int) -> None:
        """Reports the cached tokens that could be evicted now."""
        self.memory.cached_bytes = self.bytes_of(tokens)

    def may_grow(self) -> bool:
        """Whether waiting for balloond is worth while: the limit allows more, and it has not just had nothing."""
        return self._clock() >= self._no_wait_before and self.memory.headroom() > 0

    def may_grow_politely(self) -> bool:
        """Whether waiting for balloond is worth while where own prefixes could be evicted instead."""
        return self.may_grow() and self._clock() >= self._polite_before

    def may_wait_again(self) -> None:
        """Lets the next growth wait for balloond again: memory may have come."""
        self._no_wait_before = self._polite_before = 0.0
        self._polite_s = _RETRY_S

    def _hold(self, extents: list[int]) -> None:
        """Adds extents that are the engine's now, empty since now."""
        self.envelopes.hold(extents)
        now = self._clock()
        for extent in extents:
            self._emptied[extent] = now

    def hold_tied(self) -> None:
        """Also takes the extents that are mapped as one with held ones, so that all that counts as this range's is
        counted here."""
        self._hold(self.memory.take_tied())

    def hold_dummy(self, wait_s: float) -> None:
        """Maps the dummy envelope, waiting at most `wait_s` seconds. Raises NoMemory."""
        if self.has_dummy:
            return
        wanted = set(self.envelopes.extents_of(DUMMY))
        deadline = self._clock() + wait_s
        # The driver chooses the addresses, the lowest first; extents beyond the wanted ones go back.
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

    def start_over(self, wait_s: float) -> None:
        """Returns all empty extents and the reserve, so that the next extents lie in a row, from the lowest address on.
        Waits at most `wait_s` seconds for unmapping."""
        self.settle()
        self.give_up_empties()
        self.memory.lower(wait_s)

    def give_up_empties(self, older_than_s: float = 0.0) -> int:
        """Returns extents to the driver that have been empty for `older_than_s` seconds; returns how many. Those
        that cannot leave yet are kept: their empty places are for the next request, or for prefixes that are moved
        together."""
        empties = self._empties()
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

    def leaving(self) -> int:
        """Number of extents that `give_up_empties` would return."""
        return len(self._empties())

    def _empties(self) -> list[int]:
        """Held extents that are empty and leave only with others that are empty too."""
        empties = np.array(self.envelopes.empties(), dtype=np.int64)
        if not len(empties):
            return []
        units = self.units()
        in_use = np.zeros(len(units), dtype=bool)
        in_use[units[np.flatnonzero(self.envelopes.live_by_extent())]] = True
        leaving: list[int] = empties[~in_use[units[empties]]].tolist()
        return leaving

    def give_up_everything(self) -> None:
        """Returns all memory, for hibernation: only the dummy may be live. Afterwards not one extent is mapped."""
        self.settle()
        if self.has_dummy:
            self.envelopes.give(self.envelopes.all_live())
            self.has_dummy = False
        self.give_up_empties()
        self.tell_cached(0)
        self.memory.empty()

    def free_all(self) -> None:
        """Frees every envelope but the dummy."""
        self.settle()
        live = self.envelopes.all_live()
        self.envelopes.give(live[live != DUMMY] if self.has_dummy else live)
