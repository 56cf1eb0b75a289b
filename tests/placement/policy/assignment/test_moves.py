"""Sequences of migrations."""

from hypothesis import given
from hypothesis import strategies as st

from placement.policy.assignment.moves import DeferredMove, Move, MoveRules, plan_moves
from placement.policy.kvpr import Books, Device, Group, Model, Place


def cluster(**capacities):
    return [Group(name, (Device(name, capacity),)) for name, capacity in capacities.items()]


def at(name):
    return Place(name, (name,))


def model(name, weights, demand=0.0, **facts):
    return Model(name, demand, weights, **facts)


def test_a_move_that_waits_for_room_comes_after_the_one_that_makes_it():
    booked = [(model("a", 60, demand=9.0), at("A")), (model("b", 60), at("B"))]
    plan = plan_moves(cluster(A=100, B=100, C=100), booked, {"a": at("B"), "b": at("C")}, 0.0)
    assert plan.waves == ((Move("b", at("B"), at("C")),), (Move("a", at("A"), at("B")),))
    assert plan.held == ()


def test_move_source_keeps_its_memory_until_the_wave_is_over():
    booked = [(model("a", 60), at("A")), (model("b", 30, demand=9.0), at("B"))]
    plan = plan_moves(cluster(A=80, B=100), booked, {"a": at("B"), "b": at("A")}, 0.0, MoveRules(at_once=2))
    assert [[move.model for move in wave] for wave in plan.waves] == [["a"], ["b"]]


def test_plan_of_moves_has_as_many_waves_as_are_wanted():
    booked = [(model("a", 60, demand=9.0), at("A")), (model("b", 60), at("B"))]
    target = {"a": at("B"), "b": at("C")}
    plan = plan_moves(cluster(A=100, B=100, C=100), booked, target, 0.0, enough=lambda wave: True)
    assert plan.waves == ((Move("b", at("B"), at("C")),),) and plan.held == ()


def test_moves_of_two_models_into_each_others_full_place_are_held_with_the_bytes():
    booked = [(model("a", 60), at("A")), (model("b", 60), at("B"))]
    plan = plan_moves(cluster(A=100, B=100), booked, {"a": at("B"), "b": at("A")}, 0.0)
    assert plan.waves == ()
    assert plan.held[0] == DeferredMove("a", at("B"), "B has 40 bytes free, it needs 60, and no other move makes room")


def test_moves_of_a_wave_are_at_most_as_many_as_allowed_by_highest_demand():
    booked = [(model(f"m{i}", 10, demand=float(i)), at("A")) for i in range(5)]
    plan = plan_moves(cluster(A=100, B=100), booked, {f"m{i}": at("B") for i in range(5)}, 0.0, MoveRules(at_once=2))
    assert [[move.model for move in wave] for wave in plan.waves] == [["m4", "m3"], ["m2", "m1"], ["m0"]]


def test_moves_under_way_count_as_running_and_occupy_both_places():
    booked = [(model("a", 60), at("A")), (model("b", 50), at("C"))]
    running = [Move("a", at("A"), at("B"))]
    plan = plan_moves(cluster(A=100, B=100, C=100), booked, {"a": at("B"), "b": at("A")}, 0.0, under_way=running)
    assert plan.waves == ((), (Move("b", at("C"), at("A")),))


def test_model_active_on_two_groups_is_not_moved_again():
    booked = [(model("a", 30), at("A")), (model("a", 30), at("B"))]
    assert plan_moves(cluster(A=100, B=100, C=100), booked, {"a": at("C")}, 0.0).moves == []


def test_a_sleeping_engine_elsewhere_does_not_keep_the_active_one_from_moving():
    active = model("a", 30, demand=5.0, quota=5)
    booked = [(active.asleep(), at("B")), (active, at("A"))]
    plan = plan_moves(cluster(A=100, B=100), booked, {"a": at("B")}, 0.0)
    assert plan.moves == [Move("a", at("A"), at("B"))]


def test_pinned_and_cooling_models_are_held():
    booked = [(model("p", 10, pinned=True), at("A")), (model("c", 10), at("A")), (model("m", 10), at("A"))]
    target = {name: at("B") for name in "pcm"}
    moved_at = {"c": 70.0, "m": 40.0}
    plan = plan_moves(cluster(A=100, B=100), booked, target, 100.0, MoveRules(cool_down_s=60.0), moved_at=moved_at)
    assert [move.model for move in plan.moves] == ["m"]
    assert {held.model: held.reason for held in plan.held} == {
        "p": "it is pinned",
        "c": "it moved lately, 30 s of its cool-down are left",
    }


@given(st.data())
def test_plan_of_moves_is_feasible_and_holds_only_models_without_room(data):
    groups = cluster(A=100, B=100, C=100)
    names = st.sampled_from("ABC")
    books = Books(groups)
    booked, target = [], {}
    for i in range(data.draw(st.integers(0, 8))):
        made = model(f"m{i}", data.draw(st.integers(1, 50)), demand=float(data.draw(st.integers(0, 3))))
        place = at(data.draw(names))
        if books.fits(made, place.group):
            books.book(made, place.devices)
            booked.append((made, place))
            target[made.name] = at(data.draw(names))
    at_once = data.draw(st.integers(1, 3))
    plan = plan_moves(groups, booked, target, 0.0, MoveRules(at_once=at_once))

    facts = {made.name: made for made, _ in booked}
    where = {made.name: place for made, place in booked}
    for wave in plan.waves:
        assert 0 < len(wave) <= at_once
        for move in wave:
            assert where[move.model] == move.source
            assert books.fits(facts[move.model], move.target.group)
            books.book(facts[move.model], move.target.devices)
        for move in wave:
            books.release(facts[move.model], move.source.devices)
            where[move.model] = move.target
    held = {held.model for held in plan.held}
    for name, place in where.items():
        assert place == target[name] or name in held
    for name in held:
        assert not books.fits(facts[name], target[name].group)
