"""From the configuration to capacities and makers; a GPU is what it says of itself."""

import os
import resource
from pathlib import Path

import pytest

from balloond.backends.cpu import PAGE_BYTES, CpuMaker
from balloond.config import BalloondConfig
from balloond.driver.connection import alive
from balloond.node import devices, saved_capacity
from balloond.node.extent_pool import ExtentPool
from balloond.node.processes import ProcessIdentity
from balloond.node.records import LeaseFacts
from balloond.node.recovery import RecoveredState
from balloond.policy.capacity import DeviceHardware
from services.errors import Refused

GIB = 1 << 30
MIB = 1 << 20
GPU = DeviceHardware("a GPU", "580.1", 80 * GIB, 70 * GIB, 2 << 20, True, False)


@pytest.fixture
def configured(tmp_path):
    def make(**device):
        handoff = str(tmp_path / "h.sock")
        return BalloondConfig(name="b", listen="unix:b", node="n", handoff=handoff, keeper="k", devices=[device])

    return make


def given_out(device):
    return RecoveredState(leases=[LeaseFacts("a", device, "m", "token", ProcessIdentity(1, 2))])


def test_capacity_of_unused_gpu_is_free_memory_less_the_reserve(configured):
    config = configured(name="cuda:0", reserve_bytes=2 * GIB)
    assert devices.capacities(config, {"cuda:0": GPU}, RecoveredState()) == {"cuda:0": 68 * GIB}


def test_capacity_of_gpu_with_kept_extents_is_the_saved_one(configured):
    config = configured(name="cuda:0")
    saved_capacity.write(config.handoff, {"cuda:0": 79 * GIB})
    assert devices.capacities(config, {"cuda:0": GPU}, given_out("cuda:0")) == {"cuda:0": 79 * GIB}
    explicit = configured(name="cuda:0", capacity_bytes=75 * GIB)
    assert devices.capacities(explicit, {"cuda:0": GPU}, given_out("cuda:0")) == {"cuda:0": 75 * GIB}


def test_capacity_of_gpu_whose_keeper_died_while_an_engine_lives_is_the_saved_one(configured):
    config = configured(name="cuda:0")
    saved_capacity.write(config.handoff, {"cuda:0": 79 * GIB})
    lock = alive.hold(config.handoff)
    assert devices.capacities(config, {"cuda:0": GPU}, RecoveredState()) == {"cuda:0": 79 * GIB}
    os.close(lock)
    assert devices.capacities(config, {"cuda:0": GPU}, RecoveredState()) == {"cuda:0": 69 * GIB}


def test_capacity_of_gpu_with_a_truncated_saved_file_is_measured_anew(configured):
    config = configured(name="cuda:0")
    Path(alive.path_of(config.handoff)).write_text('{"cuda:')
    assert devices.capacities(config, {"cuda:0": GPU}, given_out("cuda:0")) == {"cuda:0": 69 * GIB}


def test_capacity_beyond_the_free_memory_of_a_fresh_gpu_is_refused(configured):
    with pytest.raises(Refused, match="cuda:0: capacity_bytes is"):
        devices.capacities(configured(name="cuda:0", capacity_bytes=75 * GIB), {"cuda:0": GPU}, RecoveredState())


def test_capacity_of_host_memory_is_the_configured_one(configured):
    assert devices.capacities(configured(name="cpu:0", capacity_bytes=4096), {}, RecoveredState()) == {"cpu:0": 4096}


def test_a_device_without_a_backend_is_refused_when_the_configuration_is_read(configured):
    with pytest.raises(ValueError, match="tpu:0"):
        configured(name="tpu:0", capacity_bytes=1)


def test_open_makers_with_spare_extents_gives_out_the_capacity_less_the_spares(configured):
    config = configured(
        name="cpu:0", capacity_bytes=100 * PAGE_BYTES, spare_bytes=16 * PAGE_BYTES, kv_extent_bytes=PAGE_BYTES
    )
    makers, given = devices.open_makers(config, {"cpu:0": 100 * PAGE_BYTES})
    assert isinstance(makers["cpu:0"], ExtentPool)
    assert given == {"cpu:0": 83 * PAGE_BYTES}
    makers["cpu:0"].close()


def test_open_makers_without_spare_extents_gives_out_the_whole_capacity(configured):
    makers, given = devices.open_makers(configured(name="cpu:0", capacity_bytes=PAGE_BYTES), {"cpu:0": PAGE_BYTES})
    assert isinstance(makers["cpu:0"], CpuMaker)
    assert given == {"cpu:0": PAGE_BYTES}


class OwnKeeper:
    """A keeper that is this process, and so has its limits."""

    pid = os.getpid()


def test_most_extents_are_those_of_the_process_that_may_open_fewer(configured, monkeypatch):
    config = configured(name="cuda:0")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (30000, 30000))
    monkeypatch.setattr(resource, "prlimit", lambda pid, what: (20000, 20000))
    most = devices.most_extents(config, {"cuda:0": 80 * GIB}, OwnKeeper())
    assert 10240 < most < 20000
    monkeypatch.setattr(resource, "prlimit", lambda pid, what: (40000, 40000))
    assert most < devices.most_extents(config, {"cuda:0": 80 * GIB}, OwnKeeper()) < 30000


def test_a_keeper_that_may_open_too_few_descriptors_for_the_gpus_is_refused(configured, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (30000, 30000))
    monkeypatch.setattr(resource, "prlimit", lambda pid, what: (4096, 4096))
    with pytest.raises(Refused, match=rf"the keeper \(process {os.getpid()}\) may open 4096 .* engines {32 * MIB}"):
        devices.most_extents(configured(name="cuda:0"), {"cuda:0": 80 * GIB}, OwnKeeper())
    larger = configured(name="cuda:0", kv_extent_bytes=32 * MIB)
    assert devices.most_extents(larger, {"cuda:0": 80 * GIB}, OwnKeeper()) >= 80 * 32


def test_host_memory_is_managed_whatever_number_of_descriptors_it_could_take(configured, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 1024))
    monkeypatch.setattr(resource, "prlimit", lambda pid, what: (1024, 1024))
    config = configured(name="cpu:0", capacity_bytes=80 * GIB)
    assert 0 < devices.most_extents(config, {"cpu:0": 80 * GIB}, OwnKeeper()) < 1024
