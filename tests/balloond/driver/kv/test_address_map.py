import pytest
from hypothesis import given
from hypothesis import strategies as st

from balloond.driver.kv.address_map import AddressMap


def test_address_map_index_is_free_before_and_after_an_extent_is_mapped_there():
    addresses = AddressMap(6)
    addresses.add(0, id=7, size=1)
    addresses.add(2, id=8, size=1)
    assert (addresses.mapped, addresses.ids) == (2, {0: 7, 2: 8})
    assert addresses.free(3) == [1, 3, 4] and addresses.free(99) == [1, 3, 4, 5]
    addresses.remove([0])
    assert (addresses.mapped, addresses.ids, addresses.free(2)) == (1, {2: 8}, [0, 1])
    addresses.check([2])


def test_address_map_index_of_a_large_extent_names_its_first_index():
    addresses = AddressMap(11, factor=4)
    addresses.add(4, id=1, size=4)
    addresses.add(9, id=2, size=1)
    assert addresses.first_indices.tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 8, 9, 10]
    assert [addresses.first_of(index) for index in (3, 4, 7, 8, 9)] == [3, 4, 4, 8, 9]
    assert addresses.indices_of([4, 9]) == [4, 5, 6, 7, 9] and addresses.mapped == 5
    addresses.remove([4])
    assert addresses.first_indices.tolist() == list(range(11)) and addresses.large == set()
    addresses.check([9])


def test_large_extents_fit_only_in_whole_groups_of_free_indices():
    addresses = AddressMap(11, factor=4)
    assert addresses.free_large() == [0, 4]  # 8 to 10 are fewer than four
    addresses.add(5, id=1, size=1)
    assert addresses.free_large() == [0]


@pytest.mark.parametrize(("limit", "headroom"), [(0, 0), (2, 0), (3, 1), (6, 4), (9, 4)])
def test_address_map_headroom_is_bounded_by_the_limit_and_the_addresses(limit, headroom):
    addresses = AddressMap(6)
    for index in (0, 1):
        addresses.add(index, id=index, size=1)
    assert addresses.headroom(limit) == headroom


def test_address_map_check_finds_a_missing_and_a_repeated_index():
    addresses = AddressMap(6)
    addresses.add(1, id=7, size=1)
    for wrong in ([], [1, 1], [2], [1, 2]):
        with pytest.raises(AssertionError):
            addresses.check(wrong)


@given(st.integers(1, 40), st.integers(1, 5), st.lists(st.tuples(st.sampled_from("sld"), st.integers(0, 99))))
def test_address_map_under_random_steps_agrees_with_a_plain_table(n_indices, factor, steps):
    """s: a small extent at the lowest free index; l: a large one; d: an extent is removed."""
    addresses, table = AddressMap(n_indices, factor), [None] * n_indices
    for id, (what, pick) in enumerate(steps):
        free = [index for index, extent in enumerate(table) if extent is None]
        groups = [range(first, first + factor) for first in range(0, n_indices - factor + 1, factor)]
        fits = [group[0] for group in groups if set(group) <= set(free)]
        assert (addresses.free(n_indices), addresses.free_large()) == (free, fits)
        size = factor if what == "l" else 1
        if what == "d" and addresses.ids:
            first = sorted(addresses.ids)[pick % len(addresses.ids)]
            gone = addresses.ids[first]
            addresses.remove([first])
            table = [None if extent == gone else extent for extent in table]
        elif what != "d" and (places := fits if size > 1 else free):
            addresses.add(places[0], id, size)
            table[places[0] : places[0] + size] = [id] * size
        mapped = [index for index, extent in enumerate(table) if extent is not None]
        addresses.check(mapped)
        assert [addresses.ids[addresses.first_of(index)] for index in mapped] == [table[index] for index in mapped]
        assert addresses.headroom(n_indices) == n_indices - len(mapped)
