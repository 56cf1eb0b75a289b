"""A host that allows too few descriptors gets larger extents of KV, all services the same."""

import tomllib

import pytest

from balloond.config import BalloondConfig
from balloond.policy import capacity
from deploy.local import descriptors
from deploy.local.topology import Local
from deploy.node.consistency import ConfigFile, disagreements
from gpu_scheduler.config import GpuSchedulerConfig
from loader.config import LoaderConfig

GIB, MIB = 1 << 30, 1 << 20
TWO = {"cuda:0": 80 * GIB, "cuda:1": 80 * GIB}
CLASSES = {"balloond": BalloondConfig, "loader": LoaderConfig, "gpu_scheduler": GpuSchedulerConfig}


@pytest.fixture
def local(tmp_path):
    return Local(state=tmp_path, catalogue=tmp_path / "c.toml").with_groups([{name: None} for name in TWO])


def files(local):
    """The configurations of the services that have a size of extents."""
    found = []
    for process in local.processes():
        if process.module in CLASSES:
            settings = tomllib.loads(open(process.arguments[1]).read())
            found.append(ConfigFile(process.name, CLASSES[process.module](**settings)))
    return found


def test_two_gpus_on_a_host_with_too_few_descriptors_get_extents_of_twice_the_size_in_all_services(local):
    fitted, line = descriptors.fitted(local, TWO, 20000)
    assert line == (
        "KV is given out in extents of 16 MiB, not of 8: the GPUs need 20,736 descriptors with those, and a process "
        "may open 20,000 (ulimit -Hn)"
    )
    found = files(fitted)
    assert list(disagreements(found)) == []
    of = {each.path.partition("-")[0]: each.config for each in found}
    assert {device.kv_extent_bytes for device in of["balloond"].devices} == {16 * MIB}
    assert of["gpu_scheduler"].kv_extent_bytes == of["loader"].kv_extent_bytes == 16 * MIB
    assert of["gpu_scheduler"].engines.limit == 4, "other settings of engines stay"
    needed = [(TWO[device.name], device.kv_extent_bytes) for device in of["balloond"].devices]
    capacity.check_descriptors("balloond", needed, 20000)


def test_system_stays_as_it_is_where_the_usual_extents_fit_or_none_would_or_there_is_no_gpu(local):
    assert descriptors.fitted(local, TWO, 20736) == (local, "")
    assert descriptors.fitted(local, TWO, 300) == (local, "")
    assert descriptors.fitted(local, {}, 300) == (local, "")
    assert list(disagreements(files(local))) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"loader": {"kv_extent_bytes": 8 * MIB}},
        {"gpu_scheduler": {"engines": {"kv_extent_bytes": 8 * MIB}}},
        {"device_settings": {"cuda:1": {"kv_extent_bytes": 8 * MIB}}},
    ],
)
def test_size_of_extents_that_a_setting_names_is_kept(local, settings):
    named = local.with_(**settings)
    assert descriptors.fitted(named, TWO, 20000) == (named, "")
