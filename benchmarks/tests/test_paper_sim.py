"""The paper's set-up is the artifact's; what was searched is kept and not searched again; lost cells are marked."""

import json
import random
import sys
from dataclasses import replace
from itertools import count

import pytest

from benchmarks import _paper, _paper_tables, _series, paper_sim
from benchmarks._paper import CONTENDERS, HARDWARE
from benchmarks._paper_tables import PRISM, PaperCell, PaperSeries
from benchmarks.sim_bias import corrected
from sim.engines.cost import Cost
from sim.inputs.catalogue import SHAPES


@pytest.fixture
def traces(tmp_path):
    """A folder with a small trace under arena27's name, of the eight names that the artifact's models have."""
    draw, names = random.Random(7), [f"arena-{rank:02}" for rank in (2, 14, 3, 10, 5, 19, 23, 24)]
    lines = [f"{2 * i:.2f},{draw.choice(names)},{draw.randint(20, 400)},{draw.randint(1, 60)}" for i in range(300)]
    header = "arrival_s,model,prompt_tokens,output_tokens"
    (tmp_path / "arena27.csv.gz").write_text("\n".join([header, *lines]) + "\n")
    return tmp_path


def test_decode_steps_without_graphs_take_what_the_artifact_says_of_models_alone():
    for shape, least_s, most_s in (("8b", 0.0109, 0.0117), ("3b", 0.0093, 0.0099), ("1b", 0.0054, 0.0062)):
        assert least_s < Cost(SHAPES[shape], HARDWARE).decode(1, 4, 800) < most_s


def test_weights_of_the_tight_eight_take_78_percent_of_the_memory():
    weights = sum(shape.weights_bytes for shape in _paper._TIGHT)
    assert round(100 * weights / (2 * HARDWARE.capacity_bytes)) == 78


def test_load_is_squeezed_and_its_plan_ahead_is_of_its_first_half(traces):
    given = _paper.load("light", "arena27", traces)
    assert [row.arrival for row in given.rows[:3]] == pytest.approx([0.0, 0.8, 1.6]) and given.seconds == 240.0
    early = [row for row in given.rows if row.arrival < 120.0 and row.model == "m1"]
    tokens = sum(row.prompt_tokens + row.output_tokens for row in early) + 80
    assert given.before["m1"] == pytest.approx(tokens / 120.0)


def test_load_at_a_rate_repeats_requests_at_their_moment_and_has_those_of_lower_rates(traces):
    given = _paper.load("light", "arena27", traces)
    assert given.at(2.0) == [row for row in given.rows for _ in range(2)]
    some, more = given.at(0.25), given.at(0.5)
    assert set(some) < set(more) < set(given.rows)


def test_run_in_which_too_many_first_tokens_are_late_is_given_up(traces):
    given = _paper.load("light", "arena27", traces)
    targets = dict.fromkeys(given.shapes, (1e-3, 1.0))
    contender = CONTENDERS["S-Partition, slice"]
    assert _paper.run(given, targets, 1.0, contender, 1.0, (1, 1), 1, spare=0.01).keys() == {"given_up", "cpu_s"}
    assert _paper.run(given, targets, 1.0, contender, 1.0, (1, 1), 1)["ttft"] == 0.0


def test_run_of_models_that_do_not_fit_is_refused_with_the_reason(traces):
    given = _paper.load("tight", "arena27", traces)
    targets = dict.fromkeys(given.shapes, (1.0, 1.0))
    found = _paper.run(given, targets, 1.0, CONTENDERS["MuxServe++ FIFO, slice"], 1.0, (1,), 1)
    assert "finds no place for" in found["refused"]


@pytest.fixture
def small(traces, monkeypatch):
    """Two short series of eight models, and the file for their results."""
    monkeypatch.setattr(_series, "commit", lambda sources: "one")
    monkeypatch.setattr(paper_sim, "MOST_RATE", 3.0)
    names = ("S-Partition, slice", PRISM)
    return traces, traces / "out.json", [PaperSeries("light", "arena27", 5.0, 0.0, name, 1) for name in names]


def test_series_are_kept_with_arguments_and_run_again_only_after_a_change(small, monkeypatch):
    traces, out, wanted = small
    done = paper_sim.measure(out, traces, wanted, 1)
    written = json.loads(out.read_text())["series"]
    assert written == done and set(done) == {one.key for one in wanted}
    for one in done.values():
        assert one["commit"] == "one" and one["arguments"]["fleet"] == "light"
        assert all(0 <= point["both"] <= point["ttft"] <= 100 for point in one["points"].values())
    before = out.stat().st_mtime_ns
    monkeypatch.setattr(paper_sim, "searched", lambda one, traces: pytest.fail("searched again"))
    assert paper_sim.measure(out, traces, wanted, 1) == done
    assert out.stat().st_mtime_ns == before
    assert not paper_sim._is_done(wanted[0], done[wanted[0].key], "two")


def test_series_of_more_starts_replaces_one_of_fewer_and_not_the_other_way_round():
    one = PaperSeries("light", "arena27", 5.0, 0.0, PRISM, 1)
    three = replace(one, starts=3)

    def kept(of):
        return {"arguments": {name: getattr(of, name) for name in PaperSeries.__dataclass_fields__}, "commit": "one"}

    assert paper_sim._is_done(one, kept(three), "one") and not paper_sim._is_done(three, kept(one), "one")
    assert not paper_sim._is_done(one, None, "one") and not paper_sim._is_done(one, kept(replace(one, scale=2)), "one")


@pytest.mark.parametrize(
    "text", ["", '{"benchmark": "paper_sim", "series": {"a": 1}}', '{"benchmark": "paper_sim"}', '{"benchmark": "x"}']
)
def test_damaged_results_are_a_clear_error_and_stay_as_they_are(tmp_path, monkeypatch, text):
    out = tmp_path / "out.json"
    out.write_text(text)
    for arguments in (["--show"], ["--figure"], ["--traces", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["paper_sim", "--out", str(out), *arguments])
        with pytest.raises(SystemExit, match="is damaged, or no result of paper_sim.*move it away"):
            paper_sim.main()
    assert out.read_text() == text


def series(fleet, rate, contender, points):
    one = PaperSeries(fleet, "arena27", 5.0, rate, contender, 1)
    arguments = {name: getattr(one, name) for name in PaperSeries.__dataclass_fields__}
    return {one.key: {"arguments": arguments, "commit": "one", "points": points}}


def percents(ttft, tokens_per_s=1000.0, worst=100.0):
    return {"ttft": ttft, "tpot": 100.0, "both": ttft, "worst": worst, "tokens_per_s": tokens_per_s}


def test_lost_cells_are_bold_and_the_factors_are_over_the_best_rival_of_each_plan():
    cells = {
        PRISM: PaperCell("2", 2.0),
        "S-Partition, blind": PaperCell("1", 1.0),
        "MuxServe++ FIFO, blind": PaperCell("1.6", 1.6),
        "S-Partition, slice": PaperCell("2.5", 2.5),
        "Prism, paper's rules": PaperCell("1.9", 1.9),
    }
    won = {**cells, "S-Partition, slice": PaperCell("2", 2.0)}
    rows = {row[0]: row[1:] for row in _paper_tables.marked({"lost": cells, "level": won})}
    assert rows[PRISM] == ["**2**", "2"] and rows["S-Partition, slice"] == ["**2.5**", "2"]
    assert rows["MuxServe++ FIFO, blind"] == ["1.6", "1.6"] and rows["MuxServe++ rounds, blind"] == ["", ""]
    assert rows["Prism ÷ best blind"] == ["1.25", "1.25"] and rows["Prism ÷ best slice"] == ["**0.80**", "1.00"]
    assert rows["Prism ÷ best before"] == ["", ""]


def test_shown_are_rates_gpus_and_dollars(capsys):
    done = {
        **series("tight", 0.0, PRISM, {"1": percents(100.0), "2": percents(98.0, 1900.0), "4": percents(80.0)}),
        **series("eighteen", 4.0, PRISM, {"1": {}, "2": percents(99.5, worst=90.0), "3": percents(99.6)}),
        **series("eighteen", 4.0, "S-Partition, blind", {"3": {"given_up": True}, "16": {"refused": "no room"}}),
    }
    _paper_tables.show(done, {}, 3.6)
    shown = capsys.readouterr().out
    assert "| Prism | 1.50/2.33/2.89 |" in shown
    assert "| Prism | 1.50; 2.33; $1.379 |" not in shown and "| Prism | 1.50; >4.00; $1.379 |" in shown
    assert "| Prism | 2; 3; $3.000 |" in shown and "| S-Partition, blind | >16; >16 |" in shown
    assert "| Prism ÷ best blind | ∞ |" in shown


def test_corrected_figures_have_their_systems_bias_taken_off():
    row = {"system": "prism", "quotas": "what engines need", "slice": "busy", "rate": 2.0}
    shares = {"both": 90.0, "ttft": 90.0, "tpot": 90.0}
    bias = {"run": {**row, "measured": shares, "simulated": {name: 95.0 for name in shares}}}
    points = {"2": percents(99.2), "3": percents(99.6)}
    done = series("eighteen", 4.0, PRISM, points)
    assert corrected(99.2, "prism", bias) < 99 < corrected(99.6, "prism", bias)
    shown = [_paper_tables.gpus_table(done, of, 1.0) for of in ({}, bias)]
    assert [next(iter(columns.values()))[PRISM].text[:4] for columns in shown] == ["2; 2", "3; 3"]


def test_gpus_are_searched_for_first_tokens_and_for_all_that_is_asked(monkeypatch):
    calls = count()

    def run(given, targets, scale, contender, rate, sizes, starts, spare):
        next(calls)
        gpus = sum(sizes)
        return {"given_up": True} if gpus < 4 else percents(99.5, worst=96.0 if gpus >= 6 else 50.0)

    monkeypatch.setattr(paper_sim, "_load", lambda *arguments: (None, None))
    monkeypatch.setattr(_paper, "run", run)
    points = paper_sim.searched(PaperSeries("eighteen", "arena27", 5.0, 4.0, PRISM, 1), None)["points"]
    assert _paper_tables.gpus(points, _paper_tables.in_time).rate == 4
    assert _paper_tables.gpus(points, _paper_tables.suffices).rate == 6
    assert len(points) == next(calls) and points["6"]["groups"] == [6, 0]


def test_layouts_of_the_fifty_eight_have_one_group_of_four_or_two():
    assert paper_sim.layouts("fifty-eight", 10) == [(1,) * 6 + (4,), (1, 1, 4, 4)]
    assert paper_sim.layouts("fifty-eight", 8) == [(1, 1, 1, 1, 4)] and paper_sim.layouts("fifty-eight", 4) == []
    assert all(sum(sizes) == 13 for sizes in paper_sim.layouts("fifty-eight", 13))
