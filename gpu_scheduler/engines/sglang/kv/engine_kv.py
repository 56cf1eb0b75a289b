"""All KV of one model, in one range under one limit. If the layers of a model keep tokens of different size or for
different times, the KV is of several kinds, each with an accounting and a stretch of the range of its own.

The first kind (`EVERY`) holds every token of a request, for the layers that attend to all of them. A second one
(`WINDOW`), if the model has it, holds the latest tokens, for the layers that attend to a window. A token that is
computed needs a place in every kind, so numbers of tokens are tuples with an entry for each kind.

States of a recurrent model are no tokens: a request has one, however long the request is. States lie in a stretch of
their own, and are counted beside the kinds (`states`).

Empty extents of one kind are of no use to another before they have left. If one kind lacks memory, the other kinds
therefore give up extents that they keep empty.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from kv_kinds.layout import KvLayout, attention, latent, state, window

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.ranges import KvRange

Tokens = tuple[int, ...]
"""Numbers of tokens, one for each kind of KV."""
EVERY, WINDOW = 0, 1
"""Numbers of the kinds, and of their stretches: KV of every token of a request, and of the tokens in its window."""
FREED_TOGETHER = 128
"""Most tokens that have left a running request's window before SGLang frees them (SGLANG_SWA_EVICTION_INTERVAL)."""


class EngineKv:
    """The KV of one model."""

    def __init__(
        self, memory: KvRange, kinds: Sequence[ElasticKv], window: int = 0, states: ElasticKv | None = None
    ) -> None:
        """`kinds` lie over the stretches of `memory`, in their order, and share page size and `ids`. `window`: number
        of tokens before each token that the layers of the second kind attend to. `states`: the memory of states, in the
        stretch behind those of the kinds; None: the model has no states."""
        self.memory = memory
        self.kinds = tuple(kinds)
        self.window = window
        self.page_size = self.kinds[EVERY].page_size
        self.ids = self.kinds[EVERY].ids
        self.states = states
        if states is not None:
            states.ids = self.ids
        self.promised = 0
        """Number of free slots of states that are not given up, because requests of the step that is being formed are
        to have them."""
        self.give_states: Callable[[int], int] = _no_states
        """Evicts cached states until the given number of extents have left, or no state is cached; returns how many
        left. Set by `Lifecycle`."""

    def __repr__(self) -> str:
        return f"EngineKv({', '.join(repr(kind) for kind in self.kinds)})"

    @property
    def _all(self) -> tuple[ElasticKv, ...]:
        """The memory of each kind of tokens, and of states."""
        return self.kinds if self.states is None else (*self.kinds, self.states)

    # --- sizes

    @property
    def available(self) -> Tokens:
        """Tokens that can be placed now."""
        return tuple(kind.available for kind in self.kinds)

    @property
    def arriving(self) -> Tokens:
        """Tokens for which there will be a place once the numbers that are arriving are here (`ElasticKv`)."""
        return tuple(kind.arriving for kind in self.kinds)

    def of_each(self, tokens: int) -> Tokens:
        """`tokens` for every kind: tokens that a step computes need a place in each."""
        return (tokens,) * len(self.kinds)

    def short(self, tokens: Sequence[int]) -> Tokens:
        """Number of `tokens` of each kind for which there is no place now."""
        return tuple(max(0, wanted - kind.available) for wanted, kind in zip(tokens, self.kinds, strict=True))

    def evictable(self, tree: Any) -> Tokens:
        """Cached tokens that no running request uses. `tree`: the `PrefixTree`, or SGLang's cache."""
        if len(self.kinds) == 1:
            return (tree.evictable_size(),)
        return tree.full_evictable_size(), tree.swa_evictable_size()

    def cached_bytes(self, tree: Any) -> int:
        """Bytes of the cached tokens and states that no running request uses."""
        found = zip(self.kinds, self.evictable(tree), strict=True)
        states = 0 if self.states is None else self.states.bytes_of(tree.mamba_evictable_size())
        return states + sum(kind.bytes_of(tokens) for kind, tokens in found)

    def mark(self) -> tuple[Hashable, ...]:
        """Digest of where tokens and states lie, and of which extents are held. Tests compare it among ranks."""
        return tuple(kind.envelopes.mark() for kind in self._all)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens and states of requests and of cached prefixes."""
        return sum(kind.bytes_of(kind.used) for kind in self._all)

    @property
    def held_bytes(self) -> int:
        """Bytes of the extents in which tokens and states can be placed."""
        return sum(kind.envelopes.held for kind in self._all) * self.memory.extent_bytes

    def layout(self, beyond_window_tokens: int) -> KvLayout:
        """The kinds, with the bytes of this rank. `beyond_window_tokens`: most tokens that a request holds beyond its
        window."""
        every = self.kinds[EVERY]
        of_token = every.bytes_of(1)
        found = [attention(of_token) if every.divided else latent(of_token)]
        # In the layout a token is in its own window.
        found += [window(kind.bytes_of(1), self.window + 1, beyond_window_tokens) for kind in self.kinds[WINDOW:]]
        if self.states is not None:
            found.append(state(self.states.envelopes.envelope_bytes))
        return KvLayout(tuple(found))

    def bytes_of(self, tokens: int) -> int:
        """Bytes of `tokens` in all kinds together."""
        return sum(kind.bytes_of(tokens) for kind in self.kinds)

    def extents_for(self, kind: int, tokens: int) -> int:
        """Number of extents that have to be mapped for `tokens` more of the kind with this number."""
        return self.kinds[kind].envelopes.needed_for(-(-tokens // self.page_size))

    # --- freeing

    def poll(self, most: int | None = None) -> None:
        """Makes places available whose numbers have arrived, as `ElasticKv.poll` does."""
        self.ids.poll(most)

    def settle(self) -> None:
        """Waits until no numbers are arriving. The device's queue may be a forward pass long."""
        self.ids.settle()

    # --- growing

    def grow(
        self,
        tokens: Sequence[int],
        wait_s: float,
        instead: Sequence[int],
        *,
        politely: bool = False,
        states_leave: bool = True,
    ) -> bool:
        """Makes room until `tokens` of each kind are available; False if some kind got less.

        A kind grows as `ElasticKv.grow` does; or as `grow_politely` if this is to be done `politely` and as many tokens
        as it lacks are cached (`instead`). A kind that gets too little grows once more after the others have given up
        what they keep empty beyond their own `tokens`, and cached states have left too, if `states_leave`. If the kind
        could evict its own prefixes instead, the others keep what they have used lately."""
        enough = True
        for kind, wanted, cached in zip(self.kinds, tokens, instead, strict=True):
            if (more := wanted - kind.available) <= 0:
                continue
            polite = politely and cached >= more
            grow = kind.grow_politely if polite else kind.grow
            if not grow(more, wait_s, cached):
                used = [other.used_lately if polite else 0 for other in self.kinds]
                kept = [max(some) for some in zip(tokens, used, strict=True)]
                made_way = self._make_way(kind, wanted, kept, states_leave)
                enough &= made_way and kind.regrow(wanted - kind.available, wait_s)
        return enough

    def _make_way(self, kind: ElasticKv, wanted: int, kept: Sequence[int], states_leave: bool) -> bool:
        """Has memory leave so that `kind` can place `wanted` tokens: first empty extents of the other kinds, as far as
        there is room for the `kept` tokens of each without them; then free slots of states; then cached states, if
        `states_leave` and what has left is not enough. Cached tokens are left to the caller. False if nothing has
        left."""
        others = [each for each in zip(self.kinds, kept, strict=True) if each[0] is not kind]
        given_up = sum(other.give_up_spare(tokens) for other, tokens in others)
        if self.states is not None:
            given_up += self.states.give_up_spare(self.promised)
            extents = kind.envelopes.needed_for(-(-(wanted - kind.available) // self.page_size)) - given_up
            if states_leave and extents > 0:
                given_up += self.give_states(extents)
        return given_up > 0

    def may_grow(self, tokens: Sequence[int], *, politely: bool = False) -> bool:
        """Whether waiting for balloond is worth while for each kind that cannot place `tokens` now (`ElasticKv`)."""
        short = [kind for kind, lacking in zip(self.kinds, self.short(tokens), strict=True) if lacking > 0]
        return all(kind.may_grow_politely() if politely else kind.may_grow() for kind in short)

    def may_wait_again(self) -> None:
        """Lets the next growth wait for balloond again: memory may have come."""
        for kind in self._all:
            kind.may_wait_again()

    def look(self) -> None:
        """Notes how much room each kind has; called between two steps (`ElasticKv`)."""
        if len(self.kinds) > 1:
            for kind in self.kinds:
                kind.look()

    def tell_cached(self, tree: Any) -> None:
        """Tells the driver how many bytes of tokens and states could be evicted now."""
        self.memory.cached_bytes = self.cached_bytes(tree)

    # --- whole extents

    @property
    def has_dummy(self) -> bool:
        """Whether the envelopes that padded tokens write to are held."""
        return all(kind.has_dummy for kind in self._all)

    def hold_dummy(self, wait_s: float) -> None:
        """Maps the dummy envelope of each kind, waiting at most `wait_s` seconds for each. Raises NoMemory."""
        for kind in self._all:
            kind.hold_dummy(wait_s)

    def hold_tied(self) -> None:
        """Takes the rest of the units of held extents out of the range's reserve (`ElasticKv`)."""
        for kind in self._all:
            kind.hold_tied()

    def leaving(self) -> int:
        """Number of extents that `give_up_empties` would return."""
        return sum(kind.leaving() for kind in self._all)

    def give_up_empties(self, older_than_s: float = 0.0) -> int:
        """Returns the extents to the driver that have been empty for `older_than_s` seconds; returns how many."""
        return sum(kind.give_up_empties(older_than_s) for kind in self._all)

    def share_of(self, extents: int) -> tuple[int, ...]:
        """Number of extents of each kind that leave, where `extents` have to leave in all. First leave those that
        moving live KV together empties; where these are too few, kinds lose more in proportion to the extents that
        their live KV fills. States are not counted: they are not moved, and leave by `give_states`."""
        held = [kind.envelopes.held for kind in self.kinds]
        full = [min(there, kind.least_extents) for there, kind in zip(held, self.kinds, strict=True)]
        loose = [there - needed for there, needed in zip(held, full, strict=True)]
        taken = _from_the_last(extents, loose)
        left, whole = extents - sum(taken), max(1, sum(full))
        # Proportions are rounded up, so that together they are enough, as far as there is so much.
        parts = _from_the_last(left, [min(needed, -(-left * needed // whole)) for needed in full])
        return tuple(some + more for some, more in zip(taken, parts, strict=True))

    def beyond(self, extents: int) -> Tokens:
        """Tokens that have a place now and would find none once `extents` of the held extents have left."""
        shares = self.share_of(extents)
        return tuple(kind.beyond(share) for kind, share in zip(self.kinds, shares, strict=True))

    def start_over(self, wait_s: float) -> None:
        """Returns all empty extents and the reserve, so that the next extents lie in a row, from the lowest address on.
        Waits at most `wait_s` seconds for unmapping."""
        self.settle()
        self.give_up_empties()
        self.memory.lower(wait_s)

    def give_up_everything(self) -> None:
        """Returns all memory, for hibernation: only the dummies may be live. Afterwards not one extent is mapped."""
        for kind in self._all:
            kind.give_up_everything()
        self.memory.cached_bytes = 0
        self.memory.empty()


def _from_the_last(total: int, most: Sequence[int]) -> list[int]:
    """Parts of `total`, none larger than its entry of `most`. The last part is as large as it can be, then the one
    before it."""
    parts = [0] * len(most)
    for number in reversed(range(len(most))):
        parts[number] = min(total, most[number])
        total -= parts[number]
    return parts


def _no_states(_extents: int) -> int:
    """Evicts nothing, for models without states."""
    return 0


Evict = Callable[[Any, Tokens], None]
"""Function that evicts a number of tokens of each kind from a tree, the prefix that was used longest ago first."""
