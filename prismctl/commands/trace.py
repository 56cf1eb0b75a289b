"""`prismctl trace`: how the models of a log share their time, which says whether they can share GPUs.

Nothing is simulated and no service is called.
"""

from __future__ import annotations

from dataclasses import asdict
from math import inf, isnan
from pathlib import Path
from typing import Annotated, Any

import typer

from prismctl.system.system import failed
from prismctl.views.tables import Column, Row, render
from prismctl.views.terminal import Json, show_json, width
from services.wording.plurals import counted
from sim.inputs import trace as traces
from sim.trace_analysis import ACTIVE_S, GAP_S, MANY_GAPS, PAPER, ModelActivity, Quantiles, TraceActivity, analyse

BAD_INPUT = 2
"""Exit code: the input has a fault."""


def trace(
    file: Annotated[Path, typer.Argument(help="Requests, CSV, also gzipped: " + ",".join(traces.COLUMNS))],
    from_s: Annotated[
        float | None, typer.Option(min=0, help="Second of the trace to begin at; default: that of its first request.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds to look at; default: to the last request.")] = None,
    top: Annotated[int, typer.Option(min=0, help="Number of models to list, the busiest first; 0: all.")] = 20,
    json_: Json = False,
) -> None:
    """How do the models of a log share their time? Who is active at once, how often that changes, how bursty each is.
    Status 2: something is wrong with the file."""
    try:
        if seconds is not None and not 0 < seconds < inf:
            raise ValueError(f"--seconds has to be above zero, not {seconds:g}")
        if seconds is not None and seconds > traces.LONGEST_S:
            raise ValueError(f"--seconds has to be {traces.LONGEST_S:g} at most, not {seconds:g}")
        found = analyse((row[1:] for row in traces.rows(file)), from_s, seconds)
    except OSError as error:
        raise failed(f"{error.filename}: {error.strerror}", BAD_INPUT) from None
    except traces.TraceError as error:
        raise failed(str(error), BAD_INPUT) from None
    except ValueError as error:
        raise failed(f"{file}: {error}", BAD_INPUT) from None
    if json_:
        show_json(_plain(asdict(found)))
        return
    typer.echo("\n".join(_lines(found)))
    columns = (
        Column("model"),
        Column("requests", right=True),
        Column("active", right=True),
        Column(f"silent {GAP_S:g} s", 2, right=True),
        Column("gaps per hour", 1, right=True),
        Column("CV", 1, right=True),
        Column("prompt", 3, right=True),
        Column("output", 3, right=True),
    )
    listed = list(found.models.items())[: top or None]
    typer.echo("\n" + render(columns, [Row(_cells(name, model)) for name, model in listed], width()))
    if left := len(found.models) - len(listed):
        typer.echo(f"and {counted(left, 'model')} with fewer requests: --top 0")


def _plain(value: Any) -> Any:
    """The value with null for what is not known: JSON has no number for that."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and isnan(value) else value


def _lines(found: TraceActivity) -> list[str]:
    """A line for each figure, with the paper's beside it."""
    days = found.day_correlation
    figures = (
        ("models", str(len(found.models)), PAPER["models"]),
        ("requests per s: mean, busiest minute", f"{found.requests_per_s:.2f}, {found.peak_requests_per_s:.2f}", ""),
        ("models active at once", _percent(found.active_share), PAPER["active_share"]),
        ("changes of who is active, per hour", f"{found.switches_per_hour:.0f}", PAPER["switches_per_hour"]),
        ("time in which a model is idle, mean", _percent(1 - found.active_share), PAPER["idle_share"]),
        (f"time without a request in the past {GAP_S:g} s, mean", _percent(found.silent_share), ""),
        (
            f"gaps above {GAP_S:g} s per hour and model: median, p90, most",
            _three(found.gaps_per_hour, "{:.0f}"),
            PAPER["gaps_per_hour"],
        ),
        (f"models with {MANY_GAPS:g} such gaps or more", _percent(found.many_gaps), ""),
        ("CV of requests per minute: quartiles of models", _three(found.cv, "{:.2f}"), PAPER["cv"]),
        ("models with a CV above 1", _percent(found.cv_above_one), ""),
        (
            "correlation from day to day: quartiles",
            "less than two days" if isnan(days.middle) else _three(days, "{:.2f}"),
            PAPER["day_correlation"],
        ),
        ("requests of the busiest fifth of the models", _percent(found.busiest_share), ""),
        ("prompt tokens: mean, median, p99", _three(found.prompt_tokens, "{:.0f}"), ""),
        ("output tokens: mean, median, p99", _three(found.output_tokens, "{:.0f}"), ""),
    )
    head = f"{counted(found.requests, 'request')} in {found.seconds / 3600:.2f} h; active: a request in the past "
    told = [f"{name:<56} {value:<20} {f'paper: {paper}' if paper else ''}".rstrip() for name, value, paper in figures]
    return [f"{head}{ACTIVE_S:g} s", *told]


def _cells(name: str, model: ModelActivity) -> tuple[str, ...]:
    return (
        name,
        str(model.requests),
        _percent(model.active_share),
        _percent(model.silent_share),
        f"{model.gaps_per_hour:.0f}",
        "-" if isnan(model.cv) else f"{model.cv:.2f}",
        f"{model.prompt_tokens:.0f}",
        f"{model.output_tokens:.0f}",
    )


def _three(values: Quantiles, form: str) -> str:
    return ", ".join(form.format(each) for each in (values.low, values.middle, values.high))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
