"""`prismctl config validate`, as a person and as a script use it."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prismctl.__main__ import app

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "models" / "llama-debian"
GATEWAY = 'name = "gateway"\nlisten = "unix:/g"\nhttp = "127.0.0.1:8000"\nplacement = "unix:/p"\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file where the command runs, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text)
        return name

    return write


def run(*arguments):
    return CliRunner().invoke(app, ["config", "validate", *arguments])


@pytest.mark.parametrize("folder", ["systemd/config", "compose/config/cpu", "compose/config/cuda"])
def test_shipped_configuration_files_are_valid(folder):
    files = sorted(map(str, (ROOT / "deploy" / folder).glob("*.toml")))
    result = run("--no-folders", *files)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == len(files) >= 3


def test_invalid_setting_is_printed_with_file_line_and_key(write):
    name = write("gateway.toml", GATEWAY + 'colour = "red"\nmost_in_flight = 0\n')
    result = run(name)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "gateway.toml:6: most_in_flight: it should be at least 1",
        "gateway.toml:5: colour: unknown key",
    ]


def test_removed_setting_is_a_warning_and_the_file_can_be_used(write):
    name = write("gateway.toml", GATEWAY + "tokenizers_kept = 9\n")
    result = run(name)
    warning, usable = result.stdout.splitlines()
    assert warning.startswith("gateway.toml:5: tokenizers_kept: it is not a setting any more and has no effect: 64 ")
    assert usable == "gateway.toml: a gateway that can be used" and result.exit_code == 0
    told = json.loads(run(name, "--json").stdout)
    assert told["valid"] and [each["key"] for each in told["warnings"]] == ["tokenizers_kept"]


def test_missing_key_is_printed_without_a_line_number(write):
    result = run(write("gateway.toml", GATEWAY.replace("placement", "# placement")))
    assert result.stdout == "gateway.toml: placement: it is required, and is not there\n"


def test_kind_of_a_configuration_file_is_found_by_its_keys_or_given_by_an_option(write):
    name = write("prod.toml", GATEWAY)
    assert run(name).stdout == "prod.toml: a gateway that can be used\n"
    assert "group: it is required, and is not there" in run(name, "--as", "gpu_scheduler").stdout
    result = run(write("empty.toml", ""))
    assert result.exit_code == 1 and "neither its name nor its keys say what it is" in result.stdout


def test_malformed_toml_is_printed_with_file_and_line(write):
    result = run(write("loader.toml", "name = \n"))
    assert result.exit_code == 1 and "loader.toml: not TOML: " in result.stdout and "line 1" in result.stdout


def test_catalogue_is_checked_with_the_folders_of_its_models(write, tmp_path):
    shutil.copytree(MODEL, tmp_path / "whole")
    shutil.copytree(MODEL, tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").unlink()
    listed = '[[model]]\nname = "a"\npath = "whole"\n\n[[model]]\nname = "b"\npath = "broken"\n'
    name = write("catalogue.toml", listed)
    result = run(name, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1 and not told["valid"] and told["files"] == {name: "catalogue"}
    (fault,) = told["faults"]
    assert (fault["file"], fault["line"], fault["key"]) == (name, 7, "model.1.path")
    assert fault["problem"].startswith("b: no tokenizer")
    assert run(name, "--no-folders").exit_code == 0


@pytest.mark.parametrize("key", ["context_tokens", "floor_tokens"])
def test_fault_about_a_key_of_a_model_is_told_with_that_keys_line(write, tmp_path, key):
    shutil.copytree(MODEL, tmp_path / "m")
    value = 10**7 if key == "context_tokens" else 1
    name = write("catalogue.toml", f'[[model]]\nname = "a"\npath = "m"\n{key} = {value}\n')
    assert run(name).stdout.startswith(f"{name}:4: model.0.{key}: a: the catalogue gives it {key} {value}, ")


def test_name_or_alias_given_twice_is_told_with_the_line_of_the_second(write):
    head = '[[model]]\nname = "a"\npath = "m"\naliases = ["c"]\n\n[[model]]\n'
    name = write("catalogue.toml", head + 'name = "a"\npath = "m"\n')
    assert run(name).stdout == f"{name}:7: model.1.name: the name 'a' is given twice\n"
    name = write("catalogue.toml", head + 'name = "b"\npath = "m"\naliases = ["c"]\n')
    assert run(name).stdout == f"{name}:9: model.1.aliases: the alias 'c' of 'b' is given twice: 'a' has it\n"


def test_configuration_files_that_contradict_each_other_fail_with_both_named(write):
    one = write("gateway.toml", GATEWAY)
    other = write("gateway-1.toml", GATEWAY)
    result = run(one, other)
    assert result.exit_code == 1
    assert "gateway-1.toml:2: listen: unix:/g is that of gateway.toml too" in result.stdout


@pytest.mark.parametrize("arguments", [("none.toml",), (), ("--as", "kitchen", "x.toml")])
def test_unreadable_file_or_unknown_kind_exits_with_status_2(write, arguments):
    assert run(*arguments).exit_code == 2
