"""A fleet's day is sampled as it says; searches are kept and not done again; cells that Prism loses are marked."""

import random
import sys
from dataclasses import asdict, replace

import pytest

from benchmarks import _day, _fleet_tables, _paper_tables, _series, fleet_sim, sim_bias
from benchmarks._day import SYSTEMS_OF_DAY
from benchmarks._fleet_tables import ALL, MARKS, OVERALL, STATIC, DaySeries, marks_to_reach, number
from benchmarks._paper_tables import PRISM

NAMES = [f"tenant-{i}" for i in range(6)]
ONE = DaySeries(models=6, rate=1.0, memory=84.0, ttft_s=1.0, every=12, seconds=60.0, system=PRISM)


@pytest.fixture
def traces(tmp_path):
    """A folder with a day of six tenants; tenant-0 asks most, tenant-5 only at 6 h."""
    draw, rows = random.Random(3), []
    for hour in range(24):
        for i in range(30):
            rows.append((3600 * hour + 4 * i, NAMES[min(draw.randrange(8), 7) % 5 if i % 3 else 0], 100 + i, 5 + hour))
        if hour == 6:
            rows.append((3600 * hour + 119, NAMES[5], 999, 1))
    lines = [f"{at:.2f},{name},{prompt},{output}" for at, name, prompt, output in rows]
    (tmp_path / _day.FILE).write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *lines]) + "\n")
    return tmp_path


def point(ttft=100.0, tpot=100.0, worst=100.0, **more):
    return {
        "ttft": ttft,
        "tpot": tpot,
        "both": ttft,
        "worst": worst,
        "tokens_per_s": 1000.0,
        "hours": {"0": ttft},
    } | more


def kept(one, points):
    return {one.key: {"arguments": asdict(one), "commit": "c", "weights_gb": 168.0, "points": points}}


# --- the day


def test_day_has_the_run_in_and_the_counted_seconds_of_the_hours_that_are_wanted(traces):
    given = _day.day(traces, 6, 12, 30.0)
    assert list(given.rows) == [0, 12]
    assert all(row.arrival < _day.RUN_IN_S + 30.0 for rows in given.rows.values() for row in rows)
    assert [row.arrival for row in given.rows[12]] == [4.0 * i for i in range(23)]


def test_day_of_more_models_than_the_trace_has_repeats_tenants_some_hours_later(traces):
    given = _day.day(traces, 12, 12, 60.0)
    assert len(given.shapes) == 12
    assert [row.prompt_tokens for row in given.rows[12] if row.model == "tenant-5+"] == [999]
    assert not [row for row in given.rows[12] if row.model == "tenant-5"]


def test_day_of_fewer_models_than_the_trace_has_takes_popular_and_rare_ones(traces):
    given = _day.day(traces, 2, 12, 60.0)
    assert len(given.shapes) == 2 and "tenant-0" in given.shapes


def test_plan_of_the_first_hour_is_made_of_the_last_one_of_the_day(traces):
    given = _day.day(traces, 6, 12, 60.0)
    rows = [row for row in _day._read(traces / _day.FILE, 3600.0).rows[23, "tenant-0"]]
    tokens = sum(row.prompt_tokens + row.output_tokens for row in rows) + sum(_day.WARM_TOKENS)
    assert given.before[0]["tenant-0"] == pytest.approx(tokens / 3600.0)


def test_targets_are_no_less_than_is_asked_for(traces):
    given = _day.day(traces, 6, 12, 60.0)
    tight, lax = _day.targets(given), _day.targets(given, 1.0)
    assert min(ttft_s for ttft_s, _ in tight.values()) < 1.0 == min(ttft_s for ttft_s, _ in lax.values())
    assert [tpot_s for _, tpot_s in tight.values()] == [tpot_s for _, tpot_s in lax.values()]


@pytest.mark.parametrize("system", SYSTEMS_OF_DAY)
def test_day_with_gpus_to_spare_is_on_time(traces, system):
    given = _day.day(traces, 6, 12, 60.0)
    found = _day.run(given, _day.targets(given, 3.0), SYSTEMS_OF_DAY[system], 6, 84.0, 1.0, MARKS)
    assert found["ttft"] >= 99.0 and found["tpot"] == 100.0 and list(found["hours"]) == ["0", "12"]


def test_day_in_which_too_many_are_late_is_given_up(traces):
    given = _day.day(traces, 6, 12, 60.0)
    slos = dict.fromkeys(given.shapes, (1e-6, 1.0))
    assert "given_up" in _day.run(given, slos, SYSTEMS_OF_DAY[STATIC], 6, 84.0, 1.0, MARKS)
    assert _day.run(given, slos, SYSTEMS_OF_DAY[STATIC], 6, 84.0, 1.0)["ttft"] == 0.0


def test_partition_without_a_place_for_a_model_is_refused(traces):
    given = _day.day(traces, 6, 12, 60.0)
    assert "refused" in _day.run(given, _day.targets(given), SYSTEMS_OF_DAY[STATIC], 1, 40.0, 1.0, MARKS)


# --- searches


def test_search_runs_each_number_of_gpus_once(traces, monkeypatch):
    ran = []
    monkeypatch.setattr(_day, "run", lambda given, slos, system, gpus, *rest: ran.append(gpus) or point(98.0 + gpus))
    static = replace(ONE, system=STATIC)
    found = fleet_sim.searched(static, traces, {})
    assert number(found["points"], MARKS) == _fleet_tables.Crossing(1)
    assert sorted(map(int, found["points"])) == sorted(set(ran)) and len(ran) == len(set(ran))


def test_measure_runs_what_the_file_lacks_and_nothing_else(traces, tmp_path, monkeypatch, capsys):
    out = tmp_path / "fleet_sim.json"
    monkeypatch.setattr(_series, "commit", lambda sources: "now")
    wanted = [replace(ONE, system=name) for name in (STATIC, "static that knows")]
    fleet_sim.measure(out, traces, wanted[:1], 1)
    done = fleet_sim.measure(out, traces, wanted, 1)
    assert list(done) == [one.key for one in wanted]
    assert "1 of 1: " + wanted[1].key in capsys.readouterr().out


def test_file_that_is_damaged_is_refused_by_name(tmp_path, monkeypatch):
    out = tmp_path / "fleet_sim.json"
    out.write_text('{"benchmark":"fleet_sim","series":{"a":{}}}')
    with pytest.raises(_series.ResultsError, match="fleet_sim.json is damaged"):
        _fleet_tables.read(out)
    monkeypatch.setattr(sys, "argv", ["fleet_sim", "--show", "--out", str(out)])
    with pytest.raises(SystemExit, match="move it away"):
        fleet_sim.main()


# --- tables


def test_marks_with_bias_are_those_that_become_the_marks_when_it_is_taken_off():
    bias = sim_bias.kept()
    for system, contender in SYSTEMS_OF_DAY.items():
        reached = marks_to_reach(system, bias)
        measures = zip(reached, ("ttft", "tpot", "both"), strict=True)
        back = [sim_bias.corrected(mark, contender.system, bias, of) for mark, of in measures]
        assert back == pytest.approx(MARKS)
    assert marks_to_reach(PRISM, bias)[0] > 99.0 and marks_to_reach(PRISM, {}) == MARKS


def test_number_asks_for_the_worst_model_only_with_all_marks():
    points = {"3": point(98.0), "4": point(worst=80.0), "5": point(), "6": point()}
    assert number(points, MARKS[:OVERALL]).rate == 4 and number(points, MARKS[:ALL]).rate == 5


def test_number_passes_over_one_that_is_enough_by_luck():
    points = {"3": point(), "4": point(98.0), "5": point(), "6": point(), "8": point(98.0)}
    assert number(points, MARKS).rate == 5


def test_number_is_beyond_the_most_where_none_was_enough():
    assert str(number({"3": point(98.0), "4": {"given_up": 0}}, MARKS)) == ">4.00"


def test_fill_is_the_share_that_weights_take_of_the_static_gpus():
    done = kept(replace(ONE, system=STATIC), {"4": point(), "3": point(0.0)})
    (row,) = _fleet_tables.rows(done, {})
    assert row.fill == pytest.approx(168.0 / (4 * 84.0))


def test_table_marks_rivals_that_need_fewer_gpus_than_prism(capsys):
    done = kept(ONE, {"3": point()}) | kept(replace(ONE, system=STATIC), {"2": point()})
    _fleet_tables.show(done, {}, 3.6)
    out = capsys.readouterr().out
    assert "**3 $3.000**" in out and "**2 $2.000**" in out and "| 0.7 (-) |" in out


def test_table_marks_nothing_where_prism_needs_fewest(capsys):
    done = kept(ONE, {"2": point()}) | kept(replace(ONE, system=STATIC), {"4": point()})
    _fleet_tables.show(done, {}, 3.6)
    out = capsys.readouterr().out
    assert "**" not in out and "| 2.0 (-) |" in out and "2 GPUs, least at 0 h: 100.00 %" in out


def test_dollars_are_those_of_the_papers_tables():
    assert _fleet_tables.cost is _paper_tables.cost
