"""The prefix cache of one model: SGLang's unified tree, with a core of ours. Only this module knows how a node of the
tree keeps its slots, locks and children. Imports SGLang: only the engine process may import this.

Our core keeps the time of each node's last use. SGLang's own `last_access_time` is a counter: it orders nodes, and says
nothing of their age.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.evict_policy import LRUStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
from typing_extensions import override

from gpu_scheduler.engines.sglang.kv.pools.allocator import evicted_together

if TYPE_CHECKING:
    import torch

CORE = "prism"
"""Name of the core in SGLang's registry of tree cores; `model/lifecycle.py` has SGLang choose it."""
_FULL, _WINDOW = ComponentType.FULL, ComponentType.SWA
_HEAP_PER_LEAF, _HEAP_AT_LEAST = 2, 1024
"""The heap of leaves is made anew once it has more entries than the first number times the leaves plus the second:
prefixes that left the tree leave their entries behind."""


class StampedCore(UnifiedTreeCore):  # type: ignore[misc]
    """SGLang's tree core in Python. Each node has `used_at`, the monotonic seconds of its last use. Methods override
    SGLang's.

    SGLang's orders all leaves by their last use at the beginning of each eviction: a millisecond for five thousand of
    them. This core keeps them in a heap, and hands SGLang the first ones only."""

    evictable_device_leaves: Any

    @override
    def reset(self) -> None:
        self._by_use: list[tuple[float, int]] = []
        """Heap of the numbers of nodes that were evictable leaves at some time, by SGLang's counter of their last use
        then. A node has one entry at most (`queued`), which says the time of its last use or an earlier one. Nodes
        themselves would keep the tensors of their slots on the device after they have left the tree."""
        super().reset()

    @override
    def _new_node(self, *args: Any, **kwargs: Any) -> Any:
        node = super()._new_node(*args, **kwargs)
        node.used_at = time.monotonic()
        node.queued = False
        return node

    @override
    def _update_evictable_leaf_sets(self, node: Any) -> None:
        super()._update_evictable_leaf_sets(node)
        if node in self.evictable_device_leaves:
            self._queue(node)

    def _queue(self, node: Any) -> None:
        """Puts a leaf into the heap, unless it is there. A heap that has become too large is made anew."""
        if node.queued:
            return
        self._push(node)
        if len(self._by_use) > _HEAP_PER_LEAF * len(self.evictable_device_leaves) + _HEAP_AT_LEAST:
            for _, number in self._by_use:
                if (queued := self._node_arena.get(number)) is not None:
                    queued.queued = False
            self._by_use.clear()
            for leaf in self.evictable_device_leaves:
                self._push(leaf)

    def _push(self, leaf: Any) -> None:
        leaf.queued = True
        heapq.heappush(self._by_use, (leaf.last_access_time, leaf.id))

    def _used_longest_ago(self, tokens: int) -> list[Any]:
        """The evictable leaves that were used longest ago, which have `tokens` together, or as many as there are."""
        found: list[Any] = []
        while self._by_use and tokens > 0:
            used, number = heapq.heappop(self._by_use)
            if (node := self._node_arena.get(number)) is None:
                continue
            node.queued = False
            if node not in self.evictable_device_leaves:
                continue
            if node.last_access_time != used:
                self._push(node)
                continue
            found.append(node)
            tokens -= len(node.component_data[_FULL].value)
        for node in found:  # those that stay are leaves of the next eviction
            self._queue(node)
        return found

    @override
    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        if component_type is not _FULL:
            super().evict_device_start(component_type, request_cnt)
            return
        leaves = self.evictable_device_leaves
        self.evictable_device_leaves = self._used_longest_ago(request_cnt)
        try:
            super().evict_device_start(component_type, request_cnt)
        finally:
            self.evictable_device_leaves = leaves

    @override
    def _touch_node(self, node: Any) -> None:
        super()._touch_node(node)
        node.used_at = time.monotonic()

    @override
    def _match_post_processor(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._match_post_processor(*args, **kwargs)
        now, node = time.monotonic(), self.node_by_id(result.best_match_node)
        while node is not None:
            node.used_at = now
            node = node.parent
        return result

    @override
    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        """Splits a node into a front and a rear part, both with its time of last use. SGLang would have the rear part
        used now, although the request for which the node is split goes another way behind the front: prefixes that
        share their beginning with others would leave last."""
        used_at, order = child.used_at, child.last_access_time
        front, action = super()._split_node(key, child, split_len)
        front.used_at = used_at
        child.last_access_time = order
        return front, action


def register() -> None:
    """Registers the core with SGLang, once in a process."""
    if CORE not in registered_tree_core_backends():
        register_tree_core_backend(CORE, StampedCore)


@dataclass(frozen=True)
class CachedPrefix:
    """The beginning of a sequence that is in the cache."""

    slots: torch.Tensor
    """Slots of its tokens."""
    node: int
    """The node at which it ends, for `PrefixTree.lock`."""


class KindOfTree:
    """The prefix cache as one kind of KV (`engine_kv.py`) or the states see it."""

    def __init__(self, cache: Any, component: ComponentType) -> None:
        """`cache`: SGLang's UnifiedRadixCache; `component`: SGLang's name of the kind."""
        self._cache = cache
        self._core = cache.tree_core
        self._component = component

    def nodes(self) -> Iterator[tuple[Any, int]]:
        """All nodes that have KV of this kind, each with the number of tokens before it; parents before children."""
        waiting = [(node, 0) for node in self._core.root_node.children.values()]
        while waiting:
            node, depth = waiting.pop()
            if node.component_data[self._component].value is not None:
                yield node, depth
            behind = depth + len(node.component_data[_FULL].value)
            waiting.extend((child, behind) for child in node.children.values())

    def unlocked_nodes(self) -> Iterator[tuple[Any, int]]:
        """The nodes whose KV of this kind no running request uses, each with the number of tokens before it; parents
        before children."""
        return ((node, depth) for node, depth in self.nodes() if node.component_data[self._component].lock_ref == 0)

    def unlocked_ages(self, now: float) -> Iterator[tuple[float, int]]:
        """(seconds since its last use, tokens) of each node whose KV of this kind no running request uses. `now`:
        monotonic seconds."""
        # This loop walks the whole tree while requests run, so it is written for speed.
        component = self._component
        waiting = list(self._core.root_node.children.values())
        while waiting:
            node = waiting.pop()
            data = node.component_data[component]
            if data.lock_ref == 0 and data.value is not None:
                yield now - node.used_at, data.value.numel()
            if node.children:
                waiting.extend(node.children.values())

    def slots(self, node: Any) -> torch.Tensor:
        """Slots of a node's tokens: whole pages, the slots of each in a row."""
        slots: torch.Tensor = node.component_data[self._component].value
        return slots

    def set_slots(self, node: Any, slots: torch.Tensor) -> None:
        """Replaces the slots of a node by as many others, to which its KV was moved. The tensor is kept."""
        data = node.component_data[self._component]
        assert len(slots) == len(data.value)
        data.value = slots

    def used_at(self, node: Any) -> float:
        """Monotonic seconds of a node's last use."""
        used_at: float = node.used_at
        return used_at

    def evicted_together(self) -> AbstractContextManager[None]:
        """Has the allocator free as one, for each kind of KV, what is evicted in the block."""
        return evicted_together(self._cache.token_to_kv_pool_allocator)

    @property
    def cuts_whole(self) -> bool:
        """Whether `cut` takes out whole nodes only."""
        return False

    def cut(self, node: Any, keep: int) -> list[Any]:
        """Takes the KV of this kind out of `node` from token `keep` on, and returns the nodes that lost theirs. `keep`:
        tokens of the node, a multiple of the page size. No request may use that KV, and its slots are the caller's
        now."""
        raise NotImplementedError


class WindowTree(KindOfTree):
    """The prefix cache as tokens in a window see it. A node may lose these tokens and stay: until they are computed
    again, no request can continue from it."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache, _WINDOW)

    @override
    def cut(self, node: Any, keep: int) -> list[Any]:
        core = self._core
        if keep > 0:
            core._split_node(node.key, node, keep)  # `node` is the rear part afterwards
        # The slots that SGLang would free are the caller's.
        frees: dict[ComponentType, list[torch.Tensor]] = defaultdict(list)
        core._evict_component_and_detach_lru(node, core.components_by_type[_WINDOW], frees, defaultdict(list), [])
        core._update_evictable_leaf_sets(node)
        for slots in frees[_WINDOW]:
            self._cache.token_to_kv_pool_allocator.clear_full_to_swa_mapping(slots)
        return [node]


class PrefixTree(KindOfTree):
    """The prefix cache of one model. Call it between two steps only. Nodes are SGLang's, and are passed around as they
    are."""

    def __init__(self, cache: Any) -> None:
        """`cache`: SGLang's UnifiedRadixCache. Raises TypeError if its core is not a `StampedCore`, or evicts by
        anything but the last use."""
        if not isinstance(cache.tree_core, StampedCore):
            raise TypeError(f"the prefix cache has a {type(cache.tree_core).__name__} for a core")
        if type(strategy := cache.tree_core.eviction_strategy) is not LRUStrategy:
            raise TypeError(f"the prefix cache evicts by {type(strategy).__name__}, not by the last use")
        super().__init__(cache, _FULL)
        self._kinds: list[KindOfTree] = [self, *([WindowTree(cache)] if cache.supports_swa() else [])]
        self.states = KindOfTree(cache, ComponentType.MAMBA) if cache.supports_mamba() else None
        """The cache as states see it; None: the model has none."""

    def of(self, kind: int) -> KindOfTree:
        """The cache as the kind of KV with this number sees it; for the first kind that is the cache itself."""
        return self._kinds[kind]

    # --- nodes

    @override
    def cut(self, node: Any, keep: int) -> list[Any]:
        """Takes `node` from token `keep` on, and all nodes below it, out of the tree, and returns them. The front part,
        if there is one, stays as another node. `keep`: tokens of the node, a multiple of the page size. No request may
        use any of the nodes that are taken. Slots of the first kind are the caller's now, and those of other kinds are
        free."""
        if self.cuts_whole:
            assert keep == 0
            return self._cut_whole(node)
        if keep > 0:
            self._core._split_node(node.key, node, keep)  # `node` is the rear part afterwards
        gone, waiting = [], [node]
        while waiting:
            gone.append(below := waiting.pop())
            waiting.extend(below.children.values())
        for leaf in reversed(gone):
            result = self._core.evict_device_leaf(leaf.id, is_write_back=False)
            del result.device_frees[_FULL]
            self._cache._drain_device_frees(result.device_frees)  # slots of other kinds
            assert not result.host_frees and not result.cache_actions
        return gone

    @property
    @override
    def cuts_whole(self) -> bool:
        """True where prefixes have states: a node's state is that at its end, so no request could go on from a part of
        it."""
        return bool(self._cache.supports_mamba())

    def _cut_whole(self, node: Any) -> list[Any]:
        """Takes a node with a state, and all nodes below it, out of the tree. SGLang takes out nodes above as well if
        they are left with neither state nor children. Returns all nodes that are gone."""
        core = self._core
        path, above = [], node.parent
        while above is not core.root_node:
            path.append(above)
            above = above.parent
        below, waiting = [], [node]
        while waiting:
            below.append(each := waiting.pop())
            waiting.extend(each.children.values())
        for leaf in reversed(below):
            if leaf.id in core._node_arena:
                result = core.evict_device_leaf(leaf.id, is_write_back=False)
                del result.device_frees[_FULL]
                self._cache._drain_device_frees(result.device_frees)  # slots of states
                assert not result.host_frees and not result.cache_actions
        return [each for each in (*below, *path) if each.id not in core._node_arena]

    # --- sizes

    def evictable_size(self) -> int:
        """Tokens that no running request uses."""
        size: int = self._cache.evictable_size()
        return size

    def full_evictable_size(self) -> int:
        """Tokens that no running request uses, where there are several kinds of KV."""
        size: int = self._cache.full_evictable_size()
        return size

    def swa_evictable_size(self) -> int:
        """Tokens with a place in the KV of windows that no running request uses."""
        size: int = self._cache.swa_evictable_size()
        return size

    def mamba_evictable_size(self) -> int:
        """States that no running request uses."""
        size: int = self._cache.mamba_evictable_size()
        return size

    def evict_states(self, states: int) -> int:
        """Evicts states, those used longest ago first, and the tokens from which no request can go on without them;
        returns how many tokens were evicted."""
        with self.evicted_together():
            result = self._cache.evict(EvictParams(num_tokens=0, mamba_num=states))
        return int(result.num_tokens_evicted)

    def evict(self, tokens: int, in_window: int = 0) -> int:
        """Evicts `tokens` of the first kind, and `in_window` tokens of windows, from the leaf that was used longest ago
        on; returns how many of both kinds were evicted."""
        with self.evicted_together():
            result = self._cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=in_window))
        return int(result.num_tokens_evicted + result.swa_num_tokens_evicted)

    # --- prefixes

    def key(self, tokens: Sequence[int], adapter: str = "") -> RadixKey:
        """Key of the whole pages of a sequence. Prefixes of different adapters are kept apart."""
        return RadixKey(array("q", tokens), adapter or None).page_aligned(self._cache.page_size)

    def match(self, key: RadixKey) -> CachedPrefix:
        """The longest prefix of `key` that is in the cache, which counts as used now."""
        node = self._cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        return CachedPrefix(self._cache.path_device_indices(node), node)

    def look_up(self, request: Any) -> None:
        """Has SGLang look up what is cached of a waiting request's prompt, which counts as used now. The request's
        `prefix_len` is the number of those tokens then. Nothing is copied or locked."""
        request.init_next_round_input(self._cache, cow_mamba=False)

    def lock(self, node: int) -> Any:
        """Keeps the prefix that ends at `node` in the cache, and where it is; returns what `unlock` takes."""
        return self._cache.lock(node)

    def unlock(self, lock: Any) -> None:
        """Ends a lock."""
        self._cache.unlock(lock)

    def insert(self, key: RadixKey, slots: torch.Tensor, known: int) -> None:
        """Puts a prefix into the cache, of which the first `known` tokens were there before. If later tokens are there
        by now as well, their slots in `slots` are freed."""
        self._cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=known))

    def keep(self, request: Any, tokens: int) -> None:
        """Puts the first `tokens` of a running request, whose KV must have been computed, into the cache, in whole
        pages, and locks them there."""
        self._cache.checkpoint(request, up_to=tokens)

    def check(self) -> None:
        """Raises AssertionError where SGLang's own accounts of the tree do not agree."""
        self._core.sanity_check([], [])


def unlink(root: Any) -> None:
    """Unlinks all nodes below `root` from each other, so that their memory is free at once. `root` was the tree's root
    before the cache was flushed. Parents and children refer to each other: SGLang leaves them, with the tensors of
    their slots on the device, to the garbage collector, which runs rarely (`collector`)."""
    waiting = [root]
    while waiting:
        if (node := waiting.pop()) is not None:
            waiting += node.children.values()
            node.children.clear()
            node.parent = None
