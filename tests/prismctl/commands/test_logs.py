"""`prismctl logs`: files as the services write them."""

import json

import pytest
from typer.testing import CliRunner

from prismctl.__main__ import app
from prismctl.commands.logs import LogTail


def line(second, event, level="info", **values):
    at = f"2026-01-02T03:04:{second:09.6f}Z"
    return json.dumps({"event": event, "level": level, "timestamp": at, "service": "x", **values}) + "\n"


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "loader.log").write_text(
        line(1, "ready") + line(5, "call failed", "error", model="m") + "Traceback (most recent call last):\n"
    )
    (folder / "gateway.log").write_text(line(2, "ready", port=8000) + line(6, "stopping", "warning"))
    return tmp_path


def run(state, *arguments):
    return CliRunner().invoke(app, ["--state", str(state), "logs", *arguments])


def test_logs_of_all_services_are_one_in_the_order_of_time(state):
    result = run(state)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "03:04:01.000 loader info: ready",
        "03:04:02.000 gateway info: ready port=8000",
        "03:04:05.000 loader error: call failed model=m",
        "03:04:05.000 loader error: Traceback (most recent call last):",
        "03:04:06.000 gateway warning: stopping",
    ]


@pytest.mark.parametrize(
    ("arguments", "events"),
    [
        (("loader",), ["ready", "call failed", "Traceback (most recent call last):"]),
        (("--level", "warning"), ["call failed", "Traceback (most recent call last):", "stopping"]),
        (("--model", "m"), ["call failed", "Traceback (most recent call last):"]),
        (("-n", "2"), ["Traceback (most recent call last):", "stopping"]),
        (("-n", "0"), []),
    ],
)
def test_log_filters_leave_out_lines_that_do_not_match(state, arguments, events):
    result = run(state, *arguments, "--json")
    assert [json.loads(each)["event"] for each in result.stdout.splitlines()] == events


@pytest.mark.parametrize("arguments", [("kitchen",), ("--level", "loud")])
def test_unknown_service_or_log_level_exits_with_status_2(state, arguments):
    assert run(state, *arguments).exit_code == 2


def test_model_that_no_log_line_names_is_reported(state):
    result = run(state, "--model", "nope")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"prismctl: no line of the logs in {state}/logs names the model 'nope'\n"
    result = run(state, "loader", "--model", "m", "--level", "critical", "--json")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "prismctl: no line of level critical or above of loader names the model 'm'\n"
    assert run(state, "--model", "m").stderr == run(state, "--model", "m", "-n", "0").stderr == ""


def test_state_folder_without_logs_exits_with_status_2_and_names_journalctl(tmp_path):
    result = run(tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "journalctl" in result.stderr


def test_log_tail_gives_whole_lines_once_and_restarts_with_a_new_file(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("one\ntw")
    tail = LogTail(path)
    assert tail.read() == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.read() == ["two", "three"]
    assert tail.read() == []
    path.write_text("new\n")
    assert tail.read() == ["new"]


def test_log_tail_of_a_long_file_starts_with_the_first_whole_line_of_its_end(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("a long first line\nlast one\n")
    assert LogTail(path, tail_bytes=10).read() == ["last one"]
