from dataclasses import replace

import pytest

from gpu_scheduler.policy.memory.entitlement import EngineSizes, Entitlement, ModelSizes, entitlement

EXTENT = 64
NEW = ModelSizes(weights_bytes=100, quota_bytes=3000, quota_is_default=True, floor_bytes=8)
MEASURED = replace(NEW, measured=EngineSizes(weights_bytes=100, graph_bytes=320, quota_bytes=2100))
UP = replace(MEASURED, has_engine=True)


def booked(model, awake=True):
    """(quota, weights, floor)."""
    found = entitlement(model, EXTENT, awake=awake)
    return found.quota_bytes, found.weights_bytes, found.floor_bytes


def test_booking_of_a_model_not_measured_yet_is_the_default():
    assert booked(NEW) == (3000, 128, 8)


def test_booking_of_a_measured_model_replaces_the_default_and_has_graphs_with_the_weights():
    assert booked(UP) == (2100, 448, 8)


def test_quota_stated_in_the_catalogue_stays_booked_once_the_model_is_measured():
    assert booked(replace(UP, quota_is_default=False)) == (3000, 448, 8)


def test_weights_measured_larger_than_the_catalogue_says_are_booked_as_measured():
    assert booked(replace(UP, measured=EngineSizes(weights_bytes=129)))[1] == 192


def test_a_fresh_engine_may_take_the_default_again_while_it_builds_the_model_with_its_graphs():
    assert booked(MEASURED) == (2680, 448, 8)


def test_quota_measured_above_the_default_is_booked_for_a_fresh_engine():
    assert booked(replace(MEASURED, measured=replace(MEASURED.measured, quota_bytes=3500))) == (3500, 448, 8)


@pytest.mark.parametrize(
    ("is_default", "quota", "expected"),
    [(False, 3000, (3000, 448, 8)), (True, 2100, (2680, 448, 8)), (True, 2900, (2900, 448, 8))],
)
def test_sizes_measured_by_other_groups_are_booked_before_the_model_is_built(is_default, quota, expected):
    elsewhere = EngineSizes(graph_bytes=320, quota_bytes=quota)
    assert booked(replace(NEW, quota_is_default=is_default, elsewhere=elsewhere)) == expected


def test_weights_that_measured_more_elsewhere_are_booked_so_before_the_model_is_built():
    assert booked(replace(NEW, elsewhere=EngineSizes(weights_bytes=150)))[1] == 192


def test_sizes_measured_here_count_instead_of_those_measured_elsewhere():
    assert booked(replace(UP, elsewhere=EngineSizes(500, 500, 2900))) == (2100, 448, 8)


def test_a_sleeping_engine_is_booked_with_what_it_keeps_once_that_is_known():
    assert booked(UP, awake=False) == (2100, 0, 0)
    assert booked(replace(UP, kept_bytes=616), awake=False) == (616, 0, 0)
    assert booked(replace(UP, kept_bytes=616)) == (2100, 448, 8), "not while it is awake"
    assert booked(replace(MEASURED, kept_bytes=616), awake=False) == (2680, 0, 0), "not where the engine is gone"


def test_total_of_an_entitlement_is_the_sum_of_its_parts():
    assert Entitlement(2100, 448, 8).total_bytes == 2556
