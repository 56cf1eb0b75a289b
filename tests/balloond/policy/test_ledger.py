import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from balloond.policy.ledger import Booking, Ledger
from services.errors import Exists, Invalid, NotFound, Refused, Unmet


@pytest.fixture
def ledger():
    ledger = Ledger(1000, 10)
    ledger.book("m", Booking(quota=100, weights=200, floor=50))
    ledger.open("a", "m", "secret")
    return ledger


def test_a_quota_is_booked_and_weights_and_floors_are_only_entitled(ledger):
    assert (ledger.booked, ledger.free) == (100, 900)


def test_bookings_beyond_the_capacity_are_refused_with_the_arithmetic_and_change_nothing(ledger):
    with pytest.raises(Refused) as refusal:
        ledger.book("n", Booking(quota=300, weights=300, floor=51))
    assert str(refusal.value) == (
        "n needs 651 bytes (quota 300 + weights 300 + floor 51); other models have booked 350 of 1,000, "
        "which leaves 650"
    )
    assert "n" not in ledger.bookings
    ledger.book("n", Booking(quota=300, weights=300, floor=50))


def test_the_newest_booking_replaces_the_older_one(ledger):
    ledger.book("m", Booking(quota=10))
    ledger.book("m", Booking(quota=10))
    assert (ledger.booked, ledger.free) == (10, 990)


def test_a_quota_is_booked_also_when_leases_still_hold_the_memory(ledger):
    ledger.grant("a", "kv", 10, list(range(90)))
    ledger.book("n", Booking(quota=200))
    assert ledger.free == -200
    ledger.check()
    with pytest.raises(Refused):
        ledger.grant("a", "kv", 10, [1000])


def test_a_booking_is_kept_while_a_lease_lives(ledger):
    with pytest.raises(Unmet, match="m has lease a, which holds 0 bytes"):
        ledger.unbook("m")
    ledger.end("a")
    ledger.unbook("m")
    assert ledger.free == 1000
    with pytest.raises(NotFound):
        ledger.unbook("m")


def test_a_lease_needs_a_booking_and_has_a_name_of_its_own(ledger):
    with pytest.raises(Unmet, match="n has no booking"):
        ledger.open("b", "n", "t")
    with pytest.raises(Exists):
        ledger.open("a", "m", "t")


def test_ledger_grant_beyond_free_memory_or_in_broken_pages_is_refused(ledger):
    with pytest.raises(Refused, match="910 bytes requested, 900 free of 1000"):
        ledger.grant("a", "kv", 10, list(range(91)))
    with pytest.raises(Invalid, match="whole pages of 10"):
        ledger.grant("a", "kv", 15, [1])
    assert ledger.free == 900


def test_ledger_suspended_lease_is_granted_nothing_and_keeps_its_extents(ledger):
    ledger.grant("a", "kv", 10, [1])
    ledger.suspend("a")
    with pytest.raises(Unmet):
        ledger.grant("a", "kv", 10, [2])
    assert ledger.leased == 10


def test_ledger_extent_that_a_resumed_lease_does_not_name_counts_as_returned(ledger):
    ledger.grant("a", "kv", 10, [1, 2, 3])
    ledger.suspend("a")
    assert [extent.id for extent in ledger.resume("a", [(2, 10, "kv")])] == [1, 3]
    assert ledger.leased == 10


def test_ledger_unknown_extent_of_a_resumed_lease_is_stranded_until_given_back(ledger):
    ledger.suspend("a")
    ledger.resume("a", [(77, 20, "weights")])
    assert (ledger.stranded, ledger.leased, ledger.free) == (20, 0, 880)
    assert ledger.weights_of("m") == 20
    ledger.give_back("a", [77])
    assert (ledger.stranded, ledger.free) == (0, 900)


def test_ledger_borrowed_extent_is_free_when_lease_and_borrower_returned_it(ledger):
    ledger.grant("a", "weights", 10, [1, 2])
    ledger.grant("a", "kv", 10, [3])
    assert [extent.id for extent in ledger.borrow("a", "loader")] == [1, 2]
    assert ledger.give_back("a", [1]) == []
    assert [extent.id for extent in ledger.give_back("a", [1], "loader")] == [1]
    assert ledger.give_back("a", [2], "loader") == []
    assert [extent.id for extent in ledger.give_back("a", [2])] == [2]


def test_ledger_lends_kv_extents_by_their_ids_only(ledger):
    ledger.grant("a", "weights", 10, [1])
    ledger.grant("a", "kv", 10, [2, 3, 4])
    assert [extent.id for extent in ledger.borrow("a", "loader", [4, 2])] == [4, 2]
    assert ledger.give_back("a", [2, 3]) and ledger.leased == 30
    for missing in (1, 2, 3, 99):
        with pytest.raises(NotFound, match=f"no KV extent {missing}"):
            ledger.borrow("a", "other", [4, missing])
    assert [extent.id for extent in ledger.give_back("a", [2], "loader")] == [2]
    assert ledger.give_back("a", [4], "loader") == []
    ledger.check()


def test_memory_of_graphs_counts_with_the_weights_and_is_lent_to_nobody(ledger):
    ledger.grant("a", "graphs", 10, [1, 2])
    ledger.grant("a", "weights", 10, [3])
    assert ledger.weights_of("m") == 30
    assert [extent.id for extent in ledger.borrow("a", "loader")] == [3]
    assert [extent.id for extent in ledger.give_back("a", [1, 2])] == [1, 2]
    assert ledger.weights_of("m") == 10
    ledger.check()


def test_a_dead_lease_stays_in_the_ledger_while_a_loader_has_extents_of_it(ledger):
    ledger.grant("a", "weights", 10, [1])
    ledger.borrow("a", "loader")
    assert ledger.end("a") == []
    assert ledger.leased == 10
    with pytest.raises(NotFound):
        ledger.lease("a")
    ledger.unbook("m")
    assert [extent.id for extent in ledger.end_borrower("loader")] == [1]
    assert ledger.leases == {}


def test_ledger_return_of_a_free_or_unknown_extent_changes_nothing(ledger):
    ledger.grant("a", "kv", 10, [1])
    ledger.give_back("a", [1])
    assert ledger.give_back("a", [1, 99]) == []
    assert ledger.give_back("nobody", [1]) == []
    ledger.check()


# --- against a model so slow and plain that it is obviously right


@dataclass
class Thing:
    """An extent of the model."""

    bytes: int
    kind: str
    lease: str
    held: bool = True
    stranded: bool = False
    borrowers: set = field(default_factory=set)


CAPACITY, PAGE = 640, 10
MODELS = ("m", "n", "o")
LOADERS = ("l1", "l2")


class LedgerMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(CAPACITY, PAGE)
        self.numbers = itertools.count(1)
        self.bookings = {}
        self.living = {}  # lease -> model
        self.suspended = set()
        self.things = {}

    def free(self):
        return CAPACITY - sum(b.quota for b in self.bookings.values()) - sum(t.bytes for t in self.things.values())

    def sweep(self):
        """What nobody has any more is gone. Returns its ids."""
        gone = {id for id, t in self.things.items() if not t.held and not t.borrowers}
        for id in gone:
            del self.things[id]
        return gone

    @rule(
        model=st.sampled_from(MODELS), quota=st.integers(0, 200), weights=st.integers(0, 200), floor=st.integers(0, 99)
    )
    def book(self, model, quota, weights, floor):
        wanted = Booking(quota, weights, floor)
        after = {**self.bookings, model: wanted}
        if sum(b.total for b in after.values()) > CAPACITY:
            with pytest.raises(Refused):
                self.ledger.book(model, wanted)
        else:
            self.ledger.book(model, wanted)
            self.bookings = after

    @rule(model=st.sampled_from(MODELS))
    def unbook(self, model):
        if model not in self.bookings:
            with pytest.raises(NotFound):
                self.ledger.unbook(model)
        elif model in self.living.values():
            with pytest.raises(Unmet):
                self.ledger.unbook(model)
        else:
            self.ledger.unbook(model)
            del self.bookings[model]

    @rule(target=leases, model=st.sampled_from(MODELS))
    def open(self, model):
        name = f"lease{next(self.numbers)}"
        if model not in self.bookings:
            with pytest.raises(Unmet):
                self.ledger.open(name, model, name)
            return multiple()
        self.ledger.open(name, model, name)
        self.living[name] = model
        return name

    @rule(lease=leases, kind=st.sampled_from(("kv", "weights")), pages=st.integers(0, 8), count=st.integers(1, 8))
    def grant(self, lease, kind, pages, count):
        ids = [next(self.numbers) for _ in range(count)]
        if pages == 0:
            expected = Invalid
        elif lease in self.suspended:
            expected = Unmet
        elif pages * PAGE * count > self.free():
            expected = Refused
        else:
            self.ledger.grant(lease, kind, pages * PAGE, ids)
            self.things.update({id: Thing(pages * PAGE, kind, lease) for id in ids})
            return
        with pytest.raises(expected):
            self.ledger.grant(lease, kind, pages * PAGE, ids)

    def some_of(self, data, lease, extra=()):
        mine = [id for id, t in self.things.items() if t.lease == lease and t.held]
        return data.draw(st.lists(st.sampled_from([*mine, *extra]), unique=True)) if [*mine, *extra] else []

    @rule(lease=leases, data=st.data())
    def give_back(self, lease, data):
        ids = self.some_of(data, lease, extra=(10**9,))
        freed = self.ledger.give_back(lease, ids)
        for id in ids:
            if id in self.things:
                self.things[id].held = False
        assert {extent.id for extent in freed} == self.sweep()

    @rule(lease=leases)
    def suspend(self, lease):
        self.ledger.suspend(lease)
        self.suspended.add(lease)

    @rule(lease=leases, unknown=st.integers(0, 2), data=st.data())
    def resume(self, lease, unknown, data):
        kept = self.some_of(data, lease)
        strange = [next(self.numbers) for _ in range(unknown)]
        held = [(id, self.things[id].bytes, self.things[id].kind) for id in kept] + [(id, PAGE, "kv") for id in strange]
        freed = self.ledger.resume(lease, held)
        self.suspended.discard(lease)
        for id, thing in self.things.items():
            if thing.lease == lease and id not in kept:
                thing.held = False
        assert {extent.id for extent in freed} == self.sweep()
        self.things.update({id: Thing(PAGE, "kv", lease, stranded=True) for id in strange})

    @rule(lease=consumes(leases))
    def end(self, lease):
        freed = self.ledger.end(lease)
        del self.living[lease]
        self.suspended.discard(lease)
        for thing in self.things.values():
            if thing.lease == lease:
                thing.held = False
        assert {extent.id for extent in freed} == self.sweep()

    @rule(lease=leases, loader=st.sampled_from(LOADERS))
    def borrow(self, lease, loader):
        lent = {extent.id for extent in self.ledger.borrow(lease, loader)}
        mine = {
            id
            for id, t in self.things.items()
            if t.lease == lease and t.kind == "weights" and t.held and not t.stranded
        }
        assert lent == mine
        for id in mine:
            self.things[id].borrowers.add(loader)

    @rule(lease=leases, loader=st.sampled_from(LOADERS), data=st.data())
    def borrow_kv(self, lease, loader, data):
        mine = [
            id for id, t in self.things.items() if (t.lease, t.kind, t.held, t.stranded) == (lease, "kv", True, False)
        ]
        if mine:
            ids = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
            assert [extent.id for extent in self.ledger.borrow(lease, loader, ids)] == ids
            for id in ids:
                self.things[id].borrowers.add(loader)

    @rule(loader=st.sampled_from(LOADERS), data=st.data())
    def end_borrow(self, loader, data):
        lent = [id for id, t in self.things.items() if loader in t.borrowers]
        if lent:
            id = data.draw(st.sampled_from(lent))
            freed = self.ledger.give_back(self.things[id].lease, [id], loader)
            self.things[id].borrowers.discard(loader)
            assert {extent.id for extent in freed} == self.sweep()

    @rule(loader=st.sampled_from(LOADERS))
    def loader_dies(self, loader):
        freed = self.ledger.end_borrower(loader)
        for thing in self.things.values():
            thing.borrowers.discard(loader)
        assert {extent.id for extent in freed} == self.sweep()

    @invariant()
    def nothing_is_lost_or_counted_twice(self):
        ledger = self.ledger
        ledger.check()
        assert ledger.leased + ledger.free + ledger.booked + ledger.stranded == ledger.capacity
        assert ledger.free == self.free()
        assert ledger.stranded == sum(t.bytes for t in self.things.values() if t.stranded)
        assert ledger.booked == sum(b.quota for b in self.bookings.values())
        assert {id for lease in ledger.leases.values() for id in lease.extents} == set(self.things)
        for model in MODELS:
            held = sum(t.bytes for t in self.things.values() if t.kind == "kv" and self._model(t.lease) == model)
            assert ledger.kv_of(model) == held

    def _model(self, lease):
        return self.ledger.leases[lease].model


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLedgerAgainstItsModel = LedgerMachine.TestCase
