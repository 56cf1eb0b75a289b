"""The arrays say what the books say."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.policy.field import Field
from placement.policy.kvpr import Books, Device, Group, Model, Place

GROUPS = [
    Group("a", (Device("a0", 100), Device("a1", 60))),
    Group("b", (Device("b0", 80),)),
    Group("c", (Device("c0", 100), Device("c1", 100))),
]
DEVICES = [device.name for group in GROUPS for device in group.devices]
models = st.builds(
    Model,
    st.just("m"),
    st.sampled_from([0.0, 1.0, 7.0, 50.0]),
    st.integers(0, 70),
    st.integers(0, 20),
    st.integers(0, 10),
    parts=st.sampled_from([1, 2]),
)


loads = st.lists(st.sampled_from([0.0, 0.01, 0.3]), min_size=len(DEVICES), max_size=len(DEVICES))


@given(st.lists(st.tuples(models, st.sampled_from(DEVICES)), max_size=12), models, loads)
def test_field_pressures_equal_those_of_the_books(bookings, model, loads):
    load = dict(zip(DEVICES, loads, strict=True))
    groups = [Group(g.name, tuple(replace(d, load=load[d.name]) for d in g.devices)) for g in GROUPS]
    field, books = Field(groups, {}), Books(groups)
    for booked, device in bookings:
        field.book(booked, [device])
        books.book(booked, [device])
    for group in GROUPS:
        for device in group.devices:
            assert field.resulting(model, Place(group.name, (device.name,))) == books.resulting(model, device.name)
    booked = field.copy().pressures()
    for name in DEVICES:
        at = field.numbers(Place("", (name,)))[0]
        assert booked[at] == (books.pressure(name) if field.demand[at] > 0 else 0.0)
    options = field.best(model, count=10)
    assert [option.pressure for option in options] == sorted(option.pressure for option in options)
    best = min(books.best(model, group)[0] for group in GROUPS)
    assert (options[0].pressure if options else inf) == best
    first = field.first(model)
    assert (first is None) == (best == inf)
    if first is not None:
        assert field.resulting(model, first) < inf


def test_a_copy_of_a_field_is_independent():
    field = Field(GROUPS, {})
    other = field.copy()
    other.book(Model("m", weights=90), ["c0"])
    place = Place("c", ("c0",))
    assert field.resulting(Model("n", weights=50), place) == 0.0
    assert other.resulting(Model("n", weights=50), place) == inf


def test_field_among_equal_pressures_prefers_the_smaller_group_then_the_one_with_less_demand():
    model = Model("m", demand=1.0, weights=10)
    equal = [
        Group("x", (Device("x0", 100), Device("x1", 100))),
        Group("y", (Device("y0", 100),)),
        Group("z", (Device("z0", 100),)),
    ]
    assert Field(equal, {}).best(model)[0].place.group == "y"
    assert Field(equal, {"y": 5.0}).best(model)[0].place.group == "z"


def test_field_knows_a_place_by_its_group_and_devices():
    field = Field(GROUPS, {})
    assert field.has(Place("a", ("a0", "a1")))
    assert not field.has(Place("a", ("b0",)))
    assert not field.has(Place("a", ("gone",)))
    with pytest.raises(ValueError, match="two groups"):
        Field([*GROUPS, Group("d", (Device("a0", 1),))], {})


def test_field_finds_a_device_by_its_number():
    groups = [Group("wide", (Device("w0", 100), Device("w1", 100))), Group("a", (Device("a0", 100),))]
    field = Field(groups, {})
    for group in groups:
        for device in group.devices:
            place = Place(group.name, (device.name,))
            assert field.single(*field.numbers(place)) == place
