import pytest

from balloond import backends
from balloond.policy.capacity import DeviceHardware
from deploy.local import devices
from services.errors import Invalid, PrismError, Unavailable


def test_cpu_devices_are_groups_of_the_given_sizes_of_host_memory():
    one, two = {"cpu:0": 27 << 20}, {"cpu:1": 13 << 20, "cpu:2": 13 << 20}
    assert devices.groups("cpu", [[27], [13, 13]]) == [one, two]


def test_cpu_devices_by_name_have_the_given_sizes():
    assert devices.groups("cpu:1,cpu:0+cpu:2", [[2], [1, 3]]) == [
        {"cpu:1": 2 << 20},
        {"cpu:0": 1 << 20, "cpu:2": 3 << 20},
    ]
    for wanted, mib in (("cpu:0", ()), ("cpu:0", [[1, 2]]), ("cpu:0+cpu:0", [[1, 2]]), ("cpu:0,cuda:0", [[1], [2]])):
        with pytest.raises(Invalid, match="cpu:0|cuda:0"):
            devices.groups(wanted, mib)


def test_gpu_groups_are_all_gpus_or_those_named(monkeypatch):
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


def test_bytes_of_gpus_are_those_given_or_of_the_whole_gpu(monkeypatch):
    gpu = DeviceHardware("a GPU", "580.1", 80 << 30, 70 << 30, 2 << 20, True, False)
    monkeypatch.setattr(backends, "look", {"cuda:1": gpu}.__getitem__)
    assert devices.gpu_bytes({"cuda:0": 5, "cuda:1": None}) == {"cuda:0": 5, "cuda:1": 80 << 30}
    assert devices.gpu_bytes({"cpu:0": 7}) == {}


def test_bytes_of_a_gpu_without_a_driver_are_refused_in_one_line(monkeypatch):
    def look(name):
        raise OSError(19, "no driver")

    monkeypatch.setattr(backends, "look", look)
    with pytest.raises(Unavailable, match="no GPU can be used: no driver"):
        devices.gpu_bytes({"cuda:0": None})


def test_host_memory_for_images_is_half_of_what_is_free_and_less_beside_cpu_devices(monkeypatch):
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal:"))
    assert 0 < devices.host_bytes_for_images(on_gpus=True) <= total // 2
    monkeypatch.setattr(devices, "host_bytes_free", lambda: 8 << 30)
    assert devices.host_bytes_for_images(on_gpus=True) == 4 << 30
    assert devices.host_bytes_for_images(on_gpus=False) == 2 << 30
    monkeypatch.setattr(devices, "host_bytes_free", lambda: 0)
    assert devices.host_bytes_for_images(on_gpus=False) > 0, "a budget is positive"


def host(root, free_mib, own, **files):
    """A root with what the kernel says; `files` of groups by path, with "__" for "/"."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {free_mib * 1024} kB\n")
    (proc / "cgroup").write_text(own)
    for name, (most, used, cached, names) in files.items():
        group = root / "sys" / "fs" / "cgroup" / name.replace("__", "/")
        group.mkdir(parents=True, exist_ok=True)
        version = (
            ("memory.max", "memory.current") if names == "2" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        (group / version[0]).write_text(f"{most << 20}\n" if most != "max" else "max\n")
        (group / version[1]).write_text(f"{used << 20}\n")
        total = "" if names == "2" else "total_"
        stat = f"anon 5\n{total}active_file {cached << 20}\n{total}inactive_file 0\n"
        (group / "memory.stat").write_text(stat)
    return devices.host_bytes_free(root) >> 20


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param("", {}, 1000, id="no groups"),
        pytest.param("0::/a/b\n", {"a__b": ("max", 9, 0, "2"), "a": (300, 100, 0, "2")}, 200, id="one above"),
        pytest.param("0::/a\n", {"a": (300, 250, 150, "2")}, 200, id="files in the cache can go"),
        pytest.param("0::/a\n", {"a": (300, 400, 0, "2")}, 0, id="more than its most"),
        pytest.param("0::/a\n", {"a": (5000, 0, 0, "2")}, 1000, id="more than the host has"),
        pytest.param(
            "4:memory:/x/y\n0::/\n",
            {"memory__x__y": (500, 100, 50, "1"), "memory": (1 << 33, 1, 0, "1")},
            450,
            id="version 1",
        ),
        pytest.param("4:memory:/docker/1f\n", {"memory": (400, 0, 0, "1")}, 400, id="seen from inside a container"),
        pytest.param("nonsense\n", {"a": (1, 0, 0, "2")}, 1000, id="nothing that is understood"),
    ],
)
def test_free_host_memory_is_bounded_by_control_groups(tmp_path, own, files, expected):
    assert host(tmp_path, 1000, own, **files) == expected


def test_unknown_kind_of_device_is_refused_with_the_known_kinds():
    with pytest.raises(Invalid, match="there is no device 'gpu': it is cpu, cuda, or devices by name"):
        devices.groups("gpu", [[512]])
