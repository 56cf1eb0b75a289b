"""Starting: what cannot work ends the process with one line that names it."""

import subprocess
import sys

import pytest

from testing.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("executed")
GOOD = {
    "name": "'loader'",
    "listen": "'unix:{folder}/loader.sock'",
    "catalogue": "'{folder}/catalogue.toml'",
    "keeper": "'{folder}/keeper.sock'",
    "handoff": "'{folder}/handoff.sock'",
    "host_capacity_bytes": "1000",
    "answer_timeout_s": "0.1",
}


@pytest.mark.parametrize(
    ("keys", "catalogue", "reason"),
    [
        pytest.param({"host_capacity": "1"}, "", "host_capacity: unknown key", id="unknown key"),
        pytest.param({"host_capacity_bytes": "0"}, "", "host_capacity_bytes: ", id="no room for images"),
        pytest.param({"device_dtype_bytes": "3"}, "", "device_dtype_bytes: ", id="no such float"),
        pytest.param({"disk_folder": "'/x'"}, "", "disk_folder and disk_capacity_bytes go together", id="no disk room"),
        pytest.param({}, "model = 1", "catalogue.toml: model: ", id="bad catalogue"),
        pytest.param({}, None, "catalogue.toml: No such file", id="no catalogue"),
        pytest.param({}, "", "keeper.sock: no keeper answers", id="no keeper"),
    ],
)
def test_a_loader_that_cannot_start_says_why_in_one_line(tmp_path, keys, catalogue, reason):
    if catalogue is not None:
        (tmp_path / "catalogue.toml").write_text(catalogue)
    values = {key: value.format(folder=tmp_path) for key, value in {**GOOD, **keys}.items()}
    (tmp_path / "loader.toml").write_text("".join(f"{key} = {value}\n" for key, value in values.items()))
    ended = subprocess.run(
        [sys.executable, "-m", "loader", "--config", str(tmp_path / "loader.toml")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if not line.startswith("{")]  # the log is JSON
    assert len(said) == 1 and reason in said[0], ended.stderr
