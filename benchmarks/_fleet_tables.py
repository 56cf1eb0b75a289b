"""Results of `fleet_sim.py`: reading the file, and tables of the fewest GPUs by setting and system. Cells that Prism
loses are bold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _series, sim_bias
from benchmarks._day import SYSTEMS_OF_DAY, Marks
from benchmarks._paper_tables import PRISM, Found, cost, value
from benchmarks._search import Crossing
from benchmarks._series import Done

STATIC = "static, hour before"
MARKS: Marks = (99.0, 99.0, 95.0)
ALL, OVERALL = 3, 2
"""How many of the marks are asked for: all, or those of all requests together, whatever becomes of one model."""
MEASURES = ("ttft", "tpot", "both")
"""Whose bias each of the marks has."""
Bias = Mapping[str, sim_bias.Row]


@dataclass(frozen=True, slots=True)
class DaySeries:
    """A search of the fewest GPUs. `rate`: requests for each of the trace; `memory`: GB of each GPU; `ttft_s`: the
    least TTFT target; `seconds` of each `every`-th hour count."""

    models: int
    rate: float
    memory: float
    ttft_s: float
    every: int
    seconds: float
    system: str

    @property
    def setting(self) -> str:
        sample = "" if self.every == 1 else f"; {self.seconds:g} s of {24 // self.every} hours"
        least = f", TTFT from {self.ttft_s:g} s" if self.ttft_s else ""
        return f"{self.models} models, rate {self.rate:g}, {self.memory:g} GB{least}{sample}"

    @property
    def key(self) -> str:
        return f"{self.setting}: {self.system}"


def read(out: Path) -> Done:
    """Series by key; none where there is no file. Raises ResultsError."""
    return _series.read(out, "fleet_sim", _check)


def _check(one: dict[str, Any]) -> None:
    DaySeries(**one["arguments"])
    one["commit"], float(one["weights_gb"]), {int(gpus): dict(of) for gpus, of in one["points"].items()}


# --- enough


def marks_to_reach(system: str, bias: Bias) -> Marks:
    """Percents that the simulator has to say of a system before they are MARKS with its bias taken off; MARKS
    themselves without bias."""
    if not bias:
        return MARKS
    policy = SYSTEMS_OF_DAY[system].system
    first, rest, worst = (_before(mark, policy, bias, of) for mark, of in zip(MARKS, MEASURES, strict=True))
    return first, rest, worst


def _before(percent: float, policy: str, bias: Bias, measure: str) -> float:
    """The figure that `sim_bias.corrected` makes this one of."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        if sim_bias.corrected(middle, policy, bias, measure) < percent:
            low = middle
        else:
            high = middle
    return high


def enough(point: Found, marks: Sequence[float]) -> bool:
    """Whether the first of the marks, as many as are given, are reached."""
    return all(value(point, name) >= mark for name, mark in zip(("ttft", "tpot", "worst"), marks, strict=False))


def number(points: Mapping[str, Found], marks: Sequence[float]) -> Crossing:
    """The fewest of the GPUs tried that are enough, as one more are, as `_search.fewest` has it; beyond ">" if there is
    no such number. Points that were given up are not enough."""
    held = {int(gpus): enough(point, marks) for gpus, point in points.items()}
    good = [gpus for gpus in sorted(held) if held[gpus] and held.get(gpus + 1, gpus == max(held))]
    return Crossing(good[0]) if good else Crossing(max(held), ">")


# --- tables


@dataclass(frozen=True)
class FleetRow:
    """A setting: GB of weights, and by system the GPUs as simulated, those with the bias taken off, and the dollars of
    a million tokens on time with as many as simulated."""

    setting: DaySeries
    weights_gb: float
    plain: Mapping[str, Crossing]
    corrected: Mapping[str, Crossing]
    dollars: Mapping[str, str]

    @property
    def fill(self) -> float | None:
        """Share of the memory of the static partition's GPUs that weights take."""
        found = self.plain.get(STATIC)
        if found is None or found.beyond:
            return None
        return self.weights_gb / (found.rate * self.setting.memory)


def rows(done: Mapping[str, Any], bias: Bias, per_hour: float = 0.0, count: int = ALL) -> Iterator[FleetRow]:
    """Rows of the table for so many of the marks, in order of the TTFT target, models, memory and rate; of one setting
    the largest sample of hours comes first."""
    of_setting: dict[str, list[tuple[DaySeries, Mapping[str, Any]]]] = {}
    for kept in done.values():
        one = DaySeries(**kept["arguments"])
        of_setting.setdefault(one.setting, []).append((one, kept))
    every = sorted(
        of_setting.values(),
        key=lambda of: (
            of[0][0].every,
            -of[0][0].seconds,
            -of[0][0].ttft_s,
            of[0][0].models,
            -of[0][0].memory,
            of[0][0].rate,
        ),
    )
    for series in every:
        plain = {one.system: number(kept["points"], MARKS[:count]) for one, kept in series}
        corrected = {
            one.system: number(kept["points"], marks_to_reach(one.system, bias)[:count]) for one, kept in series if bias
        }
        dollars = {
            one.system: cost(plain[one.system].rate, tokens, per_hour)
            for one, kept in series
            if (tokens := value(kept["points"][f"{plain[one.system].rate}"], "tokens_per_s"))
        }
        yield FleetRow(series[0][0], series[0][1]["weights_gb"], plain, corrected, dollars)


def ratio(found: Mapping[str, Crossing], rival: str = STATIC) -> float | None:
    """GPUs of the rival over those of Prism; None where one is not there or not enough."""
    ours, theirs = found.get(PRISM), found.get(rival)
    return None if ours is None or theirs is None or ours.beyond or theirs.beyond else theirs.rate / ours.rate


def _cell(row: FleetRow, system: str) -> str:
    found = row.plain.get(system)
    if found is None:
        return ""
    text = f"{found.beyond}{found.rate}"
    if system in row.corrected:
        text += f" ({row.corrected[system].beyond}{row.corrected[system].rate})"
    text += f" {row.dollars[system]}" if not found.beyond and system in row.dollars else ""
    return f"**{text}**" if _lost(row, system) else text


def _lost(row: FleetRow, system: str) -> bool:
    """Whether a system's cell is one that Prism loses: a rival's, if the rival needs fewer GPUs than Prism; Prism's
    own, if any rival does. The bias of both is taken off where it is known."""
    found = row.corrected or row.plain
    rivals = [system] if system != PRISM else [name for name in found if name != PRISM]
    return PRISM in found and any(_needs(found[name]) < _needs(found[PRISM]) for name in rivals if name in found)


def _needs(found: Crossing) -> float:
    return found.rate if not found.beyond else float("inf")


def show(done: Mapping[str, Any], bias: Bias, per_hour: float) -> None:
    """A table for all marks, and one for those of all requests together, and Prism's worst hours."""
    for count, what in (
        (OVERALL, "99 % of first tokens and of times per token on time"),
        (ALL, "the same, and 95 % of the requests of each model on both"),
    ):
        print(
            f"Fewest GPUs with {what}, as simulated (with the simulator's bias taken off), and dollars for a million "
            f"tokens on time at ${per_hour:g} for a GPU and hour. Bold: a rival needs fewer than Prism, bias taken "
            "off.\n"
        )
        print(_markdown(list(rows(done, bias, per_hour, count))) + "\n")
    print("Prism's hours with as many GPUs as it needs, both targets:")
    for row in rows(done, bias):
        found = row.plain.get(PRISM)
        if found is not None and not found.beyond:
            hours = done[f"{row.setting.setting}: {PRISM}"]["points"][f"{found.rate}"]["hours"]
            worst = min(hours, key=lambda hour: hours[hour])
            print(f"{row.setting.setting}: {found.rate} GPUs, least at {worst} h: {hours[worst]:.2f} %")


def _markdown(found: Sequence[FleetRow]) -> str:
    head = ["setting", "GB of weights", "of the static GPUs", *SYSTEMS_OF_DAY, "static ÷ Prism"]
    lines = [head, ["---"] * len(head)]
    for row in found:
        fill = "" if row.fill is None else f"{100 * row.fill:.0f} %"
        factors = [f"{times:.1f}" if (times := ratio(of)) else "-" for of in (row.plain, row.corrected)]
        cells = [_cell(row, system) for system in SYSTEMS_OF_DAY]
        lines.append([row.setting.setting, f"{row.weights_gb:.0f}", fill, *cells, f"{factors[0]} ({factors[1]})"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
