"""Where memory is found before SGLang allocates, and how long is waited for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.engine_kv import EngineKv
from gpu_scheduler.engines.sglang.kv.provisioning import KvProvisioning
from tests.gpu_scheduler.engines.sglang.scripted import Clock, ScriptedRange

SOFT_S, HARD_S = 0.005, 0.05
NOW = 50.0


class Tree:
    """Cached tokens, all on memory that is held."""

    def __init__(self, kv: ElasticKv, cached: int) -> None:
        self.kv = kv
        self.slots = kv.envelopes.take(cached)

    def evictable_size(self) -> int:
        return 0 if self.slots is None else len(self.slots)

    def cache(self, tokens: int) -> None:
        """So many of those that are free are taken, and cached."""
        more = self.kv.envelopes.take(tokens)
        self.slots = more if self.slots is None else np.concatenate((self.slots, more))

    def evict(self, tokens: int) -> None:
        assert self.slots is not None
        self.kv.envelopes.give(self.slots[:tokens])
        self.slots = self.slots[tokens:]


def made(
    extents: int, limit: int, cached: int = 0, there: int = 10_000
) -> tuple[KvProvisioning, ElasticKv, ScriptedRange, Tree]:
    """Ten slots to an extent; `there`: what the device has."""
    memory = ScriptedRange(100, limit, there)
    kv = ElasticKv(memory, 10, 500, Clock())
    kv.grow(10 * extents, 0.0)
    tree = Tree(kv, cached)
    memory.waits.clear()
    provisioning = KvProvisioning(EngineKv(memory, [kv]), SOFT_S, HARD_S, lambda tree, tokens: tree.evict(*tokens))
    return provisioning, kv, memory, tree


def asking(prompt: int, max_new: int = 8, cached: int = 0) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(max_new_tokens=max_new),
        output_ids=[],
        full_untruncated_fill_ids=[0] * (prompt + cached),
        prefix_len=cached,
        init_next_round_input=lambda tree, cow_mamba: None,
    )


def adding(kv: ElasticKv, tree: Tree, spoken_for: int = 0) -> Any:
    return SimpleNamespace(
        page_size=1,
        tree_cache=tree,
        can_run_list=[],
        memory_budget=SimpleNamespace(total_offset=spoken_for),
        rem_total_tokens=kv.available + tree.evictable_size() - spoken_for,
    )


def test_step_that_fits_into_free_memory_asks_for_none() -> None:
    provisioning, kv, memory, tree = made(extents=2, limit=10)
    provisioning.before_allocation(tree, 20)
    assert memory.waits == [] and kv.available == 20


def test_growth_comes_before_eviction() -> None:
    provisioning, kv, memory, tree = made(extents=2, limit=10, cached=20)
    provisioning.before_allocation(tree, 5)
    assert tree.evictable_size() == 20 and kv.available >= 5 and memory.waits == [SOFT_S]


def test_own_prefixes_are_evicted_and_growth_is_waited_for_ever_less_while_it_is_refused() -> None:
    provisioning, kv, memory, tree = made(extents=20, limit=100, cached=190, there=20)
    clock = kv._clock
    assert isinstance(clock, Clock)
    waited: list[float] = []
    for _ in range(300):
        before = len(memory.waits)
        provisioning.before_allocation(tree, kv.available + 1)
        waited += [clock.now for wait in memory.waits[before:] if wait]
        assert len(memory.waits) > before, "it is asked for all the same"
        assert kv.available > 0 and memory.instead[-1] == kv.bytes_of(tree.evictable_size() + 1)
        tree.cache(1)
        clock.now += 0.01
    gaps = [round(later - sooner, 2) for sooner, later in itertools.pairwise(waited)]
    assert gaps == [0.04, 0.08, 0.16, 0.32, 0.64, 1.28]


def test_prefixes_are_evicted_ahead_between_waits_until_growth_may_succeed_again() -> None:
    provisioning, kv, memory, tree = made(extents=20, limit=100, cached=200, there=20)
    provisioning.before_allocation(tree, 5)
    assert tree.evictable_size() == 195 and memory.waits == [SOFT_S]
    kv.envelopes.take(5)
    provisioning.ahead(tree, NOW)
    assert tree.evictable_size() == 195 - 195 // 32
    kv.envelopes.take(kv.available)
    kv.may_wait_again()
    memory.there = 30
    provisioning.ahead(tree, NOW)
    assert tree.evictable_size() == 189 and memory.waits == [SOFT_S], "the next step asks"
    provisioning.before_allocation(tree, 5)
    assert tree.evictable_size() == 189 and memory.waits == [SOFT_S, SOFT_S] and kv.available >= 5


def test_growth_answer_that_is_yet_to_come_is_no_refusal() -> None:
    provisioning, kv, memory, tree = made(extents=2, limit=100, cached=20)
    memory.slow = True
    provisioning.asked = True
    for _ in range(5):
        provisioning.ask_ahead(tree, (), None, [asking(prompt=10)], 20, 100, 0.0)
        provisioning.asked = True
        provisioning.ahead(tree, NOW)
    assert tree.evictable_size() == 20 and set(memory.waits) == {0.0}
    memory.slow = False
    provisioning.before_allocation(tree, 5)
    assert tree.evictable_size() == 20 and memory.waits[-1] == SOFT_S


def test_cached_prefix_of_a_request_does_not_count_as_evictable_for_it() -> None:
    provisioning, kv, memory, tree = made(extents=10, limit=100, cached=100, there=10)
    request = asking(prompt=50, cached=80)
    provisioning.prefer_growth(adding(kv, tree), request, estimate_cap=20)
    assert memory.instead[-1] == kv.bytes_of(20)
    assert not provisioning.grow_for(adding(kv, tree), request, estimate_cap=20)
    assert memory.instead[-1] == 0


def test_step_that_own_prefixes_do_not_cover_waits_for_memory_despite_a_refusal_before() -> None:
    provisioning, kv, memory, tree = made(extents=2, limit=100, cached=20, there=2)
    provisioning.before_allocation(tree, 5)
    kv.envelopes.take(5)
    clock = kv._clock
    assert isinstance(clock, Clock)
    clock.now += 0.021
    provisioning.before_allocation(tree, 18)
    assert memory.waits == [SOFT_S, HARD_S]


def test_eviction_where_nothing_can_grow_frees_only_what_is_missing() -> None:
    provisioning, kv, _, tree = made(extents=2, limit=2, cached=16)
    provisioning.before_allocation(tree, 9)
    assert kv.available == 9 and tree.evictable_size() == 11


def test_eviction_ahead_frees_a_small_share_for_the_next_steps_which_then_do_not_wait() -> None:
    provisioning, kv, memory, tree = made(extents=40, limit=40, cached=390)
    provisioning.before_allocation(tree, 11)
    assert tree.evictable_size() == 389
    kv.envelopes.take(11)
    memory.waits.clear()
    provisioning.ahead(tree, NOW)
    assert kv.available == 12 and tree.evictable_size() == 377, "a thirty-second part"
    provisioning.ahead(tree, NOW)
    provisioning.before_allocation(tree, 11)
    assert tree.evictable_size() == 377 and memory.waits == []


def test_eviction_ahead_does_nothing_while_memory_can_grow() -> None:
    provisioning, kv, _, tree = made(extents=40, limit=41, cached=390)
    provisioning.before_allocation(tree, 20)
    kv.envelopes.take(kv.available)
    kv.memory.limit = 42  # type: ignore[attr-defined]
    provisioning.ahead(tree, NOW)
    assert tree.evictable_size() == 390


def test_eviction_ahead_counts_memory_that_is_leaving_the_device_already() -> None:
    provisioning, kv, _, tree = made(extents=40, limit=40, cached=400)
    provisioning.before_allocation(tree, 12)
    kv.envelopes.take(12)
    kv._arriving = 12
    provisioning.ahead(tree, NOW)
    assert tree.evictable_size() == 388


def test_eviction_ahead_forgets_a_large_step_after_small_ones() -> None:
    provisioning, kv, _, tree = made(extents=40, limit=40, cached=380)
    provisioning.before_allocation(tree, 20)
    kv.envelopes.take(18)
    for _ in range(30):
        provisioning.before_allocation(tree, 1)
    provisioning.ahead(tree, NOW)
    assert tree.evictable_size() == 380


def test_memory_that_an_engine_evicted_for_itself_is_not_given_back_for_a_while() -> None:
    provisioning, kv, _, tree = made(extents=40, limit=40, cached=400)
    assert not provisioning.evicted_lately(NOW)
    provisioning.before_allocation(tree, 12)
    kv.envelopes.take(12)
    provisioning.ahead(tree, NOW)
    assert provisioning.evicted_lately(NOW + 0.9) and not provisioning.evicted_lately(NOW + 1.1)


def test_decode_step_that_would_retract_a_request_waits_longer_for_memory() -> None:
    provisioning, _, memory, tree = made(extents=1, limit=5)
    tree.slots = None
    provisioning._kv.kinds[0].envelopes.take(10)
    provisioning.before_allocation(tree, 3)
    assert memory.waits == [HARD_S]


def test_next_chunk_fits_when_it_can_be_freed_or_grown_and_is_refused_otherwise() -> None:
    provisioning, _, _, tree = made(extents=3, limit=3, cached=20)
    assert provisioning.provide_chunk(tree, 30) and not provisioning.refused
    assert not provisioning.provide_chunk(tree, 31) and provisioning.refused
    provisioning, _, _, tree = made(extents=1, limit=9)
    assert provisioning.provide_chunk(tree, 80)


def test_refused_request_gets_its_missing_memory_without_waiting() -> None:
    provisioning, kv, memory, tree = made(extents=1, limit=20, cached=5)
    adder = adding(kv, tree, spoken_for=12)
    request = asking(prompt=40, cached=5)
    assert provisioning.grow_for(adder, request, estimate_cap=100) and not provisioning.refused
    after = adding(kv, tree, spoken_for=12)
    assert 40 + 8 + 1 < after.rem_total_tokens - 5
    assert memory.waits and set(memory.waits) == {0.0}


def test_a_request_beyond_the_limit_is_remembered_as_refused() -> None:
    provisioning, kv, _, tree = made(extents=1, limit=2)
    assert not provisioning.grow_for(adding(kv, tree), asking(prompt=100), estimate_cap=100)
    assert provisioning.refused


def test_growth_for_a_request_is_preferred_to_eviction() -> None:
    provisioning, kv, memory, tree = made(extents=1, limit=20, cached=10)
    provisioning.prefer_growth(adding(kv, tree, spoken_for=6), asking(prompt=30, max_new=500), estimate_cap=20)
    assert kv.available >= 30 + 20 + 1 + 6 and memory.waits == [SOFT_S]


def waiting(prompt: int, cached: int = 0) -> Any:
    """One that SGLang has not looked at yet: what is cached of it is found when it is asked for."""
    request = asking(prompt, max_new=3, cached=cached)
    found, request.prefix_len = request.prefix_len, 0
    request.init_next_round_input = lambda tree, cow_mamba: setattr(request, "prefix_len", found)
    return request


def ahead(
    provisioning: KvProvisioning, tree: Tree, behind: list[Any], most: int, chunked: Any = None, running: Any = ()
) -> None:
    provisioning.ask_ahead(tree, running, chunked, behind, estimate_cap=20, most=most, ratio=0.5)


def half(prompt: int, computed: int) -> Any:
    return SimpleNamespace(full_untruncated_fill_ids=[0] * prompt, extend_end=computed)


def test_memory_for_the_prompts_of_the_next_step_is_waited_for_only_if_no_step_was_before() -> None:
    provisioning, kv, memory, tree = made(extents=0, limit=100)
    behind = [waiting(60, cached=1000), waiting(60), waiting(200)]
    ahead(provisioning, tree, behind, most=100)
    assert provisioning.asked and kv.available == 130, "two have a hundred tokens"
    assert memory.waits == [SOFT_S]
    memory.waits.clear()
    provisioning.prefer_growth(adding(kv, tree), behind[0], estimate_cap=20)
    assert not memory.waits, "it is there"
    ahead(provisioning, tree, behind[2:], most=100)
    assert kv.available == 210 and set(memory.waits) == {0.0}, "behind a step"


def test_memory_asked_ahead_includes_what_running_requests_go_on_to_need() -> None:
    provisioning, kv, _, tree = made(extents=1, limit=50)
    ahead(
        provisioning,
        tree,
        [waiting(10)],
        26,
        half(40, 15),
        [asking(prompt=30, max_new=8), asking(prompt=9, max_new=50)],
    )
    assert kv.available == 60, "4 + 10 for outputs, 25 of the half one, 10 + 3 + 1 of the next"


def test_memory_asked_ahead_for_a_prompt_of_many_steps_covers_the_next_step() -> None:
    provisioning, kv, _, tree = made(extents=0, limit=500)
    ahead(provisioning, tree, [waiting(10)], most=100, chunked=half(4000, 100))
    assert kv.available == 110


def test_memory_asked_ahead_counts_only_the_first_of_many_waiting_requests() -> None:
    provisioning, kv, _, tree = made(extents=0, limit=500)
    ahead(provisioning, tree, [waiting(0, cached=500) for _ in range(100)], most=100)
    assert kv.available == 40, "8 times 3 + 1 and one, in whole extents"


def test_memory_is_not_asked_ahead_where_nothing_waits_or_none_could_come() -> None:
    provisioning, kv, memory, tree = made(extents=1, limit=1)
    ahead(provisioning, tree, [], most=100)
    assert not provisioning.asked
    ahead(provisioning, tree, [waiting(60)], most=100)
    assert provisioning.asked and not memory.waits and kv.available == 10


def over_edges(*extents: int) -> tuple[KvProvisioning, ElasticKv, ScriptedRange, Tree]:
    """Slots of three quarters of an extent, on these, the limit; as many as fit are cached."""
    memory = ScriptedRange(100, 100)
    kv = ElasticKv(memory, 75, 500, Clock())
    kv.grow(60, 0.0)
    kv.memory.release([extent for extent in sorted(memory.owned) if extent not in extents])
    kv.envelopes.give_up([extent for extent in range(100) if kv.envelopes.is_held(extent) and extent not in extents])
    memory.limit = len(extents)
    tree = Tree(kv, kv.available)
    provisioning = KvProvisioning(EngineKv(memory, [kv]), SOFT_S, HARD_S, lambda tree, tokens: tree.evict(*tokens))
    return provisioning, kv, memory, tree


def test_prefixes_over_extent_edges_are_evicted_where_a_refused_request_then_fits() -> None:
    provisioning, kv, memory, tree = over_edges(0, 1, 2, 10, 13, 16)
    assert tree.evictable_size() == 4 and kv.in_a_row == 7
    assert not provisioning.grow_for(adding(kv, tree), asking(prompt=4, max_new=1), estimate_cap=100)
    assert provisioning.start_over(tree) and tree.evictable_size() == 0
    assert kv.grow(7, 0.0) and memory.owned == set(range(6))


def test_prefixes_over_extent_edges_stay_where_a_request_fits_already_or_never_would() -> None:
    for prompt in (1, 6):
        provisioning, kv, _, tree = over_edges(0, 1, 2, 10, 13, 16)
        provisioning.grow_for(adding(kv, tree), asking(prompt=prompt, max_new=1), estimate_cap=100)
        assert not provisioning.start_over(tree) and tree.evictable_size() == 4
    provisioning, kv, _, tree = over_edges(0, 1, 2, 10, 13, 16)
    assert not provisioning.start_over(tree), "nobody was refused"


def test_idle_engine_waits_longer_for_room_for_incoming_kv_than_a_busy_one() -> None:
    for idle in (False, True):
        provisioning, _, memory, tree = made(extents=1, limit=20)
        assert provisioning.provide_beside(tree, 100, 0, idle=idle) == 100
        assert (memory.waits[0] > HARD_S) is idle


def test_incoming_kv_is_taken_as_far_as_there_is_room() -> None:
    provisioning, _, _, tree = made(extents=1, limit=20, there=5)
    assert provisioning.provide_beside(tree, 100, 0, idle=True) == 50


def test_room_for_incoming_requests_grows_for_their_outputs_too_and_their_kv_comes_first() -> None:
    provisioning, kv, _, tree = made(extents=1, limit=20)
    assert provisioning.provide_beside(tree, 100, 60, idle=True) == 100
    assert kv.available == 160
    provisioning, kv, _, tree = made(extents=1, limit=20, there=11)
    assert provisioning.provide_beside(tree, 100, 60, idle=True) == 100, "of what was short the KV got its part"
    provisioning, kv, _, tree = made(extents=3, limit=3, cached=20)
    assert provisioning.provide_beside(tree, 10, 60, idle=True) == 10
    assert tree.evictable_size() == 20, "no cached prefix goes for what may never be said"
