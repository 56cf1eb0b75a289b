"""Models that wait for a place where all are busy are promised one, within a bound."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from placement.policy.kvpr import Device, Group, Model, Place
from placement.policy.lifecycle.decisions import Activate, GoCold, Hibernate, LifecycleRules, PlacedModel, Wait
from placement.policy.lifecycle.group_index import GroupIndex, index_groups
from placement.policy.lifecycle.reservations import FORGOTTEN_S, Reservations

RULES = LifecycleRules(quantum_s=4.0)
PATIENCE_S, LOOK_S, WAKE_S = 2.0, 0.5, 0.5


def group(name="g", capacity=100):
    return Group(name, (Device(f"{name}0", capacity),))


def on(where, name, weights=40, **facts):
    model = Model(name, 1.0, weights, pinned=facts.pop("pinned", False))
    return PlacedModel(model, Place(where.name, (where.devices[0].name,)), **facts)


def new(name="new", weights=40):
    return Model(name, 1.0, weights)


def test_waiting_model_after_its_patience_replaces_the_model_with_the_fewest_claims():
    g, reservations = group(), Reservations(PATIENCE_S)
    there = index_groups([g], [on(g, "much", stay_s=60.0, claims=5), on(g, "little", stay_s=9.0, claims=1)], RULES)
    assert isinstance(reservations.ask(new(), there, 0.0).outcome, Wait)
    answer = reservations.ask(new(), there, 2.0)
    assert isinstance(answer.outcome, Activate)
    (eviction,) = answer.evictions
    assert (type(eviction), eviction.model) == (Hibernate, "little")
    assert eviction.reason.startswith("awake for 9 s while another waited for 2.0 s; frees 40 bytes for new")


def test_waiting_model_among_equal_claims_replaces_the_model_that_was_awake_longest():
    g, reservations = group(), Reservations(0.0)
    there = index_groups([g], [on(g, "a", stay_s=9.0), on(g, "b", stay_s=60.0)], RULES)
    assert [e.model for e in reservations.ask(new(), there, 0.0).evictions] == ["b"]


def test_waiting_model_replaces_no_model_before_its_quantum_and_no_pinned_one():
    g, reservations = group(), Reservations(0.0)
    there = index_groups([g], [on(g, "came", stay_s=3.9), on(g, "pinned", stay_s=99.0, pinned=True)], RULES)
    answer = reservations.ask(new(), there, 0.0)
    assert answer.outcome.reason.endswith("g is reserved for it, which has waited for 0.0 s")
    there = index_groups([g], [on(g, "a", stay_s=99.0, pinned=True), on(g, "b", stay_s=99.0, pinned=True)], RULES)
    assert "reserved" not in Reservations(0.0).ask(new(), there, 0.0).outcome.reason


def test_reserved_group_takes_no_other_model_until_the_reservation_is_served():
    g, reservations = group(), Reservations(0.0)
    there = index_groups([g], [on(g, "small", 30, stay_s=0.0)], RULES)
    assert isinstance(reservations.ask(new("large", 90), there, 0.0).outcome, Wait)
    assert isinstance(reservations.ask(new("fits", 20), there, 0.0).outcome, Wait)
    there = index_groups([g], [], RULES)
    assert isinstance(reservations.ask(new("large", 90), there, 0.1).outcome, Activate)
    reservations.served("large")
    assert isinstance(reservations.ask(new("fits", 20), there, 0.1).outcome, Activate)


def test_model_that_does_not_fit_beside_pinned_ones_gets_no_reservation():
    g, reservations = group(), Reservations(0.0)
    pinned, busy = on(g, "pinned", 40, stay_s=99.0, pinned=True), on(g, "busy", 40, stay_s=99.0)
    there = index_groups([g], [pinned, busy], RULES)
    assert isinstance(reservations.ask(new("large", 90), there, 0.0).outcome, Wait)
    assert not reservations.any(0.0)
    assert [e.model for e in reservations.ask(new("small", 50), there, 0.0).evictions] == ["busy"]
    reservations.served("small")
    there = index_groups([g], [busy], RULES)
    assert isinstance(reservations.ask(new("large", 90), there, 0.1).outcome, Activate), "the pinned one is gone"


def test_reservation_of_a_model_without_further_requests_ends():
    g, reservations = group(), Reservations(0.0)
    there = index_groups([g], [on(g, "small", 30, stay_s=0.0)], RULES)
    reservations.ask(new("large", 90), there, 0.0)
    assert reservations.any(FORGOTTEN_S) and not reservations.any(FORGOTTEN_S + 0.1)
    assert isinstance(reservations.ask(new("fits", 20), there, FORGOTTEN_S + 0.1).outcome, Activate)


def test_reservation_of_a_model_that_does_not_come_up_on_its_group_ends():
    g, reservations = group(), Reservations(0.0)
    there = index_groups([g], [on(g, "idle", 60, stay_s=99.0)], RULES)
    assert isinstance(reservations.ask(new("large", 90), there, 0.0, holds_s=5.0).outcome, Activate)
    assert reservations.any(FORGOTTEN_S) and not reservations.any(FORGOTTEN_S + 0.1)


def test_reservation_of_a_group_that_is_lost_ends():
    g, h, reservations = group("g"), group("h"), Reservations(0.0)
    there = index_groups([g, h], [on(g, "a", 90, claims=1, stay_s=0.0), on(h, "b", 90, claims=2, stay_s=0.0)], RULES)
    assert "g is reserved" in reservations.ask(new(), there, 0.0).outcome.reason
    there.lose("g")
    assert "h is reserved" in reservations.ask(new(), there, 0.1).outcome.reason


class Rotation:
    """A group of which every model is always asked for: who is awake has requests all the time, who is not asks at
    every look. A change takes WAKE_S."""

    def __init__(self, weights):
        self.group = group()
        self.models = {f"m{i}": Model(f"m{i}", 1.0, each) for i, each in enumerate(weights)}
        self.reservations = Reservations(PATIENCE_S)
        self.active_at = {}
        self.waits_since = dict.fromkeys(self.models, 0.0)
        self.longest = 0.0

    def run(self, seconds, claims):
        now = 0.0
        while now < seconds:
            for name in [n for n in self.models if n not in self.active_at]:
                answer = self.reservations.ask(self.models[name], self.index_groups(now, claims), now)
                if isinstance(answer.outcome, Activate):
                    self.reservations.served(name)
                    for eviction in answer.evictions:
                        assert not isinstance(eviction, GoCold)
                        assert now - self.active_at.pop(eviction.model) >= RULES.quantum_s
                        self.waits_since[eviction.model] = now
                    self.active_at[name] = now + WAKE_S
                    self.longest = max(self.longest, now + WAKE_S - self.waits_since[name])
            now += LOOK_S
        return max([self.longest, *(now - self.waits_since[n] for n in self.models if n not in self.active_at)])

    def index_groups(self, now, claims) -> GroupIndex:
        residents = [
            PlacedModel(
                self.models[name],
                Place("g", ("g0",)),
                stay_s=max(0.0, now - at),
                idle_s=0.0,
                claims=claims[int(name[1:]) % len(claims)],
                wake_s=WAKE_S,
            )
            for name, at in self.active_at.items()
        ]
        return index_groups([self.group], residents, RULES)


@settings(max_examples=25)
@given(st.lists(st.integers(10, 90), min_size=2, max_size=7), st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_waiting_models_of_any_size_are_served_within_the_bound(weights, claims):
    waited = Rotation(weights).run(100.0, claims)
    change = WAKE_S + 2 * LOOK_S
    assert waited <= PATIENCE_S + (len(weights) - 1) * (RULES.quantum_s + change) + change


def test_first_models_keep_their_places_when_patience_is_infinite():
    rotation = Rotation([40] * 4)
    rotation.reservations = Reservations(inf)
    assert rotation.run(50.0, [0]) >= 50.0
    assert set(rotation.active_at) == {"m0", "m1"}
