"""The report of a replay: attainment, latencies, throughput, and what was moved for it."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isnan
from typing import Any

from sim.inputs.request import SimulatedRequest
from sim.replay import ReplayOutcome

_QUANTILES = (0.5, 0.9, 0.99)


def build(outcome: ReplayOutcome) -> dict[str, Any]:
    """The report as a dictionary: everything about a run that is the same for the same seed, and `run`, which is
    not."""
    requests = outcome.trace.requests
    groups = outcome.system.groups
    by_model: dict[str, list[SimulatedRequest]] = {}
    for request in requests:
        by_model.setdefault(request.model, []).append(request)
    counts = {name: sum(getattr(group.counts, name) for group in groups) for name in _COUNTS}
    return {
        "all": summary(requests, outcome.trace.seconds),
        "models": {name: summary(of, outcome.trace.seconds) for name, of in sorted(by_model.items())},
        "counts": counts
        | {
            "reclaimed_bytes": sum(group.memory.reclaimed_bytes for group in groups),
            "parked": sum(request.parked for request in requests),
            "clipped": outcome.trace.clipped,
        }
        | dict(outcome.system.figures),
        "seconds": outcome.trace.seconds,
        "last_end_s": outcome.ended_s,
        "run": {"wall_s": outcome.wall_s, "cpu_s": outcome.cpu_s, "events": outcome.clock.events},
    }


_COUNTS = (
    "wakes",
    "cold_starts",
    "failed_activations",
    "hibernations",
    "gone_cold",
    "weights_bytes",
)


def summary(requests: Sequence[SimulatedRequest], seconds: float) -> dict[str, Any]:
    """Figures of at least one request, of a slice of so many seconds. Requests that were not served missed their
    targets."""
    served = [request for request in requests if request.served]
    ttfts = sorted(request.ttft for request in served)
    tpots = sorted(request.tpot for request in served if not isnan(request.tpot))
    return {
        "requests": len(requests),
        "served": len(served),
        "ttft_attainment": sum(ttft_met(request) for request in requests) / len(requests),
        "tpot_attainment": sum(tpot_met(request) for request in requests) / len(requests),
        "attainment": sum(ttft_met(request) and tpot_met(request) for request in requests) / len(requests),
        "ttft_s": {f"p{100 * q:g}": quantile(ttfts, q) for q in _QUANTILES},
        "tpot_s": {f"p{100 * q:g}": quantile(tpots, q) for q in _QUANTILES},
        "requests_per_s": len(served) / seconds,
        "output_tokens_per_s": sum(request.output_tokens for request in served) / seconds,
        "prompt_tokens_per_s": sum(request.prompt_tokens for request in served) / seconds,
    }


def ttft_met(request: SimulatedRequest) -> bool:
    """Whether the request met its TTFT target; one that was not served missed it."""
    return request.served and request.ttft <= request.ttft_s


def tpot_met(request: SimulatedRequest) -> bool:
    """Whether the request met its TPOT target, as one without a second token does; one that was not served missed
    it."""
    return request.served and (isnan(request.tpot) or request.tpot <= request.tpot_s)


def quantile(ascending: Sequence[float], q: float) -> float | None:
    """The smallest value that is at least as large as a share `q` of the values; None if there are none."""
    return ascending[max(0, ceil(q * len(ascending)) - 1)] if ascending else None


def text(report: dict[str, Any]) -> str:
    """The report as text for people."""
    total, run = report["all"], report["run"]
    lines = [
        f"{total['served']} of {total['requests']} requests served, {report['seconds'] / 3600:.2f} h in "
        f"{run['wall_s']:.1f} s ({run['cpu_s']:.1f} of a core, {run['events']} events)",
        f"attainment {total['attainment']:.4f}: TTFT {total['ttft_attainment']:.4f}, "
        f"TPOT {total['tpot_attainment']:.4f}",
        f"TTFT {_spread(total['ttft_s'])}; TPOT {_spread(total['tpot_s'])}",
        f"{total['requests_per_s']:.2f} requests/s, {total['output_tokens_per_s']:.0f} output tokens/s, "
        f"{total['prompt_tokens_per_s']:.0f} prompt tokens/s",
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["counts"].items()),
    ]
    worst = sorted(report["models"].items(), key=lambda item: item[1]["attainment"])[:5]
    lines.append("least: " + ", ".join(f"{name} {model['attainment']:.3f}" for name, model in worst))
    return "\n".join(lines)


def _spread(quantiles: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in quantiles.items() if value is not None)
