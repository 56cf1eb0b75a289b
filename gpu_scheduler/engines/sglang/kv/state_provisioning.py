"""Finds memory for the states of requests, in models with layers of linear attention or Mamba layers, and says where a
prompt is cut so that a state within it is cached. Works on SGLang's objects, imports nothing of SGLang.

Memory for a state is looked for in this order: a free slot; memory that comes; cached states; cached tokens. The number
of a slot that is freed arrives from the device behind all work that is queued there, so that states are evicted a step
before their slots are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import Any

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.engine_kv import EngineKv
from gpu_scheduler.engines.sglang.kv.provisioning import AHEAD_DIVISOR, LATELY_S, KvProvisioning, needs_of, outputs

_LEAST_SHARED = 256
"""Least tokens that a prompt shares with a cached prefix, beyond the state that it goes on from, for which the state
behind them is cached. That costs one more prefill step, which takes a host as long as hundreds of tokens take a
device."""
_FEW_STATES = 8
"""Least number of cached states of which one may leave for the state of a shared beginning. Where fewer have room, that
state would leave before another request comes for it."""


class StateProvisioning:
    """Finds memory for the states of one model. Waits are in seconds."""

    def __init__(
        self,
        kv: EngineKv,
        states: ElasticKv,
        tokens: KvProvisioning,
        soft_wait_s: float,
        hard_wait_s: float,
        empty: Callable[[int, int], None],
        evict: Callable[[int], None],
    ) -> None:
        """`states`: the part of `kv` that has them; `tokens`: provisioning of the same model's tokens. `empty(kind,
        extents)` evicts prefixes so that `extents` of one kind empty, and gives these up. `evict(count)` evicts cached
        states, the ones used longest ago first."""
        self._kv = kv
        self._states = states
        self._tokens = tokens
        self._soft_wait_s = soft_wait_s
        self._hard_wait_s = hard_wait_s
        self._empty = empty
        self._evict = evict
        self._taken = 0
        """Number of states that the last prefill step with new requests took."""
        self._taken_at = -inf
        """Time (monotonic seconds) of the last prefill step with new requests."""
        self._need = 0
        """Free states that the next prefill step should find; 0 if so many are free, or none is expected to come."""
        self._evicted_at = -inf
        """Time (monotonic seconds) of the last eviction ahead of need."""

    @property
    def available(self) -> int:
        """Number of states that can be placed now."""
        return self._states.available

    def note_taken(self, count: int, now: float) -> None:
        """Notes that a prefill step took `count` states, at `now` monotonic seconds. If the step before it was less
        than a second ago, another one is expected, which takes as many as the smaller of the two."""
        if count <= 0:  # slots may have arrived meanwhile
            return
        follows = now - self._taken_at < LATELY_S
        self._need = min(count, self._taken) if follows else 0
        self._taken, self._taken_at = count, now

    def ahead(self, tree: Any, now: float) -> None:
        """Evicts cached states until the next prefill step would find those that it needs, as far as memory cannot grow
        for them."""
        states = self._states
        if not self._need:
            return
        there = states.available + states.arriving
        lacking = self._need - there - _to_come(states)
        if lacking <= 0 or now - self._taken_at >= LATELY_S:
            self._need = 0
            return
        cached = tree.mamba_evictable_size()
        if cached:
            self._evict(min(lacking, cached, max(1, cached // AHEAD_DIVISOR)))
            if states.available + states.arriving > there:
                self._evicted_at = now

    def evicted_lately(self, now: float) -> bool:
        """Whether states were evicted ahead of need within the last second: empty slots are then for the engine's own
        next steps."""
        return now - self._evicted_at < LATELY_S

    def provide(
        self,
        tree: Any,
        waiting: Sequence[Any],
        running: Sequence[Any],
        most: int,
        estimate_cap: int,
        ratio: float,
    ) -> int:
        """Makes room for the states of `waiting` requests, which SGLang could admit all if there were memory, and
        returns how many more states there is room for: SGLang may admit as many requests. Call it before SGLang looks
        at any request, since cached states leave here. `running` requests are expected to need `ratio` of their outputs
        yet, each at most `estimate_cap` tokens.

        The first request gets a state from any memory that no request uses, and then room for its tokens. Requests
        behind the first, until the prompts together have `most` tokens, get states from memory that comes. Where none
        can come, they get those of cached prefixes that no waiting request goes on from, if there is room for their
        tokens: a step with several prompts takes hardly longer than one."""
        kv, states = self._kv, self._states
        if not waiting:
            kv.promised = states.available
            return states.available
        found = self._look_up(tree, waiting, most)
        if not self._provide_state(tree):
            self._tokens.refused = True
            return 0
        # Tokens of the first request may take the memory of all free slots but its own.
        kv.promised = 1
        self._tokens.provide_tokens(tree, waiting[0], estimate_cap)
        if (more := len(found) - states.available - states.arriving) > 0:
            states.grow_politely(more, 0.0, tree.mamba_evictable_size())
        if len(found) > states.available + states.arriving:
            self._evict_for(tree, found, ratio * outputs(running, estimate_cap), estimate_cap)
        if states.available < len(found) and states.arriving:
            kv.settle()
        kv.promised = states.available
        return states.available

    def _look_up(self, tree: Any, waiting: Sequence[Any], most: int) -> list[Any]:
        """Has SGLang look up what is cached of the `waiting` requests that may begin in one step, and returns them:
        those that waited longest, until there are `most` tokens to compute, and no more than could have states. What
        they go on from counts as used now, and of that what the first one goes on from leaves last."""
        states = self._states
        there = states.available + states.arriving + tree.mamba_evictable_size() + _to_come(states)
        found: list[Any] = []
        tokens = 0
        for request in waiting[: max(1, there)]:
            if tokens >= most:
                break
            tree.look_up(request)
            found.append(request)
            tokens += needs_of(request, 0)[0]
        if len(found) > 1:
            for request in reversed(found):
                if request.prefix_len:
                    tree.look_up(request)
        return found

    def _evict_for(self, tree: Any, found: Sequence[Any], spoken_for: float, estimate_cap: int) -> None:
        """Evicts cached states for the requests of one step, as far as memory cannot come and there is room for the
        requests' tokens: not the states that they go on from, and not for tokens that running requests are expected to
        need (`spoken_for`)."""
        kv, states = self._kv, self._states
        kept = {request.last_node: request.prefix_len for request in found if request.prefix_len}
        room = min(map(sum, zip(kv.available, kv.evictable(tree), strict=True))) - spoken_for - sum(kept.values())
        needs = accumulate(sum(needs_of(request, estimate_cap)) + 1 for request in found)
        fitting = sum(tokens <= room for tokens in needs)
        lacking = fitting - states.available - states.arriving - _to_come(states)
        if (more := min(lacking, tree.mamba_evictable_size() - len(kept))) > 0:
            self._evict(more)

    def _provide_state(self, tree: Any) -> bool:
        """Makes room for one state; False if it cannot. The room is the first that is found of a free slot, memory that
        comes, memory of cached states, and memory of cached tokens."""
        kv, states = self._kv, self._states
        kv.promised = 0
        if not states.available and states.arriving:
            kv.settle()
        if not states.available:
            cached = tree.mamba_evictable_size()
            states.grow_politely(1, self._soft_wait_s if cached else self._hard_wait_s, cached)
        extents = states.envelopes.needed_for(1)
        if not states.available and kv.give_states(extents):
            states.regrow(1, self._hard_wait_s)
        if not states.available:
            for kind in range(len(kv.kinds)):
                self._empty(kind, extents)
            states.regrow(1, self._hard_wait_s)
        return states.available > 0

    def until_shared(self, tree: Any, request: Any, most: int, *, begins: bool) -> int:
        """Number of tokens that the next prefill step computes, of its first prompt alone, so that the state behind
        them can be cached; 0: the step is not cut. They end where the prompt parts from a cached prefix that has no
        state there, and there is a free slot for a copy of the state, beside the request's own. `most`: tokens that the
        step could compute. `begins`: False for a prompt that is computed in part.

        Requests that share a beginning, such as a system prompt, go on from that state. The first of them that comes
        once another has ended makes it."""
        kv, states = self._kv, self._states
        slots = 2 if begins else 1
        if not (tokens := _until_parting(request, most)):
            return 0
        if states.available < slots and states.arriving:
            kv.settle()
        if states.available < slots:
            states.grow_politely(slots - states.available, self._soft_wait_s, tree.mamba_evictable_size())
        if states.available < slots and tree.mamba_evictable_size() >= _FEW_STATES:
            self._evict(1)
            kv.settle()
        if begins:  # what has left since the last look may be the prefix that the prompt shares
            tree.look_up(request)
            tokens = _until_parting(request, most)
        kv.promised = states.available
        return tokens if states.available >= slots else 0


def _until_parting(request: Any, most: int) -> int:
    """Number of tokens that a prompt has yet to compute up to where it parts from a cached prefix that has no state
    there; 0 if they are more than `most`, or too few are shared."""
    parting = request.mamba_branching_seqlen or 0
    tokens: int = parting - request.prefix_len
    return tokens if parting - request.kv.cache_protected_len >= _LEAST_SHARED and 0 < tokens <= most else 0


def _to_come(states: ElasticKv) -> int:
    """Number of states for which memory may still come."""
    return states.memory.headroom() // states.envelopes.needed_for(1) if states.may_grow_politely() else 0
