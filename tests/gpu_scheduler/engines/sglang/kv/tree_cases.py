"""The prefix tree over SGLang's own: cases that run in a process which has imported SGLang (`forks`).
`test_prefix_tree.py` names them."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gpu_scheduler.engines.sglang.kv import prefix_tree
from gpu_scheduler.engines.sglang.kv.prefix_tree import PrefixTree
from tests.gpu_scheduler.engines.sglang.kv.trees import Slots, cache_over

_EXAMPLES, _STEPS = 60, 30


class Clock:
    """The time of the tree, which passes when a case says so."""

    def __init__(self) -> None:
        self.now = 100.0
        patch.object(prefix_tree, "time", self).start()

    def monotonic(self) -> float:
        return self.now


class Bench:
    """A tree, its slots, and what is cached, by a model of plain lists."""

    def __init__(self, page_size: int = 1) -> None:
        self.clock, self.slots, self.page_size = Clock(), Slots(), page_size
        self.cache = cache_over(self.slots, page_size)
        self.tree = PrefixTree(self.cache)

    def put(self, tokens: list[int]) -> torch.Tensor:
        """Caches a prompt as an engine does that has computed it: tokens that are cached already keep their slots."""
        key = self.tree.key(tokens)
        there = self.tree.match(key).slots
        fresh = self.slots.take(len(key) - len(there), self.page_size)
        value = torch.cat([there, fresh])
        self.tree.insert(key, value, len(there))
        return value

    def node_of(self, tokens: list[int]) -> Any:
        """The node that ends where `tokens` do."""
        return self.cache.resolve_node_handle(self.tree.match(self.tree.key(tokens)).node)

    def used_longest_ago(self, tokens: int) -> list[int]:
        """Slots of the leaves that leave if the one that was used longest ago is looked for among all, each time."""
        tree, gone = self.tree, set[Any]()
        slots: list[int] = []
        unlocked = [node for node, _ in tree.unlocked_nodes()]
        while len(slots) < tokens:
            leaves = [each for each in unlocked if each not in gone and gone.issuperset(each.children.values())]
            if not leaves:
                break
            oldest = min(leaves, key=lambda each: each.last_access_time)
            gone.add(oldest)
            slots += tree.slots(oldest).tolist()
        return slots


# --- cases


def another_core_is_refused() -> None:
    cache = cache_over(Slots(), 1)
    cache.tree_core = object()
    try:
        PrefixTree(cache)
    except TypeError as error:
        assert "object" in str(error)
    else:
        raise AssertionError


def a_node_is_as_old_as_its_last_use() -> None:
    bench = Bench()
    bench.put([1, 2, 3, 4])
    bench.clock.now = 110.0
    bench.put([5, 6])
    bench.clock.now = 120.0
    assert sorted(bench.tree.unlocked_ages(125.0)) == [(15.0, 2), (25.0, 4)]
    assert len(bench.tree.match(bench.tree.key([1, 2, 3, 4])).slots) == 4
    assert sorted(bench.tree.unlocked_ages(125.0)) == [(5.0, 4), (15.0, 2)]


def a_prefix_that_shares_its_beginning_with_another_stays_as_old_as_it_was() -> None:
    bench = Bench()
    bench.put([1, 2, 3, 4])
    bench.clock.now = 110.0
    bench.put([9])
    bench.clock.now = 120.0
    bench.put([1, 2, 7])  # the first one is split, and its rear was not used
    assert sorted(bench.tree.unlocked_ages(120.0)) == [(0.0, 1), (0.0, 2), (10.0, 1), (20.0, 2)]
    assert bench.tree.evict(1) == 2, "the one used longest ago goes first"
    assert sorted(bench.slots.freed) == [2, 3]
    assert bench.tree.evict(1) == 1 and bench.slots.freed[2:] == [4]


def a_locked_prefix_is_neither_evicted_nor_named_unlocked() -> None:
    bench = Bench()
    bench.put([1, 2])
    bench.put([1, 2, 3])
    bench.put([4])
    lock = bench.tree.lock(bench.tree.match(bench.tree.key([1, 2])).node)
    assert bench.tree.evictable_size() == 2
    assert sorted(len(bench.tree.slots(node)) for node, _ in bench.tree.unlocked_nodes()) == [1, 1]
    assert len(list(bench.tree.nodes())) == 3
    assert bench.tree.evict(100) == 2 and bench.tree.evictable_size() == 0
    bench.tree.unlock(lock)
    assert bench.tree.evictable_size() == 2 and bench.tree.evict(100) == 2


def a_cut_keeps_the_front_and_leaves_the_slots_to_the_caller() -> None:
    bench = Bench(page_size=2)
    bench.put([1, 2, 3, 4, 5, 6])
    bench.put([1, 2, 3, 4, 5, 6, 7, 8])
    bench.clock.now = 130.0
    node = bench.node_of([1, 2, 3, 4, 5, 6])
    assert not node.parent.key, "the first one, below the root"
    bench.clock.now = 140.0
    taken = bench.tree.cut(node, 2)
    assert taken[0] is node and sorted(slot for each in taken for slot in bench.tree.slots(each).tolist()) == [
        *range(2, 8)
    ]
    assert not bench.slots.freed, "they are the caller's"
    assert list(bench.tree.unlocked_ages(150.0)) == [(20.0, 2)], "the front is as old as it was"
    assert bench.tree.match(bench.tree.key([1, 2, 3, 4])).slots.tolist() == [0, 1]
    bench.tree.check()


def slots_of_tokens_that_came_twice_are_freed_once() -> None:
    bench = Bench(page_size=2)
    bench.put([1, 2])
    key = bench.tree.key([1, 2, 3, 4, 5, 6])
    there = bench.tree.match(key).slots
    fresh = bench.slots.take(4, 2)
    bench.put([1, 2, 3, 4])  # another request computes some of it meanwhile
    bench.tree.insert(key, torch.cat([there, fresh]), len(there))
    assert bench.slots.freed == fresh[:2].tolist()
    assert len(bench.tree.match(key).slots) == 6


def prefixes_of_adapters_are_kept_apart() -> None:
    bench = Bench()
    bench.put([1, 2])
    assert len(bench.tree.match(bench.tree.key([1, 2], "adapter")).slots) == 0


class Books(RuleBasedStateMachine):
    """Prefixes come, are used, locked, moved, cut and evicted. SGLang's own numbers of the tree, walks over it, and the
    slots that were handed out agree."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(self.page_size)
        self.locks: list[Any] = []
        self.locked: list[list[int]] = []
        """Tokens that are locked, with the slots that they had then."""
        self.taken: list[int] = []
        """Slots that cuts have left to us."""

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)

    @rule(tokens=tokens)
    def put(self, tokens: list[int]) -> None:
        self.bench.clock.now += 1.0
        self.bench.put(tokens)

    @rule(tokens=tokens)
    def use(self, tokens: list[int]) -> None:
        self.bench.clock.now += 1.0
        found = self.bench.tree.match(self.bench.tree.key(tokens))
        node = self.bench.cache.resolve_node_handle(found.node)
        while node.parent is not None:
            assert node.used_at == self.bench.clock.now
            node = node.parent

    @rule(tokens=tokens)
    def lock(self, tokens: list[int]) -> None:
        found = self.bench.tree.match(self.bench.tree.key(tokens))
        self.locks.append(self.bench.tree.lock(found.node))
        self.locked.append(found.slots.tolist())

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.locks) - 1))
        self.bench.tree.unlock(self.locks.pop(which))
        self.locked.pop(which)

    @rule(tokens=st.integers(1, 20))
    def evict(self, tokens: int) -> None:
        could, before = self.bench.tree.evictable_size(), len(self.bench.slots.freed)
        expected = self.bench.used_longest_ago(tokens)
        evicted = self.bench.tree.evict(tokens)
        assert min(tokens, could) <= evicted == len(self.bench.slots.freed) - before
        assert sorted(self.bench.slots.freed[before:]) == sorted(expected)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        nodes = [node for node, _ in self.bench.tree.unlocked_nodes()]
        if not nodes:
            return
        node = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        slots = self.bench.tree.slots(node).tolist()
        keep = data.draw(st.integers(0, len(slots) // self.page_size - 1)) * self.page_size
        used_at, others = node.used_at, [each for each, _ in self.bench.tree.nodes()]
        taken = self.bench.tree.cut(node, keep)
        assert taken[0] is node and self.bench.tree.slots(node).tolist() == slots[keep:]
        self.taken += [slot for each in taken for slot in self.bench.tree.slots(each).tolist()]
        now = [each for each, _ in self.bench.tree.nodes()]
        fronts = [each for each in now if each not in others]
        assert len(now) == len(others) - len(taken) + bool(keep) and len(fronts) == bool(keep)
        assert all(front.used_at == used_at for front in fronts)

    @rule(by=st.integers(1, 5))
    def move(self, by: int) -> None:
        """All that no request uses moves to other places."""
        for node, _ in self.bench.tree.unlocked_nodes():
            old = self.bench.tree.slots(node)
            self.taken += old.tolist()
            self.bench.tree.set_slots(node, self.bench.slots.take(len(old), self.page_size))

    @invariant()
    def all_accounts_agree(self) -> None:
        tree, slots = self.bench.tree, self.bench.slots
        tree.check()
        cached = [slot for node, _ in tree.nodes() for slot in tree.slots(node).tolist()]
        everywhere = [*cached, *slots.freed, *self.taken]
        assert len(set(everywhere)) == len(everywhere), "a slot is in one place"
        unlocked = sum(len(tree.slots(node)) for node, _ in tree.unlocked_nodes())
        ages = list(tree.unlocked_ages(self.bench.clock.now))
        assert unlocked == tree.evictable_size() == sum(tokens for _, tokens in ages)
        assert all(age >= 0 and math.isfinite(age) for age, _ in ages)
        for each in self.locked:
            assert set(each) <= set(cached), "what is locked stays where it is"
        for node, depth in tree.nodes():
            assert depth % self.page_size == 0 and len(tree.slots(node)) % self.page_size == 0
            assert node.parent.used_at >= node.used_at or not node.parent.key, "a beginning is used with its rest"


class BooksInPages(Books):
    page_size = 3


def _agree(machine: type[Books]) -> None:
    given = settings(
        max_examples=_EXAMPLES,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=given)  # type: ignore[no-untyped-call]


def books_agree() -> None:
    _agree(Books)


def books_in_pages_agree() -> None:
    _agree(BooksInPages)


_WORD = st.lists(st.integers(0, 2), min_size=1, max_size=6)
_STEP = st.tuples(st.sampled_from(["put"] * 5 + ["use"] * 3 + ["evict"] * 3 + ["lock", "unlock", "cut"]), _WORD)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_STEP, min_size=30, max_size=60), st.sampled_from([0, 1024]))
def what_was_used_longest_ago_is_evicted_first(steps: list[tuple[str, list[int]]], heap_at_least: int) -> None:
    with patch.object(prefix_tree, "_HEAP_AT_LEAST", heap_at_least):
        bench, locks = Bench(), list[Any]()
        tree = bench.tree
        for kind, word in steps:
            bench.clock.now += 1.0
            if kind == "put":
                bench.put(word)
            elif kind == "use":
                tree.match(tree.key(word))
            elif kind == "evict":
                expected, before = bench.used_longest_ago(len(word)), len(bench.slots.freed)
                tree.evict(len(word))
                assert sorted(bench.slots.freed[before:]) == sorted(expected)
            elif kind == "lock":
                locks.append(tree.lock(tree.match(tree.key(word)).node))
            elif kind == "unlock" and locks:
                tree.unlock(locks.pop(len(word) % len(locks)))
            elif kind == "cut" and (nodes := [node for node, _ in tree.unlocked_nodes()]):
                tree.cut(nodes[sum(word) % len(nodes)], 0)


def the_heap_of_leaves_does_not_grow_without_end() -> None:
    bench = Bench()
    for step in range(100):
        for first in range(50):
            bench.put([first, step])
        for node, _ in list(bench.tree.unlocked_nodes()):
            if node.parent is bench.cache.tree_core.root_node:
                bench.tree.cut(node, 0)  # what has to leave for others leaves so, without an eviction of SGLang's
    assert len(bench.cache.tree_core._by_use) < 1200


def a_leaf_is_found_once_where_the_heap_becomes_too_large_meanwhile() -> None:
    bench = Bench()
    for word in range(6):
        bench.put([word])
    for word in range(2, 6):  # fewer leaves are left than the heap has entries for
        bench.tree.lock(bench.tree.match(bench.tree.key([word])).node)
    bench.tree.match(bench.tree.key([1]))  # its entry is out of date
    with patch.object(prefix_tree, "_HEAP_AT_LEAST", 0):
        assert bench.tree.evict(2) == 2


def what_has_left_the_tree_is_referred_to_no_longer() -> None:
    bench = Bench()
    for first in range(20):
        bench.put([first, 1, 2])
    slots = [weakref.ref(bench.tree.slots(node)) for node, _ in bench.tree.nodes()]
    collector_was_on = gc.isenabled()
    gc.disable()
    try:
        assert bench.tree.evict(30) == 30
        assert sum(each() is None for each in slots) == 10
        assert bench.tree.evict(30) == 30
        assert not any(each() for each in slots)
    finally:
        if collector_was_on:
            gc.enable()


def a_cache_that_evicts_by_anything_but_the_last_use_is_refused() -> None:
    cache = cache_over(Slots(), 1)
    cache.tree_core.eviction_strategy = object()
    try:
        PrefixTree(cache)
    except TypeError as error:
        assert "last use" in str(error)
    else:
        raise AssertionError
