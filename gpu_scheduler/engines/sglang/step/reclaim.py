"""Reclaims KV memory of this engine, for other leases that need it, or because it is over its limit. Prefixes leave
first, then requests, and the rest is moved together where its pages keep extents."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from gpu_scheduler.engines.sglang.base import device
from gpu_scheduler.engines.sglang.kv import prefix_eviction
from gpu_scheduler.engines.sglang.kv.compaction import make_leave
from gpu_scheduler.engines.sglang.kv.elastic_kv import DUMMY
from gpu_scheduler.engines.sglang.kv.engine_kv import EVERY, Tokens
from services.telemetry import log

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.model.loaded_model import LoadedModel

_log = log.get(__name__)
_EMPTIES_LOOK_S = 0.05
"""Seconds between two looks of a running engine for extents that were emptied and have lingered."""
_BUSY_S = 1.0
"""Seconds for which memory over the limit stays because other engines read or write KV here: a copy takes tenths of
that."""
_SCATTERED_SHARE = 0.05
"""Most of the time, as a share, for which running requests stop because other leases need memory that is cached between
their pages."""
_REPORT_SHARE = 0.0025
"""Most of the time, as a share, for walks over the prefix cache that reports need."""


class Reclaim:
    """The loop's side of the engine's memory. Single-threaded."""

    def __init__(self, model: LoadedModel, changed: Callable[[], None]) -> None:
        """`changed` is called where the next statistics should report a change."""
        self._model = model
        self._changed = changed
        self._ranks = model.ranks
        self._report_at = 0.0
        """Monotonic seconds at which the next report is due, while requests run."""
        self._empties_at = 0.0
        self._busy_since: float | None = None
        """Monotonic seconds since when an engine over its limit has waited for transfers of KV; None: it does not."""
        self._scattered_at = 0.0
        """Monotonic seconds from which prefixes between pages of running requests may be given up again."""

    def attend(self, now: float) -> None:
        """Acts on limits, reclaims and growth that have arrived; called between two steps."""
        model = self._model
        memory, kv = model.memory.kv, model.kv
        if memory is None:
            return
        kv.poll(self._ranks.agreed.arrived if self._ranks.size > 1 else None)
        kv.tell_cached(model.tree)
        kv.look()
        if memory.woken:
            model.scheduler.running_batch.batch_is_full = False
            wanted = memory.take_reclaims()
            if not wanted:  # a reclaim is no sign of more memory; a new limit or memory that came late may be
                kv.may_wait_again()
            else:
                kv.settle()
                self._give_scattered(wanted - self._give_up(wanted), now)
                self.report()
                memory.reclaimed()
                self._changed()
        if memory.overage_bytes() > 0:
            kv.settle()
            self._give_up(memory.overage_bytes())
            self.report()
            self._changed()
            return
        # States first: they take tokens of the cache along.
        provisioned = [each for each in (model.state_provisioning, model.provisioning) if each is not None]
        for each in provisioned:
            each.ahead(model.tree, now)
        kept = any(each.evicted_lately(now) for each in provisioned) or model.kv_transfer.expected_s(now) > 0
        prompts = bool(model.scheduler.waiting_queue) or model.scheduler.chunked_req is not None
        if kv.states is not None and not kept and not prompts:
            kv.states.give_up_empties()
        if now >= self._empties_at and not kept and not model.scheduler.is_fully_idle():
            self._empties_at = now + _EMPTIES_LOOK_S
            for kind in kv.kinds:  # states have left above, unless prompts are to have their slots
                kind.give_up_empties(older_than_s=model.options.linger_ms / 1e3)

    def _give_up(self, nbytes: int) -> int:
        """Returns empty extents, and evicts cached states, then prefixes, as far as `nbytes` need it; returns how many
        bytes left. Extents leave all at once: unmapping on the lease's thread meanwhile would slow the walk over the
        tree."""
        model = self._model
        memory, kv = model.memory.kv, model.kv
        assert memory is not None
        kv.hold_tied()
        wanted = -(-nbytes // memory.extent_bytes) - kv.leaving()
        states = 0
        if wanted > 0 and kv.states is not None:
            empty = kv.states.leaving()  # counted above, and leaves with the others
            states = kv.give_states(wanted + empty)
            wanted -= states - empty
        if wanted > 0:
            begun = time.monotonic()
            before = kv.leaving()
            # Prefixes leave as wholes, the oldest first. Only if that is not enough, some lose what is in the window.
            for number, kind in enumerate(kv.kinds):
                if (left := wanted + before - kv.leaving()) > 0:
                    evicted = prefix_eviction.empty_extents(model.tree.of(number), kind, left)
                    model.counters.evicted_tokens += evicted
            model.counters.evicting_s += time.monotonic() - begun
        return (states + kv.give_up_empties()) * memory.extent_bytes

    def _give_scattered(self, nbytes: int, now: float) -> None:
        """Makes `nbytes` more leave when every cached extent also holds pages of running requests: moves live KV
        together, if all of it has a place; where some is lost at the edges of extents, more cached prefixes are
        evicted. Running requests wait for that, so it does not happen all the time."""
        model, kv, tree = self._model, self._model.kv, self._model.tree
        assert model.memory.kv is not None
        extents, lost = nbytes // model.memory.kv.extent_bytes, 0
        if extents <= 0 or now < self._scattered_at or not self._may_move():
            return
        begun = time.monotonic()
        while lost <= extents and kv.leaving() < extents and self._are_cached(kv.beyond(extents + lost)):
            device.wait(model.device)
            kv.settle()
            kv.hold_tied()
            model.provisioning.evict_beyond(tree, extents + lost)
            self._move_together(extents)
            lost = 2 * lost + 1
        kv.give_up_empties()
        spent_s = time.monotonic() - begun
        model.counters.evicting_s += spent_s
        self._scattered_at = now + spent_s / _SCATTERED_SHARE

    def _are_cached(self, tokens: Tokens) -> bool:
        """Whether as many tokens of each kind are cached and unused."""
        cached = self._model.kv.evictable(self._model.tree)
        return all(lost <= there for lost, there in zip(tokens, cached, strict=True))

    def report(self, if_due_at: float = inf) -> None:
        """Reports to the driver what is used, and what is cached since when. `if_due_at`: only if a walk over the
        prefix cache is due by then."""
        if if_due_at < self._report_at:
            return
        model = self._model
        memory, tree = model.memory.kv, model.tree
        if memory is not None:
            begun = time.monotonic()
            used = model.kv.used_bytes - model.kv.cached_bytes(tree)
            memory.usage(used, prefix_eviction.cached_by_age(tree, model.kv, begun))
            self._report_at = begun + (time.monotonic() - begun) / _REPORT_SHARE

    def over_limit(self) -> bool:
        """Whether the engine holds more KV memory than its limit."""
        memory = self._model.memory.kv
        return memory is not None and memory.overage_bytes() > 0

    def shrink(self, retract: Any, *arguments: Any) -> None:
        """Makes memory over the limit leave. `retract(*arguments)` stops one request and returns it, None if there was
        none. Prefixes go first, then requests, as far as there is no place for them; the rest is moved together. How
        much is lost where pages lie over the edges of extents is known only once they are moved: then more goes."""
        model = self._model
        memory, kv, counters = model.memory.kv, model.kv, model.counters
        if memory is None or (at_first := memory.overage_bytes()) <= 0 or self._moves_later():
            return
        begun, before = time.monotonic(), counters.retractions
        lost, exhausted, moves = 0, False, self._may_move()

        def stop_one() -> bool:
            stopped = retract(*arguments)
            kv.settle()
            if stopped is None:
                return False
            if stopped.to_finish is None:  # else it has ended, and will not go on
                model.retracted(stopped, "KV memory over its limit")
            return True

        while (over := memory.overage_bytes()) > 0 and not exhausted:
            device.wait(model.device)  # a step under way cannot be moved
            kv.settle()
            kv.hold_tied()
            kv.give_states(-(-over // memory.extent_bytes))
            if (over := memory.overage_bytes()) <= 0:
                break
            extents = -(-over // memory.extent_bytes)
            model.provisioning.evict_beyond(model.tree, extents + lost)
            if moves:
                while any(kv.beyond(extents + lost)) and not exhausted:
                    exhausted = not stop_one()
                    extents -= kv.give_states(extents)  # its state is cached now
                    model.provisioning.evict_beyond(model.tree, extents + lost)  # its prompt is now cached
                self._move_together(extents)
            else:
                exhausted = not stop_one()
            self._give_up(over)
            if moves and memory.overage_bytes() >= over:
                lost = 2 * lost + 1
        left, retractions = at_first - memory.overage_bytes(), counters.retractions - before
        if left > 0 or retractions:
            ms = round(1e3 * (time.monotonic() - begun), 1)
            _log.info("memory left", bytes=left, retractions=retractions, ms=ms)

    def _moves_later(self) -> bool:
        """Whether reclaiming waits a moment for transfers that rely on where KV lies: without moving, nearly all of it
        would have to leave."""
        if not self._model.kv_transfer.busy:
            self._busy_since = None
            return False
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        return now - self._busy_since < _BUSY_S

    def _may_move(self) -> bool:
        """Whether KV may be moved: no other rank or engine relies on where it lies."""
        return self._ranks.size == 1 and not self._model.kv_transfer.busy

    def _move_together(self, extents: int) -> None:
        """Moves live KV so that `extents` extents can leave. Call it only if `_may_move`, with the device at rest."""
        model, kv = self._model, self._model.kv
        more = extents - kv.leaving()
        if more <= 0:
            return
        fixed = [DUMMY] if kv.has_dummy else []
        for number, (kind, share) in enumerate(zip(kv.kinds, kv.share_of(extents), strict=True)):
            if (some := share - kind.leaving()) > 0:
                requests = model.scheduler if number == EVERY else None
                moved = make_leave(requests, model.tree.of(number), kind, some, fixed)
                model.counters.moved_tokens += moved * kv.page_size
        device.wait(model.device)
