import os

from balloond import backends
from balloond.driver import private
from balloond.policy.capacity import DeviceHardware


def hardware(*processes):
    return DeviceHardware("a", "b", 100, 50, 2, True, False, processes)


def test_a_process_finds_its_own_bytes_among_the_others(monkeypatch):
    monkeypatch.setattr(backends, "look", lambda device: hardware((1, 7), (os.getpid(), 30)))
    assert private.counted("cuda:0") == 30
    monkeypatch.setattr(backends, "look", lambda device: hardware((1, 7)))
    assert private.counted("cuda:0") == 0


def test_a_device_that_cannot_be_inspected_counts_no_private_bytes(monkeypatch):
    def gone(device):
        raise OSError("no driver")

    monkeypatch.setattr(backends, "look", gone)
    assert private.counted("cuda:0") == 0
