import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from balloond.driver.kv.address_map import AddressMap
from balloond.driver.kv.growth import RangeGrowth
from balloond.driver.kv.reclaims import OpenReclaims
from balloond.driver.kv.reserve import Reserve
from balloond.driver.kv.watermarks import IDLE_S, Watermarks

PAUSE_S = 0.1


class Playbook:
    """A range without threads, memory and balloond: what the engine does, what is requested, what balloond answers."""

    def __init__(self, *, indices=64, large=1, low=0, high=0):
        self.addresses = AddressMap(indices, large)
        self.reserve = Reserve(self.addresses)
        self.reclaims = OpenReclaims(extent_bytes=1)
        self.growth = RangeGrowth(self.addresses, self.reserve, Watermarks(low, high), self.reclaims, PAUSE_S)
        self.limit, self.floor, self.running, self.now = indices, 0, False, 100.0
        self.owned = set()
        self.under_way = []
        self._ids = itertools.count(1)

    def wants(self, count, *, urgent=True):
        """The engine takes what is in the reserve, up to `count`; how many more are missing."""
        taken = self.reserve.take(count)
        self.owned |= set(taken)
        headroom = self.addresses.headroom(self.limit)
        return self.growth.want(count, count - len(taken), headroom, self.now, urgent=urgent)

    def takes(self):
        """The engine takes what came of the rest."""
        taken = self.reserve.take(self.growth.wanted)
        self.owned |= set(taken)
        self.growth.got(len(taken))

    def releases(self, indices):
        self.owned -= set(indices)
        self.reserve.put(indices)

    def requests(self):
        """Makes the requests that are due, and tells them in words."""
        found = self.growth.requests(self.now, self.limit, self.running)
        self.under_way += found
        return [told(request) for request in found]

    def answer(self, granted=None, *, which=0):
        """balloond grants so many extents of the request, or all; it refuses where they are fewer."""
        request = self.under_way.pop(which)
        granted = request.count if granted is None else granted
        free = self.addresses.free_large() if request.size > 1 else self.addresses.free(granted)
        for first in free[:granted]:
            self.addresses.add(first, next(self._ids), request.size)
            self.reserve.put(range(first, first + request.size))
        self.growth.answered(request, granted, granted < request.count, self.now)

    def leaves(self):
        """What goes back to balloond now."""
        leaving = self.growth.leave(self.now, self.limit, self.floor, self.running)
        self.addresses.remove(sorted({self.addresses.first_of(index) for index in leaving}))
        return sorted(leaving)

    def runs(self, capacity):
        """Requests, answers of a balloond with so many free indices, and what leaves, until nothing more happens."""
        for _ in range(1000):
            if not (self.requests() or self.under_way or self.leaves()):
                return
            while self.under_way:
                left = capacity - self.addresses.mapped
                self.answer(min(self.under_way[0].count, max(0, left // self.under_way[0].size)))
        raise AssertionError("requests and returns go on for ever")


def told(request):
    size = "" if request.size == 1 else f" of {request.size}"
    follows = f", {request.behind} behind" if request.behind else ""
    free = ", if free" if request.only_free else ""
    return f"{'fill' if request.is_fill else 'need'} {request.count}{size}{follows}{free}"


# --- what is requested for the engine


def test_growth_missing_extents_are_requested_once_and_taken_when_granted():
    book = Playbook()
    assert book.wants(3) == 3
    assert book.requests() == ["need 3"] and book.requests() == []
    assert book.growth.awaited
    book.answer()
    assert not book.growth.awaited and book.growth.wanted == 3
    book.takes()
    assert book.owned == {0, 1, 2} and book.growth.wanted == 0


def test_growth_of_many_extents_has_four_requests_at_a_time_each_with_the_count_behind_it():
    book = Playbook(indices=200)
    book.wants(200)
    assert book.requests() == [
        "need 32, 168 behind",
        "need 32, 136 behind",
        "need 32, 104 behind",
        "need 32, 72 behind",
    ]
    book.answer(which=2)
    assert book.requests() == ["need 32, 40 behind"]


def test_growth_of_many_extents_requests_large_ones_and_small_ones_for_the_rest():
    book = Playbook(large=4)
    book.wants(19)
    assert book.requests() == ["need 4 of 4, 3 behind", "need 3"]
    assert book.growth.demand == "large"


def test_growth_requests_only_large_extents_that_fit_beside_those_under_way():
    book = Playbook(indices=48, large=4)
    book.wants(8)
    book.runs(capacity=48)
    book.takes()
    book.releases([1, 2, 3, 5, 6, 7])
    assert book.leaves() == [1, 2, 3, 5, 6, 7], "so ten groups of four are free, and six other indices"
    book.wants(46)
    assert book.requests() == ["need 8 of 4, 14 behind", "need 2 of 4, 6 behind", "need 6"]


def test_growth_of_less_than_four_large_extents_requests_small_ones():
    book = Playbook(large=4)
    book.wants(15)
    assert book.requests() == ["need 15"] and book.growth.demand == "small"


def test_growth_of_an_engine_with_several_ranks_requests_small_extents_only():
    book = Playbook(large=4)
    book.growth.want(16, 16, headroom=64, now=book.now, only_small=True)
    assert book.requests() == ["need 16"]


def test_large_extents_are_requested_only_where_they_fit():
    book = Playbook(indices=20, large=4)
    book.wants(3)
    book.runs(capacity=20)
    book.takes()
    book.wants(16)
    assert book.requests() == ["need 4 of 4"]
    book = Playbook(indices=18, large=4)
    book.wants(18)
    assert book.requests() == ["need 4 of 4, 2 behind", "need 2"]


def test_refused_large_extents_are_requested_as_small_ones():
    book = Playbook(large=4)
    book.wants(16)
    assert book.requests() == ["need 4 of 4"]
    book.answer(2)
    assert (book.growth.demand, book.growth.missing) == ("small", 8)
    assert book.requests() == ["need 8"]


def test_refused_small_extents_end_the_growth_until_the_engine_needs_extents_again():
    book = Playbook()
    book.wants(8)
    book.requests()
    book.answer(5)
    assert (book.growth.demand, book.growth.missing, book.growth.awaited) == ("refused", 0, False)
    book.takes()
    book.growth.no_longer_awaited()
    assert book.growth.wanted == 0 and book.requests() == []
    book.wants(2)
    assert book.growth.demand == "small" and book.requests() == ["need 2"]


def refused():
    book = Playbook()
    book.wants(8)
    book.requests()
    book.answer(0)
    book.growth.no_longer_awaited()
    return book


def test_extents_that_are_not_urgent_are_requested_again_only_after_a_pause():
    book = refused()
    assert book.wants(2, urgent=False) == 0 and book.requests() == []
    assert book.growth.wanted == 0 and book.growth.demand == "refused"
    book.now += PAUSE_S
    assert book.wants(2, urgent=False) == 2 and book.requests() == ["need 2"]


def test_urgent_extents_are_requested_right_after_a_refusal():
    book = refused()
    assert book.wants(2) == 2 and book.requests() == ["need 2"]


def test_what_is_still_requested_after_a_refusal_stays_wanted():
    book = Playbook(indices=128)
    assert book.wants(100) == 100 and len(book.requests()) == 4
    book.answer(0)
    assert book.growth.demand == "refused" and book.growth.requested == 68
    assert book.wants(100, urgent=False) == 100 and book.growth.wanted == 100
    book.answer()
    assert book.leaves() == [], "what came is kept for the engine"


@pytest.mark.parametrize("news", [lambda growth: growth.limited(64), lambda growth: growth.end_pause()])
def test_a_new_limit_or_another_balloond_ends_the_pause_of_what_is_not_urgent(news):
    book = refused()
    news(book.growth)
    assert book.wants(2, urgent=False) == 2 and book.requests() == ["need 2"]


def test_growth_grant_after_a_refusal_withdraws_the_refusal():
    book = Playbook()
    book.wants(40)
    book.requests()
    book.answer(0)
    assert book.growth.demand == "refused"
    book.answer()
    assert book.growth.demand == "small" and book.growth.missing == 0


def test_a_late_refusal_of_large_extents_makes_the_next_growth_small():
    book = Playbook(large=4)
    book.wants(16)
    book.requests()
    book.wants(16)
    book.answer(0)
    assert book.growth.demand == "small" and book.requests() == ["need 16"]


def test_growth_missing_count_is_bounded_by_the_limit_but_not_below_requests_under_way():
    book = Playbook(indices=300)
    book.limit = 200
    assert book.wants(250) == 200
    book.requests()
    book.growth.limited(150)
    assert book.growth.missing == 150
    book.growth.limited(50)
    assert book.growth.missing == 4 * 32, "those requests are made"


def test_growth_extents_not_taken_by_an_idle_engine_go_back():
    book = Playbook(low=1, high=4)
    book.wants(3)
    book.runs(capacity=64)
    assert book.leaves() == [] and book.addresses.mapped == 6, "three of them are the reserve's"
    book.now += IDLE_S
    assert book.growth.idle(book.now) and book.leaves() == [4, 5]
    book.growth.forget_wanted()
    assert book.leaves() == [1, 2, 3]


# --- what is requested for the reserve


def test_growth_reserve_is_filled_when_no_other_request_is_under_way():
    book = Playbook(low=4, high=8)
    book.wants(1)
    assert book.requests() == ["need 1"], "the reserve comes after"
    book.answer()
    assert book.requests() == ["fill 5, if free"] and book.growth.fill == "under_way"
    assert book.requests() == []
    book.answer()
    assert book.growth.fill == "ready" and book.requests() == []


def test_growth_reserve_of_a_running_engine_below_the_low_mark_is_requested_from_others():
    book = Playbook(low=4, high=4)
    book.running = True
    assert book.requests() == ["fill 4"]


def test_growth_reserve_far_below_its_mark_requests_large_extents_then_small_ones():
    book = Playbook(large=4, low=8, high=12)
    assert book.requests() == ["fill 2 of 4, if free"]
    book.answer(0)
    assert book.growth.fill == "small_next"
    assert book.requests() == ["fill 8, if free"], "there is no pause"
    book.answer()
    assert book.growth.fill == "ready"


def test_growth_reserve_of_a_running_engine_requests_large_extents_only_if_free():
    book = Playbook(large=4, low=8, high=12)
    book.running = True
    assert book.requests() == ["fill 2 of 4, if free"]
    book.answer(0)
    assert book.requests() == ["fill 8"]


def test_growth_reserve_requests_large_extents_again_when_no_small_ones_were_needed():
    book = Playbook(large=4, low=8, high=12)
    book.requests()
    book.answer(0)
    book.limit = 0
    assert book.requests() == [] and book.growth.fill == "ready"
    book.limit = 64
    assert book.requests() == ["fill 2 of 4, if free"]


def test_growth_large_extents_never_fill_the_reserve_beyond_its_mark():
    book = Playbook(large=4, low=5, high=6)
    assert book.requests() == ["fill 1 of 4, if free"]
    book.answer()
    assert book.requests() == ["fill 1, if free"]


@pytest.mark.parametrize("why", ["refusal", "reclaim"])
def test_growth_reserve_after_a_refusal_or_a_reclaim_is_requested_only_after_a_pause(why):
    book = Playbook(low=4, high=4)
    if why == "refusal":
        book.requests()
        book.answer(0)
    else:
        book.growth.pause(book.now)
    assert book.requests() == [] and not book.growth.fill_is_due(book.now)
    book.now += PAUSE_S
    assert book.growth.fill_is_due(book.now) and book.requests() == ["fill 4, if free"]


def test_growth_pause_of_the_reserve_ends_when_balloond_is_there_again():
    book = Playbook(low=4, high=4)
    book.requests()
    book.answer(0)
    book.growth.end_pause()
    assert book.requests() == ["fill 4, if free"]


# --- what goes back


def test_growth_reserve_above_the_high_mark_goes_back_highest_first():
    book = Playbook(low=1, high=2)
    book.wants(9)
    book.runs(capacity=64)
    book.takes()
    book.releases(sorted(book.owned))
    assert book.growth.surplus(book.now, book.limit, book.running) == (0, 0, book.addresses.mapped - 2)
    assert book.leaves() == list(range(2, 11)) and book.leaves() == []


def test_growth_lowered_limit_takes_no_more_than_the_reserve():
    book = Playbook(low=4, high=4)
    book.runs(capacity=64)
    book.wants(3)
    book.limit = 2
    assert book.leaves() == [3] and book.addresses.mapped == 3


def test_growth_reserve_of_a_running_engine_keeps_its_low_mark_until_it_handled_a_reclaim():
    book = Playbook(low=2, high=6)
    book.wants(3)
    book.runs(capacity=64)
    book.takes()
    book.running = True
    book.reclaims.add(1, 5, deep=True)
    before = len(book.reserve)
    assert before > 2
    book.leaves()
    assert len(book.reserve) == 2
    book.reclaims.take()
    book.reclaims.done()
    book.leaves()
    assert len(book.reserve) == max(0, before - 5)


def test_growth_extents_that_left_for_a_reclaim_leave_once():
    book = Playbook(high=9)
    book.wants(6)
    book.runs(capacity=64)
    reclaim = book.reclaims.add(1, 2, deep=False)
    book.running = True
    assert len(book.leaves()) == 2 and (reclaim.remaining, reclaim.returned) == (0, 2)
    assert book.leaves() == []


@pytest.mark.parametrize(("floor", "leaving"), [(12, [12, 13, 14, 15]), (13, [])])
def test_a_large_extent_leaves_for_a_reclaim_of_less_only_if_the_floor_holds(floor, leaving):
    book = Playbook(large=4, low=0, high=4)
    book.wants(16)
    book.runs(capacity=16)
    book.takes()
    book.releases([12, 13, 14, 15])
    book.floor = floor
    book.reclaims.add(1, 1, deep=False)
    assert book.leaves() == leaving


def test_an_emptied_reserve_goes_back_and_is_not_filled_before_the_engine_needs_extents():
    book = Playbook(low=4, high=4)
    book.runs(capacity=64)
    book.growth.empty()
    assert book.growth.use == "emptied" and book.leaves() == [0, 1, 2, 3] and book.requests() == []
    book.wants(1)
    assert book.growth.use == "kept"
    book.runs(capacity=64)
    assert book.addresses.mapped > 1


def test_an_offered_reserve_stays_despite_a_lowered_limit_and_a_reclaim():
    book = Playbook(low=4, high=4)
    book.runs(capacity=64)
    book.growth.offer(holes=0)
    book.limit = 0
    book.reclaims.add(1, 4, deep=False)
    assert book.growth.use == "offered" and book.leaves() == []
    book.growth.end_offer(0)
    assert book.growth.use == "kept" and book.leaves() == [0, 1, 2, 3]


def test_an_emptied_reserve_stays_emptied_when_an_offer_ends():
    book = Playbook(low=4, high=4)
    book.growth.offer(holes=0)
    book.growth.empty()
    book.growth.end_offer(0)
    assert book.growth.use == "emptied"


def test_growth_highest_extent_goes_back_after_an_offer_with_holes():
    book = Playbook(low=4, high=4)
    book.runs(capacity=64)
    book.growth.offer(holes=1)
    book.growth.end_offer(0)
    assert book.leaves() == [3] and book.leaves() == []


def test_growth_highest_extent_stays_after_an_offer_with_holes_while_requests_are_under_way():
    book = Playbook(low=4, high=4)
    book.runs(capacity=64)
    book.growth.want(8, 4, headroom=60, now=book.now)
    assert book.requests() == ["need 4"]
    book.growth.offer(holes=1)
    book.growth.end_offer(0)
    assert book.leaves() == []


# --- whatever happens


class GrowthMachine(RuleBasedStateMachine):
    """Any order of what the engine does and what balloond answers, late answers included."""

    LARGE, INDICES = 1, 24

    def __init__(self):
        super().__init__()
        self.book = Playbook(indices=self.INDICES, large=self.LARGE, low=1, high=6)
        self.reclaims = 0

    @rule(count=st.integers(0, 40), urgent=st.booleans())
    def want(self, count, urgent):
        self.book.wants(count, urgent=urgent)

    @rule()
    def take(self):
        self.book.takes()

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=20))
    def release(self, picks):
        owned = sorted(self.book.owned)
        self.book.releases(list({owned[pick % len(owned)] for pick in picks if owned}))

    @rule()
    def request(self):
        self.book.requests()

    @precondition(lambda self: self.book.under_way)
    @rule(which=st.integers(0, 9), part=st.floats(0, 1))
    def answer(self, which, part):
        which %= len(self.book.under_way)
        request = self.book.under_way[which]
        fits = len(self.book.addresses.free_large()) if request.size > 1 else self.book.addresses.headroom(self.INDICES)
        self.book.answer(min(fits, round(part * request.count)), which=which)

    @rule()
    def leave(self):
        self.book.leaves()

    @rule(limit=st.integers(0, 30))
    def set_limit(self, limit):
        self.book.limit = limit
        self.book.growth.limited(limit)

    @rule(running=st.booleans(), floor=st.integers(0, 10))
    def run(self, running, floor):
        self.book.running, self.book.floor = running, floor

    @rule(extents=st.integers(1, 8), deep=st.booleans())
    def reclaim(self, extents, deep):
        self.reclaims += 1
        self.book.growth.pause(self.book.now)
        self.book.reclaims.add(self.reclaims, extents, deep)

    @rule()
    def attend(self):
        self.book.reclaims.take()
        self.book.reclaims.done()

    @rule()
    def empty(self):
        self.book.growth.empty()

    @rule(holes=st.integers(0, 3))
    def offer(self, holes):
        self.book.growth.offer(holes)
        assert self.book.leaves() == []
        self.book.growth.end_offer(0)

    @rule(seconds=st.sampled_from([0.01, 0.2, 2.0]))
    def pass_time(self, seconds):
        self.book.now += seconds

    @invariant()
    def the_counts_are_those_of_what_is_under_way(self):
        growth, needs = self.book.growth, [each for each in self.book.under_way if not each.is_fill]
        assert growth.requested == sum(each.size * each.count for each in needs) and len(needs) <= 4
        assert (growth.fill == "under_way") == any(each.is_fill for each in self.book.under_way)
        assert growth.missing >= 0 and growth.wanted >= 0
        assert growth.demand != "refused" or growth.missing == 0

    @invariant()
    def every_index_is_somewhere(self):
        self.book.addresses.check([*self.book.owned, *self.book.reserve])

    def teardown(self):
        """When all is answered and nothing more happens, the reserve has at least its low mark where there is memory,
        and no more than its high mark."""
        book = self.book
        book.reclaims.pop_all()
        book.limit = self.INDICES
        while book.under_way:
            book.answer(0)
        book.now += 2.0
        book.wants(0)
        book.growth.forget_wanted()
        book.runs(capacity=self.INDICES)
        spare = len(book.reserve)
        assert spare >= min(1, self.INDICES - len(book.owned))
        assert spare - book.reserve.tied <= 6


GrowthMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestGrowthUnderEverything = GrowthMachine.TestCase


class MixedGrowthMachine(GrowthMachine):
    LARGE, INDICES = 3, 32


MixedGrowthMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestMixedGrowthUnderEverything = MixedGrowthMachine.TestCase
