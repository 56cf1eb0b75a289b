"""Where memory is found before SGLang allocates, and how long is waited for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu_scheduler.engines.sglang.kv.admission import Admission
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
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
) -> tuple[Admission, ElasticKv, ScriptedRange, Tree]:
    """Ten slots to an extent; `there`: what the device has."""
    memory = ScriptedRange(100, limit, there)
    kv = ElasticKv(memory, 10, 500, Clock())
    kv.grow(10 * extents, 0.0)
    tree = Tree(kv, cached)
    memory.waits.clear()
    return Admission(kv, SOFT_S, HARD_S, lambda tree, tokens: tree.evict(tokens)), kv, memory, tree


def asking(prompt: int, max_new: int = 8, cached: int = 0) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(max_new_tokens=max_new),
        output_ids=[],
        full_untruncated_fill_ids=[0] * (prompt + cached),
        prefix_indices=[0] * cached,
        init_next_round_input=lambda tree: None,
    )


def adding(kv: ElasticKv, tree: Tree, spoken_for: int = 0) -> Any:
    return SimpleNamespace(
        page_size=1,
        tree_cache=tree,
        can_run_list=[],
        rem_total_token_offset=spoken_for,
        rem_total_tokens=kv.available + tree.evictable_size() - spoken_for,
    )


def test_what_is_free_is_used_without_asking_anybody() -> None:
    admission, kv, memory, tree = made(extents=2, limit=10)
    admission.before_allocation(tree, 20)
    assert memory.waits == [] and kv.available == 20


def test_growth_comes_before_eviction() -> None:
    admission, kv, memory, tree = made(extents=2, limit=10, cached=20)
    admission.before_allocation(tree, 5)
    assert tree.evictable_size() == 20 and kv.available >= 5 and memory.waits == [SOFT_S]


def test_while_nobody_has_anything_older_own_prefixes_go_and_growth_is_waited_for_less_and_less() -> None:
    admission, kv, memory, tree = made(extents=20, limit=100, cached=190, there=20)
    clock = kv._clock
    assert isinstance(clock, Clock)
    waited: list[float] = []
    for _ in range(300):
        before = len(memory.waits)
        admission.before_allocation(tree, kv.available + 1)
        waited += [clock.now for wait in memory.waits[before:] if wait]
        assert len(memory.waits) > before, "it is asked for all the same"
        assert kv.available > 0 and memory.instead[-1] == kv.bytes_of(tree.evictable_size() + 1)
        tree.cache(1)
        clock.now += 0.01
    gaps = [round(later - sooner, 2) for sooner, later in itertools.pairwise(waited)]
    assert gaps == [0.04, 0.08, 0.16, 0.32, 0.64, 1.28]


def test_between_two_waits_prefixes_are_evicted_ahead_and_news_ends_that() -> None:
    admission, kv, memory, tree = made(extents=20, limit=100, cached=200, there=20)
    admission.before_allocation(tree, 5)
    assert tree.evictable_size() == 195 and memory.waits == [SOFT_S]
    kv.envelopes.take(5)
    admission.ahead(tree, NOW)
    assert tree.evictable_size() == 195 - 195 // 32
    kv.envelopes.take(kv.available)
    kv.may_wait_again()
    memory.there = 30
    admission.ahead(tree, NOW)
    assert tree.evictable_size() == 189 and memory.waits == [SOFT_S], "the next step asks"
    admission.before_allocation(tree, 5)
    assert tree.evictable_size() == 189 and memory.waits == [SOFT_S, SOFT_S] and kv.available >= 5


def test_an_answer_that_is_not_there_yet_is_no_refusal() -> None:
    admission, kv, memory, tree = made(extents=2, limit=100, cached=20)
    memory.slow = True
    admission.asked = True
    for _ in range(5):
        admission.ask_ahead(tree, (), None, [asking(prompt=10)], 20, 100, 0.0)
        admission.asked = True
        admission.ahead(tree, NOW)
    assert tree.evictable_size() == 20 and set(memory.waits) == {0.0}
    memory.slow = False
    admission.before_allocation(tree, 5)
    assert tree.evictable_size() == 20 and memory.waits[-1] == SOFT_S


def test_what_a_request_finds_cached_is_not_what_could_be_evicted_for_it() -> None:
    admission, kv, memory, tree = made(extents=10, limit=100, cached=100, there=10)
    request = asking(prompt=50, cached=80)
    admission.prefer_growth(adding(kv, tree), request, estimate_cap=20)
    assert memory.instead[-1] == kv.bytes_of(20)
    assert not admission.make_room(adding(kv, tree), request, estimate_cap=20)
    assert memory.instead[-1] == 0


def test_a_step_that_own_prefixes_do_not_cover_waits_for_others_whatever_was_refused_before() -> None:
    admission, kv, memory, tree = made(extents=2, limit=100, cached=20, there=2)
    admission.before_allocation(tree, 5)
    kv.envelopes.take(5)
    clock = kv._clock
    assert isinstance(clock, Clock)
    clock.now += 0.021
    admission.before_allocation(tree, 18)
    assert memory.waits == [SOFT_S, HARD_S]


def test_only_what_is_missing_is_evicted_when_nothing_can_grow() -> None:
    admission, kv, _, tree = made(extents=2, limit=2, cached=16)
    admission.before_allocation(tree, 9)
    assert kv.available == 9 and tree.evictable_size() == 11


def test_between_two_steps_a_little_of_much_is_evicted_for_the_next_ones_and_they_wait_for_nothing() -> None:
    admission, kv, memory, tree = made(extents=40, limit=40, cached=390)
    admission.before_allocation(tree, 11)
    assert tree.evictable_size() == 389
    kv.envelopes.take(11)
    memory.waits.clear()
    admission.ahead(tree, NOW)
    assert kv.available == 12 and tree.evictable_size() == 377, "a thirty-second part"
    admission.ahead(tree, NOW)
    admission.before_allocation(tree, 11)
    assert tree.evictable_size() == 377 and memory.waits == []


def test_nothing_is_evicted_ahead_while_memory_can_grow() -> None:
    admission, kv, _, tree = made(extents=40, limit=41, cached=390)
    admission.before_allocation(tree, 20)
    kv.envelopes.take(kv.available)
    kv.memory.limit = 42  # type: ignore[attr-defined]
    admission.ahead(tree, NOW)
    assert tree.evictable_size() == 390


def test_what_is_on_its_way_from_the_device_is_not_evicted_for_again() -> None:
    admission, kv, _, tree = made(extents=40, limit=40, cached=400)
    admission.before_allocation(tree, 12)
    kv.envelopes.take(12)
    kv._leaving = 12
    admission.ahead(tree, NOW)
    assert tree.evictable_size() == 388


def test_small_steps_make_a_large_one_forgotten() -> None:
    admission, kv, _, tree = made(extents=40, limit=40, cached=380)
    admission.before_allocation(tree, 20)
    kv.envelopes.take(18)
    for _ in range(30):
        admission.before_allocation(tree, 1)
    admission.ahead(tree, NOW)
    assert tree.evictable_size() == 380


def test_what_an_engine_evicted_for_itself_is_not_given_back_for_a_while() -> None:
    admission, kv, _, tree = made(extents=40, limit=40, cached=400)
    assert not admission.evicts(NOW)
    admission.before_allocation(tree, 12)
    kv.envelopes.take(12)
    admission.ahead(tree, NOW)
    assert admission.evicts(NOW + 0.9) and not admission.evicts(NOW + 1.1)


def test_a_decode_that_would_be_retracted_waits_longer() -> None:
    admission, _, memory, tree = made(extents=1, limit=5)
    tree.slots = None
    admission._kv.envelopes.take(10)
    admission.before_allocation(tree, 3)
    assert memory.waits == [HARD_S]


def test_the_next_chunk_fits_when_it_can_be_freed_or_grown_and_is_refused_otherwise() -> None:
    admission, _, _, tree = made(extents=3, limit=3, cached=20)
    assert admission.fits(tree, 30) and not admission.refused
    assert not admission.fits(tree, 31) and admission.refused
    admission, _, _, tree = made(extents=1, limit=9)
    assert admission.fits(tree, 80)


def test_a_refused_request_gets_what_the_adder_lacks_without_waiting() -> None:
    admission, kv, memory, tree = made(extents=1, limit=20, cached=5)
    adder = adding(kv, tree, spoken_for=12)
    request = asking(prompt=40, cached=5)
    assert admission.make_room(adder, request, estimate_cap=100) and not admission.refused
    after = adding(kv, tree, spoken_for=12)
    assert 40 + 8 + 1 < after.rem_total_tokens - 5
    assert memory.waits and set(memory.waits) == {0.0}


def test_a_request_beyond_the_limit_is_remembered_as_refused() -> None:
    admission, kv, _, tree = made(extents=1, limit=2)
    assert not admission.make_room(adding(kv, tree), asking(prompt=100), estimate_cap=100)
    assert admission.refused


def test_memory_for_a_request_is_preferred_to_evicting_for_it() -> None:
    admission, kv, memory, tree = made(extents=1, limit=20, cached=10)
    admission.prefer_growth(adding(kv, tree, spoken_for=6), asking(prompt=30, max_new=500), estimate_cap=20)
    assert kv.available >= 30 + 20 + 1 + 6 and memory.waits == [SOFT_S]


def waiting(prompt: int, cached: int = 0) -> Any:
    """One that SGLang has not looked at yet: what is cached of it is found when it is asked for."""
    request = asking(prompt, max_new=3, cached=cached)
    found, request.prefix_indices = request.prefix_indices, []
    request.init_next_round_input = lambda tree: setattr(request, "prefix_indices", found)
    return request


def ahead(
    admission: Admission, tree: Tree, behind: list[Any], most: int, chunked: Any = None, running: Any = ()
) -> None:
    admission.ask_ahead(tree, running, chunked, behind, estimate_cap=20, most=most, ratio=0.5)


def half(prompt: int, computed: int) -> Any:
    return SimpleNamespace(full_untruncated_fill_ids=[0] * prompt, extend_range=SimpleNamespace(end=computed))


def test_memory_for_the_prompts_of_the_next_step_is_asked_for_at_once_and_waited_for_only_if_none_was_before() -> None:
    admission, kv, memory, tree = made(extents=0, limit=100)
    behind = [waiting(60, cached=1000), waiting(60), waiting(200)]
    ahead(admission, tree, behind, most=100)
    assert admission.asked and kv.available == 130, "two have a hundred tokens"
    assert memory.waits == [SOFT_S]
    memory.waits.clear()
    admission.prefer_growth(adding(kv, tree), behind[0], estimate_cap=20)
    assert not memory.waits, "it is there"
    ahead(admission, tree, behind[2:], most=100)
    assert kv.available == 210 and set(memory.waits) == {0.0}, "behind a step"


def test_memory_is_asked_ahead_beside_what_those_that_run_go_on_to_need() -> None:
    admission, kv, _, tree = made(extents=1, limit=50)
    ahead(
        admission, tree, [waiting(10)], 26, half(40, 15), [asking(prompt=30, max_new=8), asking(prompt=9, max_new=50)]
    )
    assert kv.available == 60, "4 + 10 for outputs, 25 of the half one, 10 + 3 + 1 of the next"


def test_of_a_prompt_that_takes_many_steps_the_next_one_is_asked_for() -> None:
    admission, kv, _, tree = made(extents=0, limit=500)
    ahead(admission, tree, [waiting(10)], most=100, chunked=half(4000, 100))
    assert kv.available == 110


def test_only_the_first_ones_of_many_are_looked_at() -> None:
    admission, kv, _, tree = made(extents=0, limit=500)
    ahead(admission, tree, [waiting(0, cached=500) for _ in range(100)], most=100)
    assert kv.available == 40, "8 times 3 + 1 and one, in whole extents"


def test_nothing_is_asked_ahead_where_nothing_waits_or_nothing_could_come() -> None:
    admission, kv, memory, tree = made(extents=1, limit=1)
    ahead(admission, tree, [], most=100)
    assert not admission.asked
    ahead(admission, tree, [waiting(60)], most=100)
    assert admission.asked and not memory.waits and kv.available == 10


def over_edges(*extents: int) -> tuple[Admission, ElasticKv, ScriptedRange, Tree]:
    """Slots of three quarters of an extent, on these, the limit; as many as fit are cached."""
    memory = ScriptedRange(100, 100)
    kv = ElasticKv(memory, 75, 500, Clock())
    kv.grow(60, 0.0)
    kv.memory.release([extent for extent in sorted(memory.owned) if extent not in extents])
    kv.envelopes.give_up([extent for extent in range(100) if kv.envelopes.is_held(extent) and extent not in extents])
    memory.limit = len(extents)
    tree = Tree(kv, kv.available)
    return Admission(kv, SOFT_S, HARD_S, lambda tree, tokens: tree.evict(tokens)), kv, memory, tree


def test_what_would_fit_into_the_extents_if_they_were_in_a_row_gets_them_in_a_row() -> None:
    admission, kv, memory, tree = over_edges(0, 1, 2, 10, 13, 16)
    assert tree.evictable_size() == 4 and kv.in_a_row == 7
    assert not admission.make_room(adding(kv, tree), asking(prompt=4, max_new=1), estimate_cap=100)
    assert admission.start_over(tree) and tree.evictable_size() == 0
    assert kv.grow(7, 0.0) and memory.owned == set(range(6))


def test_nothing_is_evicted_for_what_would_not_fit_in_a_row_either_or_fits_already() -> None:
    for prompt in (1, 6):
        admission, kv, _, tree = over_edges(0, 1, 2, 10, 13, 16)
        admission.make_room(adding(kv, tree), asking(prompt=prompt, max_new=1), estimate_cap=100)
        assert not admission.start_over(tree) and tree.evictable_size() == 4
    admission, kv, _, tree = over_edges(0, 1, 2, 10, 13, 16)
    assert not admission.start_over(tree), "nobody was refused"


def test_an_idle_engine_waits_longer_for_what_comes_from_elsewhere_than_one_whose_requests_wait() -> None:
    for idle in (False, True):
        admission, _, memory, tree = made(extents=1, limit=20)
        assert admission.room_beside(tree, 100, 0, idle=idle) == 100
        assert (memory.waits[0] > HARD_S) is idle


def test_of_what_comes_from_elsewhere_as_much_is_taken_as_there_is_room_for() -> None:
    admission, _, _, tree = made(extents=1, limit=20, there=5)
    assert admission.room_beside(tree, 100, 0, idle=True) == 50


def test_room_is_grown_for_what_requests_that_come_have_yet_to_say_and_kv_that_is_there_goes_first() -> None:
    admission, kv, _, tree = made(extents=1, limit=20)
    assert admission.room_beside(tree, 100, 60, idle=True) == 100
    assert kv.available == 160
    admission, kv, _, tree = made(extents=1, limit=20, there=11)
    assert admission.room_beside(tree, 100, 60, idle=True) == 100, "of what was short the KV got its part"
    admission, kv, _, tree = made(extents=3, limit=3, cached=20)
    assert admission.room_beside(tree, 10, 60, idle=True) == 10
    assert tree.evictable_size() == 20, "no cached prefix goes for what may never be said"
