"""The file of keys."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.access import keys
from prismctl.__main__ import app

GOOD = f"""\
[[key]]
name = "ann"
hash = "{keys.digest("ann's")}"
models = ["org/*", "tiny"]

[[key]]
name = "ops"
hash = "{keys.digest("ops'")}"
admin = true
"""


def load(tmp_path: Path, text: str) -> keys.Keys:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return keys.load(str(path))


def test_key_is_found_only_by_its_secret(tmp_path: Path) -> None:
    known = load(tmp_path, GOOD)
    ann, ops = known.find("ann's"), known.find("ops'")
    assert ann is not None and ops is not None
    assert (ann.name, ann.admin, ops.name, ops.admin) == ("ann", False, "ops", True)
    for other in ("", "ann", "ann's ", keys.digest("ann's"), keys.digest("ann's").removeprefix("sha256:")):
        assert known.find(other) is None


def test_a_key_is_scoped_to_models_by_name_and_pattern(tmp_path: Path) -> None:
    known = load(tmp_path, GOOD)
    ann, ops = known.find("ann's"), known.find("ops'")
    assert ann is not None and ops is not None
    assert [ann.may_use(model) for model in ("org/a", "tiny", "tiny2", "other/org/a", "ORG/a")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert ops.may_use("whatever/model")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("admin = true", "admin = 3.5", r":9: key\.1\.admin: "),
        ("admin = true", "admn = true", r":9: key\.1\.admn: unknown key"),
        ('name = "ops"', 'name = "ann"', r":7: key\.1\.name: ann is there twice"),
        ("[[key]]\nname", "[[key]\nname", r": not TOML: .*line 1"),
        ("sha256:", "md5:", r":3: key\.0\.hash: "),
        ("admin = true", "tokens_per_minute = 0", r":9: key\.1\.tokens_per_minute: "),
    ],
)
def test_invalid_key_file_is_refused_in_one_line_that_names_file_line_and_key(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(ValueError) as refused:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert re.search(r"keys\.toml" + said, str(refused.value)), str(refused.value)
    assert "\n" not in str(refused.value)


def test_keys_with_the_same_hash_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r":8: key\.1\.hash: .* twice"):
        load(tmp_path, GOOD.replace(keys.digest("ops'"), keys.digest("ann's")))


def test_new_keys_are_long_and_never_the_same() -> None:
    made = {keys.new() for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch(r"sk-prism-[\w-]{43}", key) for key in made)


def test_prismctl_prints_a_new_key_once_with_an_entry_for_the_file(tmp_path: Path) -> None:
    asked = ["keys", "new", "ann", "--models", "org/*", "--models", 'a"b', "--tokens-per-minute", "1000"]
    printed = CliRunner().invoke(app, asked).output
    (secret,) = re.findall(r"sk-prism-\S+", printed)
    (entry,) = tomllib.loads(printed)["key"]
    assert entry == {
        "name": "ann",
        "hash": keys.digest(secret),
        "models": ["org/*", 'a"b'],
        "tokens_per_minute": 1000,
    }
    found = load(tmp_path, printed).find(secret)
    assert found is not None and found.name == "ann"


def test_prismctl_checks_a_file_of_keys_as_the_gateway_does(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    assert CliRunner().invoke(app, ["config", "validate", str(path)]).exit_code == 0
    path.write_text(GOOD.replace('name = "ops"', 'name = "ann"'))
    done = CliRunner().invoke(app, ["config", "validate", str(path)])
    assert (done.exit_code, done.output) == (1, f"{path}:7: key.1.name: ann is there twice\n")


def test_prismctl_refuses_an_invalid_key_name() -> None:
    done = CliRunner().invoke(app, ["keys", "new", "two words"])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("content", "why"), [(b'name = "\xff"', "not text"), (b"key = " + b"[" * 5000, "nested too deeply")]
)
def test_key_file_that_is_no_text_or_too_deep_is_refused_with_its_path(
    tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why) as refused:
        keys.load(str(path))
    assert str(refused.value).startswith(str(path))
