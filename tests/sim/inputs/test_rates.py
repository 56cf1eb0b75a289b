"""Traces drawn from mean rates."""

import gzip
from statistics import fmean

import pytest

from sim.inputs import rates
from sim.inputs.trace import TraceError
from tests.sim import worlds

HEADER = "model,requests_per_s,prompt_tokens,output_tokens\n"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "rates.csv"
        path.write_text(text)
        return path

    return write


def test_rates_drawn_as_a_trace_give_their_mean_requests_and_tokens(file):
    known = worlds.models("a", "b", context_tokens=1 << 20)
    found = rates.read(file(HEADER + "a,5,600,100\nb,1,60,10\n"), known)
    trace = rates.draw(found, 2000.0, scale=2.0)
    for name, per_s, prompt, output in (("a", 10, 600, 100), ("b", 2, 60, 10)):
        mine = [request for request in trace.requests if request.model == name]
        assert len(mine) == pytest.approx(2000 * per_s, rel=0.1)
        assert fmean(request.prompt_tokens for request in mine) == pytest.approx(prompt, rel=0.15)
        assert fmean(request.output_tokens for request in mine) == pytest.approx(output, rel=0.25)
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals) and arrivals[-1] < trace.seconds == 2000.0


def test_rates_drawn_with_one_seed_are_equal_and_fit_the_context(file):
    known = worlds.models("a", context_tokens=100)
    found = rates.read(file(HEADER + "a,5,80,80\n"), known)

    def drawn(seed):
        return [(r.arrival, r.prompt_tokens, r.output_tokens) for r in rates.draw(found, 100.0, seed=seed).requests]

    assert drawn(1) == drawn(1) != drawn(2)
    assert all(prompt > 0 and output > 0 and prompt + output <= 100 for _, prompt, output in drawn(1))


def test_rates_in_a_gzipped_file_are_those_of_the_file(file):
    known, plain = worlds.models("a"), file(HEADER + "a,5,60,10\n")
    zipped = plain.with_suffix(".gz")
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert rates.read(zipped, known) == rates.read(plain, known)


def test_rates_with_a_byte_order_mark_are_those_without(file):
    known = worlds.models("a")
    assert rates.read(file("\ufeff" + HEADER + "a,1,2,3\n"), known) == rates.read(file(HEADER + "a,1,2,3\n"), known)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("model,rate\n", "line 1: the columns are"),
        (HEADER, "no model in it"),
        (HEADER + "a,1,2\n", "line 2: 3 columns instead of 4"),
        (HEADER + "a,1,2,3\nz,1,2,3\n", "line 3: model 'z' is not in the catalogue"),
        (HEADER + "a,1,2,3\na,1,2,3\n", "line 3: model 'a' again"),
        (HEADER + "a,0,2,3\n", "line 2: requests_per_s is 0; it has to be above zero"),
        (HEADER + "a,1,1e300,3\n", "line 2: prompt_tokens is above 1,000,000,000"),
        (HEADER + ",1,2,3\n", "line 2: model is empty"),
        (HEADER + "a,1,-2,3\n", "line 2: prompt_tokens is -2"),
        (HEADER + "a,1,2,many\n", "line 2: output_tokens is 'many', not a number"),
    ],
)
def test_bad_rates_are_refused_by_their_line(file, text, says):
    with pytest.raises(TraceError, match=says):
        rates.read(file(text), worlds.models("a"))


def test_rates_that_give_no_request_are_refused(file):
    found = rates.read(file(HEADER + "a,0.0001,2,3\n"), worlds.models("a"))
    with pytest.raises(TraceError, match="no request comes in 1 s"):
        rates.draw(found, 1.0)


def test_rates_that_give_more_requests_than_fit_in_memory_are_refused(file):
    found = rates.read(file(HEADER + "a,1000,2,3\nb,1000,2,3\n"), worlds.models("a", "b"))
    with pytest.raises(TraceError, match="20,000,000 requests come in 5000 s, over 10,000,000"):
        rates.draw(found, 5000.0, scale=2.0)


def test_rates_in_a_file_that_is_no_text_are_refused_by_its_name(tmp_path):
    path = tmp_path / "rates.csv"
    path.write_bytes(HEADER.encode() + b"a,5,60\xee,10\n")
    with pytest.raises(TraceError, match="rates.csv"):
        rates.read(path, worlds.models("a"))
