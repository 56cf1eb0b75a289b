"""Transfers of KV to and from engines on other devices. KV travels as cached prefixes, so that the cache of the other
engine keeps it and finds it again: a request whose tokens so far are in that cache goes on there after one step.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from gpu_scheduler.engines.sglang.base import device
from gpu_scheduler.engines.sglang.base.errors import NotNow
from gpu_scheduler.engines.sglang.kv.engine_kv import EVERY
from gpu_scheduler.engines.sglang.kv.prefix_eviction import envelopes_of
from gpu_scheduler.engines.sglang.policy.envelopes import Indices
from gpu_scheduler.engines.sglang.policy.places import runs
from protos import engine_pb2

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.kv.engine_kv import EngineKv
    from gpu_scheduler.engines.sglang.kv.prefix_tree import PrefixTree
    from gpu_scheduler.engines.sglang.kv.provisioning import KvProvisioning

_EXPECTED_S = 1.0
"""Seconds from the beginning of an import in which its requests are expected: time for the copy, for the last step of
the requests at their old place, and for their way here."""


@dataclass
class _Coming:
    """A prefix that is being copied here: it has room, and is not in the cache yet."""

    key: Any
    """The tokens of the prefix, as a key of SGLang's tree."""
    there: torch.Tensor
    """Slots of its beginning, which was in the cache already."""
    lock: Any
    """The lock on that beginning."""
    envelopes: Indices
    """KV blocks (envelopes) that the rest is copied into."""


class KvTransfer:
    """Transfers of one model. Call its methods between two steps only."""

    def __init__(
        self,
        kv: EngineKv,
        tree: PrefixTree,
        provisioning: KvProvisioning,
        scheduler: Any,
        lease_id: str,
        on: torch.device,
    ) -> None:
        """`scheduler`: SGLang's; `lease_id`: balloond's name of the lease; `on`: the device of the KV."""
        self._kv = kv.kinds[EVERY]
        self._is_transferable = len(kv.kinds) == 1 and kv.states is None
        """Whether KV of this model can go to other engines and come from them. KV of several kinds, or beside states,
        cannot, since a message names pages of one size only: requests are computed again then."""
        self._tree = tree
        self._provisioning = provisioning
        self._scheduler = scheduler
        self._lease_id = lease_id
        self._device = on
        self._locked: list[Any] = []
        """Locks on the prefixes that other engines are reading."""
        self._coming: dict[int, list[_Coming]] = {}
        """Prefixes that come with each import, by the command's id."""
        self._expected_until = -inf
        """Time (monotonic seconds) until which requests are expected for which KV comes or has come."""

    @property
    def imports(self) -> list[int]:
        """Ids of the imports under way."""
        return list(self._coming)

    @property
    def busy(self) -> bool:
        """Whether another engine knows places of KV here, so that these must not move."""
        return bool(self._locked or self._coming)

    def expected_s(self, now: float) -> float:
        """Seconds for which free memory is still kept for requests that come with their KV; 0 if none are expected.
        `now`: monotonic seconds."""
        return max(0.0, self._expected_until - now)

    @property
    def held_tokens(self) -> int:
        """Tokens with a place for imports under way. SGLang does not know of them."""
        pages = sum(len(one.envelopes) for some in self._coming.values() for one in some)
        return pages * self._kv.page_size

    # --- to another engine

    def keep(self) -> None:
        """Puts the KV of tokens that running requests have made so far into the cache, in whole pages, where that of
        their prompts is already. Cached KV stays in its place while other engines read it, even if the requests end."""
        if not self._is_transferable:
            return
        self._finish_device()
        for request in self._scheduler.running_batch.reqs:
            if not request.finished():
                self._keep(request)

    def _keep(self, request: Any) -> None:
        request.refresh_fill_ids()
        computed = len(request.full_untruncated_fill_ids) - 1  # the next step computes the last one's
        if computed // self._kv.page_size > request.kv.cache_protected_len // self._kv.page_size:
            self._tree.keep(request, computed)

    def export(self, command_id: int, requests: Sequence[tuple[str, str, Sequence[int], int]]) -> engine_pb2.KvPlaces:
        """Places of the KV of these requests, as far as it is cached; it stays there until `let_go`. `requests`:
        (request id, adapter, tokens so far, most tokens to come) of each."""
        if not self._is_transferable:
            return self._places(command_id, [])
        self._finish_device()
        values = []
        for _, adapter, tokens, _ in requests:
            match = self._tree.match(self._tree.key(tokens, adapter))
            values.append(match.slots)
            self._locked.append(self._tree.lock(match.node))
        places = envelopes_of(values, self._kv.page_size)
        sequences = [
            self._sequence(
                some,
                request_id=request_id,
                adapter=adapter,
                token_ids=tokens[: len(value)],
                tokens_to_come=to_come,
            )
            for (request_id, adapter, tokens, to_come), value, some in zip(requests, values, places, strict=True)
            if len(value)
        ]
        return self._places(command_id, sequences)

    def let_go(self) -> None:
        """Unlocks all exported prefixes: no engine reads them any more."""
        for lock in self._locked:
            self._tree.unlock(lock)
        self._locked.clear()

    # --- from another engine

    def begin_import(self, command: engine_pb2.ImportKv) -> engine_pb2.KvPlaces:
        """Takes places for prefixes that are about to be copied here, and returns them. Parts that are cached here
        already need none; where there is too little room, the last prefixes get fewer places or none. Raises NotNow if
        the pages of the two engines differ, or if KV of this model may not move."""
        if not self._is_transferable:
            raise NotNow("KV of several kinds is not moved: its requests are computed again")
        kv = self._kv
        ours, theirs = self._layout(), (command.page_tokens, command.page_bytes)
        if ours != theirs:
            raise NotNow(
                f"pages of {theirs[0]} tokens and {theirs[1]} bytes do not fit those of {ours[0]} and {ours[1]}"
            )
        self._finish_device()
        keys = [self._tree.key(wanted.token_ids, wanted.adapter) for wanted in command.sequences]
        matches = [self._tree.match(key) for key in keys]
        locks = [self._tree.lock(match.node) for match in matches]
        lacking = [len(key) - len(match.slots) for key, match in zip(keys, matches, strict=True)]
        idle = bool(self._scheduler.is_fully_idle())
        to_come = sum(min(wanted.tokens_to_come, CLIP_MAX_NEW_TOKENS) for wanted in command.sequences)
        left = self._provisioning.provide_beside(self._tree, sum(lacking), to_come, idle=idle) // kv.page_size
        self._expected_until = time.monotonic() + _EXPECTED_S
        coming = self._coming[command.command_id] = []
        sequences = []
        for key, match, lock, tokens in zip(keys, matches, locks, lacking, strict=True):
            there = match.slots
            envelopes = kv.envelopes.take(min(tokens // kv.page_size, left))
            assert envelopes is not None
            left -= len(envelopes)
            key = key[: len(there) + len(envelopes) * kv.page_size]
            coming.append(_Coming(key, there, lock, envelopes))
            sequences.append(self._sequence(envelopes, first_token=len(there)))
        return self._places(command.command_id, sequences)

    def end_import(self, command_id: int, failed: bool) -> None:
        """Ends an import: its prefixes enter the cache, or, if it `failed`, their places are free again. Raises NotNow
        if no such import is under way."""
        if command_id not in self._coming:
            raise NotNow(f"no import {command_id} is under way")
        kv = self._kv
        for one in self._coming.pop(command_id):
            if failed:
                kv.envelopes.give(one.envelopes)
            elif len(one.envelopes):
                self._insert(one)
            self._tree.unlock(one.lock)

    def _insert(self, one: _Coming) -> None:
        """Puts a prefix that was copied here into the cache."""
        kv = self._kv
        firsts = kv.ids.send(one.envelopes * kv.page_size)
        slots = (firsts[:, None] + torch.arange(kv.page_size, device=firsts.device)).reshape(-1)
        # The cache may have more of it by now, from another of these prefixes or from a request.
        self._tree.insert(one.key, torch.cat([one.there.to(slots.dtype), slots]), len(one.there))

    def abandon(self) -> None:
        """Ends all transfers, because all KV is about to leave. Imports under way fail."""
        self._expected_until = -inf
        for command_id in list(self._coming):
            self.end_import(command_id, failed=True)
        self.let_go()

    # --- parts

    def _sequence(self, envelopes: Indices, **facts: Any) -> engine_pb2.KvPlaces.Sequence:
        """The message that tells the place of each envelope, as pieces of extents in the order of the envelopes."""
        kv = self._kv
        found = runs(envelopes.tolist(), kv.envelopes.envelope_bytes, kv.memory.extent_bytes)
        located = kv.memory.located([extent for extent, _, _ in found])
        pieces = [
            engine_pb2.KvPlaces.Piece(extent_id=id, offset=base + offset, bytes=nbytes)
            for (id, base), (_, offset, nbytes) in zip(located, found, strict=True)
        ]
        return engine_pb2.KvPlaces.Sequence(pieces=pieces, **facts)

    def _places(self, command_id: int, sequences: Sequence[engine_pb2.KvPlaces.Sequence]) -> engine_pb2.KvPlaces:
        """The message with the places of all sequences, and the size of a page."""
        tokens, nbytes = self._layout()
        return engine_pb2.KvPlaces(
            command_id=command_id,
            lease_id=self._lease_id,
            sequences=sequences,
            page_tokens=tokens,
            page_bytes=nbytes,
        )

    def _layout(self) -> tuple[int, int]:
        """(tokens, bytes) of a page."""
        return self._kv.page_size, self._kv.envelopes.envelope_bytes

    def _finish_device(self) -> None:
        """Waits for the device. A step that overlaps with the host may still write the last token of a request that has
        ended, into a page that is cached or free by now. The device does that before our own later steps, but not
        before a copy by another engine."""
        device.wait(self._device)
