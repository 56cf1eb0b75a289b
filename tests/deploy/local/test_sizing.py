from dataclasses import replace

import pytest

from deploy.local.sizing import SMALL, needed_mib, sized
from kv_kinds.layout import KvLayout, attention, of_tokens, state
from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import CatalogueModel, Sizes
from loader.checkpoints.checkpoint import Checkpoint
from services.errors import Unavailable

MIB = 1 << 20
SIZES = Sizes(4, 256 << 10, MIB)


def model(name, weights_mib, *, devices=1, context=1024, token_bytes=1024):
    """Needs its weights, two MiB at most of KV, and one of quota."""
    found = Checkpoint(1, "Llama", context, 1, 1, 1, 1, weights_mib * MIB, of_tokens(token_bytes))
    return CatalogueModel(CatalogueEntry(name=name, path="/m", devices=devices), SIZES, found)


def broken(name):
    return CatalogueModel(CatalogueEntry(name=name, path="/m"), SIZES, None, "no config.json")


def test_memory_needed_by_a_model_is_weights_kv_of_its_longest_request_and_quota():
    assert needed_mib(model("m", 10, context=1024 - 192)) == 12
    assert needed_mib(model("m", 10, context=8192 - 192, token_bytes=MIB)) == 10 + 8192 + 1


def test_memory_needed_by_a_model_with_states_has_whole_extents_for_one_and_for_the_padding():
    plain = model("m", 10, context=1024 - 192)
    states = replace(plain, checkpoint=replace(plain.checkpoint, kv=KvLayout((attention(1024), state(3 * MIB + 1)))))
    assert needed_mib(states) == needed_mib(plain) + 7, "two states of three MiB and an extent of a quarter"


@pytest.mark.parametrize("models", [[], [broken("b")], [model("a", 10), model("b", 24), model("c", 10)]])
def test_models_that_fit_small_devices_share_them(models):
    found = sized(models, 1 << 40)
    assert (found.mib, found.needed_mib) == (SMALL, 0)


def test_larger_models_get_one_device_that_holds_all_of_them():
    models = [model("large", 500), model("small", 10), broken("b")]
    found = sized(models, 1 << 40)
    needed = sum(map(needed_mib, models[:2]))
    ((mib,),) = found.mib
    assert found.needed_mib == needed and needed < mib <= 1.25 * needed


def test_models_on_several_devices_get_a_group_of_as_many():
    found = sized([model("one", 100), model("two", 50, devices=2), model("three", 60, devices=2)], 1 << 40)
    (alone,), (first, second) = found.mib
    assert first == second > needed_mib(model("two", 50)) + needed_mib(model("three", 60)) and alone > 100
    told = str(sized([model("m", 7, devices=2)], 1 << 40))
    assert told == "CPU devices: 11+11 MiB, as the models need 20 MiB together"
    assert sized([model("small", 1, devices=2)], 1 << 40).mib == [[4, 4]]


def test_device_of_a_host_without_room_for_all_models_holds_some_at_a_time():
    models = [model(name, 300) for name in "abcd"]
    ((mib,),) = sized(models, 1000 * MIB).mib
    assert mib == 500
    ((mib,),) = sized(models, 400 * MIB).mib
    assert mib == needed_mib(models[0])  # less holds none


def test_model_that_the_host_cannot_hold_is_refused_in_one_line():
    with pytest.raises(Unavailable, match="large needs 30,003 MiB on the CPU.*the host has 16,000 MiB free") as error:
        sized([model("large", 30_000), model("small", 1)], 16_000 * MIB)
    assert "\n" not in str(error.value)
