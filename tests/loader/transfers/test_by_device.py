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


def test_path_between_devices_exists_for_one_kind_that_reach_each_other():
    transfers = Transfers()
    assert transfers.has_way("cpu:0", "cpu:1") and transfers.has_way("cpu:0", "cpu:0")
    assert not transfers.has_way("cpu:0", "cuda:0") and not transfers.has_way("cuda:0", "cpu:0")
    assert not transfers.has_way("tpu:0", "tpu:1")


@pytest.mark.skipif(find_spec("cuda") is not None, reason="CUDA's libraries are here")
def test_path_between_gpus_without_their_driver_does_not_exist():
    assert not Transfers().has_way("cuda:0", "cuda:1")


@pytest.mark.skipif(find_spec("cuda") is not None, reason="CUDA's libraries are here")
def test_a_device_whose_driver_cannot_be_asked_has_its_own_link_only():
    transfers = Transfers(("cuda:0", "cuda:1", "cpu:0"))
    assert transfers.paths() == {"cuda:0": ("cuda:0",), "cuda:1": ("cuda:1",), "cpu:0": ("cpu:0",)}


def test_device_of_an_unknown_kind_is_refused_by_name():
    with pytest.raises(Unmet, match="nothing can be copied to 'tpu:0'"):
        Transfers().of("tpu:0")


@pytest.mark.skipif(find_spec("cuda") is not None, reason="CUDA's libraries are here")
def test_transfer_to_a_gpu_without_its_libraries_names_them():
    with pytest.raises(Unavailable, match="cuda:0: No module named 'cuda'"):
        Transfers().of("cuda:0")


def test_forget_of_an_image_never_used_by_a_gpu_does_nothing():
    Transfers().forget(memoryview(bytearray(8)))
