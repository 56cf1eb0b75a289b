"""Transfers of KV to and from engines on other devices, as prefixes, which the cache can keep and find again. A request
whose tokens so far are in the cache of another engine goes on there after one step.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from gpu_scheduler.engines.sglang.base import device
from gpu_scheduler.engines.sglang.base.errors import NotNow
from gpu_scheduler.engines.sglang.kv.prefix_eviction import Places, envelopes_of
from gpu_scheduler.engines.sglang.policy.places import runs
from protos import engine_pb2

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
    from gpu_scheduler.engines.sglang.kv.provisioning import KvProvisioning

_EXPECTED_S = 1.0
"""Seconds after an import begins in which its requests are expected: the copy, the end of their last step, and their
way."""


@dataclass
class _Coming:
    """A prefix that has room and is not in the cache yet."""

    key: Any
    """The tokens of the prefix, as a key of SGLang's tree."""
    there: torch.Tensor
    """Slots of its beginning, which was in the cache already."""
    node: Any
    """The node at which that beginning ends; locked meanwhile."""
    envelopes: Places
    """KV blocks (envelopes) that the rest is copied into."""


class KvTransfer:
    """Transfers of one model. Call its methods between two steps only."""

    def __init__(
        self, kv: ElasticKv, provisioning: KvProvisioning, scheduler: Any, lease_id: str, on: torch.device
    ) -> None:
        """`scheduler`: SGLang's; `lease_id`: balloond's name of the lease; `on`: the device of the KV."""
        self._kv = kv
        self._provisioning = provisioning
        self._scheduler = scheduler
        self._lease_id = lease_id
        self._device = on
        self._locked: list[Any] = []
        """Nodes whose prefixes other engines are reading."""
        self._coming: dict[int, list[_Coming]] = {}
        """Prefixes of each import, by the command's id."""
        self._expected_until = -inf
        """Monotonic seconds until which requests are expected whose KV comes, or has come."""

    @property
    def imports(self) -> list[int]:
        """Ids of the imports under way."""
        return list(self._coming)

    @property
    def busy(self) -> bool:
        """Whether another engine knows places of KV here, so that these must not move."""
        return bool(self._locked or self._coming)

    def expected_s(self, now: float) -> float:
        """Seconds, from the monotonic `now` on, for which free memory is kept for requests that come with their KV. 0:
        none are expected."""
        return max(0.0, self._expected_until - now)

    @property
    def held_tokens(self) -> int:
        """Tokens of imports under way, which SGLang does not know of."""
        pages = sum(len(one.envelopes) for some in self._coming.values() for one in some)
        return pages * self._kv.page_size

    # --- to another engine

    def keep(self) -> None:
        """Puts what running requests have computed since their prompts into the cache, as far as it fills pages, as
        their prompts are already: so it stays where it is while others read it, whatever becomes of the requests."""
        self._finish_device()
        for request in self._scheduler.running_batch.reqs:
            if not request.finished():
                self._keep(request)

    def _keep(self, request: Any) -> None:
        request._refresh_fill_ids()
        computed = len(request.full_untruncated_fill_ids) - 1  # the next step computes the last one's
        if computed // self._kv.page_size <= request.cache_protected_len // self._kv.page_size:
            return
        prefilled = request.extend_range
        request.set_extend_range(0, computed)
        try:
            self._tree.cache_unfinished_req(request)
        finally:
            request.extend_range = prefilled

    def export(self, command_id: int, requests: Sequence[tuple[str, str, Sequence[int], int]]) -> engine_pb2.KvPlaces:
        """Places of the KV of these requests (request id, adapter, tokens, tokens to come), as far as it is cached. It
        stays there until `let_go`."""
        self._finish_device()
        matches = [self._match(tokens, adapter) for _, adapter, tokens, _ in requests]
        values = [match.device_indices for match in matches]
        for match in matches:
            self._tree.inc_lock_ref(match.last_device_node)
            self._locked.append(match.last_device_node)
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
        for node in self._locked:
            self._tree.dec_lock_ref(node)
        self._locked.clear()

    # --- from another engine

    def begin_import(self, command: engine_pb2.ImportKv) -> engine_pb2.KvPlaces:
        """Makes room for prefixes that are about to be copied here, as far as there is any, and returns their places.
        The parts that are cached here already need none. Raises NotNow if the pages of the two engines differ."""
        kv = self._kv
        ours, theirs = self._layout(), (command.page_tokens, command.page_bytes)
        if ours != theirs:
            raise NotNow(
                f"pages of {theirs[0]} tokens and {theirs[1]} bytes do not fit those of {ours[0]} and {ours[1]}"
            )
        self._finish_device()
        keys = [self._key(wanted.token_ids, wanted.adapter) for wanted in command.sequences]
        matches = [self._tree.match_prefix(MatchPrefixParams(key=key)) for key in keys]
        for match in matches:
            self._tree.inc_lock_ref(match.last_device_node)
        lacking = [len(key) - len(match.device_indices) for key, match in zip(keys, matches, strict=True)]
        idle = bool(self._scheduler.is_fully_idle())
        to_come = sum(min(wanted.tokens_to_come, CLIP_MAX_NEW_TOKENS) for wanted in command.sequences)
        left = self._provisioning.provide_beside(self._tree, sum(lacking), to_come, idle=idle) // kv.page_size
        self._expected_until = time.monotonic() + _EXPECTED_S
        coming = self._coming[command.command_id] = []
        sequences = []
        for key, match, tokens in zip(keys, matches, lacking, strict=True):
            there = match.device_indices
            envelopes = kv.envelopes.take(min(tokens // kv.page_size, left))
            assert envelopes is not None
            left -= len(envelopes)
            key = key[: len(there) + len(envelopes) * kv.page_size]
            coming.append(_Coming(key, there, match.last_device_node, envelopes))
            sequences.append(self._sequence(envelopes, first_token=len(there)))
        return self._places(command.command_id, sequences)

    def end_import(self, command_id: int, failed: bool) -> None:
        """Ends an import: its prefixes enter the cache, or if it `failed` their memory is free again. Raises NotNow for
        a command that is not under way."""
        if command_id not in self._coming:
            raise NotNow(f"no import {command_id} is under way")
        kv = self._kv
        for one in self._coming.pop(command_id):
            if failed:
                kv.envelopes.give(one.envelopes)
            elif len(one.envelopes):
                self._insert(one)
            self._tree.dec_lock_ref(one.node)

    def _insert(self, one: _Coming) -> None:
        kv = self._kv
        firsts = kv.ids.send(one.envelopes * kv.page_size)
        slots = (firsts[:, None] + torch.arange(kv.page_size, device=firsts.device)).reshape(-1)
        value = torch.cat([one.there.to(slots.dtype), slots])
        already = int(self._tree.insert(InsertParams(key=one.key, value=value)).prefix_len)
        # Another of these prefixes, or a request, may have put it there meanwhile.
        if (twice := already - len(one.there)) > 0:
            self._scheduler.token_to_kv_pool_allocator.free(slots[:twice])

    def abandon(self) -> None:
        """Ends all transfers before the KV leaves; imports under way fail."""
        self._expected_until = -inf
        for command_id in list(self._coming):
            self.end_import(command_id, failed=True)
        self.let_go()

    # --- parts

    @property
    def _tree(self) -> Any:
        return self._scheduler.tree_cache

    def _key(self, tokens: Sequence[int], adapter: str) -> Any:
        # SGLang keeps prefixes of different adapters apart by this second part of a key.
        return RadixKey(array("q", tokens), adapter or None).page_aligned(self._kv.page_size)

    def _match(self, tokens: Sequence[int], adapter: str) -> Any:
        return self._tree.match_prefix(MatchPrefixParams(key=self._key(tokens, adapter)))

    def _sequence(self, envelopes: Places, **facts: Any) -> engine_pb2.KvPlaces.Sequence:
        """Message that says where these envelopes lie, in order, by extent."""
        kv = self._kv
        found = runs(envelopes.tolist(), kv.envelopes.envelope_bytes, kv.memory.extent_bytes)
        located = kv.memory.located([extent for extent, _, _ in found])
        pieces = [
            engine_pb2.KvPlaces.Piece(extent_id=id, offset=base + offset, bytes=nbytes)
            for (id, base), (_, offset, nbytes) in zip(located, found, strict=True)
        ]
        return engine_pb2.KvPlaces.Sequence(pieces=pieces, **facts)

    def _places(self, command_id: int, sequences: Sequence[engine_pb2.KvPlaces.Sequence]) -> engine_pb2.KvPlaces:
        """Message with the places of all sequences, and the layout of a page."""
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
        """Waits for the device. An overlapping step may still write the last token of a request that has ended, whose
        page is cached or free by now: the device orders that before our own steps, but not before another engine's
        copy."""
        device.wait(self._device)
