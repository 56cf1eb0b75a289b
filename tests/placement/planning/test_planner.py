import pytest

from kv_kinds import messages
from kv_kinds.layout import KvLayout, attention, state, window
from placement.planning.traffic_record import TrafficRecord
from placement.policy.expectations import WORTH_S
from placement.policy.kvpr import LEAST_DEMAND
from placement.policy.traffic import ExpectedTraffic, TrafficCounts
from protos import common_pb2
from tests.placement.fakes import MIB, FakeCluster


def asleep_in_the_way(**measured):
    """The reason for which a sleeping model goes cold, on a group that measured these of it."""
    world = FakeCluster(groups=1)
    world.model("asleep", quota=40 * MIB)
    new = world.model("new", weights=70 * MIB, floor=MIB)
    world.groups[0].put("asleep", common_pb2.HIBERNATING, **measured)
    world.tell()
    (yielding,) = world.planner.activation(new).yields
    assert yielding.target == common_pb2.COLD
    return yielding.reason


def test_cold_start_estimate_is_the_time_that_the_group_measured():
    assert asleep_in_the_way(wake_s=0.2, cold_s=12.0).endswith("back in about 12 s")


def test_cold_start_estimate_without_a_measurement_is_half_a_minute():
    assert asleep_in_the_way().endswith("back in about 30 s")


def test_activation_takes_a_group_with_as_many_devices_as_the_model_needs():
    world = FakeCluster(groups=2)
    world.groups[1].state.memory.add(device="second", capacity_bytes=100 * MIB, free_bytes=100 * MIB)
    wide, narrow = world.model("wide", weights=120 * MIB, devices=2), world.model("narrow")
    world.tell()
    assert world.planner.activation(wide).group.name == "g1" and not world.planner.refused(wide)
    assert world.planner.activation(narrow).group.name == "g0"


def test_refusal_without_a_group_of_enough_devices_says_how_many_the_groups_have():
    world = FakeCluster(groups=1)
    wide = world.model("wide", devices=4)
    world.tell()
    assert world.planner.refused(wide) == "it is for a group of 4 devices: g0 has 1"
    assert world.planner.activation(wide).group is None


def test_refusal_counts_the_part_of_a_model_on_each_device_of_a_group():
    world = FakeCluster(groups=1)
    world.groups[0].state.memory.add(device="small", capacity_bytes=50 * MIB, free_bytes=50 * MIB)
    wide = world.model("wide", weights=120 * MIB, floor=2 * MIB, quota=2 * MIB, devices=2)
    world.tell()
    assert "on each of 2 devices" in world.planner.refused(wide)


def test_a_sleeping_model_is_booked_with_the_bytes_that_its_engine_keeps():
    world = FakeCluster(groups=1)
    world.model("asleep", quota=60 * MIB)
    new = world.model("new", weights=70 * MIB, floor=MIB)
    measured = {"quota_bytes": 50 * MIB, "kept_bytes": 5 * MIB}
    world.groups[0].put("asleep", common_pb2.HIBERNATING, **measured)
    world.tell()
    verdict = world.planner.activation(new)
    assert verdict.group is not None and not verdict.yields


def test_a_measured_model_is_booked_with_its_graphs_and_its_measured_quota():
    world = FakeCluster(groups=1)
    world.model("awake", weights=30 * MIB, floor=MIB, quota=40 * MIB)
    small, large = (world.model(name, weights=nbytes * MIB, floor=MIB) for name, nbytes in (("s", 45), ("l", 50)))
    world.groups[0].put("awake", quota_bytes=12 * MIB, graph_bytes=8 * MIB)
    world.tell()
    assert world.planner.activation(small).group is not None
    assert world.planner.activation(large).group is None


@pytest.mark.parametrize(
    ("is_default", "free", "fits"),
    [(False, 58, True), (False, 57, False), (True, 50, True), (True, 49, False)],
)
def test_measured_sizes_of_a_model_count_on_other_groups_too(is_default, free, fits):
    """30 of weights, 8 of graphs, 10 of floor and 10 of quota; the default quota has room for graphs."""
    world = FakeCluster(capacity=200 * MIB)
    there = world.model("there", weights=30 * MIB, floor=10 * MIB, quota=10 * MIB, quota_is_default=is_default)
    world.model("other", weights=(200 - free - 2) * MIB, floor=MIB)
    world.groups[0].put("there", weights_bytes=30 * MIB, graph_bytes=8 * MIB, quota_bytes=2 * MIB)
    world.groups[1].put("other")
    world.tell()
    world.groups[0].remove("there")
    world.groups[0].state.drained = True
    world.tell()
    assert (world.planner.activation(there).group is not None) == fits


def test_measured_sizes_of_a_model_are_dropped_with_a_new_checkpoint_of_its_name():
    world = FakeCluster(groups=1)
    model = world.model("m", weights=30 * MIB)
    world.groups[0].put("m", weights_bytes=30 * MIB, graph_bytes=8 * MIB)
    world.tell()
    assert world.cluster.measured("m").graphs == 8 * MIB
    world.groups[0].remove("m")
    world.tell()
    entry = world.cluster.entry("m")
    had_no_image = type(entry)(model=model)
    world.cluster.heard_catalogue([had_no_image])
    assert world.cluster.measured("m").graphs == 8 * MIB
    other = type(entry)(model=model)
    other.model.generation += 1
    world.cluster.heard_catalogue([other])
    assert world.cluster.measured("m").graphs == 0


def test_measured_sizes_of_an_outdated_or_delisted_engine_are_ignored():
    world = FakeCluster(groups=1)
    world.model("m", weights=30 * MIB)
    world.groups[0].put("m", weights_bytes=50 * MIB, graph_bytes=8 * MIB, outdated=True)
    world.groups[0].put("delisted", weights_bytes=50 * MIB, graph_bytes=8 * MIB)
    world.tell()
    for name in ("m", "delisted"):
        assert world.cluster.measured(name).weights == 0


def test_a_waking_model_is_booked_with_its_graphs_once():
    """30 of weights, 8 of graphs, a default quota of 20 that has room for these, 2 of floor."""
    world = FakeCluster(groups=2)
    world.model("m", weights=30 * MIB, floor=2 * MIB, quota=20 * MIB, quota_is_default=True)
    other = world.model("other", weights=46 * MIB, floor=MIB)
    world.groups[0].put("m", weights_bytes=30 * MIB, graph_bytes=8 * MIB, quota_bytes=4 * MIB)
    world.tell()
    world.groups[0].remove("m")
    world.groups[0].state.drained = True
    world.groups[1].put("m", common_pb2.WAKING)
    world.tell()
    assert world.planner.activation(other).group is not None


def test_a_sleeping_model_wakes_on_its_group_with_the_measured_quota():
    world = FakeCluster(groups=1)
    asleep = world.model("asleep", weights=30 * MIB, floor=MIB, quota=60 * MIB)
    world.model("awake", weights=40 * MIB, floor=MIB)
    world.groups[0].put("awake")
    world.groups[0].put("asleep", common_pb2.HIBERNATING, quota_bytes=20 * MIB, kept_bytes=5 * MIB)
    world.tell()
    assert world.planner.activation(asleep).group is not None


def test_a_sleeping_model_under_activation_is_booked_before_the_report_of_its_group():
    world = FakeCluster(groups=1)
    waking, other = (world.model(name, weights=50 * MIB) for name in ("waking", "other"))
    for name in ("waking", "other"):
        world.groups[0].put(name, common_pb2.HIBERNATING, kept_bytes=MIB, idle_s=9.0)
    world.tell()
    assert world.planner.activation(other).group is not None
    world.actuator.activating["waking"] = (world.cluster.group("g0"), None)
    world.tell()
    assert world.planner.activation(other).group is None
    del world.actuator.activating["waking"]
    world.tell()
    assert world.planner.activation(other).group is not None


def test_a_model_with_a_fixed_place_comes_up_on_that_group_only():
    world = FakeCluster(groups=2, places={"fixed": "g0"}, rebalance=False)
    fixed = world.model("fixed", weights=60 * MIB)
    world.model("there", weights=50 * MIB)
    world.groups[0].put("there")
    world.tell()
    assert world.planner.activation(fixed).group is None
    world.groups[0].remove("there")
    world.tell()
    assert world.planner.activation(fixed).group.name == "g0"


def test_a_fixed_place_on_an_unknown_group_is_refused_by_name():
    world = FakeCluster(groups=1, places={"lost": "g7"}, rebalance=False)
    assert world.planner.refused(world.model("lost")) == "it is for g7, a group of 1 device: g0 has 1"


def test_config_with_fixed_places_and_rebalance_is_refused():
    with pytest.raises(ValueError, match="rebalance has to be false"):
        FakeCluster(places={"fixed": "g0"})


def test_a_model_under_activation_makes_no_way_before_its_quantum():
    world = FakeCluster(groups=1, patience_s=0)
    world.model("coming", weights=60 * MIB)
    new = world.model("new", weights=60 * MIB)
    world.tell()
    world.actuator.activating["coming"] = (world.cluster.group("g0"), None)
    verdict = world.planner.activation(new)
    assert verdict.group is None and "g0 is reserved for it" in verdict.reason


def test_booking_of_a_dead_engine_makes_no_way_before_it_is_dropped():
    world = FakeCluster(groups=1, patience_s=0)
    new = world.model("new", weights=60 * MIB)
    world.groups[0].state.memory[0].bookings.add(model="dead", weights_bytes=60 * MIB)
    world.tell()
    verdict = world.planner.activation(new)
    assert verdict.group is None and "g0 is reserved for it" in verdict.reason


def test_idle_time_of_a_model_is_the_reported_one_and_the_time_since_the_report():
    world = FakeCluster(groups=1, idle_s=1.0, patience_s=60)
    world.model("idle", weights=60 * MIB)
    new = world.model("new", weights=60 * MIB)
    world.groups[0].put("idle", idle_s=0.5, active_s=60)
    world.tell()
    assert world.planner.activation(new).group is None
    world.time += 0.4
    assert world.planner.activation(new).group is None
    world.time += 0.2
    (yielding,) = world.planner.activation(new).yields
    assert yielding.reason.startswith("idle for 1 s")


def test_idle_time_of_a_busy_model_does_not_grow_without_reports():
    world = FakeCluster(groups=1, idle_s=1.0, patience_s=60)
    world.model("busy", weights=60 * MIB)
    new = world.model("new", weights=60 * MIB)
    world.groups[0].put("busy", idle_s=0.0, active_s=60)
    world.tell()
    world.time += 9.0
    assert world.planner.activation(new).group is None


def test_quantum_of_a_busy_model_ends_without_another_report():
    world = FakeCluster(groups=1, patience_s=0, quantum_s=4)
    world.model("busy", weights=60 * MIB)
    new = world.model("new", weights=60 * MIB)
    world.groups[0].put("busy", active_s=3.0, waiting=1)
    world.tell()
    assert world.planner.activation(new).group is None
    world.time += 1.5
    assert [y.model for y in world.planner.activation(new).yields] == ["busy"]


def test_relief_is_found_once_a_model_has_been_idle_for_long_enough():
    world = FakeCluster(groups=1, kv_idle_s=5.0)
    for name in ("busy", "idle"):
        world.model(name)
    world.groups[0].put("busy", weights_bytes=30 * MIB, waiting=3, kv_used_bytes=20 * MIB, kv_lacking_bytes=15 * MIB)
    world.groups[0].put("idle", weights_bytes=30 * MIB, idle_s=4.0, active_s=60)
    world.tell()
    assert world.planner.reliefs() == []
    world.time += 1.5
    ((_, (yielding,)),) = world.planner.reliefs()
    assert yielding.model == "idle"


def test_model_that_would_come_back_cold_stays_for_several_times_its_cold_start():
    world = FakeCluster(groups=1, stay=4.0, patience_s=60, hibernate=False)
    world.model("came", weights=60 * MIB)
    new = world.model("new", weights=60 * MIB)
    world.groups[0].put("came", idle_s=9.0, active_s=20.0, wake_s=0.3, cold_s=10.0, came_s=10.0)
    world.tell()
    assert world.planner.activation(new).group is None
    world.time += 20.5
    assert [y.model for y in world.planner.activation(new).yields] == ["came"]


def test_token_rate_leaves_out_tokens_counted_before_the_group_was_found():
    world = FakeCluster(groups=1)
    world.model("a")
    [group] = world.groups

    def counted(tokens):
        group.put("a", decode_tokens=tokens)
        world.tell()
        world.planner.observe()
        return world.planner.rates().get("a", 0.0)

    assert counted(100_000) == 0.0  # placement has just started
    rate = counted(100_200)
    assert 0.0 < rate <= 200
    world.cluster.forget_group(group.address)
    world.planner.observe()
    world.cluster.add_group(group)
    assert counted(100_400) == rate
    group.remove("a")
    world.tell()
    world.planner.observe()
    assert counted(200) > rate  # it left, and came anew


def names_within(root, seen=None):
    """Every string that it keeps, in itself and in what it has."""
    seen = {} if seen is None else seen
    if id(root) in seen:
        return
    seen[id(root)] = root  # which keeps it, so that nothing else gets its id
    if isinstance(root, str):
        yield root
    elif isinstance(root, dict):
        for each in [*root.keys(), *root.values()]:
            yield from names_within(each, seen)
    elif isinstance(root, (list, tuple, set, frozenset)):
        for each in root:
            yield from names_within(each, seen)
    elif type(root).__module__.startswith("placement."):
        slots = getattr(root, "__slots__", ())
        yield from names_within([getattr(root, slot) for slot in slots] + [getattr(root, "__dict__", {})], seen)


def test_planner_keeps_no_state_of_vanished_models_beyond_the_last_few():
    traffic = TrafficRecord()  # of which nothing is left after two days
    world = FakeCluster(groups=2, most_vanished=4, traffic=traffic)
    world.model("stays")
    world.planner.observe()
    world.groups[0].put("stays", decode_tokens=5)
    for number in range(5):
        spec = world.model(f"gone-{number}", default_slo=common_pb2.Slo(tpot_ms=50))
        world.groups[1].put(spec.name, decode_tokens=7 * (number + 1), tpot_target_ms=9.0)
        world.groups[1].put(f"{spec.name}-unused", tpot_target_ms=9.0)
        world.model(f"{spec.name}-unused")
        world.tell()
        world.planner.observe()
        assert world.planner.activation(spec).group is not None and world.planner.rates()[spec.name] > 0
        world.planner.moved(spec.name)
        world.time += 200.0
        world.groups[1].remove(spec.name)
        world.groups[1].remove(f"{spec.name}-unused")
        world.cluster.heard_catalogue([world.cluster.catalogue["stays"]])
        world.tell()
        world.planner.observe()
    assert world.planner.rates().keys() == {"stays"}
    world.planner.moved("stays")
    kept = ["gone-3", "gone-3-unused", "gone-4", "gone-4-unused"]
    within = names_within(world.planner, {id(traffic): traffic})
    assert {name for name in within if name.startswith("gone")} == set(kept)
    assert list(world.cluster.vanished) == kept


class Past(TrafficRecord):
    """A record that expects these tokens a second, and remembers what was counted."""

    def __init__(self, tokens_per_s=(), returns_per_s=0.01):
        super().__init__()
        self.expected = {name: ExpectedTraffic(rate, returns_per_s) for name, rate in dict(tokens_per_s).items()}
        self.counted = []

    def follow(self, settled):
        self.told = settled

    def observe(self, model, counts):
        self.counted.append((model, counts))


def warm(past, **facts):
    """Two groups, and four models that are on neither."""
    world = FakeCluster(groups=2, traffic=past, **facts)
    return world, {name: world.model(name, weights=10 * MIB, floor=MIB) for name in "abcd"}


def test_places_before_any_request_are_those_of_the_traffic_of_earlier_hours():
    world, specs = warm(Past({"a": 50.0, "b": 40.0, "c": 30.0, "d": 20.0}))
    world.planner.observe()
    plans = {name: world.planner.prospect(spec) for name, spec in specs.items()}
    places = {name: plan.group.name for name, plan in plans.items()}
    assert places["a"] == places["d"] != places["b"] == places["c"]
    assert "by the traffic of earlier hours" in plans["b"].reason
    assert {name: world.planner.activation(spec).group.name for name, spec in specs.items()} == places


def test_places_without_earlier_hours_or_long_after_the_start_are_those_of_least_pressure():
    world, specs = warm(Past())
    assert {world.planner.prospect(spec).group.name for spec in specs.values()} == {"g0"}
    world, specs = warm(Past({"a": 50.0, "b": 40.0}))
    world.time += WORTH_S
    world.planner.observe()
    assert {world.planner.prospect(spec).group.name for spec in specs.values()} == {"g0"}


def test_places_by_the_rules_of_the_paper_are_not_those_of_earlier_hours():
    world, specs = warm(Past({"a": 50.0, "b": 40.0}), rules="paper")
    world.planner.observe()
    assert {world.planner.prospect(spec).group.name for spec in specs.values()} == {"g0"}


def test_demand_of_a_model_with_several_kinds_of_kv_is_by_the_bytes_of_a_long_requests_token():
    world, _ = warm(Past({"a": 50.0, "e": 50.0}))
    layout = KvLayout((attention(1000), window(9000, 1024, 64), state(1 << 26)))
    world.model("e", kv_kinds=messages.kinds(layout))
    world.planner.observe()
    demands = world.planner.demands()
    assert demands["e"] == demands["a"] > LEAST_DEMAND


def test_expected_demand_counts_until_more_is_seen_and_falls_with_time():
    world, specs = warm(Past({"a": 50.0}))
    world.planner.observe()
    at_first = world.planner.demands()["a"]
    assert at_first > world.planner.demands()["b"] == LEAST_DEMAND
    world.time += WORTH_S / 2
    assert LEAST_DEMAND < world.planner.demands()["a"] < at_first
    world.time += WORTH_S / 2
    assert world.planner.demands()["a"] == LEAST_DEMAND


def test_places_by_earlier_hours_count_models_that_the_catalogue_has_only_now():
    past = Past({"a": 50.0, "b": 40.0, "c": 30.0, "d": 20.0})
    world, specs = warm(past)
    entries = dict(world.cluster.catalogue)
    world.cluster.heard_catalogue([entries["d"]])
    world.planner.observe()
    assert world.planner.activation(specs["d"]).group is not None
    world.cluster.heard_catalogue(entries.values())
    world.planner.observe()
    assert {"by the traffic of earlier hours" in world.planner.prospect(specs[name]).reason for name in "abc"} == {True}


def test_model_that_is_fixed_to_a_group_comes_up_there_whatever_was_expected():
    world, specs = warm(Past({"a": 50.0, "b": 40.0}), places={"a": "g1", "b": "g1"}, rebalance=False)
    world.planner.observe()
    assert [world.planner.activation(specs[name]).group.name for name in "ab"] == ["g1", "g1"]


def test_traffic_is_counted_once_from_what_a_group_reports_after_it_was_found():
    past = Past()
    world, _ = warm(past)
    world.planner.observe()
    group = world.groups[0]
    group.put("a", arrived=2, prefill_tokens=30, decode_tokens=7, returns=1)
    world.tell()
    world.planner.observe()
    world.planner.observe()
    group.put("a", arrived=3, prefill_tokens=50, decode_tokens=7, returns=1)
    world.tell()
    world.planner.observe()
    group.put("a", arrived=1, prefill_tokens=5, decode_tokens=0, returns=0)  # its process is a new one
    world.tell()
    world.planner.observe()
    assert past.counted == [
        ("a", TrafficCounts(2, 30, 7, 1)),
        ("a", TrafficCounts(1, 20, 0, 0)),
        ("a", TrafficCounts(1, 5, 0, 0)),
    ]


def come_back(world, **counters):
    """The model "a" leaves its group, and comes back with these counters, which its group has kept."""
    for put in (lambda group: group.remove("a"), lambda group: group.put("a", **counters)):
        put(world.groups[0])
        world.tell()
        world.planner.observe()


def test_traffic_of_a_model_that_comes_back_to_its_group_is_not_counted_again():
    past = Past()
    world, _ = warm(past)
    world.planner.observe()
    world.groups[0].put("a", arrived=5, prefill_tokens=30, decode_tokens=7, returns=2)
    world.tell()
    world.planner.observe()
    come_back(world, arrived=5, prefill_tokens=0, decode_tokens=0, returns=2)  # with another engine, whose counters are
    come_back(world, arrived=6, prefill_tokens=4, decode_tokens=0, returns=3)
    assert past.counted == [
        ("a", TrafficCounts(5, 30, 7, 2)),
        ("a", TrafficCounts(0, 0, 0, 0)),
        ("a", TrafficCounts(1, 4, 0, 1)),
    ]


def test_missed_targets_of_a_model_that_comes_back_to_its_group_are_not_counted_again():
    world, _ = warm(Past())
    outcomes = world.planner._group_indexes.outcomes
    world.planner.observe()
    world.groups[0].put("a", ttft_missed=600, returns=40)
    world.tell()
    world.planner.observe()
    assert outcomes.missed_per_s("a", world.time) == 10.0
    missed, returned = outcomes.missed_per_s("a", world.time), outcomes.returns_per_s("a", world.time)
    come_back(world, ttft_missed=600, returns=40)
    assert (outcomes.missed_per_s("a", world.time), outcomes.returns_per_s("a", world.time)) == (missed, returned)
    come_back(world, ttft_missed=60, returns=0)  # the group's process is another one
    assert outcomes.missed_per_s("a", world.time) == 11.0


def test_models_that_a_group_had_when_it_was_found_may_be_moved_though_earlier_hours_are_known():
    world, _ = warm(Past({"a": 50.0, "b": 40.0, "c": 30.0}))
    world.groups[0].put("a")
    world.groups[1].put("b", common_pb2.HIBERNATING)
    world.tell()
    world.planner.observe()
    world.groups[1].put("c")
    world.tell()
    world.planner.observe()
    assert world.planner._group_indexes.expected == {"c"}


def test_models_that_the_placement_before_called_settled_stay_so_as_long_as_they_are_on_a_group():
    past = Past({"c": 30.0, "d": 20.0})
    past.settled = frozenset({"a", "gone"})
    world, _ = warm(past)
    world.groups[0].put("a")
    world.groups[1].put("b")
    world.tell()
    world.planner.observe()
    assert world.planner._group_indexes.expected == {"a", "c", "d"}
    assert sorted(past.told()) == ["a"], "those that have no place yet have none to keep"
    world.planner.moved("b")
    assert sorted(past.told()) == ["a", "b"]
    world.groups[0].remove("a")
    world.tell()
    assert past.told() == ["b"]


def test_model_that_returns_often_by_earlier_hours_does_not_make_way_before_one_that_does_not():
    past = Past({"often": 1.0, "rarely": 1.0})
    past.expected = {"often": ExpectedTraffic(1.0, 0.02), "rarely": ExpectedTraffic(1.0, 0.0002)}

    def leaves(traffic):
        world = FakeCluster(groups=1, traffic=traffic)
        for name in ("often", "rarely"):
            world.model(name, weights=40 * MIB, floor=MIB)
        new = world.model("new", weights=40 * MIB, floor=MIB)
        world.groups[0].put("often", idle_s=20.0, wake_s=0.2, active_s=60.0)
        world.groups[0].put("rarely", idle_s=5.0, wake_s=0.2, active_s=60.0)
        world.tell()
        return [each.model for each in world.planner.activation(new).yields]

    assert leaves(past) == ["rarely"] and leaves(Past()) == ["often"]
