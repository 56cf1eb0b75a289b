"""Where a system is looked for."""

import os
import tempfile

import pytest
from typer.testing import CliRunner

from prismctl.__main__ import app
from prismctl.system.system import SystemAddresses


def run(*arguments):
    return CliRunner().invoke(app, ["--wait", "0", *map(str, arguments)])


@pytest.mark.parametrize("command", [("status",), ("top", "--once")])
def test_state_folder_without_sockets_is_named_with_the_option_that_names_another(tmp_path, command):
    for folder, what in ((tmp_path / "none", "there is no such folder"), (tmp_path, "it has no sockets")):
        result = run("--state", folder, *command)
        said = f"no system in {folder}: {what}; --state FOLDER, or PRISM_STATE, says where its sockets are"
        told = " ".join(result.stdout.split())  # long folders make a line break
        assert result.exit_code == 3 and said in told
        assert f"does not answer: placement (unix:{folder}/placement.sock): there is no such socket" in told


def test_deployed_system_is_suggested_where_the_state_folder_has_none(tmp_path):
    deployed = tmp_path / "deployed"
    system = SystemAddresses(tmp_path / "x", deployed=deployed)
    assert system.nowhere().endswith("says where its sockets are"), "it is not there either"
    deployed.mkdir()
    (deployed / "placement.sock").touch()
    assert system.nowhere().endswith(f"says where its sockets are ({deployed} has some)")
    assert "has some" not in SystemAddresses(deployed, deployed=deployed).nowhere()


def test_sockets_of_a_system_that_ended_are_reported_unlike_no_sockets(tmp_path):
    (tmp_path / "loader.sock").touch()
    (tmp_path / "file").touch()
    assert "of the processes whose sockets are there none answers" in SystemAddresses(tmp_path).nowhere()
    assert "it is no folder" in SystemAddresses(tmp_path / "file").nowhere()
    assert SystemAddresses(tmp_path, placement="127.0.0.1:1").nowhere() is None


def test_state_folder_of_another_user_is_reported_as_such():
    """Whoever runs this: root becomes somebody else for a moment."""
    me = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0)
        os.seteuid(me or 65534)
        try:
            result = run("--state", f"{folder}/x", "status")
            logs = run("--state", f"{folder}/x", "logs")
        finally:
            os.seteuid(me)
            os.chmod(folder, 0o700)
    assert result.exit_code == 3 and f"no system in {folder}/x: this user may not look into it" in result.stdout
    assert (logs.exit_code, logs.stderr) == (2, f"prismctl: {folder}/x/logs: Permission denied\n")


def test_missing_logs_are_one_line_with_the_option_that_names_their_folder(tmp_path):
    result = run("--state", tmp_path, "logs")
    assert result.exit_code == 2
    assert f"no logs in {tmp_path}/logs; --state FOLDER, or PRISM_STATE" in result.stderr


def test_service_with_a_log_in_the_state_folder_has_it_to_look_at(tmp_path):
    for name in ("loader.sock", "keeper.sock"):
        (tmp_path / name).touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "loader.log").touch()
    loader, keeper = SystemAddresses(tmp_path).node()
    assert loader.look.startswith("its log is ") and loader.look.endswith("logs/loader.log")
    assert (keeper.name, keeper.address, keeper.look) == ("the keeper", f"{tmp_path}/keeper.sock", "")
