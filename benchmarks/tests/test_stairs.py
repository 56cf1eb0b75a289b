"""A staircase of rates: its requests, what its steps say, the plan of the time, and what is kept."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import figures, stairs_sim
from benchmarks._stairs import LEAST_REQUESTS, RATES, StairRow, StairSample, climb, falls_under, steps
from benchmarks.gpu import compared, stairs
from benchmarks.gpu.stairs_load import MODELS, SIMULATED, load, system
from benchmarks.systems import SYSTEMS
from loader.checkpoints import checkpoint
from placement.planning import traffic_file
from placement.policy.traffic import TrafficHours

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "offline" / "stairs.sh"
BUSY = "7b-1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `cut` writes, of a slice with a request a second for one model and one in five for another."""
    to = tmp_path / "cut"
    to.mkdir()
    rows = [(float(at), BUSY, 200, 20) for at in range(495)] + [
        (float(at), "12b-1", 100, 10) for at in range(0, 495, 5)
    ]
    compared.write_trace(to / "slice.csv", sorted(rows))
    before = {name: [0, 0, 0, 0] for name in MODELS} | {BUSY: [3600, 720_000, 72_000, 3], "12b-1": [36, 360, 360, 36]}
    (to / "before.json").write_text(json.dumps(before))
    return to


def test_every_step_has_the_same_requests_as_often_as_its_rate_says() -> None:
    rows = [StairRow(at, "a", 10, 5) for at in (0.0, 1.0, 4.5, 5.0)]
    found = climb(rows, 5.0, rates=(0.25, 1.0, 2.0))
    assert [row.arrival for row in found if 5 <= row.arrival < 10] == [5.0, 6.0, 9.5]
    assert [row.arrival for row in found if row.arrival >= 10] == [10.0, 10.0, 11.0, 11.0, 14.5, 14.5]


def test_a_step_below_rate_one_has_the_requests_of_lower_ones() -> None:
    rows = [StairRow(float(at), "a", 10, 5) for at in range(50)]
    few, more = ({row.arrival for row in climb(rows, 50.0, rates=(rate,))} for rate in (0.5, 0.9))
    assert 0 < len(few) < len(more) < 50 and few < more


def test_a_request_without_an_answer_misses_everything_and_one_without_a_second_token_only_its_first() -> None:
    slos = {"a": {"ttft_ms": 100.0, "tpot_ms": 10.0}}
    samples = [
        StairSample(0.0, "a", 0.05, 0.005, False),
        StairSample(0.1, "a", 0.05, 0.011, False),
        StairSample(0.2, "a", 0.2, None, False),
        StairSample(0.3, "a", None, None, True),
    ]
    (step,) = steps(samples, slos, 10.0)
    assert (step["ttft"], step["tpot"], step["both"]) == (50.0, 50.0, 25.0)


def test_the_worst_model_of_a_step_has_requests_at_enough_moments() -> None:
    slos = {name: {"ttft_ms": 100.0} for name in ("few", "many", "copies")}
    samples = [StairSample(0.1 * at, "many", 0.05 if at else 0.2, None, False) for at in range(LEAST_REQUESTS)]
    samples += [StairSample(1.0, "few", 0.2, None, False)]
    samples += [StairSample(2.0, "copies", 0.2, None, False)] * LEAST_REQUESTS
    (step,) = steps(samples, slos, 10.0)
    assert (step["worst_model"], step["worst"]) == ("many", 90.0)


def test_each_step_has_the_hosts_speed_of_its_own_seconds() -> None:
    samples = [StairSample(at, "a", 0.1, None, False) for at in (1.0, 11.0)]
    found = steps(samples, {}, 10.0, pulse=[[0.0, 0.5, 0, 0], [10.0, 0.9, 0, 0]])
    assert [step["host_ms"] for step in found] == [0.5, 0.9]


def test_marks_are_linear_between_steps_and_say_where_they_were_not_passed() -> None:
    found = [{"rate": rate, "ttft": ttft, "tpot": 100.0, "both": 80.0} for rate, ttft in ((0.5, 100.0), (2.0, 97.0))]
    told = falls_under(found)
    assert told["ttft"] == {"99": "1.00", "95": ">2.00", "90": ">2.00"}
    assert told["tpot"]["99"] == ">2.00" and told["both"]["90"] == "<0.50"


# --- the plan


def test_steps_are_as_long_as_wanted_where_all_systems_fit_and_shorter_where_they_do_not() -> None:
    order = ["prism", "static", "muxserve", "prism"]
    assert stairs.planned(3600.0, order) == stairs.StairPlan(55.0, tuple(order))
    short = stairs.planned(1600.0, order)
    assert short.systems == tuple(order[:3]) and 30 <= short.step_s < 55 and short.takes_s <= 1600
    assert stairs.planned(1300.0, order).systems == ("prism", "static")


def test_a_time_in_which_not_one_system_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="300 s are not enough"):
        stairs.planned(300.0, ["prism"])


def test_a_folder_keeps_the_length_of_its_steps(tmp_path: Path) -> None:
    first = stairs.plan(stairs.parse(["plan", "--out", str(tmp_path), "--limit-s", "1600"]))
    assert stairs.plan(stairs.parse(["plan", "--out", str(tmp_path), "--limit-s", "3600"])).step_s == first.step_s


async def test_what_there_is_no_time_for_is_named_and_nothing_is_started(folder: Path, tmp_path: Path) -> None:
    arguments = ["run", "--traces", str(folder), "--out", str(tmp_path), "--rehearse", "echo", "--limit-s", "60"]
    given = stairs.parse(arguments)
    made = stairs.StairPlan(5.0, ("prism", "prism"))
    assert await stairs.run(given, made, [], stairs.site_of(given)) == ["prism: no time left", "prism-2: no time left"]


@pytest.mark.parametrize(("limit", "free"), [("max\n", (2 << 30, False)), (f"{5 << 30}\n", (4 << 30, True))])
def test_free_host_memory_is_that_of_the_control_group_where_it_has_a_limit(limit, free, tmp_path: Path) -> None:
    for name, text in (
        ("proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n"),
        ("sys/fs/cgroup/memory.max", limit),
        ("sys/fs/cgroup/memory.current", str(1 << 30)),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert stairs.host_free(tmp_path) == free


async def test_halves_hear_what_the_other_measured(tmp_path: Path) -> None:
    second = stairs.Halves(tmp_path, (2, 2))
    (tmp_path / "halves").mkdir()
    (tmp_path / "halves" / "alone.1.json").write_text('{"a": 1}')
    assert await second.meet("alone", {"a": 2}) == [{"a": 1}, {"a": 2}]


# --- models and traffic


def test_the_tight_eight_find_room_and_their_weights_are_three_quarters_of_the_memory(
    folder: Path, tmp_path: Path
) -> None:
    site = stairs.site_of(stairs.parse(["check", "--traces", str(folder)]))
    models = compared.make(tmp_path, MODELS, "")
    nbytes = {model.name: checkpoint.read(model.folder, site.sizes.dtype_bytes).weights_bytes for model in models}
    assert 0.74 < sum(nbytes.values()) / sum(site.devices.values()) < 0.78
    for name, shape in MODELS.items():
        assert nbytes[name] == pytest.approx(SIMULATED[shape].weights_bytes, rel=1e-4)
    assert set(load(folder).plan(models, site.devices, site.sizes)) == set(MODELS)
    assert sum(nbytes.values()) < site.host_bytes


@pytest.mark.parametrize("descriptors, extent", [(1 << 20, 8 << 20), (20_000, 16 << 20)])
def test_a_host_that_allows_few_descriptors_has_larger_extents(descriptors, extent, monkeypatch) -> None:
    monkeypatch.setattr(stairs.process_limits, "allow_descriptors", lambda: descriptors)
    site = stairs.site_of(stairs.parse(["check", "--traces", "."]))
    assert site.sizes.kv_extent_bytes == extent


def test_prism_remembers_the_hour_before_and_the_others_have_planned_places(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    found = load(folder)
    found.write_traffic(path)
    hours, _ = traffic_file.read(str(path))
    told = TrafficHours(hours).expected((max(hours) + 0.5) * 3600)
    assert told[BUSY].tokens_per_s == pytest.approx(found.before[BUSY].tokens_per_s) == pytest.approx(220.0)
    assert system("prism", path).placement["traffic_file"] == str(path)
    assert system("static", path) == SYSTEMS["static"]


# --- what is kept


def test_a_simulated_staircase_is_shown_and_drawn(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "staircase_h200.json"
    assert stairs_sim.main(["--slice", str(folder), "--out", str(out), "--step-s", "5", "static"]) == 0
    found = json.loads(out.read_text())
    (run,) = found["runs"]
    assert [step["rate"] for step in run["steps"]] == list(RATES)
    assert set(run["slos"]) == {BUSY, "12b-1"} and run["steps"][0]["ttft"] == 100.0
    assert stairs.main(["show", "--out", str(out)]) == 0
    assert "static, simulated" in capsys.readouterr().out
    figures.draw(["staircase_h200"], tmp_path, tmp_path)
    assert (tmp_path / "staircase.svg").exists()


def test_results_are_collected_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    step = {"rate": 1.0, "requests": 9, "ttft": 100.0, "tpot": 90.0, "both": 90.0}
    step |= {"worst": None, "worst_model": None, "host_ms": None}
    for began, half, name, valid in ((2.0, 1, "static", True), (1.0, 2, "prism", False)):
        run = {"system": name, "name": name, "half": half, "start_s": 9.0, "began_at": began}
        found = {"run": run, "step_s": 5.0, "slos": {}, "host": {}, "systems": [{"failures": {}}], "decisions": {}}
        to = tmp_path / f"half{half}"
        to.mkdir()
        (to / f"{name}.json").write_text(json.dumps(found | {"steps": [step], "valid": valid}))
    runs = stairs.collected(tmp_path)["runs"]
    assert [each["name"] for each in runs] == ["prism, half 2, sent late", "static, half 1"]
    with pytest.raises(ValueError, match="no result"):
        stairs.collected(tmp_path / "half1" / "nothing")


def test_the_script_of_a_host_is_read_by_its_shell_and_refuses_other_words() -> None:
    assert subprocess.run(["sh", "-n", str(SCRIPT)]).returncode == 0
    done = subprocess.run(
        ["sh", str(SCRIPT), "again"], capture_output=True, text=True, env=dict(os.environ, REHEARSE="1")
    )
    assert done.returncode == 2 and "first, begin or look" in done.stderr
