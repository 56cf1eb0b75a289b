"""Finds memory for KV before SGLang allocates it, by growth and by evicting cached prefixes. Works on SGLang's objects,
imports nothing of SGLang.

Memory is looked for in this order: mapped and free; the driver's reserve; balloond, for a short time; cached prefixes.
If all that is not enough, SGLang retracts running requests.

On a GPU an evicted place can be used once its number has arrived from the device, and a step that waits for that leaves
the device idle. If memory cannot grow, prefixes are therefore evicted a step or two before their place is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Any

from gpu_scheduler.engines.sglang.kv.engine_kv import EVERY, EngineKv, Evict, Tokens

AHEAD_DIVISOR = 32
"""Divisor of the cached tokens, and of the cached states: most of them that are evicted ahead of need at a time."""
_NEED_DECAY = 0.9
"""Factor by which the largest need decays with each step."""
LATELY_S = 1.0
"""Seconds for which a step, or an eviction ahead of need, counts as recent."""
_LOOKED_AT = 8
"""Most waiting requests for which memory is requested at a time: each costs a walk through the prefix cache."""
_IDLE_WAIT_S = 0.5
"""Seconds that an idle engine waits for memory for KV that is transferred here. The request still runs at its old
place; computing the KV again would take as long, and the client would wait for that."""
_START_OVER_S = 1.0
"""Seconds to wait for unmapping; a GiB takes some tens of milliseconds."""


class KvProvisioning:
    """Finds memory for one model. `evict(tree, tokens)` is SGLang's own eviction, oldest leaf first; waits are in
    seconds. Numbers of tokens that are not named otherwise are those of each kind of KV."""

    def __init__(
        self,
        kv: EngineKv,
        soft_wait_s: float,
        hard_wait_s: float,
        evict: Evict,
        empty: Callable[[int, int], None] | None = None,
    ) -> None:
        """`empty(kind, extents)` evicts prefixes so that `extents` of one kind empty, and gives these up, which makes
        room for another kind; only models with several kinds need it."""
        self._kv = kv
        self._soft_wait_s = soft_wait_s
        self._hard_wait_s = hard_wait_s
        self._evict = evict
        self._empty = empty
        self.refused = False
        """True if a waiting request has found no memory since this was last cleared."""
        self._wanted: Tokens = kv.of_each(0)
        """Tokens that the last waiting request without memory would need of each kind if nothing of it were cached."""
        self._need = 0.0
        """Tokens that the largest of the last steps allocated, decaying with each step."""
        self._evicted_at = -inf
        self.asked = False
        """True if memory was requested for the next prefill step, for as many of its prompts as had come."""

    def ahead(self, tree: Any, now: float) -> None:
        """Evicts for the next steps where memory cannot grow; called between two steps, never waits. `now`: monotonic
        seconds."""
        kv = self._kv
        there = [here + arriving for here, arriving in zip(kv.available, kv.arriving, strict=True)]
        needs = kv.of_each(ceil(self._need))
        if min(there) >= self._need or kv.may_grow(needs, politely=True):
            return
        some = tuple(
            max(0, min(int(2 * self._need) - here, cached // AHEAD_DIVISOR)) if here < self._need else 0
            for here, cached in zip(there, kv.evictable(tree), strict=True)
        )
        if any(some):
            self._evict(tree, some)
            self._evicted_at = now

    def evicted_lately(self, now: float) -> bool:
        """Whether prefixes were evicted ahead of need within the last second: empty places are then for the engine's
        own next steps."""
        return now - self._evicted_at < LATELY_S

    def before_allocation(self, tree: Any, tokens: int) -> None:
        """Makes room for `tokens` slots that SGLang is about to take, for a decode step or for a prefill that was
        admitted."""
        kv = self._kv
        self._need = max(float(tokens), _NEED_DECAY * self._need)
        needs = kv.of_each(tokens)
        if not any(kv.short(needs)):
            return
        # Slots freed a moment ago may be all that is missing.
        kv.settle()
        if not any(short := kv.short(needs)):
            return
        if not self._grow(tree, needs, self._soft_wait_s if self._covers(tree, short) else self._hard_wait_s):
            self._evict_for(tree, needs)

    def _covers(self, tree: Any, tokens: Tokens) -> bool:
        """Whether evicting would free at least `tokens` of each kind."""
        return all(cached >= lacking for cached, lacking in zip(self._kv.evictable(tree), tokens, strict=True))

    def _grow(self, tree: Any, tokens: Tokens, wait_s: float, locked: int = 0, *, states_leave: bool = True) -> bool:
        """Makes room until `tokens` are available; False if it cannot. Even where enough tokens are cached to be
        evicted, memory is better, if it comes soon. `locked`: cached tokens that are about to be used, so that they
        cannot be evicted. `states_leave`: whether cached states may leave for the tokens; they may not while SGLang
        looks at a request, whose own prefix is not locked yet."""
        instead = [max(0, cached - locked) for cached in self._kv.evictable(tree)]
        return self._kv.grow(tokens, wait_s, instead, politely=True, states_leave=states_leave)

    def _evict_for(self, tree: Any, tokens: Tokens) -> None:
        """Evicts prefixes until `tokens` are available, as far as so much is cached: first tokens of the kind that
        lacks room; if these are too few, extents of the other kinds, which are given up for it."""
        kv = self._kv
        cached = kv.evictable(tree)
        some = tuple(lacking if there else 0 for lacking, there in zip(kv.short(tokens), cached, strict=True))
        if any(some):
            self._evict(tree, some)
            kv.settle()
        for number, lacking in enumerate(kv.short(tokens)):
            if lacking and self._empty is not None and len(kv.kinds) > 1:
                extents = kv.extents_for(number, lacking)
                for other in (each for each in range(len(kv.kinds)) if each != number):
                    self._empty(other, extents)
                kv.grow(tokens, self._soft_wait_s, kv.of_each(0))

    def provide_beside(self, tree: Any, tokens: int, to_come: int, *, idle: bool) -> int:
        """Makes room for `tokens` whose KV is transferred here, beside what the next steps need, and returns the number
        of them for which there is room. Memory grows also for the `to_come` output tokens of the requests, since
        waiting for that later would stall their clients; prefixes are evicted for `tokens` alone. `idle`: no step waits
        meanwhile."""
        kv = self._kv
        kept = int(2 * self._need)
        self._grow(tree, kv.of_each(tokens + kept + to_come), _IDLE_WAIT_S if idle else self._hard_wait_s)
        self._evict_for(tree, kv.of_each(tokens + kept))
        return max(0, min(tokens, *(there - kept for there in kv.available)))

    def evict_beyond(self, tree: Any, extents: int) -> None:
        """Evicts cached tokens so that the others have a place once `extents` of the held extents have left."""
        found = zip(self._kv.beyond(extents), self._kv.evictable(tree), strict=True)
        beyond = tuple(min(lost, cached) for lost, cached in found)
        if any(beyond):
            self._evict(tree, beyond)
            self._kv.settle()

    def start_over(self, tree: Any) -> bool:
        """Evicts all that is cached and returns the empty extents, if the last refused request would fit were all held
        memory in one row. False, with nothing changed, if that is not why it was refused."""
        kv, wanted, cached = self._kv, self._wanted, self._kv.evictable(tree)
        there = zip(kv.available, cached, wanted, strict=True)
        fits = all(free + evictable >= tokens for free, evictable, tokens in there)
        if fits or any(tokens > kind.in_a_row for tokens, kind in zip(wanted, kv.kinds, strict=True)):
            return False
        self._evict(tree, cached)
        kv.start_over(_START_OVER_S)
        return True

    def provide_tokens(self, tree: Any, request: Any, estimate_cap: int) -> None:
        """Makes room for as many tokens of a request as SGLang could not get by evicting cached tokens: memory grows,
        or cached states leave for them."""
        kv = self._kv
        output = min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), estimate_cap)
        whole = len(request.full_untruncated_fill_ids) + output + kv.page_size + 1
        cached, before = kv.evictable(tree), None
        if any(kv.short([whole - there for there in cached])):
            kv.settle()  # tokens freed a moment ago may be all that is missing
        # A cached state that leaves takes its tokens along, so that fewer are left to be evicted: look again then.
        while cached != before and any(kv.short(lacking := tuple(max(0, whole - there) for there in cached))):
            self._grow(tree, lacking, self._soft_wait_s)
            cached, before = kv.evictable(tree), cached

    def provide_chunk(self, tree: Any, tokens: int) -> bool:
        """Grows for the `tokens` of the next chunk of a prompt; False if there is no place for them even after evicting
        all that could be evicted."""
        needs = self._kv.of_each(tokens)
        if self._grow(tree, needs, self._soft_wait_s):
            return True
        can_be_evicted = self._covers(tree, self._kv.short(needs))
        self.refused |= not can_be_evicted
        return can_be_evicted

    def grow_for(self, adder: Any, request: Any, estimate_cap: int) -> bool:
        """Grows by what a waiting request lacks, after SGLang's prefill adder refused it for lack of tokens. True if
        SGLang should try again.

        The numbers are the adder's own: the prompt without its cached part, a forecast of the output, and what it keeps
        for running requests.
        """
        kv, chunk = self._kv, self._chunk(adder)
        prompt, forecast = needs_of(request, estimate_cap)
        needs = self._of_request(prompt, forecast, adder.page_size, chunk)
        left = [adder.rem_total_tokens, *([adder.memory_budget.remaining_swa] if len(kv.kinds) > 1 else [])]
        # Locking the request's own prefix takes that away from what can be evicted.
        locked = self._of_request(request.prefix_len, 0, 0, 0)
        found = zip(needs, left, locked, strict=True)
        lacking = [int(tokens - there) + 1 + held for tokens, there, held in found]
        if max(lacking) <= 0:
            lacking = [1] * len(lacking)
        wanted = tuple(max(0, here + more) for here, more in zip(kv.available, lacking, strict=True))
        # Growth does not wait: other requests run meanwhile, and memory that comes later wakes the loop. Nothing could
        # be evicted instead, since the adder has counted on all that is cached.
        grown = kv.grow(wanted, 0.0, kv.of_each(0), states_leave=False)
        if not grown:
            self.refused = True
            whole = len(request.full_untruncated_fill_ids)
            self._wanted = self._of_request(whole, forecast, adder.page_size + 1, chunk)
        return grown

    def prefer_growth(self, adder: Any, request: Any, estimate_cap: int) -> None:
        """Grows for a waiting request before SGLang looks at it: SGLang would evict cached prefixes for it, and memory
        is better if it comes soon."""
        prompt, forecast = needs_of(request, estimate_cap)
        budget = adder.memory_budget
        spoken_for = [budget.total_offset, *([budget.swa_offset] if len(self._kv.kinds) > 1 else [])]
        needs = self._of_request(prompt, forecast, adder.page_size, self._chunk(adder))
        wanted = tuple(int(tokens + others) + 1 for tokens, others in zip(needs, spoken_for, strict=True))
        self._grow(adder.tree_cache, wanted, self._soft_wait_s, request.prefix_len, states_leave=False)

    def _chunk(self, adder: Any) -> int:
        """Most prompt tokens of the step that the adder is forming; 0: any number, or a model for which it does not
        matter."""
        return int(adder.rem_chunk_tokens or 0) if len(self._kv.kinds) > 1 else 0

    def _of_request(self, prompt: int, output: int, more: int, chunk: int) -> Tokens:
        """Most tokens that a request has at once: all of them, and those in its window as SGLang counts them. `prompt`
        tokens are computed in steps of `chunk` (0: in one), `output` tokens one by one. `more`: tokens on top."""
        every = prompt + output + more
        if len(self._kv.kinds) == 1:
            return (every,)
        window = self._kv.window
        together = min(prompt, chunk) if chunk else prompt
        return every, max(0, together - window) + min(prompt + output, window) + more

    def ask_ahead(
        self,
        tree: Any,
        running: Sequence[Any],
        chunked: Any,
        waiting: Sequence[Any],
        estimate_cap: int,
        most: int,
        ratio: float,
    ) -> None:
        """Requests the memory of the next prefill step ahead: for the rest of the prompt that is half computed
        (`chunked`), and for as many `waiting` requests as it takes for the prompts to have `most` tokens. This memory
        comes on top of the one that running requests are expected to need yet, which is `ratio` of their outputs (each
        at most `estimate_cap` tokens). The first call waits a moment. A call behind one that has asked does not wait: a
        step was just formed, and the memory comes while that is launched."""
        kv = self._kv
        asked_before, self.asked = self.asked, bool(waiting) or chunked is not None
        if not self.asked or not any(kind.may_grow() for kind in kv.kinds):
            return
        prompts = cached = 0
        needs = []
        if chunked is not None:
            prompts = min(most, len(chunked.full_untruncated_fill_ids) - chunked.extend_end)
            needs.append(kv.of_each(prompts))
        for request in waiting[:_LOOKED_AT]:
            if prompts >= most:
                break
            # This call counts the request's cached tokens, and copies no state; SGLang makes it again at the request's
            # turn.
            request.init_next_round_input(tree, cow_mamba=False)
            prompt, forecast = needs_of(request, estimate_cap)
            prompts += prompt
            cached += request.prefix_len
            needs.append(self._of_request(prompt, forecast, kv.page_size, most))
        spoken_for = ratio * outputs(running, estimate_cap)
        wanted = [sum(tokens) for tokens in zip(kv.of_each(0), *needs, strict=True)]
        # Running requests need no more in their windows: a token leaves for each that comes.
        wanted[EVERY] += spoken_for
        self._grow(
            tree, tuple(int(tokens) + 1 for tokens in wanted), 0.0 if asked_before else self._soft_wait_s, cached
        )


def outputs(running: Sequence[Any], estimate_cap: int) -> int:
    """Most tokens that running requests have yet to generate, at most `estimate_cap` each."""
    return sum(needs_of(request, estimate_cap)[1] for request in running)


def needs_of(request: Any, estimate_cap: int) -> tuple[int, int]:
    """(prompt, output): tokens of the prompt without its cached part, and a forecast of the output, as SGLang makes
    it."""
    forecast = min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), estimate_cap)
    return len(request.full_untruncated_fill_ids) - request.prefix_len, forecast
