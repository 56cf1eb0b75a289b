"""Settings of placement that make no sense together are refused when they are read."""

import pytest
from pydantic import ValidationError

from placement.config import PlacementConfig
from placement.policy.kvpr import Device, Group, Model, Place, load
from placement.policy.lifecycle.decisions import PlacedModel
from placement.policy.lifecycle.group_index import index_groups


def config(**settings):
    return PlacementConfig(name="p", listen="unix:/p", groups=[], loaders=["unix:/l"], **settings)


def test_config_short_window_is_no_longer_than_the_long_one_and_at_least_a_second():
    assert config(window_s=20, short_window_s=20).window_s == 20
    with pytest.raises(ValidationError, match="window_s is 15, shorter than short_window_s, 20"):
        config(window_s=15)
    with pytest.raises(ValidationError, match="short_window_s"):
        config(short_window_s=0.4)
    with pytest.raises(ValidationError, match="window_s"):
        config(window_s=float("inf"))


def test_config_with_fixed_places_requires_rebalance_to_be_off():
    with pytest.raises(ValidationError, match="rebalance has to be false"):
        config(places={"a": "cpu:0"})
    assert config(places={"a": "cpu:0"}, rebalance=False).places


def test_config_with_the_papers_rules_has_its_thresholds_and_what_is_given_beside_them():
    paper = config(rules="paper", idle_s=5.0)
    assert (paper.load_weight, paper.tau, paper.idle_s, paper.kv_idle_s) == (0.0, 0.3, 5.0, 45.0)
    assert (paper.relieve, paper.first_do_no_harm, paper.short_window_s) == (False, False, 60.0)
    assert (paper.most_replicas, paper.replication.most) == (1, 1)
    assert paper.moves.assign.improve_steps == 0 and config().moves.assign.improve_steps > 0
    assert config(rules="paper", window_s=30).short_window_s == 30


def test_config_with_the_papers_rules_decides_by_kvpr_alone():
    """b is large and idle, a small and busy: KVPR puts c beside a, as b leaves less memory; with demand it is b."""
    groups = {name: Group(name, (Device(name, 1000, load(config().load_weight, 1000)),)) for name in "AB"}
    kvpr = {name: Group(name, (Device(name, 1000, load(config(rules="paper").load_weight, 1000)),)) for name in "AB"}
    there = [
        PlacedModel(Model("a", 10.0, 200), Place("A", ("A",))),
        PlacedModel(Model("b", 1.0, 880), Place("B", ("B",))),
    ]
    chosen = [index_groups(of.values(), there).activate(Model("c", 5.0, 20)).outcome for of in (groups, kvpr)]
    assert [each.place.group for each in chosen] == ["B", "A"]
