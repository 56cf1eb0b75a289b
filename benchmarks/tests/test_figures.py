"""Every figure can be drawn from the results that are saved."""

from benchmarks import figures


def test_every_result_has_its_figures_and_the_same_data_draw_the_same(tmp_path, monkeypatch, capsys):
    drawn = []
    for folder in ("first", "second"):
        monkeypatch.setattr("sys.argv", ["figures", "--out", str(tmp_path / folder)])
        figures.main()
        drawn.append({path.name: path.read_text() for path in (tmp_path / folder).iterdir()})
    assert drawn[0] == drawn[1]
    assert {
        "overhead_one.svg",
        "loads.svg",
        "sim_eight_rate.svg",
        "sim_eighteen_gpus.svg",
        "paper_requests.svg",
        "paper_gpus.svg",
        "fleet_gpus.svg",
    } <= drawn[0].keys()
    assert "figures: no" not in capsys.readouterr().err


def test_a_result_that_is_not_there_leaves_its_figures_out_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["figures", "--results", str(tmp_path), "--out", str(tmp_path / "out")])
    figures.main()
    assert not any((tmp_path / "out").iterdir())
    assert "figures: no gpu_load.json, so none of its figures" in capsys.readouterr().err


def test_of_a_sweep_only_what_was_varied_differs_and_short_ones_are_left_out():
    def point(rate, gpus, value):
        about = {"fleet": "f", "workload": "w", "gpus": gpus, "rate": rate, "scale": 10, "variant": "prism"}
        return {"arguments": about, "attainment": value}

    points = [point(4, 2, 0.5), point(1, 2, 1.0), point(8, 2, 0.25), point(1, 3, 1.0)]
    assert figures._lines(points, "w", "rate") == {"prism": [(1, 100.0), (4, 50.0), (8, 25.0)]}
    assert figures._lines(points, "w", "gpus") == {}
