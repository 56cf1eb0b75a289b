import pytest

from balloond.config import BalloondConfig
from services.config import parse

GOOD = """
name = "balloond"
listen = "unix:/b.sock"
node = "n"
handoff = "/h.sock"
keeper = "/k.sock"
grow_timeout_s = 3.0
[[devices]]
name = "cpu:0"
capacity_bytes = 1024
"""


def test_patience_is_configured():
    config = parse(BalloondConfig, GOOD, "b.toml")
    assert (config.patience.grow_s, config.patience.reclaim_s) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("keeper =", "kepper ="), "b.toml: keeper: Field required; kepper: unknown key"),
        (("1024", "0"), "b.toml: devices.0.capacity_bytes: Input should be greater than 0"),
        (("[[devices]]", '[[devices]]\nname="cpu:0"\ncapacity_bytes=1\n[[devices]]'), "no name twice"),
        (("3.0", "-1"), "grow_timeout_s: Input should be greater than 0"),
    ],
)
def test_a_bad_file_is_named_with_key_and_problem(change, complaint):
    with pytest.raises(ValueError) as error:
        parse(BalloondConfig, GOOD.replace(*change), "b.toml")
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
