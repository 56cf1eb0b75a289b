"""Page-aware eviction over a prefix tree with the few operations of ours that it uses."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_scheduler.engines.sglang.kv import prefix_eviction
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes, Indices


class Node:
    def __init__(self, parent: Node | None, slots: list[int], used_at: float, locked: bool = False) -> None:
        self.parent, self.children = parent, {}
        self.value = torch.tensor(slots, dtype=torch.int64)
        self.used_at, self.locked = used_at, locked
        if parent is not None:
            parent.children[slots[0]] = self


class Tree:
    """A `PrefixTree` whose keys are the slots themselves."""

    cuts_whole = False
    evicted_together = contextlib.nullcontext

    def __init__(self) -> None:
        self.root_node = Node(None, [], 0.0, locked=True)

    def nodes(self) -> Iterator[tuple[Node, int]]:
        waiting = [(node, 0) for node in self.root_node.children.values()]
        while waiting:
            node, depth = waiting.pop()
            yield node, depth
            waiting.extend((child, depth + len(node.value)) for child in node.children.values())

    def of(self, kind: int) -> Tree:
        return self

    def unlocked_nodes(self) -> Iterator[tuple[Node, int]]:
        return ((node, depth) for node, depth in self.nodes() if not node.locked)

    def unlocked_ages(self, now: float) -> Iterator[tuple[float, int]]:
        return ((now - node.used_at, len(node.value)) for node, _ in self.unlocked_nodes())

    def slots(self, node: Node) -> torch.Tensor:
        return node.value

    def set_slots(self, node: Node, slots: torch.Tensor) -> None:
        node.value = slots

    def used_at(self, node: Node) -> float:
        return node.used_at

    def cut(self, node: Node, keep: int) -> list[Node]:
        assert not node.locked
        assert node.parent is not None
        slots = node.value.tolist()
        del node.parent.children[slots[0]]
        if keep > 0:
            Node(node.parent, slots[:keep], node.used_at)
        return [node, *(below for child in list(node.children.values()) for below in self.cut(child, 0))]

    def cached(self) -> list[int]:
        return sorted(slot for node, _ in self.nodes() for slot in node.value.tolist())


@pytest.fixture
def envelopes() -> Envelopes:
    """Four envelopes to an extent, all live in order: 0-3 on extent 0, and so on."""
    made = Envelopes(envelope_bytes=4, extent_bytes=16, count=40)
    made.hold(range(10))
    taken = made.take(40)
    assert taken is not None and sorted(taken.tolist()) == list(range(40))
    return made


def kv(envelopes: Envelopes, page_size: int = 1) -> Any:
    """Of an ElasticKv, what eviction asks it for."""
    of_token = envelopes.envelope_bytes // page_size
    units = np.arange(envelopes.n_extents)
    return SimpleNamespace(
        envelopes=envelopes, page_size=page_size, bytes_of=lambda tokens: tokens * of_token, units=lambda: units
    )


def only(envelopes: Envelopes, *groups: range) -> None:
    """Frees everything that is in none of the groups."""
    keep = set(itertools.chain(*groups))
    envelopes.give(np.array([slot for slot in range(40) if slot not in keep], dtype=np.int64))


def test_the_extent_with_the_oldest_prefix_is_emptied_first(envelopes: Envelopes) -> None:
    tree = Tree()
    only(envelopes, range(0, 4), range(4, 8))
    Node(tree.root_node, list(range(0, 4)), used_at=20.0)
    Node(tree.root_node, list(range(4, 8)), used_at=10.0)
    assert prefix_eviction.empty_extents(tree, kv(envelopes), 1) == 4
    assert tree.cached() == [0, 1, 2, 3] and 1 in envelopes.empties()


def test_a_prefix_is_cut_where_the_extent_begins_and_its_front_stays(envelopes: Envelopes) -> None:
    tree = Tree()
    only(envelopes, range(0, 12))
    long = Node(tree.root_node, list(range(0, 10)), used_at=10.0)
    Node(long, [10, 11], used_at=5.0)
    assert prefix_eviction.empty_extents(tree, kv(envelopes), 1) == 4
    assert tree.cached() == list(range(0, 8)) and 2 in envelopes.empties()


def test_an_extent_that_a_running_request_touches_is_left_alone(envelopes: Envelopes) -> None:
    tree = Tree()
    only(envelopes, range(0, 8))
    locked = Node(tree.root_node, [0, 1], used_at=1.0, locked=True)
    Node(locked, [2, 3], used_at=1.0)
    Node(tree.root_node, [4, 5], used_at=9.0)  # 6 and 7 belong to a request that is not in the tree
    assert prefix_eviction.empty_extents(tree, kv(envelopes), 5) == 0
    assert tree.cached() == [0, 1, 2, 3, 4, 5]


def test_eviction_takes_no_more_than_the_extents_asked_for_need(envelopes: Envelopes) -> None:
    tree = Tree()
    only(envelopes, range(0, 16))
    for start in range(0, 16, 4):
        Node(tree.root_node, list(range(start, start + 4)), used_at=float(start))
    assert prefix_eviction.empty_extents(tree, kv(envelopes), 2) == 8
    assert tree.cached() == list(range(8, 16))
    envelopes.audit()


def test_extents_that_leave_together_are_emptied_together(envelopes: Envelopes) -> None:
    tree = Tree()
    only(envelopes, range(0, 16))
    locked = Node(tree.root_node, [0], used_at=1.0, locked=True)
    Node(locked, list(range(1, 8)), used_at=1.0)
    Node(tree.root_node, list(range(8, 16)), used_at=9.0)
    memory = kv(envelopes)
    memory.units()[:4] = [0, 0, 2, 2]
    assert prefix_eviction.empty_extents(tree, memory, 1) == 8, (
        "the older prefix is beside what a running request touches"
    )
    assert tree.cached() == list(range(0, 8)) and {2, 3} <= set(envelopes.empties())


def test_prefix_in_pages_of_several_tokens_is_cut_at_whole_pages(envelopes: Envelopes) -> None:
    """Two tokens to an envelope: extent 1 holds the tokens 8 to 15."""
    tree = Tree()
    only(envelopes, range(0, 8))
    Node(tree.root_node, list(range(0, 16)), used_at=10.0)
    assert prefix_eviction.empty_extents(tree, kv(envelopes, page_size=2), 1) == 8
    assert tree.cached() == list(range(0, 8)) and 1 in envelopes.empties()


class Counted(Envelopes):
    """Envelopes that count how often extents are looked up."""

    looks = 0

    def homes(self, envelopes: Indices) -> Indices:
        self.looks += 1
        return super().homes(envelopes)


def test_extents_are_looked_up_for_all_prefixes_together() -> None:
    """There are thousands of prefixes, and a call for each takes tens of microseconds."""
    looks = []
    for prefixes in (5, 50):
        envelopes, tree = Counted(envelope_bytes=4, extent_bytes=16, count=200), Tree()
        envelopes.hold(range(50))
        envelopes.take(4 * prefixes)
        for start in range(0, 4 * prefixes, 4):
            Node(tree.root_node, list(range(start, start + 4)), used_at=float(start))
        envelopes.looks = 0
        assert prefix_eviction.empty_extents(tree, kv(envelopes), 3) == 12
        looks.append(envelopes.looks)
    assert looks[0] == looks[1] > 0


def test_slots_are_fetched_in_parts_that_a_quota_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_eviction, "SLOTS_TOGETHER", 5)
    copied, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda some: copied.append(sum(map(len, some))) or cat(some))
    slots = [torch.arange(32 * i, 32 * i + 16 * length) for i, length in enumerate((2, 3, 1, 7, 0, 4, 2))]
    found = prefix_eviction.envelopes_of(slots, 16)
    assert [some.tolist() for some in found] == [(each[::16] // 16).tolist() for each in slots]
    assert copied == [5, 1, 7, 4, 2]
    assert prefix_eviction.envelopes_of([], 16) == []


def test_cached_bytes_are_counted_by_doubling_age(envelopes: Envelopes) -> None:
    tree = Tree()
    for used_at, slots in ((99.5, [0]), (97.0, [1, 2]), (90.0, [3]), (50.0, [4, 5, 6])):
        Node(tree.root_node, slots, used_at=used_at)
    Node(tree.root_node, [7], used_at=0.0, locked=True)
    assert prefix_eviction.cached_by_age(
        tree, SimpleNamespace(page_size=1, kinds=[kv(envelopes)], states=None), now=100.0
    ) == [
        (0.0, 4),
        (2.0, 8),
        (8.0, 4),
        (32.0, 12),
    ]
