"""Memory before it is needed: what grows, and what gives way, when SGLang is about to allocate. Works on SGLang's
objects, imports nothing of SGLang.

Order in which memory is found: mapped and free; the driver's reserve; balloond, for a short time; cached prefixes;
running requests.

On a GPU what is evicted can be used once its numbers have come from the device, and a step that waits for them leaves
the device idle. So where memory cannot grow, prefixes are evicted a step or two before their place is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv

_AHEAD = 32
"""Which part of what is cached may be evicted ahead of need."""
_FORGETS = 0.9
"""What is left of the largest need after another step."""
_LATELY_S = 1.0
_LOOKED_AT = 8
"""Waiting requests that memory is asked for at a time, at most: each costs a walk through the prefix cache."""
_IDLE_WAIT_S = 0.5
"""For what comes from elsewhere, where it still runs: to compute it again takes as long, and then its client waits."""
_START_OVER_S = 1.0
"""For unmapping: a GiB takes some tens of milliseconds."""


class Admission:
    """Decides for one model. `evict(tree, tokens)` is SGLang's own eviction, oldest leaf first."""

    def __init__(
        self, kv: ElasticKv, soft_wait_s: float, hard_wait_s: float, evict: Callable[[Any, int], None]
    ) -> None:
        self._kv = kv
        self._soft_wait_s = soft_wait_s
        self._hard_wait_s = hard_wait_s
        self._evict = evict
        self.refused = False
        """A waiting request found no memory since this was last cleared."""
        self._wanted = 0
        """Tokens that it, the last one, would need with nothing of it cached."""
        self._need = 0.0
        """Tokens of the largest of the last steps."""
        self._evicted_at = -inf
        self.asked = False
        """For the prompts of the next prefill step, as far as they were there."""

    def ahead(self, tree: Any, now: float) -> None:
        """Between two steps: evicts for the next ones where memory cannot grow. Waits for nothing."""
        kv = self._kv
        there = kv.available + kv.coming
        if there >= self._need or kv.may_grow_politely():
            return
        if (some := min(int(2 * self._need) - there, tree.evictable_size() // _AHEAD)) > 0:
            self._evict(tree, some)
            self._evicted_at = now

    def evicts(self, now: float) -> bool:
        """Whether it has evicted for its own steps lately: what is empty now is for the next ones."""
        return now - self._evicted_at < _LATELY_S

    def before_allocation(self, tree: Any, tokens: int) -> None:
        """SGLang is about to take `tokens` slots, for a decode step or for a prefill that was admitted."""
        self._need = max(float(tokens), _FORGETS * self._need)
        short = tokens - self._kv.available
        if short <= 0:
            return
        # What was freed a moment ago may be all that is missing.
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
        """Makes room for `tokens` more. Where as many are cached here, memory is better if it comes soon. `locked`:
        what is cached and about to be used."""
        instead = max(0, tree.evictable_size() - locked)
        if instead >= tokens:
            return self._kv.grow_or_evict(tokens, wait_s, instead)
        return self._kv.grow(tokens, wait_s, instead)

    def room_beside(self, tree: Any, tokens: int, to_come: int, *, idle: bool) -> int:
        """Of so many tokens that come from elsewhere, those that there is room for beside the next steps: grown for and
        evicted for, once. Grown for is also what the requests that come with them have `to_come` yet: memory that they
        wait for then, their clients wait for. `idle`: no step waits meanwhile."""
        kept = int(2 * self._need)
        if (short := tokens + kept + to_come - self._kv.available) > 0:
            self._grow(tree, short, _IDLE_WAIT_S if idle else self._hard_wait_s)
        if (short := tokens + kept - self._kv.available) > 0 and tree.evictable_size():
            self._evict(tree, short)
            self._kv.settle()
        return max(0, min(tokens, self._kv.available - kept))

    def make_fit(self, tree: Any, extents: int) -> None:
        """So many of the extents that are held have to leave: evicts what will find no place then."""
        if (beyond := min(self._kv.beyond(extents), tree.evictable_size())) > 0:
            self._evict(tree, beyond)
            self._kv.settle()

    def start_over(self, tree: Any) -> bool:
        """What found no room would have it if what is here lay in a row: evicts all that is cached, and gives back what
        is empty then. False if that is not why, and nothing has changed."""
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

    def make_room(self, adder: Any, request: Any, estimate_cap: int) -> bool:
        """SGLang's prefill adder refused a waiting request for want of tokens: grows by what it lacks. True if asking
        again makes sense.

        The numbers are the adder's own: prompt without its cached part, a forecast of the output, and what it
        keeps for those that run.
        """
        prompt, forecast = _needs(request, estimate_cap)
        lacking = int(prompt + forecast + adder.page_size - adder.rem_total_tokens) + 1
        # Locking the request's own prefix takes that away from what can be evicted.
        lacking += len(request.prefix_indices)
        # No waiting: others run meanwhile, and memory that comes later wakes the loop. All that is cached here is
        # counted on already.
        ok = self._kv.grow(max(lacking, 1), 0.0)
        if not ok:
            self.refused = True
            self._wanted = len(request.full_untruncated_fill_ids) + forecast + adder.page_size + 1
        return ok

    def prefer_growth(self, adder: Any, request: Any, estimate_cap: int) -> None:
        """Before a waiting request is looked at: memory is better than evicting what is cached, if it comes at once."""
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
        """Asks for the memory of the next prefill step at once: of so many of the `waiting` that their prompts have
        `most` tokens, and of what is left of the one that is half computed (`chunked`), beside what those that run are
        thought to need yet, `ratio` of their outputs. Behind a step that was just formed nothing is waited for: the
        memory comes while that is launched."""
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
            request.init_next_round_input(tree)  # how much of it is cached; SGLang looks again when its turn comes
            prompt, forecast = _needs(request, estimate_cap)
            prompts += prompt
            cached += len(request.prefix_indices)
            wanted += prompt + forecast + self._kv.page_size
        spoken_for = ratio * sum(_needs(request, estimate_cap)[1] for request in running)
        if (short := int(wanted + spoken_for - self._kv.available) + 1) > 0:
            self._grow(tree, short, 0.0 if before else self._soft_wait_s, cached)


def _needs(request: Any, estimate_cap: int) -> tuple[int, int]:
    """Tokens of a prompt without its cached part, and a forecast of the output, as SGLang makes it."""
    forecast = min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), estimate_cap)
    return len(request.full_untruncated_fill_ids) - len(request.prefix_indices), forecast
