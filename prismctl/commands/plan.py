"""`prismctl plan`: whether a load fits a fleet.

The simulator answers, with the services' own policy; no running service is called.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from math import inf, isinf
from pathlib import Path
from typing import Annotated, Any

import typer

from prismctl.commands.plan_folders import PlanFolders
from prismctl.system.system import failed
from prismctl.views.tables import Column, Row, render
from prismctl.views.terminal import show_json, width
from services.wording.plurals import counted
from sim.arguments import MOST_GPUS, group_sizes, setting
from sim.engines.cost import GPUS, GpuModel
from sim.inputs import catalogue as catalogues
from sim.inputs import rates as drawn
from sim.inputs import trace as traces
from sim.inputs.catalogue import ModelSet, Spec
from sim.plan import FleetAttempt, FleetPlanner, PlannedLoad
from sim.policies import SYSTEMS
from sim.system import Build

MISSED, BAD_INPUT = 1, 2
"""Exit codes: fewer requests are on time than required, or the fleet cannot hold the models; the input has a fault."""
_DRAWN_S = 600.0


def plan(
    catalogue: Annotated[
        Path, typer.Option(help="Models with their folders or shapes, and targets (TOML; docs/guide/models.md).")
    ],
    gpus: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_GPUS, help="Number of GPUs, each a group of its own; with --fewest the most to try."
        ),
    ] = 0,
    groups: Annotated[
        str, typer.Option(help="Groups for models on several GPUs, such as 2x4 for two groups of four.")
    ] = "",
    trace: Annotated[Path | None, typer.Option(help="Requests, CSV, also gzipped: " + ",".join(traces.COLUMNS))] = None,
    rates: Annotated[
        Path | None,
        typer.Option(help="Mean rates in place of requests, CSV, also gzipped: " + ",".join(drawn.COLUMNS)),
    ] = None,
    from_s: Annotated[
        float | None, typer.Option(help="Second of the trace to begin at; default: that of its first request.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds to simulate; default: to the trace's end, or 600 for rates.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests made of each one in the trace, or factor of the rates.")] = 1.0,
    slo_scale: Annotated[float, typer.Option(help="Factor of all targets.")] = 1.0,
    target: Annotated[float, typer.Option(min=0, max=100, help="Percent of requests that are to be on time.")] = 99.0,
    fewest: Annotated[bool, typer.Option("--fewest", help="Find the fewest GPUs that will do.")] = False,
    hardware: Annotated[str, typer.Option(help="Kind of the GPUs: " + ", ".join(sorted(GPUS)))] = "h200",
    policy: Annotated[str, typer.Option(help="Policy to simulate: " + ", ".join(sorted(SYSTEMS)))] = "prism",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the policy; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random draws.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Does a load fit, on how few GPUs? Simulated. Status 0: as many are on time as asked, 1: fewer, or
    the GPUs cannot hold the models, 2: something is wrong with the command line or a file."""
    folders = PlanFolders()
    try:
        known = catalogues.read(catalogue, _positive("--slo-scale", slo_scale), folders)
        load = PlannedLoad(_load(known, trace, rates, from_s, seconds, _positive("--rate", rate), seed))
        planner = FleetPlanner(
            load,
            known,
            _system(policy),
            dict(setting(text) for text in set_ or ()),
            group_sizes(groups) if groups else (),
            _hardware(hardware),
            progress=lambda line: typer.echo(f"prismctl: {line}", err=True),
        )
        if not gpus and not planner.groups:
            raise ValueError("name --gpus or --groups")
        found = planner.fewest(gpus, target / 100) if fewest else [planner.tried(gpus)]
    except OSError as error:
        raise failed(f"{error.filename}: {error.strerror}", BAD_INPUT) from None
    except (ValueError, ArgumentTypeError) as error:
        raise failed(str(error), BAD_INPUT) from None
    answer = found[-1]
    models = [spec for name in load.models() if (spec := known.find(name))]
    read, unused = folders.read.values(), known.unused(load.models())
    if json_:
        told = {"target": target / 100, "fits": _fits(answer, target), "tried": [_told(tried) for tried in found]}
        show_json({**told, "folders": [each.told for each in read], "without_requests": unused})
    else:
        typer.echo("".join(f"{each.line}\n" for each in read), nl=False)
        if unused:
            typer.echo(f"left out, since nobody asks for them: {', '.join(unused)}")
        _print(found, target, models)
    if not _fits(answer, target):
        raise typer.Exit(MISSED)


def _load(
    known: ModelSet,
    trace: Path | None,
    rates: Path | None,
    from_s: float | None,
    seconds: float | None,
    rate: float,
    seed: int,
) -> traces.Workload:
    if (trace is None) == (rates is None):
        raise ValueError("name a --trace or --rates")
    if trace is not None:
        begin = traces.begins(trace) if from_s is None else from_s
        part = traces.Slice(begin, inf if seconds is None else seconds, rate, seed)
        return traces.read(trace, known, part)
    assert rates is not None
    if from_s is not None:
        raise ValueError("--from-s is for a --trace: rates have no times")
    length = _DRAWN_S if seconds is None else _positive("--seconds", seconds)
    return drawn.draw(drawn.read(rates, known), length, rate, seed)


def _positive(option: str, value: float) -> float:
    if not 0 < value < inf:
        raise ValueError(f"{option} has to be above zero, not {value:g}")
    return value


def _system(policy: str) -> Build:
    if policy not in SYSTEMS:
        raise ValueError(f"no policy {policy!r}; there are {', '.join(sorted(SYSTEMS))}")
    return SYSTEMS[policy]


def _hardware(name: str) -> GpuModel:
    if name not in GPUS:
        raise ValueError(f"no hardware {name!r}; there are {', '.join(sorted(GPUS))}")
    return GPUS[name]


def _fits(tried: FleetAttempt, target: float) -> bool:
    return not tried.refused and 100 * tried.attainment >= target


def _told(tried: FleetAttempt) -> dict[str, Any]:
    return {"gpus": tried.gpus, "groups": list(tried.sizes), "refused": tried.refused or None, "report": tried.report}


def _print(found: list[FleetAttempt], target: float, models: list[Spec]) -> None:
    answer = found[-1]
    for tried in found[:-1]:
        typer.echo(f"{counted(tried.gpus, 'GPU')}: {tried.refused or _percent(tried.attainment)}")
    if answer.report is None:
        typer.echo(f"{counted(answer.gpus, 'GPU')}: {answer.refused}")
        return
    columns = (
        Column("model"),
        Column("requests", right=True),
        Column("on time", right=True),
        Column("TTFT", 1, right=True),
        Column("TPOT", 1, right=True),
        Column("TTFT p50", 3, right=True),
        Column("TTFT p99", 2, right=True),
    )
    typer.echo(f"{counted(answer.gpus, 'GPU')}, by model:\n")
    rows = [Row(_cells(name, of)) for name, of in [*answer.report["models"].items(), ("all", answer.report["all"])]]
    typer.echo(render(columns, rows, width()))
    if replicas := answer.report["counts"].get("replicas", 0):
        typer.echo(f"models came up on one group more {counted(replicas, 'time')}: their load exceeds a group")
    if clipped := answer.report["counts"]["clipped"]:
        typer.echo(f"cut to their model's context_tokens: {counted(clipped, 'request')}")
    if free := [model.name for model in models if isinf(model.ttft_s) and isinf(model.tpot_s)]:
        typer.echo(f"without targets, on time as soon as they are served: {', '.join(free)}")
    total, fits = answer.report["all"], _fits(answer, target)
    typer.echo(
        f"{'fits' if fits else 'does not fit'}: {_percent(answer.attainment)} of "
        f"{counted(total['requests'], 'request')} on time with {counted(answer.gpus, 'GPU')}; {target:g} % asked"
    )


def _cells(name: str, of: dict[str, Any]) -> tuple[str, ...]:
    shares = (_percent(of[f"{which}attainment"]) for which in ("", "ttft_", "tpot_"))
    times = ("-" if of["ttft_s"][q] is None else f"{of['ttft_s'][q]:.2f} s" for q in ("p50", "p99"))
    return (name, str(of["requests"]), *shares, *times)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
