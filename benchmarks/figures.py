"""`make figures`: every figure of docs/lab/figures, from the JSON files of benchmarks/results. Measures nothing.

A file that is not there leaves its figures out, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import sim_bias
from benchmarks._fleet_tables import OVERALL, STATIC, FleetRow, ratio, rows
from benchmarks._paper_tables import GRID, MARKS, PRISM, PaperSeries, gpus, in_time, suffices
from benchmarks._stairs import MARKS as STAIR_MARKS
from benchmarks.sensitivity import SETTINGS, WORKLOADS, default, key

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "lab" / "figures"
PANEL = (4.2, 3.2)
"""Inches."""
SYSTEMS = {
    "prism": "#c0392b",
    "muxserve": "#2980b9",
    "static": "#7f8c8d",
    "least_slack": "#27ae60",
    "serverlessllm": "#8e44ad",
    "qlm": "#d35400",
    "qlm, swap-aware": "#f39c12",
}
"""Of the comparison: those that are drawn, with their colours. Tables have the rest."""
SWEEPS = {"rate": "requests for each of the trace", "scale": "SLO scale", "gpus": "GPUs"}


def comparison(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """A figure for each fleet and each thing that was varied, a panel for each workload."""
    points = [point for point in found["points"].values() if "attainment" in point]
    by_fleet: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        by_fleet[point["arguments"]["fleet"]].append(point)
    for fleet, mine in sorted(by_fleet.items()):
        for swept, title in SWEEPS.items():
            panels = {
                workload: lines
                for workload in sorted({point["arguments"]["workload"] for point in mine})
                if (lines := _lines(mine, workload, swept))
            }
            if panels:
                yield f"sim_{fleet}_{swept}", _drawn(panels, title, "% of requests on time")


def _lines(points: list[dict[str, Any]], workload: str, swept: str) -> dict[str, list[tuple[float, float]]]:
    """By system, the points of the longest row in which nothing but `swept` changes."""
    rows: dict[tuple[Any, ...], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        about = point["arguments"]
        if about["workload"] == workload and about["variant"] in SYSTEMS:
            fixed = tuple(about[name] for name in SWEEPS if name != swept)
            rows[fixed][about["variant"]].append((about[swept], 100 * point["attainment"]))
    longest = max(rows.values(), key=lambda row: len(row.get("prism", ())), default={})
    return {} if len(longest.get("prism", ())) < 3 else {name: sorted(line) for name, line in longest.items()}


def _drawn(panels: dict[str, dict[str, list[tuple[float, float]]]], x: str, y: str) -> Figure:
    figure, axes = pyplot.subplots(1, len(panels), figsize=(PANEL[0] * len(panels), PANEL[1]), squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for name in (each for each in SYSTEMS if each in lines):
            axis.plot(*zip(*lines[name], strict=True), marker="o", markersize=3, color=SYSTEMS[name], label=name)
        axis.set(title=title, xlabel=x, ylabel=y, ylim=(0, 103))
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    return figure


PAPER = {
    PRISM: ("#c0392b", "-"),
    "Prism, paper's rules": ("#e59866", "-"),
    "MuxServe++ FIFO, slice": ("#2980b9", "-"),
    "MuxServe++ FIFO, blind": ("#2980b9", ":"),
    "MuxServe++ rounds, slice": ("#16a085", "-"),
    "S-Partition, slice": ("#7f8c8d", "-"),
    "S-Partition, blind": ("#7f8c8d", ":"),
}
"""Systems of the paper's set-up that are drawn as lines; tables have the rest."""


def paper(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """First tokens on time by rate, a panel for each setting; and the fewest GPUs that suffice, a bar for each system
    (pale: of first tokens alone), open at the top where none of the numbers tried did."""
    every = [(PaperSeries(**kept["arguments"]), kept["points"]) for kept in found["series"].values()]
    of_setting: dict[str, dict[str, Any]] = {}
    for fleet, trace, scale, rate in GRID:
        for one, points in every:
            if (one.fleet, one.trace, one.scale, one.rate) == (fleet, trace, scale, rate):
                of_setting.setdefault(one.setting, {})[one.contender] = points
    searched = {name: of for name, of in of_setting.items() if ", rate " not in name}
    if searched:
        columns = min(4, len(searched))
        rows = -(-len(searched) // columns)
        figure, axes = pyplot.subplots(rows, columns, figsize=(PANEL[0] * columns, PANEL[1] * rows), squeeze=False)
        for axis, (title, of) in zip(axes.flat, searched.items(), strict=False):
            for name, (colour, style) in PAPER.items():
                line = sorted((float(at), point["ttft"]) for at, point in of.get(name, {}).items() if "ttft" in point)
                if line:
                    axis.plot(*zip(*line, strict=True), style, marker="o", markersize=2, color=colour, label=name)
            for mark in MARKS:
                axis.axhline(mark, color="black", linewidth=0.5, linestyle=":")
            axis.set(title=title, xlabel=SWEEPS["rate"], ylabel="% of first tokens on time")
            axis.set(xscale="log", ylim=(80, 101))
            axis.grid(alpha=0.3)
        axes.flat[0].legend(fontsize=6)
        figure.tight_layout()
        yield "paper_requests", figure
    numbers = {name: of for name, of in of_setting.items() if ", rate " in name}
    if numbers:
        figure, axes = pyplot.subplots(1, len(numbers), figsize=(PANEL[0] * len(numbers), PANEL[1]), squeeze=False)
        for axis, (title, of) in zip(axes[0], numbers.items(), strict=True):
            for row, (name, points) in enumerate(reversed(of.items())):
                for enough, alpha in ((in_time, 0.4), (suffices, 1.0)):
                    number = gpus(points, enough)
                    colour = PAPER.get(name, ("#7f8c8d", ""))[0]
                    axis.barh(row, number.rate, 0.4, color="none" if number.beyond else colour, alpha=alpha)
                    if number.beyond:
                        axis.text(number.rate, row, f">{number.rate}", fontsize=6, va="center")
            axis.set(title=title, xlabel="GPUs", yticks=range(len(of)), yticklabels=list(reversed(of)))
            axis.tick_params(axis="y", labelsize=6)
            axis.grid(alpha=0.3, axis="x")
        figure.tight_layout()
        yield "paper_gpus", figure


FLEET = {PRISM: "#c0392b", STATIC: "#7f8c8d", "static that knows": "#bdc3c7", "MuxServe++ FIFO, hour before": "#2980b9"}


def fleet(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """GPUs that are enough by number of models, for all requests and for each model, with the simulator's bias taken
    off; and how many times as many a static partition needs as Prism, by how full of weights its GPUs are. Settings
    with the largest sample of hours."""
    every = list(rows(found["series"], sim_bias.kept()))
    sample = {(row.setting.every, row.setting.seconds) for row in every}
    mine = [
        row for row in every if (row.setting.every, row.setting.seconds) == min(sample, key=lambda s: (s[0], -s[1]))
    ]
    lax = max(row.setting.ttft_s for row in mine)
    figure, (numbers, factors) = pyplot.subplots(1, 2, figsize=(2 * PANEL[0], PANEL[1]))
    memory = {row.setting.memory for row in mine if row.setting.models != 48} or {mine[0].setting.memory}
    alike = [
        row for row in mine if row.setting.rate == 1 and row.setting.ttft_s == lax and row.setting.memory in memory
    ]
    of_all = {row.setting: row for row in rows(found["series"], sim_bias.kept(), count=OVERALL)}
    for name, colour in FLEET.items():
        for style, some in ((":", alike), ("-", [of_all[row.setting] for row in alike])):
            line = [(row.setting.models, row.corrected[name].rate) for row in some if _told(row, name)]
            if line:
                label = name if style == "-" else None
                numbers.plot(
                    *zip(*sorted(line), strict=True), style, marker="o", markersize=3, color=colour, label=label
                )
    title = f"rate 1, TTFT from {lax:g} s; dotted: no model under 95 %"
    numbers.set(title=title, xlabel="models", ylabel="GPUs", ylim=(0, None))
    for label, colour, lines in (
        ("of all requests", "#e59866", {row.setting: of_all[row.setting] for row in mine}),
        ("also of each model", "#c0392b", {row.setting: row for row in mine}),
    ):
        dots = [
            (100 * fill, times, one)
            for one, row in lines.items()
            if (fill := of_all[one].fill) and (times := ratio(row.corrected))
        ]
        factors.scatter([x for x, _, _ in dots], [y for _, y, _ in dots], 14, colour, label=label)
        for x, y, one in dots:
            tight = "" if one.ttft_s == lax else ", tight"
            factors.annotate(f"{one.models}, ×{one.rate:g}, {one.memory:g} GB{tight}", (x, y), fontsize=4)
    factors.axhline(1.0, color="black", linewidth=0.8)
    factors.set(xlabel="weights, % of the memory of static's GPUs", ylabel="GPUs, static ÷ Prism", ylim=(0, None))
    for axis in (numbers, factors):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.tight_layout()
    yield "fleet_gpus", figure


def _told(row: FleetRow, name: str) -> bool:
    return name in row.corrected and not row.corrected[name].beyond


def overhead(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """Ours over SGLang's, with 95 % intervals."""
    rows = [row for row in found["summary"] if not row["measure"].startswith(("p99", "CPU"))]
    figure, axis = pyplot.subplots(figsize=(6.0, 3.2))
    names = [f"{row['load']}: {row['measure']}" for row in rows]
    ratios, halves = [row["ratio"] for row in rows], [row["half"] for row in rows]
    axis.errorbar(ratios, range(len(rows)), xerr=halves, fmt="o", color=SYSTEMS["prism"], capsize=3)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set(yticks=range(len(rows)), yticklabels=names, xlabel="elastic / SGLang's own pool")
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    yield "overhead_one", figure


def loads(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """Weights onto one GPU over its own link and others', beside plain copies."""
    rows = [row for row in found["rows"] if row["copy"] == "into"]
    figure, axis = pyplot.subplots(figsize=PANEL)
    links = [len(row["links"]) for row in rows]
    limits = [row["limit_bytes_per_s"] / 1e9 for row in rows]
    reached = [row["bytes"] / sorted(row["seconds"])[len(row["seconds"]) // 2] / 1e9 for row in rows]
    axis.plot(links, limits, marker="o", color="#7f8c8d", label="plain pinned copies")
    axis.plot(links, reached, marker="o", color=SYSTEMS["prism"], label="weights into extents")
    axis.set(xticks=links, xlabel="links", ylabel="GB/s", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    figure.tight_layout()
    yield "loads", figure


def sensitivity(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """A panel for each setting: points of the requests on time that each value gains or loses, by workload. The default
    is what they are counted from; a value that was not run is left out."""
    points = found["points"]
    columns = 6
    figure, axes = pyplot.subplots(-(-len(SETTINGS) // columns), columns, figsize=(14.0, 7.0), sharey=True)
    for axis, (setting, values) in zip(axes.flat, SETTINGS.items(), strict=False):
        at = values.index(default(setting))
        axis.axvline(at, color="black", linewidth=0.8)
        axis.axhline(0.0, color="black", linewidth=0.5)
        for workload, colour in zip(WORKLOADS, ("#2980b9", "#c0392b", "#27ae60"), strict=True):
            plain = points[key(workload, "", "")]
            names = [key(workload, setting, value) for value in values]
            line = [(i, plain if i == at else points.get(name)) for i, name in enumerate(names)]
            shown = [(i, 100 * (point["attainment"] - plain["attainment"])) for i, point in line if point is not None]
            _, name, gpus, rate = workload
            label = f"{name}, {gpus} GPU{'s' * (gpus > 1)}, rate {rate:g}: {100 * plain['attainment']:.1f} %"
            axis.plot(*zip(*shown, strict=True), marker="o", markersize=3, color=colour, label=label)
        axis.set(xticks=range(len(values)), xticklabels=values, xlim=(-0.5, len(values) - 0.5))
        axis.set_title(setting, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("points from the default", fontsize=8)
    for axis in axes.flat[len(SETTINGS) :]:
        axis.axis("off")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower right", fontsize=7, title="at the default")
    figure.tight_layout()
    yield "sensitivity", figure


def growth(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """What decisions cost a core, over their size, with the aims: of each the quickest of its runs, since on a shared
    machine the others tell of its neighbours."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in found["results"]:
        seconds = row["core"]["min"] * (1e-3 if row["unit"] == "ms" else 1.0)
        if "load" in row:
            if row["what"] not in ("plan", "event"):
                continue  # these two have them in them
            panels["arbitration"][f"{row['what']}, load {row['load']:g}"].append((row["waiting"], seconds))
        elif row["unit"] == "ms":
            panels["activation"][f"{row['what']}, {row['cluster']}"].append((row["devices"], seconds))
        else:
            panels["placement"][f"{row['what']}, {row['cluster']}"].append((row["devices"], seconds))
    about = {
        "arbitration": ("requests that wait", found["aims"]["arbitration_ms"] / 1e3),
        "placement": ("GPUs, and about as many models", found["aims"]["placement_s"]),
        "activation": ("GPUs", found["aims"]["activate_ms"] / 1e3),
    }
    drawn = [name for name in about if name in panels]
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(PANEL[0] * len(drawn), 4.2), squeeze=False)
    for axis, name in zip(axes[0], drawn, strict=True):
        x, aim = about[name]
        for label, line in panels[name].items():
            axis.plot(*zip(*sorted(line), strict=True), marker="o", markersize=3, label=label)
        axis.axhline(aim, color="black", linewidth=0.8, linestyle="--", label="aim")
        axis.set(title=name, xlabel=x, ylabel="seconds of a core", xscale="log", yscale="log")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=6)
    figure.tight_layout()
    yield "growth", figure


def two_models(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """By name of the run: memory and tokens of two models over time, a row for each system; and what is on time of the
    stricter of two, with the queues, by how strict it is."""
    memory = {name: run for name, run in sorted(found.items()) if name.startswith("memory-")}
    if memory:
        figure, axes = pyplot.subplots(len(memory), 2, figsize=(2 * PANEL[0], 2.4 * len(memory)), squeeze=False)
        for row, (name, run) in zip(axes, memory.items(), strict=True):
            _over_time(row, name.removeprefix("memory-"), run)
        figure.tight_layout()
        yield "two_models_memory", figure
    order: dict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    for run in found.values():
        if "scale" in run.get("run", {}):
            order[run["run"]["system"]].append((run["run"]["scale"], run))
    if order:
        figure, (shares, queues) = pyplot.subplots(1, 2, figsize=(2 * PANEL[0], PANEL[1]))
        for system, runs in sorted(order.items()):
            runs.sort(key=lambda each: each[0])
            for model, style in (("second", "-"), ("first", ":")):
                values = [100 * run["systems"][0]["models"][model]["ttft_attainment"] for _, run in runs]
                shares.plot([s for s, _ in runs], values, style, marker="o", markersize=3, label=f"{system}, {model}")
            rows = runs[len(runs) // 2][1]["timeline"]
            waiting = [sum(each.get("waiting", 0) for each in row["models"].values()) for row in rows]
            queues.plot([row["at_s"] for row in rows], waiting, label=f"{system}, scale {runs[len(runs) // 2][0]:g}")
        shares.set(xlabel="TTFT scale of the second", ylabel="% of first tokens on time", xscale="log")
        queues.set(xlabel="s", ylabel="requests that wait")
        for axis in (shares, queues):
            axis.grid(alpha=0.3)
            axis.legend(fontsize=6)
        figure.tight_layout()
        yield "two_models_order", figure


def _over_time(axes: Any, name: str, run: dict[str, Any]) -> None:
    """GB of KV that requests use, and tokens a second (over three seconds), by model."""
    rows = run["timeline"]
    for model in sorted({model for row in rows for model in row["models"]}):
        mine = [(row["at_s"], row["models"][model]) for row in rows if model in row["models"]]
        axes[0].plot([at for at, _ in mine], [each.get("kv_used_bytes", 0) / 1e9 for _, each in mine], label=model)
        made = [(at, each.get("decode_tokens", 0)) for at, each in mine]
        ends = [(at, count, *next(((b, c) for b, c in made if b >= at + 3), (0, 0))) for at, count in made]
        axes[1].plot(
            *zip(*[(at, (c - count) / (b - at)) for at, count, b, c in ends if b > at], strict=True), label=model
        )
    axes[0].set(title=name, ylabel="GB of KV in use", xlabel="s")
    axes[1].set(title=name, ylabel="tokens/s", xlabel="s")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)


def stairs(found: dict[str, Any]) -> Iterable[tuple[str, Figure]]:
    """First tokens, times per token and both on time by rate of a staircase, with the marks: measured runs as lines,
    simulated ones dotted."""
    names = {"ttft": "first tokens", "tpot": "times per token", "both": "both"}
    figure, axes = pyplot.subplots(1, len(names), figsize=(PANEL[0] * len(names), PANEL[1]), squeeze=False)
    for axis, (share, title) in zip(axes[0], names.items(), strict=True):
        for run in found["runs"]:
            line = [(step["rate"], step[share]) for step in run["steps"]]
            style = ":" if run["what"] == "simulated" else "-"
            colour = SYSTEMS[run["system"]]
            axis.plot(*zip(*line, strict=True), style, marker="o", markersize=3, color=colour, label=run["name"])
        for mark in STAIR_MARKS:
            axis.axhline(mark, color="black", linewidth=0.5, linestyle=":")
        axis.set(title=title, xlabel=SWEEPS["rate"], ylabel="% on time", xscale="log", ylim=(0, 103))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    yield "staircase", figure


FIGURES: dict[str, Callable[[dict[str, Any]], Iterable[tuple[str, Figure]]]] = {
    "comparison_sim": comparison,
    "paper_sim": paper,
    "fleet_sim": fleet,
    "gpu_overhead_one_pooled": overhead,
    "gpu_load": loads,
    "sensitivity": sensitivity,
    "policy": growth,
    "two_models": two_models,
    "staircase_h200": stairs,
}
"""By the result file that each is drawn from, or the folder of several."""


def draw(names: Iterable[str], results: Path, out: Path) -> None:
    """Draws the figures of these results into a folder."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "prism"  # the same data give the same file
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        path, folder = results / f"{name}.json", results / name
        if path.exists():
            found = json.loads(path.read_text())
        elif folder.is_dir():
            found = {each.stem: json.loads(each.read_text()) for each in sorted(folder.glob("*.json"))}
        else:
            print(f"figures: no {path.name}, so none of its figures", file=sys.stderr)
            continue
        for title, figure in FIGURES[name](found):
            figure.savefig(out / f"{title}.svg", metadata={"Date": None})
            pyplot.close(figure)
            print(f"{title}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    draw(FIGURES, given.results, given.out)


if __name__ == "__main__":
    main()
