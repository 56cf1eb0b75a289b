from importlib.util import find_spec

import pytest

from loader.transfers import Transfers
from loader.transfers.cpu import CpuTransfer
from services.errors import Unavailable, Unmet


def test_a_device_has_one_transfer_of_its_kind():
    transfers = Transfers()
    assert isinstance(transfers.of("cpu:0"), CpuTransfer)
    assert transfers.of("cpu:0") is transfers.of("cpu:0")


def test_a_devices_paths_are_its_own_link_and_those_that_reach_it():
    assert Transfers(("cpu:0", "cpu:1")).paths() == {"cpu:0": ("cpu:0", "cpu:1"), "cpu:1": ("cpu:1", "cpu:0")}
    assert Transfers(("cpu:0",)).paths() == {"cpu:0": ("cpu:0",)}
    assert Transfers().paths() == {}


def test_there_is_a_way_between_devices_of_one_kind_that_reach_each_other():
    transfers = Transfers()
    assert transfers.has_way("cpu:0", "cpu:1") and transfers.has_way("cpu:0", "cpu:0")
    assert not transfers.has_way("cpu:0", "cuda:0") and not transfers.has_way("cuda:0", "cpu:0")
    assert not transfers.has_way("tpu:0", "tpu:1")


@pytest.mark.skipif(find_spec("cuda") is not None, reason="CUDA's libraries are here")
def test_there_is_no_way_that_nobody_can_be_asked_for():
    assert not Transfers().has_way("cuda:0", "cuda:1")


@pytest.mark.skipif(find_spec("cuda") is not None, reason="CUDA's libraries are here")
def test_a_device_whose_driver_cannot_be_asked_has_its_own_link_only():
    transfers = Transfers(("cuda:0", "cuda:1", "cpu:0"))
    assert transfers.paths() == {"cuda:0": ("cuda:0",), "cuda:1": ("cuda:1",), "cpu:0": ("cpu:0",)}


def test_a_device_that_nothing_can_be_copied_to_is_refused_by_name():
    with pytest.raises(Unmet, match="nothing can be copied to 'tpu:0'"):
        Transfers().of("tpu:0")


@pytest.mark.skipif(find_spec("cuda") is not None, reason="CUDA's libraries are here")
def test_a_gpu_needs_libraries_that_are_named():
    with pytest.raises(Unavailable, match="cuda:0: No module named 'cuda'"):
        Transfers().of("cuda:0")


def test_forgetting_an_image_that_no_gpu_ever_saw_is_nothing():
    Transfers().forget(memoryview(bytearray(8)))
