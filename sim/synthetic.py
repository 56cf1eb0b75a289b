"""`python -m sim.synthetic --models 1000 --rate 40 --seconds 3600 --trace FILE --catalogue FILE`: draws a fleet.

Popularity has a long tail: the k-th most popular model gets a share of the requests that is in proportion to 1 /
k^skew. Each model gets requests in bursts: periods of exponential length in which requests come at random, and periods
without any. Token counts are lognormal, with medians and spreads near those of servegen48 (prompts 660, outputs 60).
Shapes are dealt out at random in the given numbers, so that popularity and size are independent.
"""

from __future__ import annotations

import argparse
import gzip
import io
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite, log
from pathlib import Path

from sim.inputs.catalogue import SHAPES
from sim.inputs.trace import COLUMNS

_PROMPT, _OUTPUT = (log(660.0), 1.0), (log(60.0), 1.4)
"""Logarithm of the median, and spread, of tokens."""
_TARGETS_MS = {"ttft_ms": 3000, "tpot_ms": 60}


class SyntheticError(ValueError):
    """A fleet that cannot be drawn."""


@dataclass(frozen=True, slots=True)
class SyntheticModels:
    """A kind of models: `parts` parts of all models have this shape, on so many devices."""

    shape: str
    devices: int
    parts: float


@dataclass(frozen=True, slots=True)
class LongTail:
    """The fleet that is drawn. Times are in seconds."""

    models: int
    rate: float
    """Requests per second of all models together."""
    seconds: float
    kinds: tuple[SyntheticModels, ...]
    skew: float = 1.1
    busy: float = 0.25
    """Share of the time in which a model gets requests."""
    burst_s: float = 120.0
    """Mean length of a period with requests."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.models < 1:
            raise SyntheticError(f"there has to be a model, not {self.models}")
        for name in ("rate", "seconds", "burst_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise SyntheticError(f"{name} has to be above zero, not {getattr(self, name):g}")
        if not (isfinite(self.skew) and self.skew >= 0):
            raise SyntheticError(f"skew has to be zero or more, not {self.skew:g}")
        if not 0 < self.busy <= 1:
            raise SyntheticError(f"busy has to be above 0 and at most 1, not {self.busy:g}")
        if not self.kinds:
            raise SyntheticError("no shapes")


def shapes(text: str) -> tuple[SyntheticModels, ...]:
    """Kinds of models, from text: "8b=30,70b/4=2" is thirty parts of 8b, and two of 70b on four devices. Raises
    SyntheticError."""
    found = []
    for part in text.split(","):
        name, _, parts = part.partition("=")
        shape, slash, devices = name.partition("/")
        if shape not in SHAPES:
            raise SyntheticError(f"{part!r}: no shape {shape!r}; there are {', '.join(SHAPES)}")
        if slash and not (devices.isdecimal() and int(devices)):
            raise SyntheticError(f"{part!r}: {devices!r} is not a number of devices")
        try:
            share = float(parts or "1")
        except ValueError:
            share = 0.0
        if not 0 < share < inf:
            raise SyntheticError(f"{part!r}: {parts!r} is not a number above zero")
        found.append(SyntheticModels(shape, int(devices or "1"), share))
    return tuple(found)


def catalogue(tail: LongTail) -> str:
    """The fleet's catalogue as TOML, for `sim.inputs.catalogue`."""
    draw = random.Random(f"shapes {tail.seed}")
    total = sum(kind.parts for kind in tail.kinds)
    dealt: list[SyntheticModels] = []
    passed = 0.0
    for kind in tail.kinds:
        passed += kind.parts
        dealt += [kind] * (round(tail.models * passed / total) - len(dealt))
    draw.shuffle(dealt)
    targets = "".join(f"{name} = {value}\n" for name, value in _TARGETS_MS.items())
    return "\n".join(
        f'[[model]]\nname = "{_name(i)}"\nshape = "{kind.shape}"\ndevices = {kind.devices}\n{targets}'
        for i, kind in enumerate(dealt)
    )


def trace(tail: LongTail) -> Iterator[tuple[float, str, int, int]]:
    """(arrival in seconds, model, prompt tokens, output tokens), in order of time."""
    weights = [1 / (i + 1) ** tail.skew for i in range(tail.models)]
    rows = []
    for i, weight in enumerate(weights):
        draw = random.Random(f"arrivals {tail.seed} {i}")
        for at in _arrivals(draw, tail.rate * weight / sum(weights), tail):
            rows.append((at, _name(i), _tokens(draw, _PROMPT), _tokens(draw, _OUTPUT)))
    return iter(sorted(rows))


def _arrivals(draw: random.Random, rate: float, tail: LongTail) -> Iterator[float]:
    pause_s = tail.burst_s * (1 - tail.busy) / tail.busy
    at, asked_for = 0.0, draw.random() < tail.busy
    while at < tail.seconds:
        mean_s = tail.burst_s if asked_for else pause_s
        end = min(tail.seconds, at + (draw.expovariate(1 / mean_s) if mean_s else 0.0))
        while asked_for and (at := at + draw.expovariate(rate / tail.busy)) < end:
            yield at
        at, asked_for = end, not asked_for


def _tokens(draw: random.Random, of: tuple[float, float]) -> int:
    return max(1, round(draw.lognormvariate(*of)))


def _name(i: int) -> str:
    return f"m{i:05}"


def write(tail: LongTail, trace_path: Path, catalogue_path: Path) -> int:
    """Writes the trace and the catalogue, and returns the number of requests. A trace whose name ends in .gz is zipped.
    Raises OSError."""
    text = io.StringIO()
    text.write(",".join(COLUMNS) + "\n")
    count = 0
    for at, model, prompt, output in trace(tail):
        text.write(f"{at:.3f},{model},{prompt},{output}\n")
        count += 1
    content = text.getvalue().encode()
    # By default a zipped file holds the time of its making, and the same seed would give another file.
    trace_path.write_bytes(gzip.compress(content, mtime=0) if trace_path.suffix == ".gz" else content)
    catalogue_path.write_text(catalogue(tail))
    return count


def main() -> int:
    parser = argparse.ArgumentParser("sim.synthetic", description="Draws a trace and a catalogue of a long-tail fleet.")
    parser.add_argument("--models", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="requests per second of all models together")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--trace", type=Path, required=True, help="to be written; zipped if it ends in .gz")
    parser.add_argument("--catalogue", type=Path, required=True, help="to be written")
    parser.add_argument(
        "--shapes", default="1b=3,3b=3,8b=4,14b=1", help="parts of each (default: %(default)s); 70b/4=1"
    )
    parser.add_argument("--skew", type=float, default=1.1, help="of popularity; 0: all alike (default: %(default)s)")
    parser.add_argument(
        "--busy", type=float, default=0.25, help="share of the time with requests (default: %(default)s)"
    )
    parser.add_argument("--burst-s", type=float, default=120.0, help="mean length of that (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        tail = LongTail(
            given.models,
            given.rate,
            given.seconds,
            shapes(given.shapes),
            skew=given.skew,
            busy=given.busy,
            burst_s=given.burst_s,
            seed=given.seed,
        )
        count = write(tail, given.trace, given.catalogue)
    except (SyntheticError, OSError) as error:
        print(f"sim.synthetic: {error}", file=sys.stderr)
        return 2
    print(f"{count} requests for {tail.models} models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
