"""Demand, pressure, and what is booked where."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.kvpr import (
    LEAST_DEMAND,
    Books,
    Device,
    Group,
    Model,
    demand,
    load,
    pressure,
    pressure_text,
    share,
)

GROUP = Group("g", (Device("d0", 100), Device("d1", 200), Device("d2", 100)))


def test_demand_is_bytes_a_second_weighted_by_the_target():
    assert demand(100.0, 1000, 0.05, default_target_s=0.1) == pytest.approx(2_000_000)
    assert demand(100.0, 1000, None, default_target_s=0.1) == pytest.approx(1_000_000)


def test_demand_of_a_model_without_requests_is_the_least_one():
    assert demand(0.0, 1000, 0.05, default_target_s=0.1) == LEAST_DEMAND


def test_pressure_is_infinite_where_nothing_is_left():
    assert pressure(10.0, 100, 50) == pytest.approx(0.2)
    assert pressure(10.0, 100, 100) == inf
    assert pressure(0.0, 100, 101) == inf


def test_demand_loads_a_device_also_where_there_is_plenty_of_memory():
    assert load(4.0, 100) == pytest.approx(0.04) and load(0.0, 100) == load(4.0, 0) == 0.0
    assert pressure(10.0, 100, 50, load(4.0, 100)) == pytest.approx(10 / 50 + 4 * 10 / 100)
    assert pressure(10.0, 100, 100, load(4.0, 100)) == inf
    # Two large models with little to do leave a little memory, one small model with much to do leaves a lot.
    large, small, new = Model("l", 2.0, weights=70), Model("s", 9.0, weights=5), Model("n", 3.0, weights=10)
    for weight, better in ((0.0, "s"), (4.0, "l")):
        group = Group("g", (Device("l", 100, load(weight, 100)), Device("s", 100, load(weight, 100))))
        books = Books([group])
        books.book(large, ["l"])
        books.book(small, ["s"])
        assert books.best(new, group)[1] == (better,)
        assert books.copy().best(new, group) == books.best(new, group)


def test_floors_need_room_but_are_kv_and_stay_in_the_denominator():
    books = Books([GROUP])
    books.book(Model("a", demand=10.0, weights=40, floor=30, quota=10), ["d0"])
    assert books.pressure("d0") == pytest.approx(10.0 / 50)
    assert books.free("d0") == 20
    assert books.fits(Model("b", weights=10, floor=10), "d0")
    assert not books.fits(Model("b", weights=10, floor=11), "d0")
    assert books.resulting(Model("b", weights=10, floor=11), "d0") == inf
    assert books.resulting(Model("b", demand=2.0, weights=10, floor=10), "d0") == pytest.approx(12.0 / 40)


def test_the_parts_of_a_tensor_parallel_model_go_to_the_least_pressured_devices_of_the_group():
    books = Books([GROUP])
    books.book(Model("a", demand=10.0, weights=10), ["d0"])
    model = Model("tp", demand=4.0, weights=41, parts=2)
    assert (model.fixed, model.needed, model.part_demand) == (21, 21, 2.0)
    worst, devices = books.best(model, GROUP)
    assert devices == ("d1", "d2")
    assert worst == pytest.approx(2.0 / 79)
    assert books.best(Model("tp4", parts=4), GROUP) == (inf, ())
    assert books.best(Model("large", weights=500, parts=2), GROUP) == (inf, ())


def test_a_sleeping_model_is_booked_with_its_quota_alone():
    model = Model("a", demand=5.0, weights=40, floor=30, quota=10, parts=2)
    assert (model.asleep().fixed, model.asleep().needed, model.asleep().part_demand) == (5, 5, 0.0)


def test_a_device_belongs_to_one_group():
    with pytest.raises(ValueError, match="d0 is in two groups"):
        Books([GROUP, Group("other", (Device("d0", 1),))])


@given(st.integers(0, 10_000), st.integers(1, 8))
def test_shares_of_an_amount_add_up_to_at_least_it(amount, parts):
    assert amount <= share(amount, parts) * parts < amount + parts


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 9), st.integers(0, 2)), max_size=20))
def test_books_after_a_release_are_as_before_the_booking(bookings):
    books = Books([GROUP])
    models = [(Model(f"{i}", float(d), w, f), f"d{device}") for i, (w, f, d, device) in enumerate(bookings)]
    for model, device in models:
        books.book(model, [device])
    copy = books.copy()
    for model, device in models:
        books.release(model, [device])
    for device in GROUP.devices:
        assert books.free(device.name) == device.capacity
        assert books.pressure(device.name) == 0.0
        assert copy.free(device.name) == device.capacity - sum(m.needed for m, d in models if d == device.name)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.011e-06, "below 0.0001"),
        (0.0001, "0.0001"),
        (0.94031, "0.9403"),
        (525.469, "525.5"),
        (123_456.7, "123457"),
        (inf, "infinite"),
    ],
)
def test_pressure_in_a_sentence_has_no_power_of_ten(value, text):
    assert pressure_text(value) == text
