"""The simulated comparison: every point comes out, is kept, and is run again only where its sources changed."""

import json
from dataclasses import replace

import pytest

from benchmarks import _series, comparison_sim
from benchmarks._fleets import FLEETS, Fleet, Source, tp, workload
from benchmarks.comparison_sim import Point, Sweep

TRACE = "arrival_s,model,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 4:.2f},m{i % 5 * (i % 3)},{100 + i},{1 + i % 20}\n" for i in range(120)
)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A fleet of three models, on one GPU and on two."""
    (tmp_path / "t.csv").write_text(TRACE)
    fleet = Fleet("tiny", {"t": (Source("t.csv", 5.0, 20.0, 3),)}, (tp("1b"),), {1: (1,), 2: (1, 1)}, {})
    monkeypatch.setitem(FLEETS, "tiny", fleet)
    monkeypatch.setattr(comparison_sim, "SWEEPS", (Sweep("tiny", (2,), (10,), ("prism", "muxserve", "static")),))
    return tmp_path


def test_of_many_models_the_busiest_and_some_of_the_long_tail_are_taken(tiny):
    given = workload(FLEETS["tiny"], "t", 1, 1.0, tiny, 1)
    asked = {request.model for request in given.requests}
    assert "m0" in asked and len(given.specs) == 3 and asked <= set(given.specs)
    assert all(0 <= request.arrival < 20 for request in given.requests)


def test_points_are_written_with_their_arguments_and_run_again_only_after_a_change(tiny, monkeypatch):
    monkeypatch.setattr(_series, "commit", lambda sources: "one")
    out = tiny / "out.json"
    done = comparison_sim.measure(out, tiny, "tiny", 1)
    written = json.loads(out.read_text())
    assert set(written["points"]) == {f"tiny/t/{n}/{v}/2/10" for n in (1, 2) for v in ("prism", "muxserve", "static")}
    assert {point["commit"] for point in written["points"].values()} == {"one"}
    point = written["points"]["tiny/t/1/static/2/10"]
    assert point["arguments"]["gpus"] == 1 and point["served"] == point["requests"] > 20 and not point["failed"]
    assert written["alone"]["tiny/t"]["p95_s"]["m0"][0] > 0

    before = out.stat().st_mtime_ns
    assert comparison_sim.measure(out, tiny, "tiny", 1) == done | written["points"]
    assert out.stat().st_mtime_ns == before
    monkeypatch.setattr(_series, "commit", lambda sources: "two")
    again = comparison_sim.measure(out, tiny, "tiny", 1)
    assert {point["commit"] for point in again.values()} == {"two"} and set(again) == set(done)


def test_a_system_that_cannot_hold_the_models_is_a_point_too_with_the_reason(tiny, monkeypatch, capsys):
    large = replace(FLEETS["tiny"], shapes=(tp("32b"),))
    monkeypatch.setitem(FLEETS, "tiny", large)
    done = comparison_sim.measure(tiny / "out.json", tiny, "tiny", 1)
    assert "finds no place for" in done["tiny/t/2/muxserve/2/10"]["refused"]
    assert done["tiny/t/2/static/2/10"]["failed"].keys() == {"its model has no place"}
    comparison_sim.show(done, {})
    shown = capsys.readouterr().out
    assert "tiny, t:" in shown and "refused" in shown


def test_the_same_point_comes_out_the_same_and_what_warms_up_does_not_count(tiny):
    fleet = FLEETS["tiny"]
    targets = {name: (0.1, 0.01) for name in workload(fleet, "t", 1, 1.0, tiny, 1).specs}
    point = Point("tiny", "t", 1, "prism", 1.0, 10.0)
    one, other = (comparison_sim.run(point, targets, tiny) for _ in range(2))
    assert one | {"cpu_s": 0} == other | {"cpu_s": 0}
    assert one["counts"]["activations"] == 0 and one["attainment"] > 0.9
    assert one["requests"] == len(workload(fleet, "t", 1, 1.0, tiny, 1).requests)
