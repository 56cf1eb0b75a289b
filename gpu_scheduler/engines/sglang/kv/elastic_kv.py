"""The elastic memory of one kind of KV: the addresses, and the accounting of the KV blocks (envelopes) that lie there.
A model has one such memory for each of its kinds (`engine_kv.py`).

The engine's own thread calls all of it, between two steps of the event loop. Memory counts as available only once it is
mapped: SGLang's scheduler dies when an allocation fails that it counted on.

SGLang counts tokens; an envelope holds `page_size` of them. A number of an envelope is *arriving* when SGLang has freed
the envelope on the device and its number has not reached the host yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.kv.rolling_least import RollingLeast
from gpu_scheduler.engines.sglang.kv.slot_transfer import HostIds, Ids
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes, Indices

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.memory.ranges import KvAddresses

DUMMY = 0
"""The envelope that SGLang lets padded tokens write to. It is held while the model is active, never handed out."""
MAP_DUMMY_WAIT_S = 5.0
"""Seconds to wait for memory for the dummy envelope."""
_RETRY_S = 0.02
"""Seconds for which growth does not wait for balloond after balloond had nothing to give."""
_MOST_POLITE_S = 1.28
"""Most seconds for which growth does not wait for balloond where own prefixes could be evicted instead. The time
doubles with every refusal, up to this. A step that waits in vain loses a millisecond, and then leaves the device
without work, since nothing was evicted ahead of the step."""

_SPARE_S = 1.0
"""Seconds for which room has to have been unused before other kinds of KV get it in place of prefixes of their own.
A prefill step takes thousands of tokens of each kind, and those of a window are free again a step later. Extents that
went back and forth between kinds with every such step would be unmapped and mapped each time."""


class ElasticKv:
    """The addresses of one kind of KV, and the accounting of the envelopes there."""

    def __init__(
        self,
        memory: KvAddresses,
        envelope_bytes: int,
        count: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        page_size: int = 1,
        ids: Ids | None = None,
        divided: bool = True,
        dummy_is_read: bool = False,
    ) -> None:
        """`count` envelopes of `envelope_bytes` over `memory`. `ids`: the transfers of envelopes' numbers to and from
        the device; by default those of a device whose memory is the host's. `divided`: whether each rank of a model has
        the KV of some heads; False: each has all of it. `dummy_is_read`: whether kernels compute with what they read in
        the dummy envelope, so that it may not have NaN."""
        self.memory = memory
        self.divided = divided
        self._dummy_is_read = dummy_is_read
        self.rows: torch.Tensor
        """The KV as bytes, (envelopes, bytes of one); only held memory may be touched. Set by the pool."""
        self.moved: Callable[[Indices, Indices], None] = _nothing_else
        """Function of the old and the new numbers of envelopes that were moved, which corrects the allocator's own
        notes of them; `compaction` corrects the prefix tree and the table of requests' slots. Set by the allocator."""
        self.page_size = page_size
        self.ids = ids or HostIds()
        self.envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=memory.extent_bytes, count=count)
        self.has_dummy = False
        self._clock = clock
        self._no_wait_before = 0.0
        """Time (`clock`) before which no growth waits for balloond."""
        self._polite_before = 0.0
        """Time (`clock`) before which growth does not wait for balloond where own prefixes could be evicted instead."""
        self._polite_s = _RETRY_S
        """Seconds from the last refusal to `_polite_before`."""
        self._emptied: dict[int, float] = {}
        """Time (`clock`) since when each held extent has been empty, as far as known."""
        self._arriving = 0
        """Number of envelopes whose numbers are arriving: they are neither used nor available."""
        self._unused = RollingLeast(_SPARE_S, clock())
        """Least number of envelopes that were available of late."""

    def __repr__(self) -> str:
        return f"ElasticKv({self.envelopes!r})"

    # --- sizes

    @property
    def available(self) -> int:
        """Tokens that can be placed now."""
        return self.envelopes.available * self.page_size

    @property
    def arriving(self) -> int:
        """Tokens for which there will be a place once the numbers that are arriving are here."""
        return self._arriving * self.page_size

    @property
    def used(self) -> int:
        """Tokens of requests and of cached prefixes that have a place."""
        return (self.envelopes.live - self.has_dummy - self._arriving) * self.page_size

    @property
    def used_lately(self) -> int:
        """Tokens for which there is room now, beyond what was free throughout the last second or two (`look`). Room
        that has come meanwhile counts too."""
        return max(0, self.envelopes.available - self._unused.least) * self.page_size

    @property
    def in_a_row(self) -> int:
        """Tokens for which as many extents as are held would have room if they lay in a row from the lowest address on,
        without anything in them."""
        nbytes = self.envelopes.held * self.memory.extent_bytes
        return (nbytes // self.envelopes.envelope_bytes - 1) * self.page_size

    @property
    def unbacked(self) -> int:
        """Tokens for which SGLang's pool has slots without memory. SGLang checks that used and free tokens fill a pool
        of fixed size; with these added they do."""
        return (self.envelopes.total - 1) * self.page_size - self.used - self.available

    @property
    def least_extents(self) -> int:
        """Number of extents that the live envelopes would take if they lay in a row."""
        return self._extents_in_a_row(self.envelopes.live)

    def _extents_in_a_row(self, envelopes: int) -> int:
        """Number of extents that so many envelopes take at the least."""
        return -(-envelopes * self.envelopes.envelope_bytes // self.memory.extent_bytes)

    def beyond(self, extents: int) -> int:
        """Tokens that have a place now and would find none once `extents` of the held extents have left."""
        nbytes = max(0, self.envelopes.held - extents) * self.memory.extent_bytes
        return max(0, self.envelopes.live - nbytes // self.envelopes.envelope_bytes) * self.page_size

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the KV of `tokens`."""
        return tokens * self.envelopes.envelope_bytes // self.page_size

    def units(self) -> Indices:
        """The unit of each extent, by the number of the unit's first extent; (extents,). A unit is the extents that
        were mapped as one, several where much was requested at once: they leave together or not at all. The answer is a
        snapshot, and right for held extents only."""
        mapped, count = self.memory.extents, self.envelopes.n_extents
        return np.append(mapped, np.arange(len(mapped), count))[:count]

    def look(self) -> None:
        """Notes how much room there is; called between two steps."""
        self._unused.see(self.envelopes.available, self._clock())

    # --- freeing

    def free(self, envelopes: torch.Tensor) -> None:
        """Frees envelopes by their numbers on the device, in any order, repeats allowed. The envelopes are available
        once the numbers have arrived (`poll`, `settle`)."""
        expected = len(envelopes)
        self._arriving += expected

        def arrived(numbers: Indices) -> None:
            self._arriving -= expected
            self.envelopes.give(numbers)

        self.ids.fetch(envelopes, arrived)

    def poll(self, most: int | None = None) -> None:
        """Makes envelopes available whose numbers have arrived; never waits. `most`: number of copies since the start,
        of which later ones are left for the next call."""
        self.ids.poll(most)

    def settle(self) -> None:
        """Waits until no numbers are arriving. The device's queue may be a forward pass long."""
        self.ids.settle()

    # --- growing

    def grow(self, tokens: int, wait_s: float, instead: int = 0) -> bool:
        """Makes room for at least `tokens` more than are available; False if less memory came, which is kept. Waits for
        balloond at most `wait_s` seconds, and not at all shortly after balloond had nothing. `instead`: cached tokens
        that could be evicted for these; balloond takes memory of other leases only for what exceeds them, or where the
        others' prefixes are older."""
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

    def grow_politely(self, tokens: int, wait_s: float, instead: int) -> bool:
        """Makes room as `grow` does, for a caller that evicts `instead` tokens if too little comes. After each refusal
        that was waited for, balloond is not waited for during a time that doubles. On one device it is asked at
        most every 0.1 s in that time (`ElasticRange.acquire`), on several each time."""
        waits = self.may_grow_politely()
        enough = self.grow(tokens, wait_s if waits else 0.0, instead)
        if waits and enough:
            self._polite_s = _RETRY_S
        elif waits and wait_s > 0 and self.memory.refused:
            self._polite_s = min(_MOST_POLITE_S, 2 * self._polite_s)
            self._polite_before = self._clock() + self._polite_s
        return enough

    def regrow(self, tokens: int, wait_s: float) -> bool:
        """Makes room for `tokens` that `grow` got no memory for, once other kinds of KV have given up extents for them:
        waits for balloond again."""
        self._no_wait_before = 0.0
        return self.grow(tokens, wait_s)

    def may_grow(self) -> bool:
        """Whether waiting for balloond is worth while: the limit allows more, and balloond has not just had nothing."""
        return self._clock() >= self._no_wait_before and self.memory.headroom() > 0

    def may_grow_politely(self) -> bool:
        """Whether waiting for balloond is worth while where own prefixes could be evicted instead."""
        return self.may_grow() and self._clock() >= self._polite_before

    def may_wait_again(self) -> None:
        """Lets the next growth wait for balloond again: memory may have come."""
        self._no_wait_before = self._polite_before = 0.0
        self._polite_s = _RETRY_S

    def _hold(self, extents: list[int]) -> None:
        """Takes in extents that the range has handed over, which count as empty since now."""
        self.envelopes.hold(extents)
        now = self._clock()
        for extent in extents:
            self._emptied[extent] = now

    def hold_tied(self) -> None:
        """Takes the rest of the units of held extents out of the range's reserve: a unit leaves only as a whole, so all
        of it has to be accounted for here."""
        self._hold(self.memory.take_tied())

    def hold_dummy(self, wait_s: float) -> None:
        """Maps the dummy envelope, waiting at most `wait_s` seconds, and makes it zero if it is read. Raises
        NoMemory."""
        if self.has_dummy:
            return
        wanted = set(self.envelopes.extents_of(DUMMY))
        deadline = self._clock() + wait_s
        # The driver chooses the addresses, the lowest first. Other extents that come are kept, and are empty.
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
        if self._dummy_is_read:
            self.rows[DUMMY].zero_()

    # --- giving back

    def give_up_empties(self, older_than_s: float = 0.0) -> int:
        """Returns extents to the driver that have been empty for `older_than_s` seconds; returns how many. Empty
        extents of a unit that is in use are kept: the next request has room in them, or prefixes that are moved
        together."""
        empties = self._empties()
        now = self._clock()
        for extent in empties:
            self._emptied.setdefault(extent, now)
        if older_than_s > 0:
            still = set(empties)
            self._emptied = {extent: since for extent, since in self._emptied.items() if extent in still}
            empties = [extent for extent in empties if now - self._emptied[extent] >= older_than_s]
        self._give_up(empties)
        return len(empties)

    def _give_up(self, empties: list[int]) -> None:
        """Returns these empty extents to the driver."""
        if empties:
            before = self.envelopes.available
            self.envelopes.give_up(empties)
            self._unused.lower(before - self.envelopes.available)
            self.memory.release(empties)
            for extent in empties:
                self._emptied.pop(extent, None)

    def give_up_spare(self, tokens: int) -> int:
        """Returns empty extents to the driver, those with the highest addresses first, as long as there is room for
        `tokens` without them; returns how many."""
        kept = min(self.envelopes.available, -(-tokens // self.page_size))
        if self.envelopes.held <= self._extents_in_a_row(self.envelopes.live + kept):
            return 0
        units = self.units()
        by_unit: dict[int, list[int]] = {}
        for extent in self._empties():
            by_unit.setdefault(int(units[extent]), []).append(extent)
        given_up = 0
        for _, extents in sorted(by_unit.items(), reverse=True):
            if self.available - self.envelopes.available_on(extents) * self.page_size < tokens:
                break
            self._give_up(extents)
            given_up += len(extents)
        return given_up

    def leaving(self) -> int:
        """Number of extents that `give_up_empties` would return."""
        return len(self._empties())

    def _empties(self) -> list[int]:
        """Held extents of units in which nothing is live."""
        if self.envelopes.held <= self.least_extents:
            return []
        empties = np.array(self.envelopes.empties(), dtype=np.int64)
        if not len(empties):
            return []
        units = self.units()
        in_use = np.zeros(len(units), dtype=bool)
        in_use[units[np.flatnonzero(self.envelopes.live_by_extent())]] = True
        leaving: list[int] = empties[~in_use[units[empties]]].tolist()
        return leaving

    def give_up_everything(self) -> None:
        """Returns all memory, for hibernation: only the dummy may be live. Afterwards not one extent is held."""
        self.settle()
        if self.has_dummy:
            self.envelopes.give(self.envelopes.all_live())
            self.has_dummy = False
        self.give_up_empties()

    def free_all(self) -> None:
        """Frees every envelope but the dummy."""
        self.settle()
        live = self.envelopes.all_live()
        self.envelopes.give(live[live != DUMMY] if self.has_dummy else live)


def _nothing_else(_sources: Indices, _destinations: Indices) -> None:
    """Corrects nothing, for KV whose places the allocator does not know."""
