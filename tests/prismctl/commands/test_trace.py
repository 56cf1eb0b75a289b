"""`prismctl trace`, as a person and as a script use it."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from prismctl.__main__ import app

HEADER = "arrival_s,model,prompt_tokens,output_tokens\n"
ROWS = "".join(f"{60 * i},steady,100,10\n" + ("200,burst,7,1\n" if i == 3 else "") for i in range(11))


def run(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress((HEADER + ROWS).encode()))
    return path


def test_trace_is_told_with_the_papers_figures_beside_it_and_by_model(file):
    result = run(file, "--top", 1)
    assert result.exit_code == 0
    assert "12 requests in 0.17 h" in result.stdout
    assert "models active at once" in result.stdout and "62.5 %" in result.stdout  # (1 + 120 / 480) / 2
    assert "paper: 23-50 %" in result.stdout and "less than two days" in result.stdout
    assert "and 1 model with fewer requests: --top 0" in result.stdout and "burst" not in result.stdout


def test_trace_for_a_script_has_null_for_what_is_not_known(file):
    found = json.loads(run(file, "--json").stdout)
    assert found["active_share"] == pytest.approx(0.625) and found["day_correlation"]["middle"] is None
    assert list(found["models"]) == ["steady", "burst"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival,model\n", "line 1: the columns are"),
        (HEADER + "1,a,2,3\n2,a,x,3\n", "line 3: prompt_tokens is 'x', not a whole number"),
        (HEADER + "5,a,2,3\n4,a,2,3\n", "line 3: time goes back"),
        (HEADER + "1,a,2\n", "line 2: 3 columns instead of 4"),
        (HEADER + "1,,2,3\n", "line 2: model is empty"),
        (HEADER + "1,a,2,1000000001\n", "line 2: output_tokens is above 1,000,000,000"),
        (HEADER + f"1,a,{10**400},3\n200,a,2,3\n", "line 2: prompt_tokens is above 1,000,000,000"),
        (HEADER + "5,a,2,3\n4e8,a,2,3\n", "line 3: arrival_s is 4e+08 s after the first, over ten years"),
        (HEADER + "1764470400123,a,2,3\n", "line 2: arrival_s is 1,764,470,400,123, over 100,000,000,000: is it milli"),
        ("", "it is empty"),
        (HEADER, "no request"),
        (HEADER + "1,a,2,3\n9,a,2,3\n", "too short"),
    ],
)
def test_fault_in_a_trace_is_told_with_its_line(tmp_path, text, says):
    path = tmp_path / "log.csv"
    path.write_text(text)
    result = run(path)
    assert result.exit_code == 2 and says in result.stderr and str(path) in result.stderr


def test_trace_as_spreadsheets_write_it_is_read_as_any_other(tmp_path, file):
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" + (HEADER + ROWS).replace("\n", "\r\n").encode())
    assert run(path).exit_code == 0 and run(path).stdout == run(file).stdout


def test_trace_that_is_not_there_or_a_length_of_nothing_is_refused(tmp_path, file):
    assert "No such file" in run(tmp_path / "none.csv").stderr
    assert "--seconds has to be above zero" in run(file, "--seconds", 0).stderr
    assert "--seconds has to be 3.1536e+08 at most" in run(file, "--seconds", 1e15).stderr


def test_file_that_is_no_text_is_refused_as_that(tmp_path):
    (tmp_path / "ls").write_bytes(b"\x7fELF\x02\x01\xb7\xff")
    result = run(tmp_path / "ls")
    assert result.exit_code == 2 and result.stderr == f"prismctl: {tmp_path / 'ls'}: it is no text file\n"


def test_trace_in_an_archive_that_is_damaged_is_refused_by_its_name(tmp_path, file):
    head = file.read_bytes()[:10]
    (tmp_path / "log.csv").write_bytes(head + b"\xff" * 40)
    result = run(tmp_path / "log.csv")
    assert result.exit_code == 2 and "log.csv, after line 0: " in result.stderr
