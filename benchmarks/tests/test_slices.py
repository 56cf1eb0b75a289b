"""The halves of the simulated comparison share no traffic, and cells beside rivals are told as they came out."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import slices_sim
from benchmarks._rivals import gap, summary
from benchmarks._slices import EIGHTEEN, HALVES, SECONDS, Part, dealt, parts
from benchmarks.gpu.slices import MODELS

TRACE = "arrival_s,model,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 2:.2f},n{i % 5},{100 + i},{1 + i % 20}\n" for i in range(240)
)


def seconds_of(half, file, seconds=SECONDS):
    return {
        second
        for part in parts(half, seconds=seconds)
        if part.file == file
        for second in range(int(part.from_s), int(part.from_s + part.seconds))
    }


@pytest.mark.parametrize("seconds", [SECONDS, 1500.0, 7200.0])
def test_no_second_of_a_trace_is_in_both_halves(seconds):
    for file in {part.file for half in HALVES for part in parts(half)}:
        tuning, unseen = (seconds_of(half, file, seconds) for half in HALVES)
        assert tuning and unseen and not tuning & unseen


def test_slices_that_policies_were_made_on_are_for_tuning():
    for part in EIGHTEEN:
        assert set(range(int(part.from_s), int(part.from_s + part.seconds))) <= seconds_of("tuning", part.file)
        assert part.dealing not in {other.dealing for other in parts("unseen")}


def test_quick_cells_are_cells_of_the_half():
    for half in HALVES:
        assert {part.cell for part in parts(half, quick=True)} < {part.cell for part in parts(half)}


def test_other_dealing_gives_models_other_tenants_and_as_many():
    names = [f"t{i:02}" for i in range(48)]
    usual, other = (dealt(names, list(MODELS), dealing) for dealing in (0, 49))
    assert usual.keys() == other.keys() == set(names) and usual != other
    for model in MODELS:
        assert sum(to == model for to in usual.values()) == sum(to == model for to in other.values()) == 6


def figures(both, ttft):
    return {"both": both, "ttft": ttft}


def test_best_rival_is_chosen_for_each_measure():
    cell = {"prism": figures(90.0, 97.0), "static slice": figures(92.0, 95.0), "muxserve before": figures(80.0, 99.0)}
    both, ttft = (gap("c", cell, measure) for measure in ("both", "ttft"))
    assert (both.rival, both.points, ttft.rival, ttft.points) == ("static slice", -2.0, "muxserve before", -2.0)
    assert gap("c", {"prism": figures(90.0, 97.0)}, "both") is None


def test_summary_counts_cells_below_the_best_rival_and_those_that_a_rival_still_serves():
    cells = {
        "calm": {"prism": figures(97.0, 99.0), "static": figures(99.0, 99.0)},
        "lively": {"prism": figures(80.0, 99.0), "static": figures(76.0, 98.0)},
        "level": {"prism": figures(70.0, 90.0), "static": figures(70.0, 90.0)},
    }
    both, within, *_ = summary("unseen", cells)
    assert "below the best rival in 1 of 3 cells, by 2.00 in the mean, 2.00 at most (calm: static 99.00)" in both
    assert "above in 1, by 4.00; +0.67 over all" in both
    assert "in 1 of 1 cells" in within


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A half with one cell, of a trace of five names."""
    (tmp_path / "t.csv").write_text(TRACE)
    part = Part("t", "t.csv", 60.0, 2.0, seconds=30.0, half="unseen", dealing=1, before_s=60.0)
    monkeypatch.setattr(slices_sim, "parts", lambda half, quick, seconds: [part] if half == "unseen" else [])
    return tmp_path, part


def compared(monkeypatch, folder, *arguments):
    out = folder / "out.json"
    command = ["slices_sim", "--traces", str(folder), "--half", "unseen", "--workers", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, *arguments])
    slices_sim.main()
    return json.loads(out.read_text())["cells"]


def test_rivals_are_planned_in_three_ways_and_kept_for_the_next_try(tiny, monkeypatch, capsys):
    folder, part = tiny
    cell = compared(monkeypatch, folder)[part.cell]
    plans = ("blind", "before", "slice")
    assert set(cell) == {"prism", *(f"{system} {plan}" for system in ("static", "muxserve") for plan in plans)}
    assert all(0 < of["both"] <= 100 and of["worst"] <= 100 for of in cell.values())
    assert all(of["moves"] == of["activations"] == 0 for name, of in cell.items() if name != "prism")
    kept = folder / "kept.json"
    document = json.loads((folder / "out.json").read_text())
    for of in document["cells"][part.cell].values():
        of["both"] = 1.0  # no run would come to that
    kept.write_text(json.dumps(document))
    again = compared(monkeypatch, folder, "--rivals", str(kept))[part.cell]
    assert again["prism"] == cell["prism"]
    assert {of["both"] for name, of in again.items() if name != "prism"} == {1.0}
    assert "Prism is below the best rival in 0 of 1 cells" in capsys.readouterr().out


def test_cells_are_those_with_any_of_the_given_parts_in_their_names(tiny, monkeypatch):
    folder, part = tiny
    prism = ("--system", "prism")
    assert set(compared(monkeypatch, folder, *prism, "--only", "another", "--only", "t, 2")) == {part.cell}
    assert compared(monkeypatch, folder, *prism, "--only", "another") == {}


def test_plan_of_the_hour_before_sees_no_request_of_the_slice(tiny):
    folder, part = tiny
    rates = slices_sim.rates_before(part, folder)
    later = slices_sim.rates_before(replace(part, from_s=60.5), folder)
    tokens = sum(100 + i + 1 + i % 20 for i in range(120))
    assert sum(rates.values()) == pytest.approx((tokens + 8 * 80) / 60.0)
    assert later != rates


def test_history_of_a_slice_is_of_the_time_before_it_at_its_rate_and_none_for_a_cold_start(tiny):
    folder, part = tiny
    once, twice = (slices_sim.expected_before(replace(part, rate=rate), folder) for rate in (1.0, 2.0))
    tokens = sum(100 + i + 1 + i % 20 for i in range(120))
    assert sum(each.tokens_per_s for each in once.values()) == pytest.approx(tokens / 60.0)
    assert sum(each.tokens_per_s for each in twice.values()) == pytest.approx(2 * tokens / 60.0)
    assert slices_sim.expected_before(replace(part, cold=True), folder) == {}
    assert slices_sim.expected_before(replace(part, before_s=0.0), folder) == {}


def test_slices_remember_the_hour_before_where_the_trace_has_one():
    for part in EIGHTEEN:
        assert part.before_s == (3600.0 if part.from_s else 0.0)
