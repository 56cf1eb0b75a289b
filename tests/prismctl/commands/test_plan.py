"""`prismctl plan`, as a person and as a script use it."""

import json

import pytest
from typer.testing import CliRunner

from prismctl.__main__ import app

CATALOGUE = '[[model]]\nname = "chat"\nshape = "8b"\nttft_ms = 2000\ntpot_ms = 100\n'
RATES = "model,requests_per_s,prompt_tokens,output_tokens\nchat,{rate},100,20\n"
TRACE = "arrival_s,model,prompt_tokens,output_tokens\n0.5,chat,100,20\n1.5,chat,100,20\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "models.toml").write_text(CATALOGUE)
    (tmp_path / "rates.csv").write_text(RATES.format(rate=2))
    (tmp_path / "trace.csv").write_text(TRACE)
    return tmp_path


def run(files, *arguments, catalogue="models.toml"):
    options = ["plan", "--catalogue", str(files / catalogue)]
    return CliRunner().invoke(app, [*options, *(each.format(files=files) for each in arguments)])


def test_plan_of_a_load_that_fits_exits_with_status_0(files):
    result = run(files, "--rates", "{files}/rates.csv", "--seconds", "20", "--gpus", "1")
    assert result.exit_code == 0
    assert "fits: 100.0 % of" in result.stdout and "with 1 GPU; 99 % asked" in result.stdout


def test_plan_for_the_fewest_gpus_finds_them_and_lists_every_fleet_tried(files):
    result = run(files, "--trace", "{files}/trace.csv", "--gpus", "4", "--fewest", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and answer["fits"]
    assert answer["tried"][0]["gpus"] == 4 and answer["tried"][-1]["gpus"] == 1
    assert answer["tried"][-1]["report"]["all"]["requests"] == 2


def test_a_fleet_of_h100s_decodes_more_slowly_than_one_of_h200s(files):
    medians = []
    for hardware in ("h100", "h200"):
        told = run(files, "--trace", "{files}/trace.csv", "--gpus", "1", "--json", "--hardware", hardware)
        medians.append(json.loads(told.stdout)["tried"][-1]["report"]["all"]["tpot_s"]["p50"])
    assert medians[0] > 1.2 * medians[1]


def test_plan_says_that_a_model_came_up_on_further_groups(files):
    (files / "rates.csv").write_text("model,requests_per_s,prompt_tokens,output_tokens\nchat,20,4000,20\n")
    result = run(files, "--rates", "{files}/rates.csv", "--seconds", "40", "--gpus", "2")
    assert "models came up on one group more 1 time: their load exceeds a group" in result.stdout


def test_plan_of_a_load_that_does_not_fit_exits_with_status_1(files):
    rates = RATES.format(rate=300)
    (files / "rates.csv").write_text(rates)
    result = run(files, "--rates", "{files}/rates.csv", "--seconds", "5", "--gpus", "1", "--slo-scale", "0.01")
    assert result.exit_code == 1 and "does not fit: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpus", "1"), "name a --trace or --rates"),
        (("--trace", "{files}/trace.csv", "--rates", "{files}/rates.csv", "--gpus", "1"), "name a --trace or --rates"),
        (("--trace", "{files}/none.csv", "--gpus", "1"), "No such file"),
        (("--trace", "{files}/rates.csv", "--gpus", "1"), "line 1: the columns are"),
        (("--rates", "{files}/rates.csv", "--rate", "0", "--gpus", "1"), "--rate has to be above zero"),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--policy", "best"), "no policy 'best'; there are"),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--hardware", "v100"), "no hardware 'v100'; there are h"),
        (("--rates", "{files}/rates.csv", "--gpus", "1", "--set", "tau"), "'tau' is not name=value"),
        (("--rates", "{files}/rates.csv", "--groups", "two"), "'two' is not a number of groups"),
    ],
)
def test_plan_with_bad_input_exits_with_status_2_and_one_line(files, arguments, says):
    result = run(files, *arguments)
    assert result.exit_code == 2 and says in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_fleet_that_cannot_hold_the_largest_model_is_refused_by_name(files):
    (files / "models.toml").write_text(CATALOGUE.replace('"8b"', '"70b"').replace("ttft", "devices = 1\nttft"))
    result = run(files, "--trace", "{files}/trace.csv", "--gpus", "0")
    assert result.exit_code == 2 and result.stderr == "prismctl: name --gpus or --groups\n"
