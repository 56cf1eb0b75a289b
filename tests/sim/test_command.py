"""`python -m sim`: what goes in, what comes out, and what is refused."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = '[[model]]\nname = "chat-*"\nshape = "1b"\nttft_ms = 3000\ntpot_ms = 50\n'
HEADER = "arrival_s,model,prompt_tokens,output_tokens\n"
LINES = "0.0,chat-1,100,20\n0.5,chat-2,2000,5\n0.5,chat-1,10,1\n7.25,chat-2,30,300\n"


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    """Runs the command on a trace and a catalogue of this text: (exit status, what it said)."""

    def run(trace=HEADER + LINES, catalogue=CATALOGUE, *arguments):
        (tmp_path / "trace.csv").write_text(trace)
        (tmp_path / "models.toml").write_text(catalogue)
        fleet = () if "--groups" in arguments else ("--gpus", "2")
        files = ("--trace", str(tmp_path / "trace.csv"), "--catalogue", str(tmp_path / "models.toml"))
        monkeypatch.setattr(sys, "argv", ["sim", *files, *fleet, *arguments])
        status = main()
        said = capsys.readouterr()
        return status, said.err if status else said.out

    return run


@pytest.mark.parametrize("policy", ["prism", "static"])
def test_sim_command_replays_and_reports_a_trace(say, tmp_path, policy):
    status, said = say(HEADER + LINES, CATALOGUE, "--policy", policy, "--out", str(tmp_path / "out.json"))
    assert status == 0 and said.startswith("4 of 4 requests served")
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result["models"]) == {"chat-1", "chat-2"} and result["all"]["attainment"] == 1.0


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0.0,chat-1,100,20\n0.5,code-1,1,1\n", "line 3: model 'code-1' is not in the catalogue"),
        ("5.0,chat-1,100,20\n4.5,chat-1,1,1\n", "line 3: time goes back, from 5 to 4.5 s"),
        ("0.0,chat-1,-100,20\n", "line 2: prompt_tokens is -100; it has to be above zero"),
        ("0.0,chat-1,100,0\n", "line 2: output_tokens is 0; it has to be above zero"),
        ("0.0,chat-1,100,2.5\n", "line 2: output_tokens is '2.5', not a whole number"),
        ("nan,chat-1,100,2\n", "line 2: arrival_s is nan"),
        ("-1,chat-1,100,2\n", "line 2: arrival_s is -1"),
        ("soon,chat-1,100,2\n", "line 2: arrival_s is 'soon', not a number"),
        ("0.0,chat-1,100\n", "line 2: 3 columns instead of 4"),
        ("", "no request in this slice"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(say, lines, said):
    status, text = say(HEADER + lines)
    assert status == 2 and said in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "0"), "the rate has to be above zero, not 0"),
        (("--rate", "nan"), "the rate has to be above zero"),
        (("--seconds", "0"), "no slice"),
        (("--from-s", "100"), "no request in this slice; the last of the file is at 7.25 s"),
        (("--set", "speed=9"), "prism has no setting speed; it has"),
        (("--set", "tau=-1"), "tau: it should be at least 0"),
        (("--policy", "static", "--set", "tau=1"), "static has no setting tau"),
        (("--groups", "3x2"), "chat-1 is for a group of 1 device: g0 has 2, g1 has 2, g2 has 2"),
    ],
)
def test_bad_settings_are_refused_in_one_line(say, arguments, said):
    status, text = say(HEADER + LINES, CATALOGUE, *arguments)
    assert status == 2 and said in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("catalogue", "said"),
    [
        (
            '[[model]]\nname = "chat-*"\nweights_bytes = 900000000000\nkv_bytes_per_token = 9\n',
            "no group can hold chat-1: ",
        ),
        ('[[model]]\nname = "chat-*"\nshape = "9b"\n', "model 1 (chat-*): no shape '9b'; there are 1b, "),
        ('[[model]]\nname = "chat-*"\nshape = "1b"\nttft = 3\n', "model 1 (chat-*): unknown ttft; known are "),
        ('[[model]]\nname = "chat-*"\nshape = "1b"\ntpot_ms = 0\n', "tpot_ms has to be a number above zero, not 0"),
        ('[[model]]\nname = "chat-*"\nweights_bytes = 9\n', "without its KV: give it kv_bytes_per_token,"),
        ('[[model]]\nshape = "1b"\n', "model 1: it has no name"),
        ("", "no [[model]] in it"),
        ("[[model]", "models.toml: "),
    ],
)
def test_a_bad_catalogue_is_refused_in_one_line(say, catalogue, said):
    status, text = say(HEADER + LINES, catalogue)
    assert status == 2 and said in text and text.count("\n") == 1


@pytest.mark.parametrize("policy", ["prism", "static"])
def test_fleet_that_cannot_hold_the_largest_model_is_refused(say, policy):
    status, text = say(HEADER + LINES, CATALOGUE + "weights_bytes = 200000000000\n", "--policy", policy)
    assert status == 2 and "no group can hold chat-1" in text


def test_a_request_longer_than_its_model_is_clipped_and_counted(say, tmp_path):
    known = CATALOGUE + "context_tokens = 200\n"
    status, _ = say(HEADER + LINES, known, "--out", str(tmp_path / "out.json"))
    assert status == 0
    assert json.loads((tmp_path / "out.json").read_text())["counts"]["clipped"] == 2


def test_gzipped_trace_is_read_and_a_torn_one_refused(tmp_path, monkeypatch, capsys):
    whole = gzip.compress((HEADER + 200 * "0.0,chat-1,100,20\n").encode())
    (tmp_path / "models.toml").write_text(CATALOGUE)
    for name, content, status in (("whole", whole, 0), ("torn", whole[:-20], 2)):
        (tmp_path / name).write_bytes(content)
        files = ["--trace", str(tmp_path / name), "--catalogue", str(tmp_path / "models.toml"), "--gpus", "1"]
        monkeypatch.setattr(sys, "argv", ["sim", *files])
        assert main() == status
    assert "torn, after line" in capsys.readouterr().err


def test_sim_result_of_one_seed_is_equal_in_two_processes(tmp_path):
    (tmp_path / "models.toml").write_text(CATALOGUE)
    lines = "".join(f"{i / 7:.2f},chat-{i * i % 11},{1 + 37 * i % 900},{1 + 13 * i % 70}\n" for i in range(300))
    (tmp_path / "trace.csv").write_text(HEADER + lines)
    results = []
    for hash_seed in ("1", "2"):
        out = tmp_path / f"{hash_seed}.json"
        command = [sys.executable, "-m", "sim", "--trace", str(tmp_path / "trace.csv"), "--gpus", "2", "--rate", "1.5"]
        command += ["--catalogue", str(tmp_path / "models.toml"), "--seed", "5", "--out", str(out)]
        subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": hash_seed}
        )
        results.append(json.loads(out.read_text()))
        results[-1]["run"] = results[-1]["run"]["events"]
    assert results[0] == results[1] and results[0]["all"]["requests"] > 300
