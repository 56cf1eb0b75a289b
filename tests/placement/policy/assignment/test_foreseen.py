"""Where models belong that are on no group yet."""

from itertools import permutations

from placement.policy.assignment.assign import AssignRules
from placement.policy.assignment.foreseen import foreseen
from placement.policy.kvpr import Device, Group, Model, Place, load
from placement.policy.lifecycle.decisions import PlacedModel
from placement.policy.lifecycle.group_index import index_groups

GROUPS = [Group(name, (Device(f"{name}-0", 100, load(100.0, 100)),)) for name in ("g0", "g1")]
RULES = AssignRules(tau=0.2)


def model(name, demand, weights=10):
    return Model(name, demand=demand, weights=weights)


def there(group):
    return Place(group, (f"{group}-0",))


def test_models_belong_where_the_expected_demand_is_even():
    places = foreseen(GROUPS, (), [model("a", 50.0), model("b", 40.0), model("c", 30.0), model("d", 20.0)], RULES)
    assert places["a"] == places["d"] != places["b"] == places["c"]


def test_models_that_are_on_a_group_are_counted_there_with_what_is_expected_and_have_no_other_place():
    up = PlacedModel(model("up", 0.0), there("g0"))
    places = foreseen(GROUPS, [up], [model("up", 100.0), model("a", 50.0), model("b", 40.0)], RULES)
    assert places == {"a": "g1", "b": "g1"}


def test_model_without_room_beside_the_others_has_no_place():
    places = foreseen(GROUPS, (), [model("a", 50.0, 80), model("b", 40.0, 80), model("c", 1.0, 80)], RULES)
    assert set(places) == {"a", "b"}


def test_activation_follows_it_whatever_the_order_in_which_models_are_asked_for():
    models = [model("a", 50.0), model("b", 40.0), model("c", 30.0), model("d", 20.0)]
    wanted = foreseen(GROUPS, (), models, RULES)
    for order in permutations(models):
        up = []
        for each in order:
            answer = index_groups(GROUPS, up).activate(each, first=wanted[each.name])
            up.append(PlacedModel(each, answer.outcome.place))
        assert {r.model.name: r.place.group for r in up} == wanted


def test_activation_goes_elsewhere_where_others_would_have_to_leave_for_it():
    idle = PlacedModel(model("idle", 0.0, 95), there("g0"), idle_s=60.0)
    answer = index_groups(GROUPS, [idle]).activate(model("a", 50.0), first="g0")
    assert answer.outcome.place.group == "g1" and not answer.evictions


def test_model_that_hibernates_wakes_at_home_and_not_where_it_was_to_be():
    asleep = PlacedModel(Model("a", demand=5.0, weights=10, quota=1), there("g0"), hibernating=True)
    answer = index_groups(GROUPS, [asleep]).activate(Model("a", demand=5.0, weights=10, quota=1), first="g1")
    assert answer.outcome.place.group == "g0"


def test_group_that_is_gone_or_closed_is_not_followed():
    index = index_groups(GROUPS)
    assert index.activate(model("a", 5.0), first="gone").outcome.place.group in {"g0", "g1"}
    assert index.activate(model("a", 5.0), closed={"g1"}, first="g1").outcome.place.group == "g0"
