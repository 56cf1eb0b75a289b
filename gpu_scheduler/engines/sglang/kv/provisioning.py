"""Memory before it is needed: growth, and eviction of cached prefixes, when SGLang is about to allocate. Works on
SGLang's objects, imports nothing of SGLang.

Memory is looked for in this order: mapped and free; the driver's reserve; balloond, for a short time; cached prefixes;
running requests.

On a GPU an evicted place can be used once its number has come from the device, and a step that waits for that leaves
the device idle. So where memory cannot grow, prefixes are evicted a step or two before their place is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv

_AHEAD = 32
"""Divisor: at most this fraction of the cached tokens is evicted ahead of need at a time."""
_FORGETS = 0.9
"""Factor by which the largest need decays with each step."""
_LATELY_S = 1.0
"""Seconds for which an eviction ahead of need counts as recent."""
_LOOKED_AT = 8
"""Most waiting requests that memory is requested for at a time: each costs a walk through the prefix cache."""
_IDLE_WAIT_S = 0.5
"""Seconds to wait for memory for KV that is transferred here, where its request still runs at its old place: computing
it again takes as long, and then its client waits."""
_START_OVER_S = 1.0
"""Seconds to wait for unmapping; a GiB takes some tens of milliseconds."""


class KvProvisioning:
    """Finds memory for one model. `evict(tree, tokens)` is SGLang's own eviction, oldest leaf first; waits are in
    seconds."""

    def __init__(
        self, kv: ElasticKv, soft_wait_s: float, hard_wait_s: float, evict: Callable[[Any, int], None]
    ) -> None:
        self._kv = kv
        self._soft_wait_s = soft_wait_s
        self._hard_wait_s = hard_wait_s
        self._evict = evict
        self.refused = False
        """True if a waiting request has found no memory since this was last cleared."""
        self._wanted = 0
        """Tokens that the last such request would need with nothing of it cached."""
        self._need = 0.0
        """Tokens that the largest of the last steps allocated, decaying with each step."""
        self._evicted_at = -inf
        self.asked = False
        """True if memory was requested for the prompts of the next prefill step, as far as they were here."""

    def ahead(self, tree: Any, now: float) -> None:
        """Evicts for the next steps where memory cannot grow; called between two steps, never waits. `now`: monotonic
        seconds."""
        kv = self._kv
        there = kv.available + kv.coming
        if there >= self._need or kv.may_grow_politely():
            return
        if (some := min(int(2 * self._need) - there, tree.evictable_size() // _AHEAD)) > 0:
            self._evict(tree, some)
            self._evicted_at = now

    def evicts(self, now: float) -> bool:
        """Whether it has evicted ahead of need within the last second: empty places are then for its own next steps."""
        return now - self._evicted_at < _LATELY_S

    def before_allocation(self, tree: Any, tokens: int) -> None:
        """Makes room for `tokens` slots that SGLang is about to take, for a decode step or for a prefill that was
        admitted."""
        self._need = max(float(tokens), _FORGETS * self._need)
        short = tokens - self._kv.available
        if short <= 0:
            return
        # Slots freed a moment ago may be all that is missing.
        self._kv.settle()
        if (short := tokens - self._kv.available) <= 0:
            return
        if self._grow(tree, short, self._soft_wait_s if tree.evictable_size() >= short else self._hard_wait_s):
            return
        short = tokens - self._kv.available
        if short > 0 and tree.evictable_size():
            self._evict(tree, short)
            self._kv.settle()

    def _grow(self, tree: Any, tokens: int, wait_s: float, locked: int = 0) -> bool:
        """Makes room for `tokens` more; False if it cannot. Where as many tokens are cached here, memory is better than
        evicting them if it comes soon. `locked`: cached tokens that are about to be used, so that they cannot be
        evicted."""
        instead = max(0, tree.evictable_size() - locked)
        if instead >= tokens:
            return self._kv.grow_or_evict(tokens, wait_s, instead)
        return self._kv.grow(tokens, wait_s, instead)

    def provide_beside(self, tree: Any, tokens: int, to_come: int, *, idle: bool) -> int:
        """Makes room, once, for `tokens` whose KV is transferred here, beside what the next steps need: grows, then
        evicts. Returns the tokens that there is room for. Also reserves the `to_come` output tokens of their requests:
        waiting for that memory later would stall their clients. `idle`: no step waits meanwhile."""
        kept = int(2 * self._need)
        if (short := tokens + kept + to_come - self._kv.available) > 0:
            self._grow(tree, short, _IDLE_WAIT_S if idle else self._hard_wait_s)
        if (short := tokens + kept - self._kv.available) > 0 and tree.evictable_size():
            self._evict(tree, short)
            self._kv.settle()
        return max(0, min(tokens, self._kv.available - kept))

    def make_fit(self, tree: Any, extents: int) -> None:
        """Evicts the cached tokens that will have no place once `extents` of the held extents have left."""
        if (beyond := min(self._kv.beyond(extents), tree.evictable_size())) > 0:
            self._evict(tree, beyond)
            self._kv.settle()

    def start_over(self, tree: Any) -> bool:
        """Starts over when the last refused request would fit if all held memory were in one row: evicts all that is
        cached, and returns the empty extents. False if that is not the reason, and nothing has changed."""
        kv = self._kv
        if not kv.available + tree.evictable_size() < self._wanted <= kv.in_a_row:
            return False
        self._evict(tree, tree.evictable_size())
        kv.start_over(_START_OVER_S)
        return True

    def fits(self, tree: Any, tokens: int) -> bool:
        """Whether `tokens` slots can be had for the next chunk of a prompt, free or by evicting; grows for them."""
        short = tokens - self._kv.available
        if short <= 0 or self._grow(tree, short, self._soft_wait_s):
            return True
        ok: bool = tokens <= self._kv.available + tree.evictable_size()
        self.refused |= not ok
        return ok

    def grow_for(self, adder: Any, request: Any, estimate_cap: int) -> bool:
        """Grows by what a waiting request lacks, after SGLang's prefill adder refused it for lack of tokens. True if
        SGLang should try again.

        The numbers are the adder's own: the prompt without its cached part, a forecast of the output, and what it keeps
        for running requests.
        """
        prompt, forecast = _needs(request, estimate_cap)
        lacking = int(prompt + forecast + adder.page_size - adder.rem_total_tokens) + 1
        # Locking the request's own prefix takes that away from what can be evicted.
        lacking += len(request.prefix_indices)
        # Does not wait: other requests run meanwhile, and memory that comes later wakes the loop. All that is cached
        # here is counted on already.
        ok = self._kv.grow(max(lacking, 1), 0.0)
        if not ok:
            self.refused = True
            self._wanted = len(request.full_untruncated_fill_ids) + forecast + adder.page_size + 1
        return ok

    def prefer_growth(self, adder: Any, request: Any, estimate_cap: int) -> None:
        """Grows for a waiting request before SGLang looks at it: memory is better than evicting cached prefixes, if it
        comes soon."""
        prompt, forecast = _needs(request, estimate_cap)
        spoken_for = adder.rem_total_token_offset
        short = int(prompt + forecast + adder.page_size + spoken_for - self._kv.available) + 1
        if short > 0:
            self._grow(adder.tree_cache, short, self._soft_wait_s, len(request.prefix_indices))

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
        (`chunked`), and for as many `waiting` requests as it takes for the prompts to have `most` tokens. It comes on
        top of what running requests are expected to need yet, which is `ratio` of their outputs (each at most
        `estimate_cap` tokens). Behind a step that was just formed nothing is waited for: the memory comes while that
        step is launched."""
        before, self.asked = self.asked, bool(waiting) or chunked is not None
        if not self.asked or not self._kv.may_grow():
            return
        prompts = cached = 0
        if chunked is not None:
            prompts = min(most, len(chunked.full_untruncated_fill_ids) - chunked.extend_range.end)
        wanted = prompts
        for request in waiting[:_LOOKED_AT]:
            if prompts >= most:
                break
            request.init_next_round_input(tree)  # counts its cached tokens; SGLang does so again at its turn
            prompt, forecast = _needs(request, estimate_cap)
            prompts += prompt
            cached += len(request.prefix_indices)
            wanted += prompt + forecast + self._kv.page_size
        spoken_for = ratio * sum(_needs(request, estimate_cap)[1] for request in running)
        if (short := int(wanted + spoken_for - self._kv.available) + 1) > 0:
            self._grow(tree, short, 0.0 if before else self._soft_wait_s, cached)


def _needs(request: Any, estimate_cap: int) -> tuple[int, int]:
    """(prompt, output): tokens of the prompt without its cached part, and a forecast of the output, as SGLang makes
    it."""
    forecast = min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), estimate_cap)
    return len(request.full_untruncated_fill_ids) - len(request.prefix_indices), forecast
