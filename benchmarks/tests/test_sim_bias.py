"""The bias of the simulator: requests of a run whose result has a summary, and means by system."""

import gzip

import pytest

from benchmarks import sim_bias, sim_check
from benchmarks.gpu.slices import MODELS, SLICES, deal

NAMES = [f"tenant{i}" for i in range(10)]


def run_of(counts):
    entries = {model: {"context_tokens": 8192} for model in MODELS}
    return {
        "run": {"slice": "busy", "rate": 2.0},
        "seconds": 240.0,
        "arguments": {"rate": "2.0", "seed": "0"},
        "system": {"shapes": MODELS, "catalogue": entries},
        "slos": {},
        "systems": [{"samples": {"rows": {"rows": sum(counts.values()), "columns": [{}, counts]}}}],
    }


@pytest.fixture
def traces(tmp_path):
    """Ten requests of ten tenants from 11 h on, one of which is longer than the context, and one an hour before."""
    begins = SLICES["busy"].from_s
    rows = [f"{begins - 3600},tenant0,1,1"]
    rows += [f"{begins + i},{name},{9000 if i == 9 else 10 + i},5" for i, name in enumerate(NAMES)]
    text = "\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n"
    (tmp_path / SLICES["busy"].trace).write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_requests_of_a_summary_are_those_of_the_trace_at_the_rate(traces):
    dealt = deal(NAMES, list(MODELS))
    counts = {}
    for name in NAMES:
        counts[dealt[name]] = counts.get(dealt[name], 0) + 2
    found = sim_check.requests(run_of(counts), "0-", 100.0, traces)
    assert [request.arrival for request in found] == [100.0 + i for i in range(10) for _ in range(2)]
    assert [request.model for request in found[::2]] == [dealt[name] for name in NAMES]
    assert found[-1].prompt_tokens == 8191 and found[0].prompt_tokens == 10


def test_trace_that_has_other_requests_than_the_run_is_refused(traces):
    with pytest.raises(ValueError, match="does not have the requests of this run"):
        sim_check.requests(run_of({"8b-1": 3}), "0-", 0.0, traces)
    with pytest.raises(ValueError, match="--traces has to say"):
        sim_check.requests(run_of({"8b-1": 3}), "0-", 0.0)


def row(system, measured, simulated, on_host=None):
    said = dict.fromkeys(sim_bias.MEASURES, simulated)
    slow = said if on_host is None else dict.fromkeys(sim_bias.MEASURES, on_host)
    return {
        "system": system,
        "quotas": sim_bias.PRESENT,
        "measured": dict.fromkeys(sim_bias.MEASURES, measured),
        "simulated": said,
        "on_host": slow,
    }


ROWS = {"1": row("prism", 80.0, 90.0, 84.0), "2": row("prism", 70.0, 72.0), "3": row("static", 50.0, 49.0)}


def test_line_of_a_system_has_signed_means_and_the_worst_run():
    told = sim_bias.line("prism", [ROWS["1"], ROWS["2"]])
    assert told[:-1] == ["prism", "2", "+6.0", "+6.0", "+6.0", "6.0", "+10.0", "+3.0"]
    assert float(told[-1]) < 0


def test_correction_makes_of_what_was_simulated_what_was_measured_and_leaves_certainty():
    one = {"1": ROWS["1"]}
    assert sim_bias.corrected(90.0, "prism", one) == pytest.approx(80.0)
    assert 96.0 < sim_bias.corrected(98.5, "prism", one) < 98.0  # less is left of ten points near the top
    older = {"0": {**row("prism", 90.0, 50.0), "quotas": "2 GiB"}}
    assert sim_bias.corrected(90.0, "prism", one | older) == pytest.approx(80.0)
    assert sim_bias.corrected(100.0, "prism", one) == 100.0
    assert sim_bias.corrected(60.0, "static", ROWS) > 60.0
    with pytest.raises(KeyError, match="no run of muxserve"):
        sim_bias.corrected(95.0, "muxserve", ROWS)


def test_host_of_a_run_is_that_of_its_sitting_and_its_half():
    runs = [
        {"circumstances": {"date": f"2026-11-{time}:00+00:00"}, "run": {"system": system}}
        for time, system in (("27T15:20", "prism"), ("27T15:06", "static"), ("27T06:00", "prism"))
    ]
    assert [sim_bias.host_of(run) for run in [*runs, {"run": {"system": "static"}}]] == [1.3, 1.12, 1.0, 1.0]
