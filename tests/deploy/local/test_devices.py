import pytest

from deploy.local import devices
from services.errors import Invalid, PrismError


def test_without_a_gpu_host_memory_is_cut_into_devices():
    one, two = {"cpu:0": 27 << 20}, {"cpu:1": 13 << 20, "cpu:2": 13 << 20}
    assert devices.groups("cpu", [[27], [13, 13]]) == [one, two]


def test_gpus_are_all_or_those_named_with_what_is_free_of_them(monkeypatch):
    monkeypatch.setattr(devices, "_gpus", lambda: 3)
    assert devices.groups("cuda", ()) == [{"cuda:0": None}, {"cuda:1": None}, {"cuda:2": None}]
    assert devices.groups("cuda:1", ()) == [{"cuda:1": None}]
    assert devices.groups("cuda:2,cuda:0+cuda:1", ()) == [{"cuda:2": None}, {"cuda:0": None, "cuda:1": None}]
    with pytest.raises(Invalid, match="there is no device 'cuda:3'; this machine has cuda:0, cuda:1, cuda:2"):
        devices.groups("cuda:0+cuda:3", ())
    for twice in ("cuda:0,cuda:0+cuda:1", "cuda:1,cuda:0+cuda:0"):
        with pytest.raises(Invalid, match="the device 'cuda:0' is given twice"):
            devices.groups(twice, ())


def test_a_machine_without_a_gpu_says_so_in_one_line():
    try:
        assert devices.groups("cuda", ())
    except PrismError as error:
        assert "CUDA" in str(error) and "\n" not in str(error)


def test_images_may_take_half_of_what_the_host_has_free():
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal:"))
    assert 0 < devices.host_bytes_for_images() <= total // 2


def test_another_kind_of_device_is_refused_with_those_there_are_also_without_a_gpu():
    with pytest.raises(Invalid, match="there is no device 'gpu': it is cpu, cuda, or GPUs by name"):
        devices.groups("gpu", [[512]])
