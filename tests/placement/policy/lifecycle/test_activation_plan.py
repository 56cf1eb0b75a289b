"""Activation: which group, and who leaves."""

from hypothesis import given
from hypothesis import strategies as st

from placement.policy.kvpr import Books, Device, Group, Model, Place
from placement.policy.lifecycle.decisions import Activate, GoCold, Hibernate, LifecycleRules, PlacedModel, Refuse, Wait
from placement.policy.lifecycle.group_index import index_groups

GROUPS = [Group("A", (Device("a0", 100),)), Group("B", (Device("b0", 100),))]


def activate(model, groups, residents, rules=None):
    return index_groups(groups, residents, rules).activate(model)


def on(group, name, weights, demand=0.0, **facts):
    model = Model(
        name, demand, weights, facts.pop("floor", 0), facts.pop("quota", 0), pinned=facts.pop("pinned", False)
    )
    devices = next(tuple(d.name for d in g.devices) for g in GROUPS if g.name == group)
    return PlacedModel(model, Place(group, devices), **facts)


def new(weights=20, demand=1.0, **facts):
    return Model("new", demand, weights, **facts)


def test_activation_takes_the_group_with_the_least_resulting_pressure():
    activation = activate(new(), GROUPS, [on("A", "hot", 20, demand=50.0)])
    assert activation.outcome == Activate(
        "new", Place("B", ("b0",)), 1 / 80, "pressure 0.0125 on B, the least of 2 groups"
    )
    assert [option.place.group for option in activation.options] == ["B", "A"]


def test_activation_of_a_model_without_demand_takes_the_device_with_the_most_memory_left():
    activation = activate(new(demand=0.0), GROUPS, [on("A", "quiet", 40)])
    assert activation.outcome.place.group == "B"


def test_activation_evicts_idle_models_only_for_a_pressure_lower_by_more_than_tau():
    idle, hot = on("A", "idle", 90, idle_s=60.0), on("B", "hot", 20, demand=1.0)
    activation = activate(new(50), GROUPS, [idle, hot])
    assert activation.outcome.place.group == "A"  # the pressure on B would be 0.067, without idle that on A is 0.02
    assert [type(d) for d in activation.evictions] == [Hibernate]
    assert "idle leaves first" in activation.outcome.reason
    calm = on("B", "calm", 20, demand=0.0)
    activation = activate(new(50), GROUPS, [idle, calm], LifecycleRules(tau=0.5))
    assert activation.outcome.place.group == "B"
    assert activation.evictions == ()
    assert "not less by more than 50%" in activation.outcome.reason


def test_activation_hibernates_idle_models_first_and_sends_engines_cold_if_that_is_not_enough():
    residents = [
        on("A", "one", 45, quota=5, idle_s=60.0),
        on("A", "two", 40, quota=10, hibernating=True, cold_s=9.0, idle_s=60.0),
    ]
    activation = activate(new(83), GROUPS[:1], residents)
    assert [(type(d), d.model) for d in activation.evictions] == [(Hibernate, "one")]
    activation = activate(new(88), GROUPS[:1], residents)
    assert [(type(d), d.model) for d in activation.evictions] == [(Hibernate, "one"), (GoCold, "two")]


def test_a_hibernating_model_wakes_where_it_sleeps_unless_the_gain_is_worth_a_cold_start():
    home = on("A", "new", 20, quota=5, hibernating=True)
    model = Model("new", 10.0, 20, quota=5)
    activation = activate(model, GROUPS, [home, on("A", "some", 10)])
    assert activation.outcome.place.group == "A"
    assert activation.outcome.reason.endswith("it hibernates there")
    activation = activate(model, GROUPS, [home, on("A", "hot", 10, demand=30.0)])
    assert activation.outcome.place.group == "B"


def test_activation_of_a_sleeping_model_needs_no_second_quota():
    home = on("A", "new", 89, quota=10, hibernating=True)
    activation = activate(Model("new", 1.0, 89, quota=10), GROUPS[:1], [home])
    assert isinstance(activation.outcome, Activate)
    assert activation.evictions == ()


def test_activation_waits_for_busy_and_pinned_models_and_its_reason_has_the_missing_bytes():
    residents = [on("A", "busy", 90, idle_s=0.5), on("B", "pinned", 70, idle_s=999.0, pinned=True)]
    activation = activate(new(50), GROUPS, residents)
    assert activation.outcome == Wait(
        "new",
        "no group has room now; the nearest is B: weights 50 + floor 0 + engine quota 0 = 50 bytes, "
        "30 free, 30 with all idle models gone",
    )


def test_activation_of_a_model_that_could_never_fit_is_refused():
    assert isinstance(activate(new(500), GROUPS, []).outcome, Refuse)


def test_a_tensor_parallel_model_has_its_parts_freed_on_the_devices_that_it_takes():
    group = Group("T", (Device("t0", 100), Device("t1", 100)))
    idle = PlacedModel(Model("idle", weights=80), Place("T", ("t1",)), idle_s=60.0)
    activation = activate(Model("tp", 1.0, weights=100, parts=2), [group], [idle])
    assert activation.outcome.place == Place("T", ("t0", "t1"))
    assert [d.model for d in activation.evictions] == ["idle"]


@st.composite
def worlds(draw):
    groups = [
        Group(
            f"g{i}",
            tuple(Device(f"g{i}d{j}", draw(st.sampled_from([64, 100]))) for j in range(draw(st.integers(1, 2)))),
        )
        for i in range(draw(st.integers(1, 3)))
    ]
    residents = []
    for i in range(draw(st.integers(0, 7))):
        group = draw(st.sampled_from(groups))
        parts = draw(st.integers(1, len(group.devices)))
        model = Model(
            f"m{i}",
            float(draw(st.integers(0, 50))),
            draw(st.integers(1, 60)),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 9)),
            parts,
            pinned=draw(st.sampled_from([False, False, True])),
        )
        devices = tuple(device.name for device in draw(st.permutations(group.devices))[:parts])
        asleep = draw(st.booleans())
        idle = float(draw(st.integers(0, 90)))
        residents.append(
            PlacedModel(model, Place(group.name, devices), asleep, idle, wake_s=draw(st.integers(1, 9)) / 8)
        )
    model = Model(
        "new",
        float(draw(st.integers(0, 50))),
        draw(st.integers(1, 90)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
        draw(st.integers(1, 2)),
    )
    return groups, residents, model


@given(worlds())
def test_activation_place_has_room_for_the_model_after_the_evictions(world):
    groups, residents, model = world
    activation = activate(model, groups, residents)
    if not isinstance(activation.outcome, Activate):
        assert activation.evictions == ()
        return
    place = activation.outcome.place
    left = {d.model: isinstance(d, GoCold) for d in activation.evictions}
    books = Books(groups)
    for r in residents:
        if r.model.name in left:
            assert r.place.group == place.group
            assert not r.model.pinned
            if left[r.model.name]:
                continue
            books.book(r.model.asleep(), r.place.devices)
        else:
            books.book(r.booked, r.place.devices)
    for device in place.devices:
        assert books.fits(model, device)


@given(worlds())
def test_activation_waits_only_if_no_group_has_room_with_all_idle_models_gone(world):
    groups, residents, model = world
    activation = activate(model, groups, residents)
    books = Books(groups)
    for r in residents:
        if r.model.pinned or not (r.hibernating or r.idle_s >= 1.0):
            books.book(r.booked, r.place.devices)
    possible = any(books.best(model, group)[1] for group in groups)
    assert isinstance(activation.outcome, Activate) == possible


EXCLUSIVE = LifecycleRules(idle_s=1.0, exclusive=True, hibernate=False)


def test_an_exclusive_model_has_its_group_alone_and_takes_it_from_the_longest_idle():
    residents = [on("A", "lately", 10, idle_s=3.0), on("B", "long ago", 10, idle_s=9.0)]
    activation = activate(new(), GROUPS, residents, EXCLUSIVE)
    assert activation.outcome.place.group == "B"
    assert [(type(d), d.model) for d in activation.evictions] == [(GoCold, "long ago")]


def test_an_exclusive_model_waits_while_every_group_is_busy_whatever_memory_is_free():
    residents = [on("A", "busy", 10), on("B", "busy too", 10)]
    assert isinstance(activate(new(), GROUPS, residents, EXCLUSIVE).outcome, Wait)
    assert activate(new(), GROUPS, residents[:1], EXCLUSIVE).outcome.place.group == "B"


def test_an_exclusive_model_leaves_sleeping_models_in_their_place():
    rules = LifecycleRules(idle_s=1.0, exclusive=True)
    residents = [on("A", "asleep", 60, quota=5, hibernating=True), on("A", "idle", 10, quota=5, idle_s=3.0)]
    activation = activate(new(), GROUPS[:1], residents, rules)
    assert [(type(d), d.model) for d in activation.evictions] == [(Hibernate, "idle")]
