import pytest

from balloond.config import BalloondConfig
from services.runtime.config import parse

GOOD = """
name = "balloond"
listen = "unix:/b.sock"
node = "n"
handoff = "/h.sock"
keeper = "/k.sock"
reclaim_timeout_s = 3.0
[[devices]]
name = "cpu:0"
capacity_bytes = 1024
"""


def test_config_timeouts_become_the_patience_of_claims():
    config = parse(BalloondConfig, GOOD, "b.toml")
    assert (config.patience.reclaim_s, config.patience.grow_s) == (3.0, 10.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("keeper =", "kepper ="), "b.toml: keeper: it is required, and is not there; kepper: unknown key"),
        (("capacity_bytes = 1024", ""), "devices.0: cpu:0 needs capacity_bytes"),
        (("cpu:0", "gpu:0"), 'devices.0.name: device \'gpu:0\': there is a backend for "cpu:N" and "cuda:N" only'),
        (("unix:/b.sock", "nonsense"), 'listen: "nonsense" is neither "unix:PATH" nor "HOST:PORT"'),
        (('"/h.sock"', '"unix:/h.sock"'), 'handoff: "unix:/h.sock" is not the path of a socket'),
        (("1024", "0"), "b.toml: devices.0.capacity_bytes: it should be greater than 0"),
        (("[[devices]]", '[[devices]]\nname="cpu:0"\ncapacity_bytes=1\n[[devices]]'), "no name twice"),
        (("3.0", "-1"), "reclaim_timeout_s: it should be greater than 0"),
    ],
)
def test_config_error_names_the_file_the_key_and_the_problem(change, complaint):
    with pytest.raises(ValueError) as error:
        parse(BalloondConfig, GOOD.replace(*change), "b.toml")
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_config_of_a_gpu_has_spares_and_needs_no_capacity():
    config = parse(BalloondConfig, GOOD.replace("capacity_bytes = 1024", "").replace("cpu:0", "cuda:0"), "b.toml")
    (device,) = config.devices
    assert (device.capacity_bytes, device.spares_budget) == (None, 128 << 20)


def test_config_of_host_memory_has_spares_only_when_set():
    assert parse(BalloondConfig, GOOD, "b.toml").devices[0].spares_budget == 0
    assert parse(BalloondConfig, GOOD + "spare_bytes = 512", "b.toml").devices[0].spares_budget == 512
