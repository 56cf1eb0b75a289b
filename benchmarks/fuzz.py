"""Nonsense to every way in, and what became of whoever listens there: tests/fuzz/ with as many cases as are wanted.

    make fuzz                              # 10,000 cases each over the wire and of grammars, 100,000 of each decoder
    python -m benchmarks.fuzz --cases 500 --decoded 2000 --only handoff,keeper --out /tmp/fuzz.json

Over the wire: a system of echo engines on CPU pages, all processes real. After each surface every process has to live,
answer its health check and serve a completion; its log may have no error, the ledger has to be equal to the capacity,
descriptors and memory must not have grown. docs/lab/reliability.md has the results.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import services.ipc.forking  # noqa: F401  (before grpc: this starts processes)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import _report  # noqa: E402
from testing.fuzz import decoders, grammars, schemas  # noqa: E402
from testing.fuzz.outcome import SurfaceOutcome  # noqa: E402
from testing.fuzz.surfaces import SURFACES  # noqa: E402
from testing.fuzz.system import attack, fuzzed  # noqa: E402


async def over_the_wire(cases: int, described: int, seed: int, only: list[str]) -> dict[str, SurfaceOutcome]:
    found: dict[str, SurfaceOutcome] = {}
    for with_keys in (False, True):
        chosen = {
            name: surface
            for name, surface in SURFACES.items()
            if any(part in name for part in only) and ("with keys" in name) == with_keys
        }
        if not chosen:
            continue
        async with fuzzed(with_keys) as it:
            for name, surface in chosen.items():
                count = described if "described" in name else cases

                async def run(outcome: SurfaceOutcome, surface: Any = surface, count: int = count) -> None:
                    await surface(it, count, seed, outcome)

                found[name] = await attack(it, name, run)
                told = found[name]
                print(name, told.cases, f"{told.seconds:.0f} s", *told.faults, sep="\n    ", flush=True)
    return found


def in_process(cases: int, seed: int, only: list[str]) -> dict[str, SurfaceOutcome]:
    found: dict[str, SurfaceOutcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case, decode, may_raise in decoders.surfaces(Path(folder)):
            if any(part in name for part in only):
                began = time.monotonic()
                found[name] = decoders.fuzz(case, decode, may_raise, cases, seed)
                found[name].seconds = time.monotonic() - began
                print(name, found[name].cases, *found[name].faults, sep="\n    ", flush=True)
    return found


def by_engines(cases: int, seed: int, only: list[str]) -> dict[str, SurfaceOutcome]:
    """What C++ reads beside an engine."""
    found: dict[str, SurfaceOutcome] = {}
    for name, fuzz in (("grammars", grammars.fuzz), ("schemas", schemas.fuzz)):
        if any(part in name for part in only):
            began = time.monotonic()
            found[name] = fuzz(cases, seed)
            found[name].seconds = time.monotonic() - began
            print(name, found[name].cases, *found[name].faults, sep="\n    ", flush=True)
    return found


def main() -> None:
    parser = _report.arguments("fuzz", __doc__ or "")
    parser.add_argument("--cases", type=int, default=10_000, help="of each surface (default: %(default)s)")
    parser.add_argument("--described", type=int, default=2_000, help="of schemathesis, whose are slow (%(default)s)")
    parser.add_argument("--decoded", type=int, default=100_000, help="of each decoder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="surfaces whose names contain this, or one of these, with commas")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    found = asyncio.run(over_the_wire(arguments.cases, arguments.described, arguments.seed, only))
    found |= in_process(arguments.decoded, arguments.seed, only)
    found |= by_engines(arguments.cases, arguments.seed, only)
    rows = [(name, o.cases, o.answers["FAULT"], o.hangs, o.seconds) for name, o in found.items()]
    _report.table(("surface", "cases", "faults", "hangs", "s"), rows)
    surfaces = {name: outcome.as_json() for name, outcome in found.items()}
    _report.write(arguments.out, "fuzz", {"seed": arguments.seed, "surfaces": surfaces})
    sys.exit(any(outcome.faults for outcome in found.values()))


if __name__ == "__main__":
    main()
