"""Algorithm 1 against the obvious loop over all models and all groups, and its scenarios."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.assignment.assign import AssignRules, Candidate, ModelKind, assign
from placement.policy.kvpr import Books, Device, Group, Model, Place

# --- against a slow obvious model -------------------------------------------------------------------------------------


@st.composite
def clusters(draw, sizes=(1, 2, 4)):
    """Groups, candidates with and without a present place, and something booked beside them."""
    load = draw(st.sampled_from([0.0, 0.03125]))
    groups = [
        Group(f"g{i}", tuple(Device(f"g{i}d{j}", draw(st.sampled_from([64, 100, 160])), load) for j in range(size)))
        for i, size in enumerate(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=5)))
    ]
    candidates, booked = [], []
    for i in range(draw(st.integers(0, 10))):
        model = Model(
            f"m{i}",
            demand=float(draw(st.sampled_from([0, 1, 1, 5, 40, 300]))),
            weights=draw(st.integers(1, 90)),
            floor=draw(st.integers(0, 10)),
            quota=draw(st.integers(0, 5)),
            parts=draw(st.sampled_from([1, 1, 1, 2, 4])),
            pinned=draw(st.sampled_from([False, False, False, True])),
        )
        group = draw(st.sampled_from(groups))
        current = None
        if draw(st.booleans()) and len(group.devices) >= model.parts:
            devices = draw(st.permutations(group.devices))[: model.parts]
            current = Place(group.name, tuple(sorted(device.name for device in devices)))
        candidates.append(Candidate(model, current, draw(st.sampled_from([-inf, 0.0, 95.0]))))
    if draw(st.booleans()):
        booked.append((Model("sleeper", quota=8), Place(groups[0].name, (groups[0].devices[0].name,))))
    return groups, candidates, booked


RULES = AssignRules(tau=0.25, cool_down_s=60.0, improve_steps=0)
NOW = 100.0


def obvious(groups, candidates, booked):
    """Algorithm 1 as it reads: for each model all groups, one after the other. Without first-fit-decreasing."""
    books = Books(groups)
    for model, place in booked:
        books.book(model, place.devices)
    ordered = sorted(candidates, key=lambda c: (-c.model.demand, c.model.name))
    present = {group.name: 0.0 for group in groups}
    for c in ordered:
        if c.current:
            present[c.current.group] += c.model.demand
    order = sorted(groups, key=lambda group: (len(group.devices), present[group.name]))
    stuck = [c for c in ordered if c.current and (c.model.pinned or c.moved_at + RULES.cool_down_s > NOW)]
    for c in stuck:
        books.book(c.model, c.current.devices)
    places = {c.model.name: c.current for c in stuck}
    for c in (c for c in ordered if c not in stuck):
        best, best_place = inf, None
        for group in order:
            worst, devices = books.best(c.model, group)
            if worst < best:
                best, best_place = worst, Place(group.name, devices)
        stay = inf
        if c.current:
            stay = max(books.resulting(c.model, device) for device in c.current.devices)
        if best_place is None:
            continue
        place = c.current if stay < inf and not best < stay * (1 - RULES.tau) else best_place
        places[c.model.name] = place
        books.book(c.model, place.devices)
    return places


def check_placement(groups, candidates, booked, places):
    """Nothing is where it must not be, and nobody was put where there was no room for it."""
    books = Books(groups)
    for model, place in booked:
        books.book(model, place.devices)
    by_group = {group.name: {device.name for device in group.devices} for group in groups}
    moved_in = set()
    for c in candidates:
        place = places.get(c.model.name)
        if place is None:
            continue
        assert len(set(place.devices)) == c.model.parts
        assert set(place.devices) <= by_group[place.group]
        if place != c.current:
            assert not (c.model.pinned and c.current)
            moved_in |= set(place.devices)
        books.book(c.model, place.devices)
    for device in moved_in:
        assert books.free(device) >= 0


@given(clusters())
def test_assignment_equals_that_of_the_obvious_loop(cluster):
    groups, candidates, booked = cluster
    assignment = assign(groups, candidates, NOW, RULES, booked)
    expected = obvious(groups, candidates, booked)
    if not any(reason.kind is ModelKind.PACKED for reason in assignment.reasons.values()):
        assert assignment.places == expected
    else:
        assert len(assignment.places) > len(expected)


@given(clusters(), st.randoms(use_true_random=False))
def test_assignment_respects_room_and_does_not_depend_on_the_order_of_the_input(cluster, random):
    groups, candidates, booked = cluster
    assignment = assign(groups, candidates, NOW, RULES, booked)
    check_placement(groups, candidates, booked, assignment.places)
    assert set(assignment.reasons) == {c.model.name for c in candidates}
    shuffled = list(candidates)
    random.shuffle(shuffled)
    assert assign(groups, shuffled, NOW, RULES, booked).places == assignment.places
    for reason in assignment.reasons.values():
        assert reason.text
        assert reason.place == assignment.places.get(reason.model)


@given(clusters(sizes=(1,)))
def test_first_fit_decreasing_leaves_no_more_models_out_than_the_greedy_order(cluster):
    groups, candidates, booked = cluster
    assert len(assign(groups, candidates, NOW, RULES, booked).places) >= len(obvious(groups, candidates, booked))


@given(clusters())
def test_assignment_run_again_on_its_outcome_moves_only_for_a_gain_of_tau(cluster):
    groups, candidates, booked = cluster
    first = assign(groups, candidates, NOW, RULES, booked)
    settled = [replace(c, current=first.places.get(c.model.name), moved_at=-inf) for c in candidates]
    second = assign(groups, settled, NOW, RULES, booked)
    for reason in second.reasons.values():
        if reason.kind is ModelKind.MOVES:
            assert reason.pressure < reason.stay_pressure * (1 - RULES.tau)


# --- scenarios --------------------------------------------------------------------------------------------------------


SCENARIOS = """
two busy models part, the quiet one joins the quieter of them
    devices  A 100  B 100
    model    hot   demand 100 weights 20 on A
    model    warm  demand 50  weights 20 on A
    model    cool  demand 1   weights 20 on A
    then     hot A stays, warm B moves, cool B moves

a gain below tau is not worth a move
    devices  A 100  B 90
    model    m  demand 10 weights 10 on B
    then     m B stays

a large model counts by what it leaves, not by the pressure before it came
    devices  A 100  B 40
    model    busy   demand 10 weights 10 on A
    model    large  demand 9  weights 35
    then     busy A stays, large A placed

a pinned model is booked before the others choose
    devices  A 100  B 100
    model    low   demand 1  weights 60 on A pinned
    model    high  demand 90 weights 60
    then     low A pinned, high B placed

where it was there is no room any more
    devices  A 100  B 100
    model    high  demand 90 weights 60 on A
    model    low   demand 1  weights 60 on A
    then     high A stays, low B displaced

by weights as many would be left out, so demand decides
    devices  A 100  B 100
    model    p  demand 90 weights 50
    model    q  demand 80 weights 50
    model    r  demand 1  weights 90
    then     p A placed, q B placed, r - unplaced

by demand the large one finds no place, by weights all do
    devices  A 100  B 101
    model    p  demand 90 weights 50
    model    q  demand 80 weights 50
    model    r  demand 1  weights 90
    then     p B packed, q B packed, r A packed

where staying apart leaves no place for the last one, the large ones come together
    devices  A 101  B 101
    model    x  demand 90 weights 50 on A
    model    y  demand 80 weights 50 on B
    model    u  demand 3  weights 30
    model    v  demand 2  weights 30
    model    w  demand 1  weights 30
    then     x B packed, y B packed, u A packed, v A packed, w A packed

what fits nowhere changes nothing for the others
    devices  A 100  B 100
    model    p     demand 90 weights 50
    model    q     demand 80 weights 50
    model    huge  demand 1  weights 500
    then     p A placed, q B placed, huge - unplaced

a new model goes to an empty device, not to one whose model is still to choose
    devices  A 100  B 100
    model    here  demand 10 weights 20 on A
    model    new   demand 50 weights 20
    then     here A stays, new B placed
"""


def scenarios():
    for block in SCENARIOS.strip().split("\n\n"):
        title, *lines = block.splitlines()
        yield pytest.param([line.split(maxsplit=1) for line in lines], id=title)


def parse_model(text):
    name, *words = text.split()
    facts = dict(zip(words[0:4:2], words[1:4:2], strict=True))
    on = words[words.index("on") + 1] if "on" in words else None
    model = Model(name, float(facts["demand"]), int(facts["weights"]), pinned="pinned" in words)
    return Candidate(model, Place(on, (on,)) if on else None)


@pytest.mark.parametrize("lines", list(scenarios()))
def test_assignment_of_a_written_scenario_is_the_expected_one(lines):
    devices = next(rest for word, rest in lines if word == "devices").split()
    groups = [Group(name, (Device(name, int(size)),)) for name, size in zip(devices[::2], devices[1::2], strict=True)]
    candidates = [parse_model(rest) for word, rest in lines if word == "model"]
    assignment = assign(groups, candidates, 0.0, AssignRules(tau=0.2))
    expected = {}
    for item in next(rest for word, rest in lines if word == "then").split(","):
        name, group, kind = item.split()
        expected[name] = (group, kind)
    got = {
        reason.model: (reason.place.group if reason.place else "-", reason.kind.value)
        for reason in assignment.reasons.values()
    }
    assert got == expected


def group(name, *capacities):
    return Group(name, tuple(Device(f"{name}{i}", capacity) for i, capacity in enumerate(capacities)))


def test_assigned_model_that_moved_lately_stays_and_shows_the_rest_of_its_cool_down():
    model = Model("m", demand=10.0, weights=10)
    other = Candidate(Model("other", demand=20.0, weights=10), Place("A", ("A0",)))
    candidates = [Candidate(model, Place("A", ("A0",)), moved_at=50.0), other]
    groups = [group("A", 100), group("B", 100)]
    early = assign(groups, candidates, 70.0, AssignRules(cool_down_s=60.0))
    assert early.reasons["m"].kind is ModelKind.COOLING
    assert early.reasons["m"].cool_down_left_s == pytest.approx(40.0)
    assert early.places["other"].group == "B"
    later = assign(groups, candidates, 110.0, AssignRules(cool_down_s=60.0))
    assert later.places["m"].group == "B"


def test_tensor_parallel_parts_take_distinct_devices_of_one_group():
    groups = [group("one", 100), group("two", 100, 100), group("four", 100, 100, 100, 100)]
    busy = Candidate(Model("busy", demand=100.0, weights=10), Place("four", ("four0",)))
    tp = Candidate(Model("tp", demand=50.0, weights=40, parts=2))
    assignment = assign(groups, [busy, tp], 0.0)
    assert assignment.places["tp"] == Place("two", ("two0", "two1"))
    wide = Candidate(Model("wide", demand=200.0, weights=40, parts=3), None)
    assignment = assign(groups, [busy, tp, wide], 0.0)
    assert assignment.places["wide"].group == "four"
    assert len(set(assignment.places["wide"].devices)) == 3


def test_assigned_model_whose_group_is_gone_is_displaced():
    assignment = assign([group("B", 100)], [Candidate(Model("m", weights=10), Place("A", ("A0",)))], 0.0)
    assert assignment.places["m"] == Place("B", ("B0",))
    assert assignment.reasons["m"].kind is ModelKind.DISPLACED


def test_assignment_without_groups_leaves_every_model_unplaced():
    assignment = assign([], [Candidate(Model("m", weights=10))], 0.0)
    assert assignment.unplaced == ["m"]


def test_reason_of_a_move_shows_the_pressures_that_were_compared():
    groups = [group("A", 100), group("B", 100), group("C", 100)]
    candidates = [
        Candidate(Model("hot", demand=80.0, weights=20), Place("A", ("A0",))),
        Candidate(Model("warm", demand=40.0, weights=20), Place("A", ("A0",))),
    ]
    reason = assign(groups, candidates, 0.0, AssignRules(tau=0.2, explain=2)).reasons["warm"]
    assert reason.kind is ModelKind.MOVES
    assert [option.place.group for option in reason.options] == ["B", "C"]
    assert reason.text == "moves to B: pressure 0.5 instead of 2, more than 20% less"


def test_reason_of_a_model_that_stays_names_the_best_place_alone():
    stays = Candidate(Model("m", demand=1.0, weights=20), Place("A", ("A0",)))
    reason = assign([group("A", 200), group("B", 100)], [stays], 0.0, AssignRules(explain=2)).reasons["m"]
    assert reason.kind is ModelKind.STAYS and [option.place.group for option in reason.options] == ["A"]
