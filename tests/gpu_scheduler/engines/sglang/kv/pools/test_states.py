"""Memory of states beside that of tokens, under one limit: what is promised to the requests of a step is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from gpu_scheduler.engines.sglang.kv.engine_kv import EngineKv
from gpu_scheduler.engines.sglang.kv.provisioning import KvProvisioning
from gpu_scheduler.engines.sglang.kv.state_provisioning import StateProvisioning
from gpu_scheduler.engines.sglang.model.stats import EngineCounters
from gpu_scheduler.engines.sglang.policy.envelopes import Indices
from gpu_scheduler.engines.sglang.policy.layout import distinct
from gpu_scheduler.engines.sglang.step.reclaim import Reclaim
from tests.gpu_scheduler.engines.sglang.forks import Imported
from tests.gpu_scheduler.engines.sglang.scripted import Clock, ScriptedRange

EXTENT, STATE_EXTENTS = 100, 3
"""Bytes of an extent, which has ten tokens, and extents of a state."""
CAP = 8


class LateIds:
    """The transfers of a GPU, whose numbers arrive once `poll` or `settle` is called."""

    def __init__(self) -> None:
        self._coming: list[tuple[torch.Tensor, Callable[[Indices], None]]] = []

    def send(self, numbers: Indices) -> torch.Tensor:
        return torch.from_numpy(numbers)

    def fetch(self, numbers: torch.Tensor, arrived: Callable[[Indices], None]) -> None:
        self._coming.append((numbers.clone(), arrived))

    def arrived(self) -> int:
        return 0

    def poll(self, most: int | None = None) -> None:
        self.settle()

    def settle(self) -> None:
        while self._coming:
            numbers, arrived = self._coming.pop(0)
            arrived(distinct(numbers.numpy()))


class Stretch(ScriptedRange):
    """One of two stretches of a range, which share its limit."""

    beside: ScriptedRange

    def headroom(self) -> int:
        return max(0, self.limit - len(self.owned) - len(self.beside.owned))


class Books:
    """Tokens and states of a model, with requests that run and a cache that has the state of each prefix."""

    def __init__(self, limit: int) -> None:
        self.of_tokens, self.of_states = Stretch(EXTENT, limit), Stretch(EXTENT, limit)
        self.of_tokens.beside, self.of_states.beside = self.of_states, self.of_tokens
        clock = Clock()
        self.clock, ids = clock, LateIds()
        self.tokens = ElasticKv(self.of_tokens, EXTENT // 10, 400, clock, ids=ids)
        self.states = ElasticKv(self.of_states, STATE_EXTENTS * EXTENT, 30, clock)
        self.kv = EngineKv(self.of_tokens, [self.tokens], 0, self.states)  # type: ignore[arg-type]
        self.kv.give_states = self.give_states
        self.kv.hold_dummy(0.0)
        self.cached: list[tuple[Any, Any]] = []
        """(tokens, state) of each prefix, the one used longest ago first."""
        self.running: list[tuple[Any, Any]] = []
        self.provisioning = KvProvisioning(self.kv, 0.0, 0.0, lambda _, tokens: self.evict(*tokens), self.empty)
        self.state_provisioning = StateProvisioning(
            self.kv, self.states, self.provisioning, 0.0, 0.0, self.empty, self.evict_states
        )

    # what the provisioning asks of a tree

    def look_up(self, request: Any) -> None:
        """Sets a request's tokens, which a fresh request lacks, and has its cached prefix count as used now, as SGLang
        does."""
        known = [each for each in self.cached if each is request.goes_on]
        if known:
            self.cached = [*(each for each in self.cached if each is not request.goes_on), *known]
        request.prefix_len = sum(len(tokens) for tokens, _ in known)
        request.last_node = id(request.goes_on)
        request.full_untruncated_fill_ids = [0] * (request.prefix_len + request.prompt)

    def evictable_size(self) -> int:
        return sum(len(tokens) for tokens, _ in self.cached)

    def mamba_evictable_size(self) -> int:
        return len(self.cached)

    def evict(self, tokens: int) -> None:
        while tokens > 0 and self.cached:
            tokens -= self.evict_one()

    def evict_states(self, count: int) -> None:
        for _ in range(count):
            self.evict_one()

    def evict_one(self) -> int:
        slots, state = self.cached.pop(0)
        self.tokens.free(torch.from_numpy(slots))
        self.states.free(torch.from_numpy(state))
        return len(slots)

    def give_states(self, extents: int) -> int:
        left = self.states.give_up_spare(self.kv.promised)
        while left < extents and self.cached:
            self.evict_one()
            self.kv.settle()
            left += self.states.give_up_spare(self.kv.promised)
        return left

    def empty(self, _kind: int, extents: int) -> None:
        while self.tokens.leaving() < extents and self.cached:
            self.evict_one()
            self.kv.settle()
        self.tokens.give_up_empties()

    # steps

    def admit(self, prompts: list[int], goes_on: Sequence[int] = ()) -> int:
        """Admits as many requests as SGLang would, with their tokens; how many. `goes_on`: numbers of the cached
        prefixes that the first ones go on from."""
        waiting = [waiting_for(prompt, CAP) for prompt in prompts]
        for request, number in zip(waiting, goes_on, strict=False):
            request.goes_on = self.cached[number]
        room = self.state_provisioning.provide(self, waiting, [], 64, CAP, 0.0)
        admitted = []
        for prompt in prompts[:room]:
            if sum(admitted) + prompt > self.tokens.available + self.evictable_size():
                break
            admitted.append(prompt)
        self.provisioning.before_allocation(self, sum(admitted))
        for prompt in admitted:
            slots, state = self.tokens.envelopes.take(prompt), self.states.envelopes.take(1)
            assert slots is not None and state is not None, "SGLang dies where there is none"
            self.running.append((slots, state))
        self.kv.promised = 0
        self.state_provisioning.note_taken(len(admitted), self.clock.now)
        return len(admitted)

    def between_steps(self) -> None:
        """The engine's work between two steps, as far as it moves states: numbers arrive, and some leave ahead."""
        self.kv.poll()
        self.state_provisioning.ahead(self, self.clock.now)
        self.provisioning.ahead(self, self.clock.now)

    def end(self, number: int) -> None:
        self.cached.append(self.running.pop(number % len(self.running)))

    def audit(self) -> None:
        for kind in (self.tokens, self.states):
            kind.envelopes.audit()
        assert self.states.used == len(self.running) + len(self.cached)
        held = len(self.of_tokens.owned) + len(self.of_states.owned)
        assert held <= self.of_tokens.limit
        assert self.kv.held_bytes == held * EXTENT


def waiting_for(prompt: int, output: int) -> Any:
    """A request that SGLang has not looked at yet."""
    return SimpleNamespace(
        prompt=prompt,
        goes_on=None,
        full_untruncated_fill_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=output),
        output_ids=[],
        prefix_len=0,
    )


FLOOR = 2 * STATE_EXTENTS + 6
"""Extents for the padding's state, one request's, and its tokens: 40, what it says, the dummy, and what is lost at the
edges of extents."""


@given(
    st.integers(FLOOR, 40),
    st.lists(
        st.one_of(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 5), st.sampled_from([0.1, 2.0])),
        max_size=40,
    ),
)
@example(12, [[33, 9]])  # slots of others would take the memory of the first one's tokens
@example(12, [[12], 0, [30]])  # a cached state takes tokens along that could have been evicted
def test_every_admitted_request_finds_its_state_and_an_idle_model_admits_one(limit: int, steps: list[Any]) -> None:
    books = Books(limit)
    for step in steps:
        if isinstance(step, list):
            idle = not books.running
            admitted = books.admit(step)
            assert admitted or not idle, "with nothing that runs there is room for one"
        elif isinstance(step, float):
            books.clock.now += step
            books.between_steps()
        elif books.running:
            books.end(step)
        books.audit()
    while books.running:
        books.end(0)
    while books.cached:
        books.evict_one()
    books.kv.give_up_everything()
    assert not books.of_tokens.owned and not books.of_states.owned


@pytest.mark.parametrize("waiting", [2, 3, 4])
def test_a_step_takes_all_prompts_that_wait_where_states_are_cached_and_memory_cannot_grow(waiting: int) -> None:
    books = with_cached(7 * STATE_EXTENTS + 9, 6)
    assert books.admit([5] * waiting) == waiting
    assert len(books.cached) == 6 - waiting
    for _ in range(20):  # a queue that is never empty does not part them
        for _ in range(waiting):
            books.end(0)
        books.clock.now += 0.1
        books.between_steps()
        assert books.admit([5] * waiting) == waiting


def test_memory_comes_for_the_states_of_all_prompts_of_a_step_before_it_comes_for_their_tokens() -> None:
    books = Books(40)
    waiting = [waiting_for(40, CAP) for _ in range(4)]
    assert books.state_provisioning.provide(books, waiting, [], 1000, CAP, 0.0) == 4
    assert books.tokens.available < 4 * 40


def test_what_a_waiting_request_goes_on_from_stays_while_others_take_the_places_of_cached_states() -> None:
    books = with_cached(NO_ROOM, 3)
    oldest = books.cached[0]
    assert books.admit([5] * 4, goes_on=[0]) == 2
    assert len(books.cached) == 1 and books.cached[0] is oldest


def test_where_all_cached_prefixes_are_waited_for_the_last_request_loses_its_own() -> None:
    books = with_cached(7 * STATE_EXTENTS + 9, 6)
    first, *others = books.cached
    assert books.admit([5] * 6, goes_on=range(6)) == 1
    assert books.cached[-1] is first and books.cached[::-1] == [first, *others[:-1]]


def test_several_requests_that_go_on_from_one_prefix_keep_that_one_alone() -> None:
    books = with_cached(7 * STATE_EXTENTS + 9, 6)
    oldest = books.cached[0]
    assert books.admit([5] * 4, goes_on=[0] * 4) == 4
    assert len(books.cached) == 2 and books.cached[-1] is oldest


def test_no_cached_state_leaves_for_tokens_that_running_requests_are_expected_to_need() -> None:
    books = with_cached(NO_ROOM, 3)
    running = [waiting_for(10, CAP) for _ in range(3)]
    waiting = [waiting_for(10, CAP) for _ in range(2)]
    books.state_provisioning.provide(books, waiting, running, 64, CAP, 1.0)
    assert len(books.cached) == 2, "one for the first"


def test_no_cached_state_leaves_for_a_prompt_behind_the_first_where_memory_may_come() -> None:
    books = with_cached(40, 3)
    books.evict_one()
    books.kv.settle()
    books.of_states.slow = True
    assert books.admit([10] * 3) == 1 and len(books.cached) == 2
    books.of_states.slow = False
    assert books.admit([10] * 2) == 2 and len(books.cached) == 2


def test_no_cached_state_leaves_for_a_prompt_whose_tokens_have_no_room() -> None:
    books = with_cached(NO_ROOM, 3)
    room = books.tokens.available + books.evictable_size()
    assert books.admit([10, room]) == 1
    assert len(books.cached) == 2 and books.states.available == 0


def shares(books: Books, prompt: int, shared: int) -> Any:
    """A waiting request that SGLang has looked up: the first `shared` tokens of its prompt are cached without a state
    at their end."""
    request = waiting_for(prompt, CAP)
    books.look_up(request)
    request.mamba_branching_seqlen = shared or None
    request.kv = SimpleNamespace(cache_protected_len=0)
    return request


def test_a_step_ends_where_a_prompt_parts_from_a_cached_prefix_if_a_second_state_has_room() -> None:
    books = Books(44)
    request = shares(books, 320, 300)
    assert books.state_provisioning.provide(books, [request], [], 512, CAP, 0.0) == 1
    assert books.state_provisioning.until_shared(books, request, 512, begins=True) == 300
    assert books.states.available == books.kv.promised == 2
    books.audit()


def full(cached: int) -> Books:
    """A limit that is reached: so many prefixes of a token are cached, and there is one free slot."""
    books = Books(STATE_EXTENTS * (cached + 2) + 3)
    for _ in range(cached):
        assert books.admit([1]) == 1
        books.end(0)
    assert books.states.grow(1, 0.0) and books.states.available == 1
    while books.of_tokens.headroom() and books.tokens.grow(1 + books.tokens.available, 0.0):
        pass
    assert len(books.cached) == cached and not books.of_states.headroom()
    return books


@pytest.mark.parametrize(("cached", "cut"), [(8, 300), (7, 0)])
def test_the_state_used_longest_ago_leaves_for_that_of_a_shared_beginning_if_there_are_others(
    cached: int, cut: int
) -> None:
    books = full(cached)
    before = list(books.cached)
    request = shares(books, 320, 300)
    assert books.state_provisioning.until_shared(books, request, 512, begins=True) == cut
    assert books.cached == (before[1:] if cut else before) and books.states.available == (2 if cut else 1)
    books.audit()


def test_a_step_is_not_cut_where_the_shared_prefix_itself_had_to_leave() -> None:
    books = full(8)
    request = shares(books, 320, 300)
    found = books.look_up

    def found_nothing_more(looked_up: Any) -> None:
        found(looked_up)
        looked_up.mamba_branching_seqlen = None

    books.look_up = found_nothing_more  # type: ignore[method-assign]
    assert books.state_provisioning.until_shared(books, request, 512, begins=True) == 0


@pytest.mark.parametrize(("shared", "most", "limit"), [(0, 512, 44), (200, 512, 44), (300, 299, 44), (300, 512, 8)])
def test_a_step_is_not_cut_for_few_shared_tokens_or_beyond_its_own_or_without_room_for_a_second_state(
    shared: int, most: int, limit: int
) -> None:
    books = Books(limit)
    request = shares(books, 320, shared)
    assert books.state_provisioning.provide(books, [request], [], 512, CAP, 0.0) == 1
    assert books.state_provisioning.until_shared(books, request, most, begins=True) == 0


@pytest.mark.parametrize(("shared", "cuts"), [(640, [0, 128, 0]), (520, [0, 8, 0]), (255, [0, 0, 0])])
def test_a_prompt_that_is_computed_in_part_is_cut_once_more_where_it_parts_from_a_cached_prefix(
    shared: int, cuts: list[int]
) -> None:
    books = Books(12)
    request = shares(books, 900, shared)
    found = []
    for computed, most in ((0, 200), (shared // 2 if shared < 512 else 512, 200), (shared, 200)):
        request.prefix_len = computed
        found.append(books.state_provisioning.until_shared(books, request, most, begins=not computed))
    assert found == cuts


def test_cached_states_leave_before_memory_of_tokens_is_evicted_for_a_state() -> None:
    books = Books(2 * STATE_EXTENTS + STATE_EXTENTS + 6)
    for _ in range(2):
        assert books.admit([20]) == 1
        books.end(0)
    assert len(books.cached) == 2
    books.admit([20])
    assert len(books.cached) == 1, "the one used longest ago has left"


def with_cached(limit: int, cached: int, per_step: int = 1) -> Books:
    """Books with so many cached prefixes, whose requests were admitted in steps that followed each other closely."""
    books = Books(limit)
    for _ in range(cached // per_step):
        assert books.admit([10] * per_step) == per_step
        for _ in range(per_step):
            books.end(0)
        books.clock.now += 0.1
    assert not books.states.available and len(books.cached) == cached
    return books


NO_ROOM = 4 * STATE_EXTENTS + 6
"""Extents of four states, the padding's among them, and the tokens of three; two more are too few for a state."""


def test_a_state_leaves_ahead_of_the_next_step_where_memory_cannot_grow() -> None:
    books = with_cached(NO_ROOM, 3)
    books.between_steps()
    assert (books.states.available, books.states.arriving, len(books.cached)) == (0, 1, 2)
    assert books.state_provisioning.evicted_lately(books.clock.now)
    books.state_provisioning.ahead(books, books.clock.now)
    books.between_steps()
    assert books.states.available == 1 and len(books.cached) == 2, "one takes the place of the one that was taken"
    assert books.admit([10]) == 1 and len(books.cached) == 2, "and the next step evicts none"


def test_a_state_that_left_ahead_in_vain_is_not_followed_by_another() -> None:
    books = with_cached(NO_ROOM, 3)
    for _ in range(2):
        books.between_steps()
    books.states.give_up_empties()
    books.tokens.grow(60, 0.0)
    books.between_steps()
    assert not books.states.available and len(books.cached) == 2


def test_states_leave_ahead_for_as_many_requests_as_the_smaller_of_two_steps_had() -> None:
    books = with_cached(7 * STATE_EXTENTS + 9, 6, per_step=2)
    books.between_steps()
    assert len(books.cached) == 5, "one at a time of so few"
    for _ in range(3):
        books.between_steps()
    assert (books.states.available, len(books.cached)) == (2, 4)
    assert books.admit([10]) == 1
    books.between_steps()
    assert (books.states.available, len(books.cached)) == (1, 4), "one is free already"
    books.evict_one()
    books.kv.settle()
    assert books.admit([10, 10]) == 2
    for _ in range(3):
        books.between_steps()
    assert (books.states.available, len(books.cached)) == (1, 2), "after steps with one request and with two"


@pytest.mark.parametrize("apart_s", [1.0, 3.0])
def test_no_state_leaves_ahead_where_steps_do_not_follow_each_other(apart_s: float) -> None:
    books = with_cached(NO_ROOM, 3)
    books.clock.now += apart_s
    books.between_steps()
    assert len(books.cached) == 3, "the last step is long ago"
    assert books.admit([10]) == 1
    books.end(0)
    books.clock.now += apart_s / 2
    books.between_steps()
    assert len(books.cached) == 3, "the one before it was too"


def test_no_state_leaves_ahead_where_memory_can_grow() -> None:
    books = with_cached(NO_ROOM + STATE_EXTENTS, 3)
    books.between_steps()
    assert len(books.cached) == 3 and not books.state_provisioning.evicted_lately(books.clock.now)


def test_a_state_leaves_ahead_where_balloond_has_just_had_nothing() -> None:
    books = with_cached(NO_ROOM + STATE_EXTENTS, 3)
    books.of_states.there = len(books.of_states.owned)
    assert not books.states.grow_politely(1, 0.01, 1)
    books.between_steps()
    assert len(books.cached) == 2


def with_one_arriving() -> Books:
    """Books with one cached prefix, places of another one that are free, and those of a third that are about to
    arrive."""
    books = with_cached(40, 3)
    books.evict_one()
    books.kv.settle()
    books.evict_one()
    assert (books.states.available, books.states.arriving) == (1, 1)
    return books


def test_memory_does_not_grow_for_states_whose_slots_are_about_to_arrive() -> None:
    books = with_one_arriving()
    held = len(books.of_states.owned)
    assert books.admit([10, 10]) == 2 and len(books.of_states.owned) == held and len(books.cached) == 1


def test_memory_does_not_grow_for_tokens_whose_places_are_about_to_arrive() -> None:
    books = with_one_arriving()
    held = len(books.of_tokens.owned)
    assert books.tokens.available < 25 <= books.tokens.available + books.tokens.arriving
    assert books.admit([25]) == 1 and len(books.of_tokens.owned) == held and len(books.cached) == 1


def test_a_request_waits_for_the_slot_that_is_about_to_arrive() -> None:
    books = with_cached(NO_ROOM, 3)
    books.evict_one()
    assert books.states.arriving == 1 and books.admit([10]) == 1 and len(books.cached) == 2


def test_tokens_of_a_running_request_take_the_memory_of_cached_states() -> None:
    books = Books(3 * STATE_EXTENTS + 4)
    assert books.admit([10]) == 1
    books.end(0)
    assert books.admit([10]) == 1 and len(books.cached) == 1
    books.provisioning.before_allocation(books, 50)
    assert books.tokens.available >= 50 and not books.cached


def test_free_slots_that_a_step_is_to_have_are_not_given_up_for_tokens() -> None:
    books = Books(2 * STATE_EXTENTS + 3)
    assert books.state_provisioning.provide(books, [waiting_for(1, 1)], [], 64, CAP, 0.0) == 1
    books.provisioning.before_allocation(books, 100)
    assert books.states.available == 1 and books.tokens.available < 100
    books.kv.promised = 0
    books.provisioning.before_allocation(books, 50)
    assert books.states.available == 0 and books.tokens.available >= 50


def test_request_for_whose_state_there_is_no_memory_is_refused_for_now() -> None:
    books = Books(2 * STATE_EXTENTS + 4)
    assert books.admit([20]) == 1
    assert books.admit([1]) == 0 and books.provisioning.refused
    books.end(0)
    assert books.admit([1]) == 1


def test_reclaim_beside_an_empty_slot_of_a_state_gives_back_as_many_extents_as_were_asked_for() -> None:
    books = Books(6 * STATE_EXTENTS)
    for _ in range(2):
        assert books.admit([1]) == 1
    books.end(0)  # cached
    slots, state = books.running.pop()  # aborted: its slot is empty, and held
    books.tokens.envelopes.give(slots)
    books.states.envelopes.give(state)
    before, wanted = books.kv.held_bytes, 2 * STATE_EXTENTS * EXTENT
    tree = SimpleNamespace(of=lambda _: SimpleNamespace(unlocked_nodes=lambda: iter(())))
    memory = SimpleNamespace(kv=SimpleNamespace(extent_bytes=EXTENT))
    model: Any = SimpleNamespace(kv=books.kv, memory=memory, tree=tree, counters=EngineCounters(), ranks=None)
    assert Reclaim(model, lambda: None)._give_up(wanted) >= wanted
    assert before - books.kv.held_bytes >= wanted and not books.cached


COPIES = """
import torch
from sglang.srt.mem_cache.memory_pool import MambaPool
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_scheduler.engines.sglang.kv.pools.kv_views import state_views
from gpu_scheduler.engines.sglang.kv.pools.states import ElasticStatePool

LAYERS, SLOTS, ENTRY, CONV, TEMPORAL = 3, 9, 4096, (4, 3), (2, 4, 8)

class Largest(TorchDispatchMode):
    made = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view and result._base is None:
            self.made = max(self.made, result.numel() * result.itemsize)
        return result

def pool_of(kind, raw):
    conv, temporal = state_views(raw, LAYERS, ENTRY, [(CONV, torch.bfloat16), (TEMPORAL, torch.float32)])
    pool = object.__new__(kind)
    pool.mamba_cache = kind.State(conv=[conv], temporal=temporal)
    pool.replayssm_write_pos, pool.debug_memory_pool = None, False
    return pool

raw = torch.randint(0, 100, (SLOTS * ENTRY,), dtype=torch.uint8)
sources, targets = torch.tensor([3, 1, 3, 7]), torch.tensor([2, 8, 5, 4])
copied, largest = [], []
for kind in (MambaPool, ElasticStatePool):
    mine = raw.clone()
    with Largest() as seen:
        pool_of(kind, mine).copy_from(sources, targets)
    copied.append(mine)
    largest.append(seen.made)
assert torch.equal(*copied) and not torch.equal(copied[0], raw)
state = LAYERS * 2 * 4 * 8 * 4
assert largest == [len(sources) * state, state], largest
"""


@pytest.mark.sglang
def test_states_of_several_requests_are_copied_through_memory_for_one(imported: Imported) -> None:
    imported.run(COPIES)
